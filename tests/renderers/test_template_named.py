"""Chat templates by name and by file, and their arguments."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from kit.rollouts import bpe

from turnwright.errors import ConfigError, TemplateError
from turnwright.renderers import (
    ChatRenderer,
    ChatTemplate,
    load_renderer,
    template_names,
    template_source,
)
from turnwright.renderers.template import check_arguments, with_preset_variables
from turnwright.types import Message, ToolCall

TALK = (
    Message("system", "Be brief."),
    Message("user", "One?"),
    Message("assistant", "Yes.", reasoning="I count."),
    Message("user", "Two?"),
    Message(
        "assistant",
        "",
        reasoning="Again.",
        tool_calls=(ToolCall("look", {"key": "a"}, "1"), ToolCall("look", {}, "2")),
    ),
    Message("tool", "x", tool_call_id="1"),
    Message("tool", "y", tool_call_id="2"),
)
END = Message("assistant", "Done.", reasoning="All seen.")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]


def named(name: str) -> ChatTemplate:
    return ChatTemplate(template_source(name), origin=name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer and a template of its own."""
    path = tmp_path / "model"
    path.mkdir()
    bpe().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (path / "chat_template.jinja").write_text(template_source("chatml"))
    return path


def test_thinking_is_kept_or_shown_in_the_last_message_alone() -> None:
    with_it, without = named("qwen3_with_thinking"), named("qwen3_without_thinking")
    thoughts = ["I count.", "Again.", "All seen."]
    text = with_it.render((*TALK, END))
    assert [thought in text for thought in thoughts] == [True, True, True]
    assert text.endswith("<|im_start|>assistant\n<think>\nAll seen.\n</think>\n\nDone.<|im_end|>\n")
    text = without.render((*TALK, END))
    assert [thought in text for thought in thoughts] == [False, False, True]
    assert text.endswith("<|im_start|>assistant\n<think>\nAll seen.\n</think>\n\nDone.<|im_end|>\n")
    assert "<think>" not in without.render(TALK, generation_prompt=True)


def test_thinking_within_the_content_is_stripped_too() -> None:
    inside = Message("assistant", "<think>\nI count.\n</think>\n\nYes.")
    apart = Message("assistant", "Yes.", reasoning="I count.")
    for name in ("qwen3_with_thinking", "qwen3_without_thinking"):
        for rest in ((), (Message("user", "Go on."),)):
            assert named(name).render((inside, *rest)) == named(name).render((apart, *rest))


@pytest.mark.parametrize("name", ["chatml", "qwen3_with_thinking"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_templates_that_keep_all_only_append(name: str, tools: list) -> None:
    """Behind a message that is complete: tool results that follow one another are one turn in Qwen3's format."""  # noqa: E501
    whole = (*TALK, END, Message("user", "More?"))
    cuts = [
        n
        for n in range(1, len(whole) + 1)
        if n == len(whole) or whole[n].role != "tool" or whole[n - 1].role != "tool"
    ]
    texts = [named(name).render(whole[:n], tools) for n in cuts]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


def test_what_stands_there_is_as_qwen_writes_it() -> None:
    assert named("qwen3_with_thinking").render(TALK[3:], generation_prompt=True) == (
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n<think>\nAgain.\n</think>\n\n"
        '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_model_directory_takes_a_template_by_name_or_file(model: Path, tmp_path: Path) -> None:
    own = load_renderer(model)
    file = tmp_path / "mine.jinja"
    file.write_text(template_source("qwen3_with_thinking"))
    by_name = load_renderer(model, template="qwen3_with_thinking")
    by_file = load_renderer(model, template=str(file))
    assert by_name.fingerprint == by_file.fingerprint != own.fingerprint
    assert {k for k in own.fingerprints if own.fingerprints[k] != by_name.fingerprints[k]} == {
        "template"
    }
    opened = [r.decode(r.open([Message("user", "Hi")], TOOLS).ids) for r in (own, by_name, by_file)]
    assert opened[1] == opened[2] != opened[0]


def test_arguments_reach_the_template_and_stay_in_its_source(model: Path, tmp_path: Path) -> None:
    plain = load_renderer(model, template="qwen3_with_thinking")
    quiet = load_renderer(
        model, template="qwen3_with_thinking", template_args={"enable_thinking": False}
    )
    assert text(quiet) == text(plain) + "<think>\n\n</think>\n\n"
    assert quiet.fingerprint != plain.fingerprint
    saved = tmp_path / "saved"
    shutil.copytree(model, saved)
    (saved / "chat_template.jinja").write_text(quiet.template.source)
    assert text(load_renderer(saved)) == text(quiet)
    assert load_renderer(saved).fingerprint == quiet.fingerprint


def text(renderer: ChatRenderer) -> str:
    return renderer.decode(renderer.open([Message("user", "Hi")]).ids)


def test_what_a_source_sets_itself_is_any_json_and_can_be_given_all_the_same() -> None:
    values = {
        "a": True,
        "b": None,
        "c": [1, -2.5, "x'\"{{ \n\u00e9\U0001f600"],
        "d": {"k": {"n": False}},
        "e": "%}",
    }
    source = "\n  {% if true %}{{ [a, b, c, d, e] | tojson }}\n{% endif %}tail\n"
    expected = ChatTemplate(source, values).render([])
    assert ChatTemplate(with_preset_variables(source, values)).render([]) == expected
    other = values | {"a": False}
    assert ChatTemplate(with_preset_variables(source, values), {"a": False}).render(
        []
    ) == ChatTemplate(source, other).render([])


def test_mistakes_say_what_was_meant(model: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r'"qwen3_with_thinkin": no such template; did you mean .qwen3_with_thinking.',
    ):
        load_renderer(model, template="qwen3_with_thinkin")
    with pytest.raises(
        ConfigError, match=r"enable_thinkin: .* no such variable; did you mean 'enable_thinking'"
    ):
        load_renderer(model, template="qwen3_with_thinking", template_args={"enable_thinkin": True})
    with pytest.raises(ConfigError, match=r"nothing_like_it: .* it uses none"):
        load_renderer(model, template_args={"nothing_like_it": 1})
    with pytest.raises(ConfigError, match=r"a = .*not a JSON value"):
        check_arguments(ChatTemplate("{{ a }}"), {"a": float("nan")})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_renderer(model, template=str(model))
    with pytest.raises(TemplateError, match="not a Jinja template"):
        check_arguments(ChatTemplate("{% if %}"), {"a": 1})


def test_parameters_are_what_a_conversation_does_not_bring() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}{% set x = 1 %}{{ "
        "x }}{% endfor %}{{ tools }}{{ namespace() }}"
    )
    assert ChatTemplate(source + "{% if enable_thinking is defined %}{% endif %}").parameters == {
        "bos_token",
        "enable_thinking",
    }
    assert template_names() == [
        "chatml",
        "qwen3_with_thinking",
        "qwen3_without_thinking",
        "qwen_vl",
    ]

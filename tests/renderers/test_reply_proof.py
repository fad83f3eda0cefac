"""Replies that a template writes, cut as an engine cuts them: they are read, or
`check` says which are not."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
from kit.corpus import distinct, template_of, tokenizer_of

from turnwright.cli.check import check_template
from turnwright.cli.main import main
from turnwright.errors import TemplateError
from turnwright.renderers import ChatRenderer, HFTokenizer
from turnwright.renderers.load import template_renderer
from turnwright.types import Message, ToolCall

ASKED = Message("user", "USERMARK")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("look", "keep")
]
for tool in TOOLS:
    tool["function"]["parameters"]["properties"] = {
        "key": {"type": "string", "description": "d"},
        "rows": {"type": "array", "items": {"type": "string"}, "description": "d"},
        "count": {"type": "integer", "description": "d"},
    }

# As Apertus: the mark that ends the calls ends the reply too.
CALL_END_IS_STOP = """
{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|user|>{{ m.content }}<|end|>
  {%- elif m.role == 'assistant' -%}<|assistant|>{{ m.content or '' }}
    {%- if m.tool_calls -%}$OPEN{%- for c in m.tool_calls -%}
      $ONE{%- if not loop.last -%}$BETWEEN{%- endif -%}
    {%- endfor -%}$CLOSE{%- else -%}<|done|>{%- endif -%}
  {%- else -%}[{{ m.content }}]{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
NAMED = "{{ {c.function.name: c.function.arguments} | tojson }}"
HERMES = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
)
FUNCTION = (
    "call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}{{ '}' }}"
)


def in_frame(opening: str, call: str, between: str, close: str) -> str:
    frame = CALL_END_IS_STOP.replace("$OPEN", opening).replace("$ONE", call)
    return frame.replace("$BETWEEN", between).replace("$CLOSE", close)


CLOSES = {
    "apertus": (
        in_frame("<|tools_prefix|>[", NAMED, ", ", "]<|tools_suffix|>"),
        "<|tools_suffix|>",
        2,
    ),
    "hermes": (in_frame("", HERMES, "</tool_call>", "</tool_call>"), "</tool_call>", 1),
    "gemma": (
        in_frame("", f"<|tool_call>{FUNCTION}", "<tool_call|>", "<tool_call|>"),
        "<tool_call|>",
        1,
    ),
    "nemotron_v2": (
        in_frame("<TOOLCALL>[", "{{ c.function | tojson }}", ", ", "]</TOOLCALL>"),
        "</TOOLCALL>",
        2,
    ),
}


def renderer_of(source: str, tmp_path: Path, declared: bool = True) -> ChatRenderer:
    """Return a renderer whose tokens are the template's marks; `declared` if its
    end of sequence is known."""
    file = tmp_path / "template.jinja"
    file.write_text(source, encoding="utf-8")
    made = template_renderer(str(file))
    return made if declared else ChatRenderer(made.codec, made.template)


def reported(renderer: ChatRenderer) -> set[str]:
    """Return the kinds of replies that `check` names."""
    lines = [text for _, text in check_template(renderer) if "does not come back: " in text]
    return {line.partition("does not come back: ")[2].partition(": ")[0] for line in lines}


def cut(renderer: ChatRenderer, message: Message) -> list[int]:
    """Return the ids of the template's reply, up to the first stop id."""
    opening = renderer.template.render([ASKED], TOOLS, generation_prompt=True)
    rendered = renderer.template.render([ASKED, message], TOOLS)
    assert rendered.startswith(opening)
    ids = renderer.codec.encode(rendered[len(opening) :])
    return ids[: next(number for number, token in enumerate(ids) if token in renderer.stop_ids) + 1]


@pytest.mark.parametrize("name", CLOSES)
@pytest.mark.parametrize("text", ["", "I look."])
def test_the_stop_that_is_the_calls_end_mark_closes_them(name, text, tmp_path):
    source, mark, count = CLOSES[name]
    renderer = renderer_of(source, tmp_path, declared=False)
    assert renderer.call_format == (name, "")
    assert renderer.codec.control[mark] in renderer.stop_ids
    calls = (ToolCall("look", {"key": "a"}, "call_0"), ToolCall("keep", {"key": "b"}, "call_1"))[
        :count
    ]
    ids = cut(renderer, Message("assistant", text, calls))
    assert renderer.codec.decode(ids[-1:]) == mark
    for given in (None, renderer.decode(ids[:-1])):
        assert renderer.parse(ids, TOOLS, given) == Message("assistant", text, calls)
    if text:  # a stop text that cut the reply's text, though not its ids, ended it
        assert renderer.parse(ids, TOOLS, text) == Message("assistant", text)
    assert renderer.encode_reply(renderer.decode(ids)) == ids

    # Without the stop, the same call is cut off; without the opening, it is half a call.
    (call,) = renderer.parse(ids[:-1], TOOLS).tool_calls
    assert call.cause == "truncated"
    if name != "gemma":  # its text without marks is a call's
        (call,) = renderer.parse(ids[-1:], TOOLS).tool_calls
        assert call.cause == "unopened"


def test_a_token_between_two_calls_is_no_stop_if_another_end_is_declared(tmp_path):
    source, mark, _ = CLOSES["hermes"]
    alone, known = (renderer_of(source, tmp_path, declared) for declared in (False, True))
    assert alone.codec.control[mark] in alone.stop_ids
    assert known.codec.control[mark] not in known.stop_ids
    two = Message("assistant", "", (ToolCall("look", {"key": "a"}), ToolCall("keep", {"key": "b"})))
    opening = known.template.render([ASKED], TOOLS, generation_prompt=True)
    ids = known.codec.encode(known.template.render([ASKED, two], TOOLS)[len(opening) :])
    assert [call.name for call in known.parse(ids, TOOLS).tool_calls] == ["look", "keep"]
    assert len(alone.parse(cut(alone, two), TOOLS).tool_calls) == 1
    assert {"the end of a reply", "two calls"} <= reported(alone)
    assert "two calls" not in reported(known)


# As Solar Open: one token closes the thinking and the text.
TWO_PARTS = """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if m.reasoning_content -%}<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>{%- endif -%}
    <|begin|>assistant<|content|>{{ m.content }}<|end|>
  {%- else -%}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|begin|>assistant{%- endif -%}
"""  # noqa: E501


def test_a_token_that_also_closes_the_thinking_is_no_stop_if_another_end_is_declared(tmp_path):
    known = renderer_of(TWO_PARTS, tmp_path)
    reply = "<|think|>hm<|end|><|begin|>assistant<|content|>42"
    ids = known.encode_reply(reply)
    assert known.decode(ids) == f"{reply}<|end|><|eos_token|>"
    assert known.encode_reply(f"{reply}<|end|>") == ids
    assert [token for token in ids if token in known.stop_ids] == ids[-1:]
    for text in (None, known.decode(ids[:-1])):
        assert known.parse(ids, TOOLS, text) == Message("assistant", "42", reasoning="hm")
    appended = known.extend([ASKED, known.parse(ids)], ids, [Message("user", "more")])
    assert known.decode(appended.ids) == "<|begin|>user<|content|>more<|end|><|begin|>assistant"
    assert any("'<|end|>', which also ends a part" in text for _, text in check_template(known))


def test_check_says_where_nothing_ends_a_reply_but_what_ends_its_thinking(tmp_path):
    alone = renderer_of(TWO_PARTS, tmp_path, declared=False)
    assert {alone.decode([token]) for token in alone.stop_ids} == {"<|end|>"}
    found = [text for _, text in check_template(alone)]
    assert any("nothing but '<|end|>' ends a reply" in text for text in found)
    assert any("thinking and text: " in text and "stops it before" in text for text in found)


LLAMA4 = """
{%- for m in messages -%}<|header_start|>{{ m.role }}<|header_end|>

{% if m.tool_calls -%}<|python_start|>{{ m.content }}<|python_end|>
{%- for c in m.tool_calls -%}
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{%- endfor -%}
{%- else -%}{{ m.content }}{%- endif -%}<|eot|>{%- endfor -%}
{%- if add_generation_prompt -%}<|header_start|>assistant<|header_end|>

{% endif -%}
"""


def test_json_calls_after_a_text_between_marks_are_read(tmp_path):
    renderer = renderer_of(LLAMA4, tmp_path)
    assert renderer.call_format == ("llama3", "")
    calls = (ToolCall("look", {"key": "a"}, "call_0"), ToolCall("keep", {"rows": ["b"]}, "call_1"))
    for text in ("", "I look:\n[1]"):
        message = Message("assistant", text, calls)
        ids = cut(renderer, message)
        assert renderer.parse(ids, TOOLS) == message
        written = renderer.decode(ids[:-1])
        for position in range(len("<|python_start|>"), len(written)):
            found = renderer.parse((), TOOLS, written[:position]).tool_calls
            assert found
            assert all(call.error or call in calls for call in found)
    assert renderer.unread_replies == ()


TOLD = {
    "two calls": in_frame(
        "<TOOLCALL>[", "{% if loop.first %}{{ c.function | tojson }}{% endif %}", "", "]</TOOLCALL>"
    ),
    "a call with a string with quotes": in_frame(
        "<function_calls>",
        "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k "
        "}}=\"{{ v if v is string else '' }}\"{{ ', ' if not loop.last }}{% endfor %})",
        "\\n",
        "</function_calls><|done|>",
    ),
    "a call with numbers": in_frame(
        "<TOOLCALL>[",
        '{"name": {{ c.function.name | tojson }}, "arguments": { {%- for k, v in '
        "c.function.arguments.items() -%}"
        "{{ k | tojson }}: {{ (v | string if v is number else v) | tojson }}{{ ', ' if "
        "not loop.last }}{%- endfor -%} }}",
        ", ",
        "]</TOOLCALL><|done|>",
    ),
    "text and a call": in_frame(
        "{% if m.content %}<|done|>{% endif %}<TOOLCALL>[",
        "{{ c.function | tojson }}",
        ", ",
        "]</TOOLCALL><|done|>",
    ),
}


@pytest.mark.parametrize("kind", TOLD)
def test_check_names_the_kind_of_call_that_does_not_come_back(kind, tmp_path, capsys):
    renderer = renderer_of(TOLD[kind], tmp_path)
    assert kind in reported(renderer)
    assert main(["check", "--template", str(tmp_path / "template.jinja")]) == 0
    assert f"does not come back: {kind}: " in " ".join(capsys.readouterr().out.split())
    assert main(["check", "--template", str(tmp_path / "template.jinja"), "--json"]) == 0
    assert kind in {row["kind"] for row in json.loads(capsys.readouterr().out)["unread_replies"]}


KINDS = {
    "text": Message("assistant", "An answer."),
    "thinking and text": Message("assistant", "An answer.", reasoning="Thought."),
    "a call": Message("assistant", "", (ToolCall("look", {"key": "a"}, "abcdefgh0"),)),
    "text and a call": Message(
        "assistant", "An answer.", (ToolCall("look", {"key": "a"}, "abcdefgh0"),)
    ),
    "thinking and a call": Message(
        "assistant", "", (ToolCall("look", {"key": "a"}, "abcdefgh0"),), reasoning="Thought."
    ),
    "two calls": Message(
        "assistant",
        "",
        (ToolCall("look", {"key": "a"}, "abcdefgh0"), ToolCall("keep", {"key": "b"}, "abcdefgh1")),
    ),
    "a call with a string with quotes": Message(
        "assistant", "", (ToolCall("look", {"key": 'it\'s "x"\\'}, "abcdefgh0"),)
    ),
    "a call with a string that begins and ends with line breaks": Message(
        "assistant", "", (ToolCall("look", {"key": "\na\n\nb\n"}, "abcdefgh0"),)
    ),
    "a call with a list and an object": Message(
        "assistant",
        "",
        (ToolCall("look", {"key": "5", "rows": ["a", 'b"c'], "count": -3}, "abcdefgh0"),),
    ),
}
CORPUS = distinct()


@lru_cache(maxsize=256)
def corpus_renderer(name: str, source: str) -> ChatRenderer | None:
    template = template_of(name, source)
    try:
        codec = HFTokenizer(tokenizer_of(template))
        return ChatRenderer(codec, template, stop_ids=frozenset((codec.control["<|eos|>"],)))
    except TemplateError:
        return None


def lost_kinds(renderer: ChatRenderer) -> set[str]:
    """Return the kinds of this file's replies that do not come back, where the reply
    begins as the prompt does."""
    lost: set[str] = set()
    opening = renderer.template.try_render([ASKED], TOOLS, generation_prompt=True) or "-"
    for kind, message in KINDS.items():
        rendered = renderer.template.try_render([ASKED, message], TOOLS) or ""
        reply = rendered.removeprefix(opening)
        if not rendered.startswith(opening) or (message.tool_calls and "look" not in reply):
            continue
        ids = renderer.codec.encode_segment(reply)
        stop = next(
            (number for number, token in enumerate(ids) if token in renderer.stop_ids), None
        )
        found = renderer.parse(ids if stop is None else ids[: stop + 1], TOOLS)
        wanted = [(call.name, call.arguments, None) for call in message.tool_calls]
        same = [(call.name, call.arguments, call.error) for call in found.tool_calls] == wanted
        if not same or (
            message.text in reply and message.text not in (found.reasoning or "") + found.text
        ):
            lost.add(kind)
    return lost


LOST = {
    "GigaChat3-10B-A1.8B": {"two calls"},
    "GigaChat3.1-10B-A1.8B": {"two calls"},
    "LFM2.5-8B-A1B": {"a call with a string with quotes"},
    "lfm2_2_5": {"a call with a string with quotes"},
    "lfm2_2_5_v2": {"a call with a string with quotes"},
    "NVIDIA-Nemotron-Nano-v2": {"text and a call"},
    "openai-gpt-oss-120b": {"two calls"},
    "gptoss": {"two calls"},
    "gptoss_training": {"two calls"},
}
"""Kinds of replies of the corpus that do not come back: calls that are not written, not quoted, or
written after a stop."""


@pytest.mark.skipif(
    not CORPUS, reason="0 templates at hand; `PYTHONPATH=tests python -m kit.corpus` fetches them"
)
def test_what_an_engine_returns_is_read_or_check_says_so(capsys):
    count = 0
    for full, source in CORPUS:
        renderer = corpus_renderer(full, source)
        if renderer is None:
            continue
        name = full.rpartition("/")[2]
        told = reported(renderer)
        lost = lost_kinds(renderer)
        count += bool(lost or told)
        if "a call" in told:  # the values of arguments are not looked at where no call is read
            assert renderer.call_format[1], full
            continue
        assert lost <= told, f"{full}: check says nothing of {lost - told}"
        assert lost == LOST.get(name, set()), full
    with capsys.disabled():
        print(f"\n{count} of {len(CORPUS)} templates have a kind of reply that does not come back")

"""What is appended is what the template writes behind the real conversation, whatever state
it keeps across turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.histories import TOOLS, of_template
from kit.stateful import source, sources

from turnwright.errors import TemplateError
from turnwright.renderers import ChatTemplate, template_source
from turnwright.renderers.contract import explain_contract
from turnwright.renderers.control_text import random_mark
from turnwright.renderers.full_render import BuiltConversation, OriginRun, compare_with_render
from turnwright.renderers.load import template_renderer
from turnwright.types import Message, Origin, ToolCall

NONE: frozenset[str] = frozenset()
KINDS = {
    "user": ("user",),
    "tool": ("tool",),
    "tools": ("tool", "tool"),
    "tool, user": ("tool", "user"),
}


def renderer_of(text):
    return of_template(ChatTemplate(text, origin="made.jinja"))


def turn(number, kind, thought=None):
    """A reply and what answers it."""
    roles = KINDS[kind]
    calls = tuple(
        ToolCall("look", {"key": str(number)}, f"call{number}{i}")
        for i, role in enumerate(roles)
        if role == "tool"
    )
    reply = Message("assistant", "" if calls else f"said {number}", calls, reasoning=thought)
    ids = iter([call.id for call in calls])
    told = [
        Message(role, f"told {number}", tool_call_id=next(ids), name="look")
        if role == "tool"
        else Message(role, f"asked {number}")
        for role in roles
    ]
    return reply, told


def behind(text, history, told, tools):
    """What the template writes behind the real conversation from the end of its last reply on."""
    own, reply = random_mark(), history[-1]
    if reply.tool_calls:
        last = replace(reply.tool_calls[-1], arguments={"key": own})
        reply = replace(reply, tool_calls=(*reply.tool_calls[:-1], last))
    else:
        reply = replace(reply, content=own)
    whole = text.template.render([*history[:-1], reply, *told], tools, generation_prompt=True)
    return whole.rpartition(own)[2].partition("<|im_end|>")[2]


def check_appends(text, kinds, thoughts=(None,), *, system=False):
    tools = TOOLS if any("tool" in kind for kind in kinds) else []
    end = text.codec.control["<|im_end|>"]
    history = (
        [Message("system", "Be kind."), Message("user", "Begin.")]
        if system
        else [Message("user", "Begin.")]
    )
    for number, kind in enumerate(kinds):
        reply, told = turn(number, kind, thoughts[number % len(thoughts)])
        history.append(reply)
        wanted = behind(text, history, told, tools)
        got = text.decode(text.extend(history, [end], told, tools).ids)
        assert got == wanted, f"turn {number} ({kind})"
        history += told


@pytest.mark.parametrize(
    "name", ["round", "reminder", "long", "used tools", "system moves", "replies"]
)
def test_what_a_user_says_is_numbered_as_behind_the_whole_conversation(name):
    check_appends(
        renderer_of(source(frozenset((name,)), NONE, "kept", "")),
        ["user", "tool", "user", "user", "user"],
        system=True,
    )


@pytest.mark.parametrize("name", ["numbered", "first", "call ids", "parity"])
def test_results_of_tools_are_counted_over_the_whole_conversation(name):
    check_appends(
        renderer_of(source(NONE, frozenset((name,)), "kept", "")),
        ["tool", "tools", "user", "tool, user", "tool"],
    )


@settings(max_examples=20, deadline=None)
@given(
    text=sources().map(renderer_of),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=4, max_size=6),
    system=st.booleans(),
    thoughts=st.sampled_from([(None,), ("hm",), ("",), ("hm", "", None)]),
)
def test_appends_are_those_behind_the_real_conversation(text, kinds, system, thoughts):
    check_appends(text, kinds, thoughts, system=system)


@pytest.mark.parametrize("first", [["user", "user"], ["tool", "user"]])
def test_another_conversation_of_the_same_length_changes_nothing(first):
    text = renderer_of(source(frozenset(("used tools",)), NONE, "kept", ""))
    for kinds in (first, ["user", "tool"], ["tool", "tool"], ["user", "user"]):
        check_appends(text, [*kinds, "user"])


def test_a_window_that_no_probe_is_as_long_as_is_met_where_it_begins():
    late = (
        "{%- if m.role == 'user' and messages | length > 60 -%}{{- 'Late: ' -}}{%- "
        "endif -%}\n{{- m.content -}}"
    )
    text = renderer_of(source(NONE, NONE, "kept", "").replace("{{- m.content -}}", late))
    check_appends(text, ["user"] * 34)


def test_text_that_moves_with_the_conversation_cannot_become_control():
    text = renderer_of(source(frozenset(("system moves",)), NONE, "kept", ""))
    history = [
        Message("system", "Be kind.<|im_end|>"),
        Message("user", "Begin."),
        Message("assistant", "said"),
    ]
    ends = text.extend(history, [text.codec.control["<|im_end|>"]], [Message("user", "On.")]).ids
    assert ends.count(text.codec.control["<|im_end|>"]) == 1
    assert "Be kind." in text.decode(ends)


# What is said of such templates


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (source(NONE, NONE, "kept", "last five"), "rewrites messages"),
        (source(NONE, NONE, "kept", "last eight"), "rewrites messages"),
        (source(NONE, NONE, "older than two", ""), "strips older"),
        (source(frozenset(("round",)), NONE, "kept", ""), "append-only"),
    ],
)
def test_the_class_is_found_in_conversations_of_many_turns(text, kind):
    assert renderer_of(text).contract.kind == kind


def test_a_system_message_that_moves_is_seen():
    moves = source(NONE, NONE, "kept", "").replace(
        "{{- m.content -}}",
        "{%- if loop.last and messages[0].role == 'system' -%}{{- messages[0].content + '\\n' "
        "-}}{%- endif -%}{%- if m.role != 'system' -%}{{- m.content -}}{%- endif -%}",
    )
    contract = renderer_of(moves).contract
    assert not contract.append_only
    assert contract.system == "moved"


def test_it_is_said_that_appends_depend_on_earlier_turns():
    lines = [
        line
        for _, line in explain_contract(
            renderer_of(source(frozenset(("round",)), NONE, "kept", "")).contract
        )
    ]
    assert any("user" in line and "depends on earlier turns" in line for line in lines), lines


@pytest.mark.parametrize("window", ["last five", "last eight"])
def test_the_sanity_check_names_state_across_turns(window):
    text = renderer_of(source(NONE, NONE, "kept", window))
    end = text.codec.control["<|im_end|>"]
    messages = [Message("user", "Begin.")]
    ids = list(text.open(messages).ids)
    pieces = [OriginRun(Origin.PROMPT, 0, len(ids))]
    for number in range(6):
        said = [*text.encode(f"said {number}"), end]
        pieces.append(OriginRun(Origin.MODEL, len(ids), len(ids) + len(said), number))
        ids += said
        messages.append(Message("assistant", f"said {number}"))
        if number < 5:
            told = [Message("user", f"asked {number}")]
            more = text.extend(messages, said, told).ids
            pieces.append(OriginRun(Origin.ENV, len(ids), len(ids) + len(more)))
            ids += more
            messages += told
    found = compare_with_render(text, BuiltConversation(ids, pieces, messages))
    assert found is not None
    assert found.cause == "state"


# How bare templates end a reply


COMMAND = (
    "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' "
    "%}<|USER_TOKEN|>{{ m.content }}{% elif m.role == 'system' %}<|SYSTEM_TOKEN|>{{ "
    "m.content }}{% else %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content "
    "}}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor "
    "%}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if add_generation_prompt "
    "%}<|START_RESPONSE|>{% endif %}"
)
EXAONE = (
    "{% for m in messages %}{{ '[|' + m.role + '|]' + m.content }}"
    "{{ '\\n' if m.role == 'user' else '[|endofturn|]\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "end"), [(COMMAND, "<|END_OF_TURN_TOKEN|>"), (EXAONE, "[|endofturn|]")]
)
def test_a_bare_template_ends_a_reply_by_its_own_end(tmp_path, text, end):
    file = tmp_path / "bare.jinja"
    file.write_text(text, encoding="utf-8")
    try:
        found = template_renderer(str(file))
    except TemplateError as error:
        found = error
    assert getattr(getattr(found, "contract", None), "stops", found) == (end,)
    said = [*found.encode_reply("Yes.")]
    shown = found.decode([*found.open([Message("user", "u")]).ids, *said])
    rest = found.decode(
        found.extend([Message("user", "u"), found.parse(said)], said, [Message("user", "v")]).ids
    )
    assert shown + rest == found.template.render(
        [Message("user", "u"), Message("assistant", "Yes."), Message("user", "v")],
        generation_prompt=True,
    )


# Thinking that is empty


@pytest.mark.parametrize("thought", ["", " ", "\n"])
@pytest.mark.parametrize("name", ["qwen3_without_thinking", "qwen3_with_thinking"])
def test_empty_thinking_is_kept_where_the_template_keeps_it_and_stripped_where_it_strips(
    name, thought
):
    text = of_template(ChatTemplate(template_source(name), origin=name))
    said = text.encode_reply(f"<think>\n{thought}\n</think>\n\nIt is.")
    asked = [Message("user", "Is it?")]
    opened = list(text.open(asked).ids)
    messages = [*asked, text.parse(said), Message("user", "Why?")]
    from turnwright.renderers import Branch, SampledReply

    found = text.compose(messages, [SampledReply(1, tuple(said), len(opened))], [*opened, *said])
    kept = len(opened) + len(said) if not isinstance(found, Branch) else found.keep
    shown = text.decode([*opened, *said][:kept] + list(found.ids))
    whole = text.template.render(messages, generation_prompt=True)
    assert "".join(shown.split()) == "".join(whole.split())
    assert isinstance(found, Branch) == (name == "qwen3_without_thinking")

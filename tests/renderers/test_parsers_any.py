"""Whatever a model writes: no exception, no time lost, the same answer again."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.cpu import own_cost

from tests.renderers.test_parsers import GOLDEN, TOOLS
from turnwright.renderers.parsers import PARSERS, detect_format
from turnwright.types import Message

NAMES = sorted(PARSERS)
# What replies of any format are made of: whole examples, their marks, and what JSON
# and Python are made of.
_SPLIT = re.compile(r"(?<=[>\]])|(?=[<\[])")
_LOOSE = "\"'{}[](),:\\ \n\0\ud800"
PIECES = [
    *sorted({piece for text in GOLDEN.values() for piece in (text, *_SPLIT.split(text)) if piece}),
    *_LOOSE,
    *("True", "null", "1e5", "NaN", "```", ">>>"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def check(name: str, text: str, thinking: bool = False) -> Message:
    message = PARSERS[name].parse(text, TOOLS, thinking=thinking)
    assert message == PARSERS[name].parse(text, TOOLS, thinking=thinking)
    for call in message.tool_calls:
        assert isinstance(call.arguments, dict)
        assert call.id
        assert call.error is None or (call.error and call.cause and call.arguments == {})
        assert call.error is not None or call.name
    assert len(message.text) <= len(text)
    assert len(set(message.call_error_kinds)) <= len(message.call_error_kinds)
    assert PARSERS[name].parse(text, thinking=thinking).tool_calls == ()
    return message


@given(st.sampled_from(NAMES), TEXTS, st.booleans())
@example("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", False)
@example("lfm2", "<|tool_call_start|>[f(x=" + "(" * 100_000 + ")]<|tool_call_end|>", False)
@example(
    "qwen3_coder",
    "<tool_call><function=f><parameter=x>" + "[" * 100_000 + "</parameter></function></tool_call>",
    False,
)
def test_no_text_is_too_much(name, text, thinking):
    check(name, text, thinking)


@given(st.sampled_from(NAMES), st.data())
def test_a_reply_cut_off_anywhere_has_no_call_that_was_not_finished(name, data):
    text = GOLDEN[name]
    cut = data.draw(st.integers(0, len(text)))
    whole = PARSERS[name].parse(text, TOOLS).tool_calls[0]
    for call in check(name, text[:cut]).tool_calls:
        assert call.error is not None or call.arguments == whole.arguments


@given(TEXTS)
def test_any_text_chooses_a_known_format(text):
    assert detect_format(text) in (None, *PARSERS)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), st.text(max_size=20))
def test_json_formats_read_back_any_arguments(arguments, said):
    dumped = json.dumps(arguments, ensure_ascii=False)
    said = said.replace("<", "").replace("[", "").strip()
    forms = {
        "hermes": f'<tool_call>\n{{"name": "look_up", "arguments": {dumped}}}\n</tool_call>',
        "mistral": f"[TOOL_CALLS]look_up[ARGS]{dumped}",
        "deepseek": f"<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{dumped}<｜tool▁call▁end｜>",
        "kimi": f"<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{dumped}<|tool_call_end|>",  # noqa: E501
        "cohere": '<|START_ACTION|>[{"tool_name": "look_up", "parameters": '
        f"{dumped}}}]<|END_ACTION|>",
    }
    for name, text in forms.items():
        message = check(name, said + text)
        assert [(c.name, c.arguments, c.error) for c in message.tool_calls] == [
            ("look_up", arguments, None)
        ]
        assert message.text == said


_SIZE = 150_000
BAD = [
    "{mark}",
    "{mark}{{",
    '{mark}"',
    "{mark}[",
    '{mark}{{"name": "',
    "{mark}{close}",
    '{mark}"{close}',
    "{mark}[{close}",
    "{close}",
    "'\\",
    '"\\',
    "<function=f><parameter=x>",
    "<parameter=x>\n",
    "<arg_key>x</arg_key>",
    '{{"name": "f"}};',
    '<|"|>x:',
    "x(",
    "f(x=1,",
    "<|start|>assistant to=f",
    "<|message|>",
    "<think>",
    "</think>",
    " ",
    "{{",
]


@pytest.mark.parametrize("name", NAMES)
def test_megabytes_take_time_in_proportion(name):
    """At most 0.2 s of a core, for tens of thousands of calls that do not read; what looks at the
    rest per call takes 2.5."""
    dialects = getattr(PARSERS[name], "dialects", ())
    marks = {(d.open, d.close) for d in dialects} or {
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|python_tag|>", ""),
    }
    for mark, close in marks:
        for pattern in BAD:
            unit = pattern.format(mark=mark, close=close)
            if not unit or (unit == close and name != "hermes"):
                continue
            with own_cost() as cost:
                PARSERS[name].parse(mark + unit * (_SIZE // len(unit)) + close, TOOLS)
            assert cost.seconds < 1.5, (name, unit)


def test_the_end_of_thinking_in_an_argument_ends_no_thinking():
    call = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a</think>b"}}\n</tool_call>'
    tools = [
        {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    ]
    reply = PARSERS["hermes"].parse(call, tools)
    assert (reply.reasoning, [c.arguments for c in reply.tool_calls]) == (
        None,
        [{"q": "a</think>b"}],
    )
    thought = PARSERS["hermes"].parse(f"hm {call}</think>{call}", tools, thinking=True)
    assert thought.calls_in_thinking == 1

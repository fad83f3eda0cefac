"""Kimi K2's calls, whose ids are kept as they are written, since the template shows them again::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{"key": "a"}<|tool_call_end|><|tool_calls_section_end|>

Kimi K3 writes tags, with the type of each argument::

    <|open|>tools<|sep|><|open|>call tool="look_up" index="1"<|sep|><|open|>argument key="key" type="string"<|sep|>a<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
"""  # noqa: E501

import re

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat
from turnwise.render.parsers.readers import NamedJsonCalls, TaggedCalls

_MARK = "<|tool_call_argument_begin|>"


def _kimi_head(text: str) -> tuple[str, str]:
    """`functions.look_up:0` is the id of a call of `look_up`."""
    given_id = text.strip()
    name, _, _ = given_id.removeprefix("functions.").partition(":")
    return name, given_id


KIMI = ReplyFormat(
    "kimi",
    (
        CallSyntax(
            "<|tool_call_begin|>",
            NamedJsonCalls(_MARK, f"functions.NAME:0{_MARK}{{...}}", _kimi_head),
            "<|tool_call_end|>",
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
    ),
)

KIMI_K3 = ReplyFormat(
    "kimi_k3",
    (
        CallSyntax(
            "<|open|>tools<|sep|>",
            TaggedCalls(
                re.compile(r'<\|open\|>call tool="([^"<]*)"[^<]*<\|sep\|>'),
                re.compile(r'\s*<\|open\|>argument key="([^"<]*)" type="(?P<type>[^"<]*)"<\|sep\|>'),
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
                '<|open|>call tool="NAME"<|sep|><|open|>argument key="KEY" type="TYPE"<|sep|>VALUE'
                "<|close|>argument<|sep|><|close|>call<|sep|>",
            ),
            "<|close|>tools<|sep|>",
        ),
    ),
    thinking=ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)

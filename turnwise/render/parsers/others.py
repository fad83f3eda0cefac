"""Formats of one family each: a row of marks and a reader that others have too.

Functionary 3.1::    <function=look_up>{"key": "a"}</function>
Functionary 3.2::    look_up\\n{"key": "a"}>>>look_up\\n{"key": "b"}   (the prompt ends in `>>>`; `all` is the visible text)
Solar Open::         <|tool_call:begin|>ID<|tool_call:name|>look_up<|tool_call:args|>{"key": "a"}<|tool_call:end|>
Apertus::            <|tools_prefix|>[{"look_up": {"key": "a"}}]<|tools_suffix|>
Granite 3, Phi 4::   <|tool_call|>[{"name": "look_up", "arguments": {"key": "a"}}]   (`<tool_call>` in Granite 3.1)
InternLM 2::         <|action_start|><|plugin|>{"name": "look_up", "parameters": {"key": "a"}}<|action_end|>
MiniCPM 5::          <function name="look_up"><param name="key">a</param></function>
"""

from __future__ import annotations

import re

from turnwise.render.parsers.base import CallSyntax, MalformedCall, ReasoningMarks, ReplyFormat, Tools, malformed_call
from turnwise.render.parsers.readers import JsonCalls, NamedJsonCalls, TaggedCalls, make_call
from turnwise.render.parsers.values import read_json
from turnwise.types import ToolCall

FUNCTIONARY = ReplyFormat(
    "functionary", (CallSyntax("<function=", NamedJsonCalls(">", "<function=NAME>{...}</function>"), "</function>"),)
)


def _solar_head(text: str) -> tuple[str, str]:
    given_id, _, name = text.partition("<|tool_call:name|>")
    return name.strip(), given_id.strip()


_SOLAR = NamedJsonCalls(
    "<|tool_call:args|>", "<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>", _solar_head
)
SOLAR = ReplyFormat(
    "solar",
    (CallSyntax("<|tool_call:begin|>", _SOLAR, "<|tool_call:end|>", ("<|tool_calls|>",)),),
    thinking=ReasoningMarks("<|think|>", "<|end|>"),
    dropped=("<|begin|>assistant", "<|content|>"),
)


def _apertus(body: str, tools: Tools) -> list[ToolCall]:
    try:
        value = read_json(body)
    except MalformedCall as error:
        return [malformed_call(error.cause, str(error))]
    if not isinstance(value, list) or not value:
        return [malformed_call("not_a_call", 'tool calls are a list of objects {"NAME": {...}}')]
    return [
        make_call(*next(iter(item.items())))
        if isinstance(item, dict) and len(item) == 1
        else malformed_call("not_a_call", 'a tool call is an object {"NAME": {...}}')
        for item in value
    ]


APERTUS = ReplyFormat("apertus", (CallSyntax("<|tools_prefix|>", _apertus, "<|tools_suffix|>"),))

_LIST = JsonCalls(many=True)


def _granite(body: str, tools: Tools) -> list[ToolCall]:
    text = body.strip()
    for mark in ("<|/tool_call|>", "</tool_call>"):  # Phi 4 writes an end, Granite none
        text = text.removesuffix(mark)
    return _LIST(text)


GRANITE = ReplyFormat("granite", (CallSyntax("<|tool_call|>", _granite), CallSyntax("<tool_call>", _granite)))
INTERNLM2 = ReplyFormat(
    "internlm2",
    (CallSyntax("<|action_start|><|plugin|>", JsonCalls(arguments=("parameters", "arguments")), "<|action_end|>"),),
)

_MINICPM = TaggedCalls(
    re.compile(r'<function name="([^">\n]*)">'),
    re.compile(r'\s*<param name="([^">\n]*)">'),
    "</param>",
    "</function>",
    '<function name="NAME"><param name="KEY">VALUE</param></function>',
    cdata=True,
)


def _minicpm(body: str, tools: Tools) -> list[ToolCall]:
    return _MINICPM(f"<function {body}</function>", tools)


MINICPM = ReplyFormat("minicpm", (CallSyntax("<function ", _minicpm, "</function>"),))

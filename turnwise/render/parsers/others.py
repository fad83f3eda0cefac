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

from turnwise.render.parsers.base import BadCall, Dialect, Format, Thinking, Tools, bad_call
from turnwise.render.parsers.readers import JsonCalls, NamedJson, Tags, with_arguments
from turnwise.render.parsers.values import read_json
from turnwise.types import ToolCall

FUNCTIONARY = Format("functionary", (Dialect("<function=", NamedJson(">", "<function=NAME>{...}</function>"), "</function>"),))


def _solar_head(text: str) -> tuple[str, str]:
    given_id, _, name = text.partition("<|tool_call:name|>")
    return name.strip(), given_id.strip()


_SOLAR = NamedJson(
    "<|tool_call:args|>", "<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>", _solar_head
)
SOLAR = Format(
    "solar",
    (Dialect("<|tool_call:begin|>", _SOLAR, "<|tool_call:end|>", ("<|tool_calls|>",)),),
    thinking=Thinking("<|think|>", "<|end|>"),
    dropped=("<|begin|>assistant", "<|content|>"),
)


def _apertus(body: str, tools: Tools) -> list[ToolCall]:
    try:
        value = read_json(body)
    except BadCall as error:
        return [bad_call(error.cause, str(error))]
    if not isinstance(value, list) or not value:
        return [bad_call("not_a_call", 'tool calls are a list of objects {"NAME": {...}}')]
    return [
        with_arguments(*next(iter(item.items())))
        if isinstance(item, dict) and len(item) == 1
        else bad_call("not_a_call", 'a tool call is an object {"NAME": {...}}')
        for item in value
    ]


APERTUS = Format("apertus", (Dialect("<|tools_prefix|>", _apertus, "<|tools_suffix|>"),))

_LIST = JsonCalls(many=True)


def _granite(body: str, tools: Tools) -> list[ToolCall]:
    text = body.strip()
    for mark in ("<|/tool_call|>", "</tool_call>"):  # Phi 4 writes an end, Granite none
        text = text.removesuffix(mark)
    return _LIST(text)


GRANITE = Format("granite", (Dialect("<|tool_call|>", _granite), Dialect("<tool_call>", _granite)))
INTERNLM2 = Format(
    "internlm2",
    (Dialect("<|action_start|><|plugin|>", JsonCalls(arguments=("parameters", "arguments")), "<|action_end|>"),),
)

_MINICPM = Tags(
    re.compile(r'<function name="([^">\n]*)">'),
    re.compile(r'\s*<param name="([^">\n]*)">'),
    "</param>",
    "</function>",
    '<function name="NAME"><param name="KEY">VALUE</param></function>',
    cdata=True,
)


def _minicpm(body: str, tools: Tools) -> list[ToolCall]:
    return _MINICPM(f"<function {body}</function>", tools)


MINICPM = Format("minicpm", (Dialect("<function ", _minicpm, "</function>"),))

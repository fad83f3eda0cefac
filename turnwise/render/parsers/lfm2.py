"""Calls as Python writes them: LFM2's list between marks, and lines of calls in MiniCPM 3 and OLMo 3::

    <|tool_call_start|>[look_up(key='a', limit=3), look_up(key='b')]<|tool_call_end|>
    <|tool_call_start|>\n```python\nlook_up(key="a")\n```\n<|tool_call_end|>
    <function_calls>look_up(key="a")\nlook_up(key="b")</function_calls>

Values are Python's literals, or JSON (templates write nested objects so). The templates do not escape quotes in strings, so
that a string with a quote in it cannot be read back; a model that escapes them, as in Python, is read.
"""

from __future__ import annotations

import re
from typing import Any

from turnwise.render.parsers.base import CallSyntax, MalformedCall, ReasoningMarks, ReplyFormat, Tools, malformed_call
from turnwise.render.parsers.values import STRING, python_as_json, read_json
from turnwise.types import ToolCall

_EXAMPLE = "[NAME(KEY='VALUE')]"
_CALL = re.compile(r"\s*([\w.-]+)\(")
_KEY = re.compile(r"\s*([\w-]+)\s*=")
_LFM2_BETWEEN = re.compile(r"\s*,(?=\s*[\w.-]+\()")
_LFM2_PLAIN = re.compile(r"""[^'"()\[\]{},]+""")
_FENCE = re.compile(r"^```(?:python)?\s*|\s*```$")
_LINES = re.compile(r"\)\s*\n(?=\s*[\w.-]+\()")
_OPENING, _CLOSING = "([{", ")]}"


def read_list(body: str, tools: Tools) -> list[ToolCall]:
    """Read `[NAME(KEY='VALUE'), ...]`."""
    text = body.strip()
    found: list[ToolCall] = []
    name = ""
    try:
        if not text.startswith("["):
            raise MalformedCall("not_a_call", f"a tool call looks like {_EXAMPLE}")
        at = 1
        while True:
            head = _CALL.match(text, at)
            name = head[1] if head else ""
            if head is None:
                cut = not text[at:].strip()
                raise MalformedCall("truncated" if cut else "not_a_call", f"a tool call looks like {_EXAMPLE}")
            arguments, at = _arguments(text, head.end())
            found.append(ToolCall(name, arguments))
            if (between := _LFM2_BETWEEN.match(text, at)) is None:
                break
            at = between.end()
        if text[at:].strip() != "]":
            name = ""
            raise MalformedCall("not_a_call" if text[at:] else "truncated", f"the list of tool calls does not end: {_EXAMPLE}")
    except MalformedCall as error:
        found.append(malformed_call(error.cause, str(error), name))
    return found


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The arguments from behind an opening parenthesis on, and where the call ends."""
    arguments: dict[str, Any] = {}
    while True:
        key = _KEY.match(text, at)
        if key is None:
            end = at + len(text[at : at + 64]) - len(text[at : at + 64].lstrip())
            if text[end : end + 1] == ")":
                return arguments, end + 1
            raise MalformedCall("not_a_call" if text[end:] else "truncated", f"arguments are given by name: {_EXAMPLE}")
        if key[1] in arguments:
            raise MalformedCall("repeated_argument", f"the argument {key[1]:.80} is given twice; give it once")
        end = _end_of_value(text, key.end())
        value = text[key.end() : end].strip()
        arguments[key[1]] = read_json(python_as_json(value), f"the argument {key[1]:.80}")
        at = end + (text[end] == ",")


def _end_of_value(text: str, at: int) -> int:
    """Where the comma or the parenthesis behind a value stands."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            if not depth:
                return at
            depth -= 1
        elif char == "," and not depth:
            return at
        elif char != ",":
            token = STRING.match(text, at) or _LFM2_PLAIN.match(text, at)
            if token is None:
                break
            at = token.end()
            continue
        at += 1
    raise MalformedCall("truncated", "the tool call is cut off: a value does not end")


LFM2 = ReplyFormat("lfm2", (CallSyntax("<|tool_call_start|>", read_list, "<|tool_call_end|>"),))


def _read_lines(body: str, tools: Tools) -> list[ToolCall]:
    """Read calls in lines, with or without a fence of code around them."""
    text = _FENCE.sub("", body.strip()).strip()
    return read_list("[" + _LINES.sub("),", text) + "]", tools) if text else read_list(text, tools)


MINICPM3 = ReplyFormat(
    "minicpm3",
    (CallSyntax("<|tool_call_start|>", _read_lines, "<|tool_call_end|>"),),
    thinking=ReasoningMarks("<|thought_start|>", "<|thought_end|>"),
)
OLMO3 = ReplyFormat("olmo3", (CallSyntax("<function_calls>", _read_lines, "</function_calls>"),))

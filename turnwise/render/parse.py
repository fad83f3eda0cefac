"""What a reply's text means: reasoning, tool calls, and the visible rest. Ids are never touched by it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.types import Message, ToolCall

_THINK = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


def parse_reply(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Message:
    """Read a reply in Hermes' format (`<think>`, `<tool_call>` with JSON), as Qwen models write it.

    Tool calls are looked for only where the model was told of tools. Never raises: a malformed call is a `ToolCall` whose
    `error` says what is wrong.

    Args:
        text: the decoded reply without its end token.
        tools: OpenAI schemas of the tools that the model was told of.
    """
    if "<" not in text:
        return Message("assistant", text)
    reasoning = None
    if "</think>" in text and (match := _THINK.match(text)):
        reasoning, text = match.group(1).strip("\n"), text[match.end() :]
    elif text.lstrip().startswith("<think>"):  # cut off while thinking: nothing was said or called yet
        return Message("assistant", "", reasoning=text.lstrip().removeprefix("<think>").strip("\n"))
    calls: tuple[ToolCall, ...] = ()
    if tools and "<tool_call>" in text:
        calls = tuple(_read_call(body, bool(end), number) for number, (body, end) in enumerate(_CALL.findall(text)))
        text = _CALL.sub("", text).strip()
    return Message("assistant", text, tool_calls=calls, reasoning=reasoning)


def _read_call(body: str, closed: bool, number: int) -> ToolCall:
    name = f"call_{number}"
    if not closed:
        return ToolCall("", {}, name, "the tool call is cut off: </tool_call> is missing")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, name, f"the tool call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, name, 'a tool call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, name, '"arguments" of a tool call is a JSON object')
    return ToolCall(value["name"], arguments, name)

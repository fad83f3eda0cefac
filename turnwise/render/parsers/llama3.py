"""Llama 3's JSON: the whole reply is one call, or several parted by semicolons::

    {"name": "look_up", "parameters": {"key": "a"}}
    <|python_tag|>{"name": "look_up", "parameters": {"key": "a"}}; {"name": "look_up", "parameters": {"key": "b"}}

No mark says that it is a call: without `<|python_tag|>`, a reply that begins with an object of other keys is an answer in
JSON, and a reply that begins with words has no calls.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from turnwise.render.parsers.base import ReplyFormat, Tools, finish_calls
from turnwise.render.parsers.readers import JsonCalls
from turnwise.types import Message, ToolCall

_MARK = "<|python_tag|>"
_BEGIN = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_LLAMA3_BETWEEN = re.compile(r"\s*;\s*(?=\{)")
_DECODER = json.JSONDecoder()
_LLAMA3_PLAIN = ReplyFormat("llama3", ())
_READ = JsonCalls(arguments=("parameters", "arguments"))


@dataclass(frozen=True, slots=True)
class Llama3:
    """Reads replies that are a call as a whole."""

    name: str = "llama3"

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`."""
        message = _LLAMA3_PLAIN.parse(text, tools, thinking=thinking)
        if not tools:
            return message
        said = message.text.strip()
        if not said.startswith(_MARK) and not _BEGIN.match(said):
            return message
        calls = finish_calls(_calls(said.removeprefix(_MARK).strip()), tools)
        return Message("assistant", "", tool_calls=calls, reasoning=message.reasoning)

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return _LLAMA3_PLAIN.opens_reasoning(prompt)


def _calls(text: str) -> list[ToolCall]:
    """The objects of a text; what follows the last one that reads is read with it, and is an error there."""
    found: list[ToolCall] = []
    at = 0
    while True:
        try:
            end = _DECODER.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            return found + _READ(text[at:])
        between = _LLAMA3_BETWEEN.match(text, end)
        if between is None:
            return found + _READ(text[at:])
        found += _READ(text[at:end])
        at = between.end()


LLAMA3 = Llama3()

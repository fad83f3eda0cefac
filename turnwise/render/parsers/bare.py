"""Replies that are a list of calls as a whole, without a mark::

    [look_up(key="a"), look_up(key="b")]                      Python: Llama 4, ToolACE, ...
    [{"name": "look_up", "arguments": {"key": "a"}}]          JSON: xLAM, ...

A reply that begins in another way has no calls: words, a list of numbers, or a link in Markdown are answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from turnwise.render.parsers.base import Read, ReasoningMarks, ReplyFormat, Tools, finish_calls, name_of
from turnwise.render.parsers.lfm2 import read_list
from turnwise.render.parsers.readers import JsonCalls
from turnwise.types import Message


@dataclass(frozen=True, slots=True)
class Bare:
    """Reads replies that are a list of calls as a whole."""

    name: str
    begins: re.Pattern[str]
    """What such a reply begins with; group 1 is the first tool's name, where it must be one that there is."""
    read: Read
    dropped: tuple[str, ...] = ()
    """Marks that may stand around the list."""
    thinking: ReasoningMarks = field(default_factory=ReasoningMarks)

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`."""
        message = self._plain.parse(text, tools, thinking=thinking)
        said = message.text.strip()
        for mark in self.dropped:
            said = said.removeprefix(mark).removesuffix(mark).strip()
        begins = self.begins.match(said) if tools else None
        if begins is None or (begins.lastindex and begins[1] not in map(name_of, tools) and not said.endswith(")]")):
            return message
        return Message("assistant", "", tool_calls=finish_calls(self.read(said, tools), tools), reasoning=message.reasoning)

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return self.thinking.opened(prompt)

    @property
    def _plain(self) -> ReplyFormat:
        return ReplyFormat(self.name, (), thinking=self.thinking)


PYTHONIC = Bare("pythonic", re.compile(r"\[\s*([\w.-]+)\("), read_list, ("<|python_start|>", "<|python_end|>"))
JSON_LIST = Bare(
    "json_list",
    re.compile(r'\[\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*|"id"\s*:\s*"[^"]*"\s*,\s*)*"(?:name|function)"\s*:'),
    JsonCalls(many=True, arguments=("arguments", "parameters")),
)
BARE = (PYTHONIC, JSON_LIST)

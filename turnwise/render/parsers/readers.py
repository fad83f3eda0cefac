"""Readers for what stands between the marks of a call: JSON, a name before JSON, and tags with bare text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from turnwise.render.parsers.base import MalformedCall, Tools, malformed_call, properties_of
from turnwise.render.parsers.values import coerce, read_json
from turnwise.types import ToolCall

_CDATA = "<![CDATA["


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Reads `{"name": ..., "arguments": {...}}`, or a list of those."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    given_id: str = "id"
    many: bool = False
    """Whether a list of calls is read."""
    lines: bool = False
    """Whether calls stand in lines, one JSON object each."""

    def __call__(self, body: str, tools: Tools = ()) -> list[ToolCall]:
        if self.lines:
            return [call for line in body.split("\n") if line.strip() for call in self._read(line)] or self._read(body)
        return self._read(body)

    def _read(self, body: str) -> list[ToolCall]:
        try:
            value = read_json(body)
        except MalformedCall as error:
            return [malformed_call(error.cause, str(error))]
        if self.many and isinstance(value, list) and value:
            return [self._call(item) for item in value]
        return [self._call(value)]

    def _call(self, value: Any) -> ToolCall:
        key = self.arguments[0]
        if isinstance(value, dict) and isinstance(value.get("function"), dict):  # a call in OpenAI's own shape
            value = {self.given_id: value.get(self.given_id), **value["function"]}
        if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
            return malformed_call("not_a_call", f'a tool call is a JSON object with "{self.name}" and "{key}"')
        name, given = value[self.name], value.get(self.given_id)
        given = given if isinstance(given, str) else ""
        found = next((value[key] for key in self.arguments if key in value), None)
        if found is None and len(value) == 1:
            found = {}
        return make_call(name, found, given, f'"{key}" of a tool call')


def make_call(name: str, arguments: Any, given_id: str = "", what: str = "the arguments of a tool call") -> ToolCall:
    """A call of these arguments: an object, or a string that holds one in JSON (as OpenAI's API has it)."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except MalformedCall as error:
            return malformed_call("arguments_not_object", f"{what} is a JSON object, not a string ({error})", name, given_id)
    if not isinstance(arguments, dict):
        return malformed_call("arguments_not_object", f"{what} is a JSON object", name, given_id)
    return ToolCall(name, arguments, given_id)


@dataclass(frozen=True, slots=True)
class NamedJsonCalls:
    """Reads a name, a mark, and the arguments in JSON."""

    mark: str
    example: str
    """What a call looks like, for the model."""
    head: Callable[[str], tuple[str, str]] = lambda text: (text.strip(), "")
    """Name and id in what stands before the mark."""

    def __call__(self, body: str, tools: Tools) -> list[ToolCall]:
        before, found, after = body.partition(self.mark)
        name, given_id = self.head(before)
        if not found:
            return [
                malformed_call("truncated", f"the tool call is cut off: {self.mark.strip()} is missing; write {self.example}")
            ]
        if not name or name != "".join(name.split()):
            return [malformed_call("not_a_call", f"a tool call looks like {self.example}")]
        try:
            arguments = read_json(after.strip())
        except MalformedCall as error:
            return [malformed_call(error.cause, str(error), name, given_id)]
        return [make_call(name, arguments, given_id)]


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Reads calls whose arguments stand in tags as bare text, as many as one block holds.

    Bare text has no type: see `values.coerce`. A text that holds the tag which ends it cannot be told from one that ends
    there. An argument given twice, a tag that is not closed, and anything between tags are errors.
    """

    head: re.Pattern[str]
    """Begins a call; group 1 is its name."""
    argument: re.Pattern[str]
    """Begins an argument; group 1 is its name, group `type` says whether its text is a `string` where the format tells."""
    end: str
    """Ends an argument."""
    tail: str
    """Ends a call; empty where the block's end does."""
    example: str
    newline: bool = False
    """Whether a line break stands before and behind the text of an argument, which is no part of it."""
    cdata: bool = False
    """Whether `<![CDATA[` and `]]>` may stand around the text of an argument."""

    def __call__(self, body: str, tools: Tools) -> list[ToolCall]:
        heads = list(self.head.finditer(body))
        if not heads:
            return [malformed_call("not_a_call" if body.strip() else "truncated", f"a tool call looks like {self.example}")]
        calls = []
        if body[: heads[0].start()].strip():
            calls.append(
                malformed_call("not_a_call", f"text stands before the tool call; a tool call looks like {self.example}")
            )
        ends = [*(head.start() for head in heads[1:]), len(body)]
        for head, end in zip(heads, ends, strict=True):
            name = head[1].strip()
            try:
                if not name:
                    raise MalformedCall("not_a_call", f"the tool call has no name; it looks like {self.example}")
                calls.append(ToolCall(name, dict(self._arguments(body[head.end() : end], name, tools))))
            except MalformedCall as error:
                calls.append(malformed_call(error.cause, str(error), name))
        return calls

    def _arguments(self, text: str, name: str, tools: Tools) -> Iterator[tuple[str, Any]]:
        properties = properties_of(tools, name)
        seen: set[str] = set()
        at = 0
        while match := self.argument.match(text, at):
            key = match[1].strip()
            if key in seen:
                raise MalformedCall("repeated_argument", f"the argument {key:.80} is given twice; give it once")
            seen.add(key)
            begin = match.end()
            begin = begin + len(_CDATA) if self.cdata and text.startswith(_CDATA, begin) else begin
            end = "]]>" + self.end if begin != match.end() else self.end
            at = text.find(end, begin)
            if at < 0:
                raise MalformedCall("truncated", f"the tool call is cut off: the argument {key:.80} has no {end}")
            value = text[begin:at]
            at += len(end)
            if self.newline:
                value = value.removeprefix("\n").removesuffix("\n")
            kind = match.groupdict().get("type")
            if kind is None:
                yield key, coerce(value, properties.get(key))
            else:
                yield key, value if kind in ("string", "true") else read_json(value, f"the argument {key:.80}")
        rest = text[at:].strip()
        if self.tail and rest.startswith(self.tail):
            rest = rest[len(self.tail) :].strip()
        elif self.tail:
            said = f"{rest[:40]!r} stands in place of {self.tail}" if rest else f"{self.tail} is missing"
            raise MalformedCall("not_a_call" if rest else "truncated", f"the tool call does not end: {said}")
        if rest:
            raise MalformedCall(
                "not_a_call", f"the tool call has {rest[:40]!r} where it should end; it looks like {self.example}"
            )

"""Read tool-call bodies: JSON, named JSON, tags, Python literals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from turnwise.renderers.parsers.base import MalformedCall, Tools, malformed_call, properties_of
from turnwise.types import ToolCall

_NEAR = 64
"""Characters before a mistake that are looked at for its cause."""
_COMMA = re.compile(r",?\s*[}\]]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"""'|\b(?:True|False|None)\b""")
STRING = re.compile(r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\"""", re.DOTALL)
"""A string as Python and JSON write it."""
_TOKEN = re.compile(rf"""(?P<string>{STRING.pattern})|(?P<word>[^\W\d]\w*)|(?P<other>[^'"\w]+|\d[\w.+-]*)""", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def read_json(text: str, what: str = "the tool call") -> Any:
    """Strict JSON.

    Raises:
        MalformedCall: `truncated`, `trailing_comma`, `python_literal`, `too_deep` or `not_json`.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise MalformedCall("too_deep", f"{what} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise _explained(text, error, what) from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise MalformedCall("not_json", f"{what} is not valid JSON: {error}") from None


def _explained(text: str, error: json.JSONDecodeError, what: str) -> MalformedCall:
    at = error.pos
    before = text[max(0, at - _NEAR) : at].rstrip()
    if text.strip() and (not text[at:].strip() or error.msg.startswith("Unterminated string")):
        return MalformedCall("truncated", f"{what} is cut off: {error}")
    if _COMMA.match(text, at) and (text[at] == "," or before.endswith(",")):
        return MalformedCall(
            "trailing_comma", f"{what} is not valid JSON: remove the comma before the closing bracket ({error})"
        )
    if _PYTHON.match(text, at):
        return MalformedCall(
            "python_literal",
            f"{what} is not valid JSON: write strings in double quotes, and true, false and null in small letters ({error})",
        )
    return MalformedCall("not_json", f"{what} is not valid JSON: {error}")


def python_as_json(text: str) -> str:
    """The JSON for a text of Python's literals (strings, numbers, True, False, None, lists, tuples and dicts of them).

    Raises:
        MalformedCall: `truncated` when a string does not end, `not_json` for a name that is none of these.
    """
    parts: list[str] = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise MalformedCall("truncated", "the tool call is cut off: a string does not end")
        at = token.end()
        if (string := token["string"]) is not None:
            parts.append(json.dumps(unescape(string[1:-1])))
        elif (word := token["word"]) is not None:
            if word not in _WORDS and word not in _WORDS.values():
                raise MalformedCall("not_json", f"the tool call has the bare word {word:.40}; write strings in quotes")
            parts.append(_WORDS.get(word, word))
        else:
            parts.append(token["other"].replace("(", "[").replace(")", "]"))
    return "".join(parts)


def unescape(text: str) -> str:
    """The text that a Python string's body stands for; an escape that is none stays as it is."""
    return _ESCAPE.sub(_escaped, text) if "\\" in text else text


def _escaped(match: re.Match[str]) -> str:
    what = match[1]
    if len(what) > 1:
        return chr(int(what[1:], 16))
    return _ESCAPED.get(what) if what in _ESCAPED else what if what in "\\'\"" else match[0]  # type: ignore[return-value]


def coerce(text: str, schema: Any) -> Any:
    """The value that a bare text stands for, by the type that its schema asks for.

    Formats that write arguments as bare text lose their types: `5` may be a string. Where the schema asks for strings alone
    the text stays; where it allows others too, or says nothing, what reads as JSON (or as Python's True, False and None,
    which templates write) is that. A text that fits nothing stays, and the environment says what is wrong with it.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        try:
            value = _DECODER.decode(python_as_json(text))
        except (ValueError, RecursionError):
            return text
    if "string" in kinds and not any(_is(value, kind) for kind in kinds):
        return text
    return value


def _kinds(schema: Any, depth: int = 8) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if isinstance(kinds := schema.get("type"), str):
        return {kinds}
    if isinstance(kinds, (list, tuple)):
        return {kind for kind in kinds if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(members := schema.get(key), (list, tuple)):
            found = [_kinds(member, depth - 1) for member in members]
            return set().union(*found) if all(found) else set()
    choices = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if isinstance(choices, (list, tuple)) and choices and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    return set()


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    plain: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "array": list, "object": dict}
    return value is None if kind == "null" else kind in plain and isinstance(value, plain[kind])


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

"""Read tool-call bodies: JSON, named JSON, tags, Python literals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from turnwright.renderers.parsers.reply_format import MalformedCall, malformed_call, properties_of
from turnwright.types import ToolCall, Tools
from turnwright.types.json_schema import JSON_TYPES, SchemaFault, is_plain, json_type, read_schema

_NEAR = 64
"""Characters before an error that are inspected for its cause."""
_COMMA = re.compile(r",?\s*[}\]]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"""'|\b(?:True|False|None)\b""")
STRING = re.compile(r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\"""", re.DOTALL)
"""Pattern of a Python or JSON string."""
_TOKEN = re.compile(
    rf"""(?P<string>{STRING.pattern})|(?P<word>[^\W\d]\w*)|(?P<other>[^'"\w]+|\d[\w.+-]*)""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value")


def _finite(text: str) -> float:
    """Convert a number; raise `ValueError` for one that JSON has and a float has not."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)


def read_json(text: str, what: str = "the tool call") -> Any:
    """Parse strict JSON. Raises `MalformedCall`: `truncated`, `trailing_comma`, `python_literal`,
    `too_deep` or `not_json`."""
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
        cause, found = "trailing_comma", f"remove the comma before the closing bracket ({error})"
    elif _PYTHON.match(text, at):
        found = (
            f"write strings in double quotes, and true, false and null in small letters ({error})"
        )
        cause = "python_literal"
    else:
        cause, found = "not_json", str(error)
    return MalformedCall(cause, f"{what} is not valid JSON: {found}")


def python_as_json(text: str) -> str:
    """Convert Python literals (strings, numbers, True, False, None, and lists, tuples and
    dicts of them) to JSON text.

    Raises `MalformedCall`: `truncated` if a string does not end, `not_json` for any other name.
    """
    parts: list[str] = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise MalformedCall("truncated", "the tool call is cut off: a string does not end")
        at = token.end()
        if (string := token["string"]) is not None:
            parts.append(json.dumps(_ESCAPE.sub(_escaped, string[1:-1])))
        elif (word := token["word"]) is not None:
            if word not in _WORDS and word not in _WORDS.values():
                raise MalformedCall(
                    "not_json",
                    f"the tool call has the bare word {word:.40}; write strings in quotes",
                )
            parts.append(_WORDS.get(word, word))
        else:
            parts.append(token["other"].replace("(", "[").replace(")", "]"))
    return "".join(parts)


def _escaped(match: re.Match[str]) -> str:
    """Return the character of an escape in a Python string; invalid escapes stay unchanged."""
    what = match[1]
    if len(what) > 1:
        return chr(int(what[1:], 16))
    return _ESCAPED.get(what) if what in _ESCAPED else what if what in "\\'\"" else match[0]  # type: ignore[return-value]


def coerce(text: str, schema: Any) -> Any:
    """Convert bare text to the type of its schema.

    Formats with bare-text arguments lose types: `5` may be a string. If the schema allows strings
    only, the text stays. If it allows other types too, or none is given, text that parses as JSON
    (or as Python's True, False and None, which templates write) is converted. Text that matches no
    type stays, and the environment reports the error.
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        try:
            value = _DECODER.decode(python_as_json(text))
        except (ValueError, RecursionError):
            return text
    # "1.0" passes as an integer in the check of arguments; where a text is
    # possible too, it stays one
    value_type = "number" if isinstance(value, float) else json_type(value)
    if "string" in types and value_type not in types:
        return text
    return value


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of them if it names
    none, or cannot be read."""
    if not isinstance(schema, Mapping):
        return JSON_TYPES
    if schema.get("type") == "string" and is_plain(schema):
        return _TEXT
    try:
        resolved = read_schema(schema)
        return resolved.types(resolved.root)
    except SchemaFault:
        return JSON_TYPES


_TEXT = frozenset({"string"})


_CDATA = "<![CDATA["


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Reader of `{"name": ..., "arguments": {...}}`, or a list of those."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    given_id: str = "id"
    many: bool = False
    """Whether the body may be a list of calls."""
    lines: bool = False
    """Whether each line is a call, as one JSON object."""

    def __call__(self, body: str, tools: Tools = ()) -> list[ToolCall]:
        if self.lines:
            return [
                call for line in body.split("\n") if line.strip() for call in self._read(line)
            ] or self._read(body)
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
        if isinstance(value, dict) and isinstance(
            value.get("function"), dict
        ):  # a call in OpenAI's own shape
            value = {self.given_id: value.get(self.given_id), **value["function"]}
        if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
            return malformed_call(
                "not_a_call", f'a tool call is a JSON object with "{self.name}" and "{key}"'
            )
        given = value.get(self.given_id)
        found = next((value[key] for key in self.arguments if key in value), None)
        if found is None and len(value) == 1:
            found = {}
        return make_call(
            value[self.name],
            found,
            given if isinstance(given, str) else "",
            f'"{key}" of a tool call',
        )


def make_call(
    name: str, arguments: Any, given_id: str = "", what: str = "the arguments of a tool call"
) -> ToolCall:
    """Make a call from arguments: an object, or a string with one in JSON (as in OpenAI's API)."""
    given = arguments
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except MalformedCall as error:
            wrong = f"{what} is a JSON object, not a string ({error})"
            return malformed_call("arguments_not_object", wrong, name, given_id, given)
    if not isinstance(arguments, dict):
        raw = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return malformed_call(
            "arguments_not_object", f"{what} is a JSON object", name, given_id, raw
        )
    return ToolCall(name, arguments, given_id)


@dataclass(frozen=True, slots=True)
class NamedJsonCalls:
    """Reader of a name, a mark, and JSON arguments."""

    mark: str
    example: str
    """Example of a call, for the model."""
    head: Callable[[str], tuple[str, str]] = lambda text: (text.strip(), "")
    """Returns name and id from the text before the mark."""

    def __call__(self, body: str, tools: Tools) -> list[ToolCall]:
        before, found, after = body.partition(self.mark)
        name, given_id = self.head(before)
        if not found:
            missing = (
                f"the tool call is cut off: {self.mark.strip()} is missing; write {self.example}"
            )
            return [malformed_call("truncated", missing)]
        if not name or name != "".join(name.split()):
            return [malformed_call("not_a_call", f"a tool call looks like {self.example}")]
        try:
            return [make_call(name, read_json(after.strip()), given_id)]
        except MalformedCall as error:
            return [malformed_call(error.cause, str(error), name, given_id, after.strip())]


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Reader of calls whose arguments are bare text in tags; a block may contain several.

    Bare text has no type, see `coerce`. A text that contains its own end tag cannot be recognized
    and ends there. A repeated argument, an unclosed tag, and text between tags are errors.
    """

    head: re.Pattern[str]
    """Beginning of a call; group 1 is its name."""
    argument: re.Pattern[str]
    """Beginning of an argument; group 1 is its name, group `type` whether it is a `string`,
    if the format has one."""
    end: str
    """End of an argument."""
    tail: str
    """End of a call; empty if the end of the block ends it."""
    example: str
    newline: bool = False
    """Whether a line break before and after an argument's text is removed."""
    cdata: bool = False
    """Whether `<![CDATA[` and `]]>` may enclose an argument's text."""

    def __call__(self, body: str, tools: Tools) -> list[ToolCall]:
        heads = list(self.head.finditer(body))
        if not heads:
            return [
                malformed_call(
                    "not_a_call" if body.strip() else "truncated",
                    f"a tool call looks like {self.example}",
                )
            ]
        calls = []
        if body[: heads[0].start()].strip():
            before = f"text stands before the tool call; a tool call looks like {self.example}"
            calls.append(malformed_call("not_a_call", before))
        ends = [*(head.start() for head in heads[1:]), len(body)]
        for head, end in zip(heads, ends, strict=True):
            name = head[1].strip()
            try:
                if not name:
                    raise MalformedCall(
                        "not_a_call", f"the tool call has no name; it looks like {self.example}"
                    )
                calls.append(
                    ToolCall(name, dict(self._arguments(body[head.end() : end], name, tools)))
                )
            except MalformedCall as error:
                calls.append(malformed_call(error.cause, str(error), name))
        return calls

    def _arguments(self, text: str, name: str, tools: Tools) -> Iterator[tuple[str, Any]]:
        properties = properties_of(tools, name)
        known: set[str] = set()
        at = 0
        while match := self.argument.match(text, at):
            key = match[1].strip()
            if key in known:
                raise MalformedCall(
                    "repeated_argument", f"the argument {key:.80} is given twice; give it once"
                )
            known.add(key)
            begin = match.end()
            begin = begin + len(_CDATA) if self.cdata and text.startswith(_CDATA, begin) else begin
            end = "]]>" + self.end if begin != match.end() else self.end
            at = text.find(end, begin)
            if at < 0:
                raise MalformedCall(
                    "truncated", f"the tool call is cut off: the argument {key:.80} has no {end}"
                )
            value = text[begin:at]
            at += len(end)
            if self.newline:
                value = value.removeprefix("\n").removesuffix("\n")
            kind = match.groupdict().get("type")
            if kind is None:
                yield key, coerce(value, properties.get(key))
            else:
                yield (
                    key,
                    value
                    if kind in ("string", "true")
                    else read_json(value, f"the argument {key:.80}"),
                )
        rest = text[at:].strip()
        if self.tail and rest.startswith(self.tail):
            rest = rest[len(self.tail) :].strip()
        elif self.tail:
            problem = (
                f"{rest[:40]!r} stands in place of {self.tail}"
                if rest
                else f"{self.tail} is missing"
            )
            raise MalformedCall(
                "not_a_call" if rest else "truncated", f"the tool call does not end: {problem}"
            )
        if rest:
            problem = (
                f"the tool call has {rest[:40]!r} where it should end; it looks like {self.example}"
            )
            raise MalformedCall("not_a_call", problem)

"""Read tool-call bodies: JSON, named JSON, tags, Python literals.

A reader returns the calls in the text between two marks and never raises: what cannot be read is a
call with an error for the model, and a cause that is counted (`malformed_call`). Which marks belong
to which reader is in `formats.py`.
"""

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
    """Parse strict JSON; `what` names the text in errors.

    Raises `MalformedCall`: `truncated`, `trailing_comma`, `python_literal`, `too_deep` or
    `not_json`.
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
    """Return the error of a text that is no JSON, with what the model should write instead."""
    position = error.pos
    is_unterminated = error.msg.startswith("Unterminated string")
    if text.strip() and (is_unterminated or not text[position:].strip()):
        return MalformedCall("truncated", f"{what} is cut off: {error}")

    cause = "not_json"
    problem = str(error)
    before = text[max(0, position - _NEAR) : position].rstrip()
    if _COMMA.match(text, position) and (text[position] == "," or before.endswith(",")):
        cause = "trailing_comma"
        problem = f"remove the comma before the closing bracket ({error})"
    elif _PYTHON.match(text, position):
        cause = "python_literal"
        problem = (
            f"write strings in double quotes, and true, false and null in small letters ({error})"
        )
    return MalformedCall(cause, f"{what} is not valid JSON: {problem}")


def python_as_json(text: str) -> str:
    """Convert Python literals (strings, numbers, True, False, None, and lists, tuples and dicts of
    them) to JSON text.

    Raises `MalformedCall`: `truncated` if a string does not end, `not_json` for any other name.
    """
    parts: list[str] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise MalformedCall("truncated", "the tool call is cut off: a string does not end")
        position = token.end()

        string, word = token["string"], token["word"]
        if string is not None:
            parts.append(json.dumps(_ESCAPE.sub(_escaped, string[1:-1])))
        elif word is not None:
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
    escaped = match[1]
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    if escaped in _ESCAPED:
        return _ESCAPED[escaped]
    return escaped if escaped in "\\'\"" else match[0]


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

    # "1.0" passes as an integer in the check of arguments; where a text is possible too, it stays
    # one.
    value_type = "number" if isinstance(value, float) else json_type(value)
    if "string" in types and value_type not in types:
        return text
    return value


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of them if it names none, or cannot be
    read."""
    if not isinstance(schema, Mapping):
        return JSON_TYPES
    if schema.get("type") == "string" and is_plain(schema):
        return _STRING_ALONE
    try:
        resolved = read_schema(schema)
        return resolved.types(resolved.root)
    except SchemaFault:
        return JSON_TYPES


_STRING_ALONE = frozenset({"string"})
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
        if not self.lines:
            return self._read(body)
        calls: list[ToolCall] = []
        for line in body.split("\n"):
            if line.strip():
                calls += self._read(line)
        return calls or self._read(body)

    def _read(self, body: str) -> list[ToolCall]:
        try:
            value = read_json(body)
        except MalformedCall as error:
            return [malformed_call(error.cause, str(error))]
        if self.many and isinstance(value, list) and value:
            return [self._call(item) for item in value]
        return [self._call(value)]

    def _call(self, value: Any) -> ToolCall:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            # A call in OpenAI's own shape.
            value = {self.given_id: value.get(self.given_id), **value["function"]}
        if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
            return malformed_call(
                "not_a_call",
                f'a tool call is a JSON object with "{self.name}" and "{self.arguments[0]}"',
            )

        arguments = None
        for key in self.arguments:
            if key in value:
                arguments = value[key]
                break
        if arguments is None and len(value) == 1:  # a name alone
            arguments = {}
        given_id = value.get(self.given_id)
        return make_call(
            value[self.name],
            arguments,
            given_id if isinstance(given_id, str) else "",
            what=f'"{self.arguments[0]}" of a tool call',
        )


def make_call(
    name: str, arguments: Any, given_id: str = "", what: str = "the arguments of a tool call"
) -> ToolCall:
    """Make a call from arguments: an object, or a string with one in JSON (as in OpenAI's API).

    `what` names the arguments in errors.
    """
    value = arguments
    if isinstance(arguments, str):
        try:
            value = read_json(arguments)
        except MalformedCall as error:
            problem = f"{what} is a JSON object, not a string ({error})"
            return malformed_call("arguments_not_object", problem, name, given_id, arguments)
    if isinstance(value, dict):
        return ToolCall(name, value, given_id)

    raw = arguments
    if not isinstance(arguments, str):
        raw = json.dumps(arguments, ensure_ascii=False)
    return malformed_call("arguments_not_object", f"{what} is a JSON object", name, given_id, raw)


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
        if not found:
            problem = (
                f"the tool call is cut off: {self.mark.strip()} is missing; write {self.example}"
            )
            return [malformed_call("truncated", problem)]

        name, given_id = self.head(before)
        if not name or name != "".join(name.split()):
            return [malformed_call("not_a_call", f"a tool call looks like {self.example}")]
        arguments = after.strip()
        try:
            return [make_call(name, read_json(arguments), given_id)]
        except MalformedCall as error:
            return [malformed_call(error.cause, str(error), name, given_id, arguments)]


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Reader of calls whose arguments are bare text in tags; a block may contain several.

    Bare text has no type, see `coerce`. A text that contains its own end tag cannot be recognized
    and ends there. A repeated argument, an unclosed tag, and text between tags are errors.
    """

    head: re.Pattern[str]
    """Beginning of a call; group 1 is its name."""
    argument: re.Pattern[str]
    """Beginning of an argument; group 1 is its name, group `type` whether it is a `string`, if the
    format has one."""
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
            cause = "not_a_call" if body.strip() else "truncated"
            return [malformed_call(cause, f"a tool call looks like {self.example}")]

        calls = []
        if body[: heads[0].start()].strip():
            problem = f"text stands before the tool call; a tool call looks like {self.example}"
            calls.append(malformed_call("not_a_call", problem))
        ends = [*[head.start() for head in heads[1:]], len(body)]
        for head, end in zip(heads, ends, strict=True):
            name = head[1].strip()
            if not name:
                problem = f"the tool call has no name; it looks like {self.example}"
                calls.append(malformed_call("not_a_call", problem))
                continue
            try:
                arguments = dict(self._arguments(body[head.end() : end], name, tools))
                calls.append(ToolCall(name, arguments))
            except MalformedCall as error:
                calls.append(malformed_call(error.cause, str(error), name))
        return calls

    def _arguments(self, text: str, name: str, tools: Tools) -> Iterator[tuple[str, Any]]:
        """Yield the arguments of a call of the tool `name`.

        Raises `MalformedCall` for one that is repeated or cannot be read, and if the call does not
        end after the last.
        """
        properties = properties_of(tools, name)
        given_keys: set[str] = set()
        position = 0
        head = self.argument.match(text)
        while head is not None:
            key = head[1].strip()
            if key in given_keys:
                raise MalformedCall(
                    "repeated_argument", f"the argument {key:.80} is given twice; give it once"
                )
            given_keys.add(key)

            start = head.end()
            end_mark = self.end
            if self.cdata and text.startswith(_CDATA, start):
                start += len(_CDATA)
                end_mark = "]]>" + self.end
            end = text.find(end_mark, start)
            if end < 0:
                raise MalformedCall(
                    "truncated",
                    f"the tool call is cut off: the argument {key:.80} has no {end_mark}",
                )
            value = text[start:end]
            if self.newline:
                value = value.removeprefix("\n").removesuffix("\n")

            kind = head.groupdict().get("type")
            if kind is None:
                yield key, coerce(value, properties.get(key))
            elif kind in ("string", "true"):
                yield key, value
            else:
                yield key, read_json(value, f"the argument {key:.80}")
            position = end + len(end_mark)
            head = self.argument.match(text, position)

        self._check_end(text[position:].strip())

    def _check_end(self, rest: str) -> None:
        """Raise `MalformedCall` if what follows the last argument does not end the call."""
        if self.tail:
            if not rest:
                raise MalformedCall(
                    "truncated", f"the tool call does not end: {self.tail} is missing"
                )
            if not rest.startswith(self.tail):
                problem = f"{rest[:40]!r} stands in place of {self.tail}"
                raise MalformedCall("not_a_call", f"the tool call does not end: {problem}")
            rest = rest[len(self.tail) :].strip()
        if rest:
            raise MalformedCall(
                "not_a_call",
                f"the tool call has {rest[:40]!r} where it should end; it looks like "
                f"{self.example}",
            )

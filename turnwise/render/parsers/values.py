"""Values in a call: JSON with a cause where it does not read, Python's literals as JSON, and text by its schema's type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from turnwise.render.parsers.base import MalformedCall

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

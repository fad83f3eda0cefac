"""JSON schemas in small: made flat for a prompt, said in words, and compared with a value."""

from __future__ import annotations

import functools
import json
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any

_KINDS = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def pydantic_hint(hint: Any) -> Any:
    """A hint in which every `typing.TypedDict` is one that pydantic reads on Python 3.11 too."""
    if typing.is_typeddict(hint):
        import typing_extensions

        fields = typing.get_type_hints(hint, include_extras=True)
        optional = hint.__optional_keys__
        return typing_extensions.TypedDict(  # type: ignore[operator]
            hint.__name__,
            {
                k: typing_extensions.NotRequired[pydantic_hint(v)] if k in optional else pydantic_hint(v)
                for k, v in fields.items()
            },
        )
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, (pydantic_hint(member) for member in typing.get_args(hint)))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, dict, tuple, set, frozenset, typing.Union) and any(map(typing.is_typeddict, _within(hint))):
        return origin[tuple(pydantic_hint(member) for member in args)]
    return hint


def _within(hint: Any) -> typing.Iterator[Any]:
    yield hint
    for member in typing.get_args(hint):
        yield from _within(member)


def flatten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without references, titles and what else a model need not read.

    Raises:
        ValueError: for a type that contains itself.
    """
    definitions: Mapping[str, Any] = schema.get("$defs") or {}

    def walk(value: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [walk(item, inside) for item in value]
        if not isinstance(value, Mapping):
            return value
        if isinstance(reference := value.get("$ref"), str):
            name = reference.rpartition("/")[2]
            if name in inside:
                raise ValueError(f"the type {name} contains itself")
            return walk(definitions[name], (*inside, name)) | {
                k: v for k, v in value.items() if k in ("description", "default")
            }
        found = {k: walk(v, inside) for k, v in value.items() if k not in ("$defs", "title", "properties")}
        if isinstance(properties := value.get("properties"), Mapping):  # a property may itself be called "title"
            found["properties"] = {name: walk(inner, inside) for name, inner in properties.items()}
        return _simple_union(found)

    flat: dict[str, Any] = walk(schema, ())
    return flat


def _simple_union(schema: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` of bare types as a list of types: what an optional string looks like in most prompts."""
    members = schema.get("anyOf")
    if not members or not all(isinstance(member, dict) and set(member) == {"type"} for member in members):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {"type": [member["type"] for member in members]} | rest


def describe_schema(schema: Mapping[str, Any]) -> str:
    """What a schema asks for, in a few words, such as "a whole number" or "one of 'up', 'down'"."""
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if members := schema.get("anyOf"):
        return " or ".join(describe_schema(member) for member in members)
    kinds = _types(schema)
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds) if kinds else "any value"


def schema_error(value: Any, schema: Mapping[str, Any]) -> str:
    """What is wrong with a value, worded to follow the name of the argument; empty where it fits.

    Knows types, enum, const, anyOf, items, properties and required; other keywords are left to whoever reads the value.
    """
    if members := schema.get("anyOf"):
        return "" if any(not schema_error(value, member) for member in members) else _must_be(schema, value)
    if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        return _must_be(schema, value)
    if "const" in schema and not _same(value, schema["const"]):
        return _must_be(schema, value)
    kinds = _types(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return _must_be(schema, value)
    if isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        found = ((index, schema_error(item, items)) for index, item in enumerate(value))
        return next((f"at [{index}] {problem}" for index, problem in found if problem), "")
    if isinstance(value, Mapping):
        return _object_mismatch(value, schema)
    return ""


def _object_mismatch(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for key in schema.get("required") or ():
        if key not in value:
            return f"lacks {key!r} ({describe_schema(properties.get(key, {}))})"
    rest = schema.get("additionalProperties")
    for key, inner in value.items():
        if key in properties:
            problem = schema_error(inner, properties[key])
        elif isinstance(rest, Mapping):
            problem = schema_error(inner, rest)
        else:
            # as for arguments themselves: what a schema with names does not name is refused, not dropped in silence
            problem = "is not known there" if rest is False or (rest is None and properties) else ""
        if problem:
            return f"at [{key!r}] {problem}"
    return ""


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else list(kinds or ())


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    plain = {"string": str, "integer": int, "number": (int, float), "array": (list, tuple), "object": Mapping}
    return value is None if kind == "null" else kind in plain and isinstance(value, plain[kind])  # type: ignore[arg-type]


def _same(value: Any, choice: Any) -> bool:
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)


def _must_be(schema: Mapping[str, Any], value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=repr)
    return f"must be {describe_schema(schema)}, not {shown if len(shown) <= 60 else shown[:57] + '...'}"

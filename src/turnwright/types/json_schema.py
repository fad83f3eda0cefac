"""JSON schemas of tools in one form, with their references resolved within the schema.

Authors write many dialects: OpenAPI's `nullable`, Gemini's upper-case types, Python's type
names, the tuples of draft 7, the nulls that Parquet adds. `read_schema` converts a copy to
the keywords of draft 2020-12. Checks and the types of bare text use the copy; the model
reads what the author wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas all judge the same value, or some of which do."""

_TYPE_NAMES: Mapping[str, str] = {
    **{name: name for name in JSON_TYPES},
    "str": "string",
    "text": "string",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "none": "null",
}
"""Names of types, in small letters: JSON Schema's own, and those of Python and Java that data sets
have."""
_ANY_TYPE = frozenset({"any", "type_unspecified"})

_SCHEMA_KEYWORDS = frozenset(
    {
        "additionalProperties",
        "additionalItems",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    }
)
_LIST_KEYWORDS = frozenset({*IN_PLACE_LISTS, "prefixItems"})
_MAP_KEYWORDS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA_KEYWORDS = frozenset({"const", "default", "enum", "examples", "example"})
"""Keywords that hold values, in which nothing is a schema."""
ANNOTATIONS = frozenset(
    {
        "description",
        "title",
        "default",
        "examples",
        "example",
        "format",
        "$schema",
        "$comment",
        "deprecated",
        "readOnly",
    }
)
"""Keywords that are no condition."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OUTSIDE_NULLABLE = frozenset(
    {
        "$id",
        "id",
        "$schema",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
    }
)
"""Keywords that stay beside the two alternatives of a nullable schema: what others refer to, and
texts."""

_NOTHING: Mapping[str, Any] = {"not": {}}
"""Schema that allows no value."""
_MAX_DEPTH = 100
"""Nesting of a schema.

Those of real servers have under 30 levels; the validator recurses four calls per level.
"""
_MAX_JUDGMENTS = 10_000
"""Schemas that judge one value. References to references double it with each line of a schema."""


class SchemaFault(ValueError):
    """Schema that cannot be checked; the message states where and why."""


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """Keys that a schema allows an object, over all its alternatives."""

    named: dict[str, list[Any]]
    """Schemas of each named key."""
    patterns: list[tuple[str, Any]]
    """Patterns of keys, with their schemas."""
    others: list[Any]
    """Schemas of the keys that have neither a name nor a pattern; `True` allows all."""
    closed: bool
    """Whether there are no keys but these."""

    def schemas_of(self, key: str, matches: Callable[[str, str], bool]) -> list[Any]:
        """Return the schemas of a key; empty if it is unknown.

        `matches` takes a pattern and a key.
        """
        schemas = list(self.named.get(key, ()))
        schemas += [schema for pattern, schema in self.patterns if matches(pattern, key)]
        if schemas:
            return schemas
        if self.others:
            return list(self.others)
        return [] if self.closed else [True]


@dataclass(slots=True)
class ResolvedSchema:
    """A schema in the one form, its references resolved."""

    root: Any
    _targets: dict[int, Any] = field(default_factory=dict)
    """Schema that each reference means, by the `id` of the schema that refers."""

    def in_place(self, node: Any) -> Iterator[Any]:
        """Yield the schemas that judge the same value as a schema, one level deep."""
        if not isinstance(node, Mapping):
            return
        target = self._targets.get(id(node))
        if target is not None:
            yield target
        for keyword in IN_PLACE_LISTS:
            yield from node.get(keyword) or ()
        for keyword in ("if", "then", "else"):
            if keyword in node:
                yield node[keyword]
        for keyword in ("dependentSchemas", "dependencies"):
            for inner in (node.get(keyword) or {}).values():
                if not isinstance(inner, list):  # a list names the keys that must be there too
                    yield inner

    def members(self, nodes: Iterable[Any]) -> list[Any]:
        """Return all schemas that may judge a value of one of these, each once."""
        members: list[Any] = []
        seen: set[int] = set()
        waiting = list(nodes)[::-1]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Mapping) and id(node) in seen:
                continue
            seen.add(id(node))
            members.append(node)
            waiting += list(self.in_place(node))[::-1]
        return members

    def types(self, node: Any) -> frozenset[str]:
        """Return the JSON types that a schema allows; `number` comes with `integer`."""
        if node is False:
            return frozenset()
        if not isinstance(node, Mapping):
            return JSON_TYPES

        # What the schema itself says of the value.
        allowed = _with_integers(type_names(node)) or JSON_TYPES
        choices = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(choices, list):
            types = [_with_integers([json_type(choice)]) for choice in choices]
            allowed &= frozenset().union(*types)

        # What other schemas of the same value say.
        target = self._targets.get(id(node))
        if target is not None:
            allowed &= self.types(target)
        for member in node.get("allOf") or ():
            allowed &= self.types(member)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                allowed &= frozenset().union(*map(self.types, node[keyword]))
        if "if" in node:
            allowed &= self.types(node.get("then", True)) | self.types(node.get("else", True))

        excluded = node.get("not")
        if excluded == {}:
            return frozenset()
        if isinstance(excluded, Mapping) and set(excluded) == {"type"}:
            allowed -= _with_integers(type_names(excluded))
        return allowed

    def keys(self, nodes: Iterable[Any]) -> ObjectKeys:
        """Return the keys that these schemas allow an object, over all alternatives."""
        named: dict[str, list[Any]] = {}
        patterns: list[tuple[str, Any]] = []
        others: list[Any] = []
        free_alternative = False

        for member in self.members(nodes):
            if not isinstance(member, Mapping):
                continue
            for key, schema in (member.get("properties") or {}).items():
                named.setdefault(key, []).append(schema)
            patterns += (member.get("patternProperties") or {}).items()
            for keyword in ("additionalProperties", "unevaluatedProperties"):
                if member.get(keyword, False) is not False:
                    others.append(member[keyword])
            for keyword in ("anyOf", "oneOf"):
                free_alternative = free_alternative or any(
                    map(self._allows_any_object, member.get(keyword) or ())
                )

        return ObjectKeys(named, patterns, others, closed=not free_alternative)

    def _allows_any_object(self, node: Any) -> bool:
        """Whether an alternative is any object, as in a union of an object's schema with a free
        one."""
        members = self.members([node])
        is_object = any(
            isinstance(member, Mapping) and "object" in type_names(member) for member in members
        )
        about_keys = ("properties", "patternProperties", "additionalProperties", "required")
        return is_object and not any(
            keyword in member for member in members for keyword in about_keys
        )

    def items(self, nodes: Iterable[Any], index: int) -> list[Any]:
        """Return the schemas of an item of a list, over all alternatives."""
        schemas: list[Any] = []
        for member in self.members(nodes):
            if not isinstance(member, Mapping):
                continue
            tuple_schemas = member.get("prefixItems") or ()
            items = member.get("items", True)
            if isinstance(items, list):  # a tuple of a schema that declares an old draft
                tuple_schemas = items
                items = member.get("additionalItems", True)
            schemas.append(tuple_schemas[index] if index < len(tuple_schemas) else items)
        return schemas


def type_names(node: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names itself; empty if it names none."""
    names = node.get("type")
    if isinstance(names, str):
        return [names]
    return list(names or ())


def json_type(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _with_integers(names: Iterable[str]) -> frozenset[str]:
    types = frozenset(names)
    return types | {"integer"} if "number" in types else types


def is_plain(schema: Any) -> bool:
    """Whether a schema names one type in JSON Schema's own words, and nothing in it can change
    that."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    return isinstance(kind, str) and kind in JSON_TYPES and schema.keys() - ANNOTATIONS == {"type"}


def read_schema(schema: Any) -> ResolvedSchema:
    """Convert a schema to the one form and resolve its references.

    References are resolved within the schema only: nothing is fetched.

    Raises `SchemaFault` for a type that does not exist, a reference to nothing, to another document
    or to itself, and a schema that is nested, or refers, too much to be checked.

    Example::

        >>> read_schema({"type": "INT"}).root
        {'type': 'integer'}
    """
    reader = _Reader(schema)
    root = reader.read(schema, "", "", 0)
    resolved = ResolvedSchema(root)
    for node, base, keyword, where in reader.references:
        resolved._targets[id(node)] = reader.target(node[keyword], base, root, where)
    _check_judgments(resolved, reader.nodes)
    return resolved


class _Reader:
    """Conversion of one schema; collects what its references can mean."""

    def __init__(self, schema: Any) -> None:
        dialect = str(schema.get("$schema")) if isinstance(schema, Mapping) else ""
        old_drafts = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")
        self.old_draft = any(draft in dialect for draft in old_drafts)
        self.boolean_limits = "draft-03" in dialect or "draft-04" in dialect
        self.nodes: list[Any] = []
        self.references: list[tuple[Mapping[str, Any], str, str, str]] = []
        self.resources: dict[str, Any] = {}
        """Schemas with an address of their own: `$id`, `$anchor`."""

    def read(self, schema: Any, base: str, where: str, depth: int) -> Any:
        """Convert one schema and those in it."""
        if isinstance(schema, bool):
            # `jsonschema` loses the place of an error of the schema `false`.
            return schema or dict(_NOTHING)
        if not isinstance(schema, Mapping):
            raise SchemaFault(f"{where or 'the schema'} is {type(schema).__name__}, no JSON schema")
        if depth > _MAX_DEPTH:
            raise SchemaFault(f"its schema is nested over {_MAX_DEPTH} levels deep")

        # Parquet writes null for each keyword that other rows have.
        keywords = {
            keyword: value
            for keyword, value in schema.items()
            if value is not None or keyword in ("const", "default")
        }
        null_const = "const" in keywords and keywords["const"] is None
        if null_const and keywords.get("type", "null") != "null":
            del keywords["const"]  # such a null too, since the type excludes it

        address = keywords.get("id" if self.boolean_limits else "$id")
        # Draft 7 writes an anchor in the place of an address, as `#name`.
        own_address = isinstance(address, str) and not address.startswith("#")
        if own_address:
            base = urljoin(base, address)

        node: dict[str, Any] = {}
        for keyword, value in keywords.items():
            node[keyword] = self._value(keyword, value, base, f"{where}/{keyword}", depth + 1)
        self._normalize(node, where)
        if keywords.get("nullable") is True:
            nullable = _nullable(node)
            if "anyOf" in nullable:
                self._collect(nullable["anyOf"][0], base, where, own_address=False)
            node = nullable

        self._collect(node, base, where, own_address or not depth)
        return node

    def _value(self, keyword: str, value: Any, base: str, where: str, depth: int) -> Any:
        """Convert the value of a keyword."""
        is_list = isinstance(value, (list, tuple))
        if keyword in _DATA_KEYWORDS:
            return list(value) if keyword == "enum" and is_list else value
        if keyword in _SCHEMA_KEYWORDS or (keyword == "items" and not is_list):
            return value if value is False else self.read(value, base, where, depth)

        if keyword in _LIST_KEYWORDS or keyword == "items":
            if not is_list or not value:
                raise SchemaFault(f"{where} is no list of schemas")
            return [
                self.read(inner, base, f"{where}/{index}", depth)
                for index, inner in enumerate(value)
            ]

        if keyword in _MAP_KEYWORDS or keyword == "dependencies":
            if not isinstance(value, Mapping):
                raise SchemaFault(f"{where} is no object of schemas")
            schemas: dict[str, Any] = {}
            for key, inner in value.items():
                if isinstance(inner, (list, tuple)):
                    schemas[key] = list(inner)
                elif inner is not None:
                    schemas[key] = self.read(inner, base, f"{where}/{key}", depth)
            return schemas

        if isinstance(value, Mapping) and not keyword.startswith("x-"):
            return self._read_unknown(value, base, where, depth)
        return value

    def _read_unknown(self, value: Any, base: str, where: str, depth: int) -> Any:
        """Convert what may hold schemas, such as OpenAPI's `components`.

        References may point into it.
        """
        nodes_before = len(self.nodes)
        references_before = len(self.references)
        resources_before = dict(self.resources)
        try:
            return self.read(value, base, where, depth)
        except SchemaFault:  # data: what looks like a schema there is none
            del self.nodes[nodes_before:]
            del self.references[references_before:]
            self.resources = resources_before
            return value

    def _normalize(self, node: dict[str, Any], where: str) -> None:
        """Replace what other dialects write by the keywords of draft 2020-12, in place."""
        if "type" in node and not isinstance(node["type"], Mapping):
            self._normalize_type(node, where)
        if not isinstance(node.get("required", []), (list, tuple)):
            del node["required"]  # draft 3 wrote it, as a boolean, into the schema of the argument

        if not self.boolean_limits:
            for limit, exclusive in (
                ("minimum", "exclusiveMinimum"),
                ("maximum", "exclusiveMaximum"),
            ):
                # OpenAPI 3.0 has a boolean beside the limit.
                if isinstance(node.get(exclusive), bool):
                    is_exclusive = node.pop(exclusive)
                    if is_exclusive and limit in node:
                        node[exclusive] = node.pop(limit)

        # Before draft 2020-12, `items` was the list of a tuple's schemas.
        if isinstance(node.get("items"), list) and not self.old_draft:
            node["prefixItems"] = node.pop("items")
            if "additionalItems" in node:
                node["items"] = node.pop("additionalItems")

    def _normalize_type(self, node: dict[str, Any], where: str) -> None:
        written = node["type"]
        names = [written] if isinstance(written, str) else written

        types: list[str] = []
        for name in names:
            lower = name.lower() if isinstance(name, str) else ""
            if lower in _ANY_TYPE:
                del node["type"]
                return
            if lower not in _TYPE_NAMES:
                raise SchemaFault(
                    f"{where}/type is {name!r}; the types are {', '.join(sorted(JSON_TYPES))}"
                )
            if _TYPE_NAMES[lower] not in types:
                types.append(_TYPE_NAMES[lower])

        node["type"] = types[0] if len(types) == 1 else types
        if not types:
            raise SchemaFault(f"{where}/type is an empty list")

    def _collect(self, node: dict[str, Any], base: str, where: str, own_address: bool) -> None:
        """Note a converted schema, its references and what can refer to it."""
        self.nodes.append(node)
        if own_address:
            self.resources.setdefault(base.rstrip("#"), node)
        for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
            anchor = node.get(keyword)
            if isinstance(anchor, str) and (not keyword.endswith("id") or anchor.startswith("#")):
                self.resources[f"{urldefrag(base)[0]}#{anchor.removeprefix('#')}"] = node
        for keyword in _REFERENCES:
            if isinstance(node.get(keyword), str):
                self.references.append((node, base, keyword, where))

    def target(self, reference: str, base: str, root: Any, where: str) -> Any:
        """Return the schema that a reference means."""
        address, fragment = urldefrag(urljoin(base, reference))
        if reference.startswith("#"):
            # `urljoin` loses the fragment of an address that is no URL, such as urn:a.
            address = urldefrag(base)[0]
            fragment = reference[1:]
        fragment = unquote(fragment)

        anchored = self.resources.get(f"{address}#{fragment}")
        if fragment and anchored is not None:
            return anchored

        node = self.resources.get(address, root if not address else None)
        if node is None:
            raise SchemaFault(
                f"{where or '/'} refers to {reference!r:.100}, which is not in the schema; nothing "
                "is fetched, so write it under $defs"
            )
        if fragment and not fragment.startswith("/"):
            raise SchemaFault(
                f"{where or '/'} refers to {reference!r:.100}, which the schema does not have"
            )

        for part in fragment.split("/")[1:]:  # a JSON pointer
            part = part.replace("~1", "/").replace("~0", "~")
            node = _child(node, part)
            if not isinstance(node, (Mapping, list, bool)):
                raise SchemaFault(
                    f"{where or '/'} refers to {reference!r:.100}, which the schema does not have"
                )
        if isinstance(node, list):
            raise SchemaFault(
                f"{where or '/'} refers to {reference!r:.100}, which is a list, no schema"
            )
        return node


def _child(node: Any, part: str) -> Any:
    if isinstance(node, Mapping):
        return node.get(part)
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    return None


def _nullable(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows null.

    Others that judge the same value would refuse it, so they become alternatives.
    """
    types = type_names(node)
    judged_elsewhere = (*IN_PLACE_LISTS, *_REFERENCES, "enum", "const", "not", "if")
    if types and not any(keyword in node for keyword in judged_elsewhere):
        return node if "null" in types else {**node, "type": [*types, "null"]}
    outside = {key: value for key, value in node.items() if key in _OUTSIDE_NULLABLE}
    inside = {key: value for key, value in node.items() if key not in _OUTSIDE_NULLABLE}
    return {**outside, "anyOf": [inside, {"type": "null"}]}


def _check_judgments(resolved: ResolvedSchema, nodes: Iterable[Any]) -> None:
    """Refuse a schema that judges a value by itself again, or by too many schemas."""
    counts: dict[int, int] = {}
    waiting_for: set[int] = set()

    def count(node: Any, depth: int) -> int:
        if not isinstance(node, Mapping):
            return 1
        if id(node) in counts:
            return counts[id(node)]
        if id(node) in waiting_for:
            raise SchemaFault(
                "it has a reference that leads back to itself without an argument between them"
            )
        if depth > 2 * _MAX_DEPTH:
            raise SchemaFault(
                f"its references lead over {2 * _MAX_DEPTH} steps to other references"
            )

        waiting_for.add(id(node))
        inner = list(resolved.in_place(node))
        if "not" in node:
            inner.append(node["not"])
        total = 1 + sum(count(member, depth + 1) for member in inner)
        waiting_for.discard(id(node))
        if total > _MAX_JUDGMENTS:
            raise SchemaFault(
                f"over {_MAX_JUDGMENTS} of its schemas judge one value; it refers too often"
            )
        counts[id(node)] = total
        return total

    for node in nodes:
        count(node, 0)

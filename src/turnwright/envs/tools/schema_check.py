"""Check of values against a tool's schema, with messages for the model.

The package `jsonschema` decides; it is imported by the first value that needs it. Python runs each
pattern of a schema with a guard, because an MCP server's schema is not to be trusted, and unknown
keys of an object are refused unless the schema allows them.

`SchemaCheck` checks values and says what is wrong, `quick_checks_of` makes checks that need no
validator, `Pattern` bounds the time of a pattern, and `_make_validator` sets up `jsonschema`. How a
schema is read is in `types/json_schema.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwright.types.json_schema import (
    ANNOTATIONS,
    ObjectKeys,
    ResolvedSchema,
    SchemaFault,
    read_schema,
    type_names,
)

_KINDS = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}

_MAX_CHOICES = 20
"""Choices of an enum in a message."""

_MAX_STEPS = 200_000
"""Keywords applied to one call's arguments; a keyword takes a microsecond or two."""

_MAX_PATTERN_WORK = 100_000_000
"""Positions that Python's own matcher may try, where the linear one cannot read a pattern."""

_LIMITS = {
    "minimum": "must be greater than or equal to {limit}, not {value}",
    "exclusiveMinimum": "must be greater than {limit}, not {value}",
    "maximum": "must be less than or equal to {limit}, not {value}",
    "exclusiveMaximum": "must be less than {limit}, not {value}",
    "multipleOf": "must be a multiple of {limit}, not {value}",
    "minLength": "must have at least {limit} characters, not {value}",
    "maxLength": "must have at most {limit} characters, not {value}",
    "pattern": "must match the pattern {limit}, not {value}",
    "minItems": "must have at least {limit} items, not {value}",
    "maxItems": "must have at most {limit} items, not {value}",
    "uniqueItems": "must have no item twice, not {value}",
    "contains": "must have an item of another kind, not {value}",
    "minProperties": "must have at least {limit} keys, not {value}",
    "maxProperties": "must have at most {limit} keys, not {value}",
    "not": "must be something else than {value}",
}
"""What is wrong with a value, by keyword."""

Path = tuple[Any, ...]


class TooComplex(Exception):
    """Value that cannot be checked in bounded time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """First violation of a schema."""

    path: Path
    """Keys and indices that lead to the value."""
    text: str
    """What is wrong, to follow the value's name."""
    missing: tuple[str, ...] = ()
    """Keys that the value lacks; one of them is enough."""
    unknown: str | None = None
    """Key that the value must not have."""

    def below(self, depth: int) -> str:
        """Return the text, with the place below the first `depth` keys."""
        place = "".join(f"at [{quoted(part)}] " for part in self.path[depth:])
        return place + self.text


@dataclass(slots=True)
class SchemaCheck:
    """Check of values against one schema; made once per tool.

    Raises `SchemaFault` for a schema that cannot be checked, see `read_schema`.
    """

    resolved: ResolvedSchema
    _validator: Any = None
    _keys_of_root: ObjectKeys | None = None

    @classmethod
    def of(cls, schema: Any) -> SchemaCheck:
        """Read a schema and its patterns; the validator is made by the first value, or by
        `make_validator`."""
        check = cls(read_schema(schema))
        members = list(_all_schemas(check.resolved.root))
        has_unevaluated = any("unevaluatedProperties" in member for member in members)
        for member in members:
            value_pattern = member.get("pattern")
            key_patterns = member.get("patternProperties") or ()
            for pattern in (value_pattern, *key_patterns):
                if not isinstance(pattern, str):
                    continue
                # `unevaluatedProperties` of jsonschema runs the patterns of keys without our guard.
                for_python = has_unevaluated and pattern != value_pattern
                Pattern.of(pattern).check(for_python=for_python)
        return check

    def make_validator(self) -> None:
        """Check the schema against its metaschema, and make the validator. Raises `SchemaFault`."""
        self._validator = _make_validator(self.resolved.root)

    @property
    def root_keys(self) -> ObjectKeys:
        """Keys that the schema allows its values."""
        if self._keys_of_root is None:
            self._keys_of_root = self.resolved.keys([self.resolved.root])
        return self._keys_of_root

    def schemas_of(self, key: str) -> list[Any]:
        """Return the schemas of a key of the schema's values; empty if it is unknown."""
        return self.root_keys.schemas_of(key, self.matches)

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern of the schema occurs in a text. Raises `TooComplex`."""
        return Pattern.of(pattern).occurs_in(text)

    def problems(self, value: Any) -> Iterator[Problem]:
        """Yield the violations of a value. Raises `TooComplex`."""
        if self._validator is None:
            self.make_validator()
        _STEPS.begin()
        try:
            for error in self._validator.iter_errors(value):
                yield self._explained(error)
        except RecursionError:
            raise TooComplex("is nested too deep") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            # A keyword's value makes no sense.
            raise TooComplex(f"cannot be checked: {error}") from error

    def unknown_key(self, value: Any, nodes: Iterable[Any], path: Path = ()) -> Problem | None:
        """Return the first key in a value that no schema there knows, of objects whose schema names
        keys."""
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                item_nodes = self.resolved.items(nodes, index)
                problem = self.unknown_key(item, item_nodes, (*path, index))
                if problem is not None:
                    return problem
            return None
        if not isinstance(value, Mapping):
            return None

        keys = self.resolved.keys(nodes)
        names_keys = bool(keys.named or keys.patterns)
        for key, item in value.items():
            item_nodes = keys.schemas_of(key, self.matches)
            if not item_nodes and names_keys:
                return Problem((*path, key), "is not known there", unknown=key)
            problem = self.unknown_key(item, item_nodes, (*path, key))
            if problem is not None:
                return problem
        return None

    def with_integers(self, value: Any, nodes: Iterable[Any]) -> Any:
        """Return a valid value with floats such as 3.0 as integers where the schema wants
        integers."""
        if isinstance(value, float):
            return int(value) if value.is_integer() and self._wants_integer(nodes) else value
        if isinstance(value, list):
            items = []
            for index, item in enumerate(value):
                items.append(self.with_integers(item, self.resolved.items(nodes, index)))
            return items
        if isinstance(value, dict):
            keys = self.resolved.keys(nodes)
            members = {}
            for key, item in value.items():
                members[key] = self.with_integers(item, keys.schemas_of(key, self.matches))
            return members
        return value

    def _wants_integer(self, nodes: Iterable[Any]) -> bool:
        """Whether schemas name the type integer, and not number."""
        names: set[str] = set()
        for member in self.resolved.members(nodes):
            if isinstance(member, Mapping):
                names.update(type_names(member))
        return "integer" in names and "number" not in names

    def _explained(self, error: Any, above: Path = ()) -> Problem:
        """Describe an error of `jsonschema` in the words of the tools."""
        path = (*above, *error.absolute_path)
        keyword = error.validator
        limit = error.validator_value
        value = error.instance

        # Keys.
        missing: list[str] = []
        if keyword == "required":
            missing = [key for key in limit if key not in value]
        elif keyword in ("dependentRequired", "dependencies"):
            missing = [key for key in _dependent_keys(limit, value) if key not in value]
        if missing:
            first = missing[0]
            return Problem(path, f"lacks {self._wanted(first, error.schema)}", missing=(first,))
        if keyword in ("additionalProperties", "unevaluatedProperties"):
            unknown = self._unknown_to(error.schema, value)
            if unknown is not None:
                return Problem((*path, unknown), "is not known there", unknown=unknown)

        # Kinds of values.
        if keyword in ("anyOf", "oneOf"):
            return self._no_alternative(error, path)
        if keyword in ("type", "enum", "const"):
            return Problem(path, _must_be(describe(self.resolved, error.schema), value))

        # Limits.
        if keyword == "not" and limit == {}:
            return Problem(path, f"must be left out, not {shortened(value)}")
        if keyword in _LIMITS:
            text = _LIMITS[keyword].format(limit=shortened(limit), value=shortened(value))
            return Problem(path, text)
        return Problem(path, f"is invalid: {error.message[:120]}")

    def _no_alternative(self, error: Any, path: Path) -> Problem:
        """Describe a value that fits none of several schemas, or more than one."""
        value = error.instance
        errors_by_alternative: dict[Any, list[Any]] = {}
        for inner in error.context:
            errors_by_alternative.setdefault(inner.schema_path[0], []).append(inner)
        if len(errors_by_alternative) < len(error.validator_value):
            return Problem(path, f"must fit one alternative only, not {shortened(value)}")

        # If only one alternative is for this kind of value, what it lacks there is the better
        # answer.
        of_kind = [
            errors
            for errors in errors_by_alternative.values()
            if not any(map(_of_another_kind, errors))
        ]
        likely = of_kind
        if len(of_kind) != 1:
            # An alternative that lacks no key, and is wrong within one, is the one that was meant.
            likely = [errors for errors in of_kind if all(inner.relative_path for inner in errors)]
        if len(likely) == 1:
            return self._explained(likely[0][0])

        problems = [self._explained(errors[0]) for errors in of_kind]
        if problems and all(problem.missing and problem.path == path for problem in problems):
            missing = tuple(dict.fromkeys(key for problem in problems for key in problem.missing))
            wanted = " or ".join(self._wanted(key, error.schema) for key in missing)
            return Problem(path, f"lacks {wanted}", missing=missing)

        kinds = describe(self.resolved, error.schema)
        if "any value" in kinds:
            count = len(error.validator_value)
            return Problem(path, f"must fit one of {count} alternatives, not {shortened(value)}")
        return Problem(path, _must_be(kinds, value))

    def _wanted(self, key: str, node: Any) -> str:
        """Describe a key that is missing."""
        schemas = self.resolved.keys([node]).named.get(key) or self.root_keys.named.get(key)
        schema = schemas[0] if schemas else True
        return f"{key!r} ({describe(self.resolved, schema)})"

    def _unknown_to(self, node: Mapping[str, Any], value: Any) -> str | None:
        """Return the first key of a value that one schema does not name itself."""
        named = node.get("properties") or {}
        patterns = node.get("patternProperties") or ()
        if "unevaluatedProperties" in node:
            keys = self.resolved.keys([node])
            named = keys.named
            patterns = [pattern for pattern, _ in keys.patterns]
        for key in value:
            if key not in named and not any(self.matches(pattern, key) for pattern in patterns):
                return str(key)
        return None


def _of_another_kind(error: Any) -> bool:
    """Whether an alternative is for another kind of value, or has a constant in one of its keys
    that tells it apart."""
    if error.validator == "type":
        return not error.relative_path
    return error.validator in ("const", "enum") and len(error.relative_path) <= 1


def _dependent_keys(rules: Mapping[str, Any], value: Any) -> list[str]:
    """Return the keys that the keys of a value need."""
    keys: list[str] = []
    for key, needed in rules.items():
        if key in value and isinstance(needed, list):
            keys += needed
    return keys


def _all_schemas(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all mappings in a schema, in any order; those that are no schemas do no harm."""
    data = ("const", "default", "enum", "examples")
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += [value for key, value in node.items() if key not in data]
        elif isinstance(node, list):
            waiting += node


def describe(resolved: ResolvedSchema, node: Any, depth: int = 4) -> str:
    """Describe a schema in a few words, such as "a number" or "one of 'up', 'down'"."""
    if not isinstance(node, Mapping):
        return "any value"
    if "enum" in node:
        choices = [json.dumps(choice, ensure_ascii=False) for choice in node["enum"]]
        text = "one of " + ", ".join(choices[:_MAX_CHOICES])
        more = len(choices) - _MAX_CHOICES
        return f"{text} ({more} more)" if more > 0 else text
    if "const" in node:
        return json.dumps(node["const"], ensure_ascii=False)

    alternatives = node.get("anyOf") or node.get("oneOf")
    if alternatives and depth:
        kinds = [describe(resolved, member, depth - 1) for member in alternatives]
        return " or ".join(dict.fromkeys(kinds))
    types = type_names(node)
    if types:
        return " or ".join(_KINDS[kind] for kind in types)
    if depth:
        for member in resolved.in_place(node):
            described = describe(resolved, member, depth - 1)
            if described != "any value":
                return described
    return "any value"


def shortened(value: Any) -> str:
    """Return a value as JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def quoted(key: Any) -> str:
    """Return a key or an index as Python writes it, of at most 80 characters."""
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."


def _must_be(kind: str, value: Any) -> str:
    return f"must be {kind}, not {shortened(value)}"


def schema_error(value: Any, schema: Any) -> str:
    """Describe how a value violates a schema, as text to follow the value's name; empty if it is
    valid.

    Example::

        >>> schema_error({"x": 1, "y": 2}, {"type": "object", "properties": {"x": {}}})
        "at ['y'] is not known there"
    """
    check = SchemaCheck.of(schema)
    try:
        problem = next(check.problems(value), None)
        if problem is None:
            problem = check.unknown_key(value, [check.resolved.root])
    except TooComplex as error:
        return str(error)
    except RecursionError:
        return "is nested too deep"
    return "" if problem is None else problem.below(0)


# Quick checks

QuickCheck = Callable[[Any], bool]
"""Whether a value is surely valid and needs no conversion; if not, the validator decides."""

_PYTHON_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})


def quick_checks_of(root: Mapping[str, Any]) -> dict[str, QuickCheck]:
    """Return the quick checks of an object's keys, as far as there are any; none if it has other
    conditions."""
    if not isinstance(root, Mapping) or not _is_closed_object(root):
        return {}
    checks = {}
    for key, schema in (root.get("properties") or {}).items():
        check = _quick_check(schema)
        if check is not None:
            checks[key] = check
    return checks


def _is_closed_object(node: Mapping[str, Any]) -> bool:
    """Whether an object has no condition but its keys, and no other keys."""
    conditions = node.keys() - ANNOTATIONS
    return conditions <= _OBJECT_KEYWORDS and node.get("additionalProperties", False) is False


def _quick_check(node: Any) -> QuickCheck | None:
    """Make the quick check of a schema of types, choices of texts, lists and objects; None for any
    other."""
    if not isinstance(node, Mapping):
        return None
    conditions = node.keys() - ANNOTATIONS
    kinds = type_names(node)

    if conditions == {"type"}:
        types = frozenset(_PYTHON_TYPES[kind] for kind in kinds if kind != "number")
        if "number" in kinds:
            types |= {int, float}
        return lambda value: type(value) in types

    if conditions == {"type", "enum"} and kinds == ["string"]:
        choices = node["enum"]
        if not all(isinstance(choice, str) for choice in choices):
            return None
        texts = frozenset(choices)
        return lambda value: type(value) is str and value in texts

    if conditions == {"type", "items"} and kinds == ["array"]:
        check_item = _quick_check(node["items"])
        if check_item is None:
            return None
        return lambda value: type(value) is list and all(map(check_item, value))

    if node.get("properties") and kinds == ["object"] and _is_closed_object(node):
        checks = quick_checks_of(node)
        required = frozenset(node.get("required") or ())
        if len(checks) == len(node["properties"]):
            return lambda value: _fits_object(value, checks, required)
    return None


def _fits_object(value: Any, checks: Mapping[str, QuickCheck], required: frozenset[str]) -> bool:
    if type(value) is not dict or not required <= value.keys():
        return False
    return all(key in checks and checks[key](inner) for key, inner in value.items())


# Patterns


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression of a schema, whose time is bounded: a pattern may take exponential time
    in Python's `re`.

    Rust's matcher, which pydantic has, is linear. What it cannot read (looking ahead or back) `re`
    matches, in texts of bounded length, if its repeats are not nested.
    """

    text: str
    linear: Any
    """Validator of pydantic; None for a pattern that only Python can read."""
    repeats: int | None
    """Unbounded repeats, each of which multiplies the work by the text's length; None for nested
    ones, or no pattern."""

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> Pattern:
        """Compile a pattern."""
        from pydantic_core import SchemaError, SchemaValidator, core_schema

        linear: Any = None
        with contextlib.suppress(SchemaError):
            linear = SchemaValidator(
                core_schema.str_schema(pattern=text, regex_engine="rust-regex")
            )
        return Pattern(text, linear, _count_repeats(text))

    def check(self, for_python: bool) -> None:
        """Raise `SchemaFault` for a pattern that cannot be matched, or only in unbounded time."""
        if self.repeats is not None or (self.linear is not None and not for_python):
            return
        with contextlib.suppress(re.error, RecursionError, OverflowError):
            re.compile(self.text)
            raise SchemaFault(
                f"the pattern {shortened(self.text)} repeats what repeats, which may take "
                "forever; write it without repeats in repeats, or without looking ahead and "
                "back"
            )
        raise SchemaFault(f"the pattern {shortened(self.text)} is no regular expression")

    def occurs_in(self, text: str) -> bool:
        """Whether the pattern occurs in a text. Raises `TooComplex`."""
        if self.linear is not None:
            return bool(self.linear.isinstance_python(text))
        if self.repeats is None or (len(text) + 1) ** self.repeats > _MAX_PATTERN_WORK:
            raise TooComplex(f"is too long to be matched with the pattern {shortened(self.text)}")
        return re.search(self.text, text) is not None


_FEW_REPEATS = 8
"""Repeats that count as none."""


def _count_repeats(text: str) -> int | None:
    """Count the unbounded repeats of a pattern, and one for its search; None where they are nested
    or it is no pattern."""
    from re import _parser  # type: ignore[attr-defined]

    count = 1

    def walk(parsed: Any, is_repeated: bool) -> bool:
        """Count the repeats of a part; return whether none is nested."""
        nonlocal count
        for operation, argument in parsed:
            name = str(operation)
            inner_is_repeated = is_repeated
            if name.endswith("_REPEAT"):
                is_unbounded = argument[1] > _FEW_REPEATS
                if is_unbounded and is_repeated:
                    return False
                count += is_unbounded
                inner_is_repeated = is_repeated or is_unbounded
            elif name == "BRANCH" and is_repeated:
                return False  # (a|a)* tries both at each place
            for inner in _subpatterns(argument):
                if not walk(inner, inner_is_repeated):
                    return False
        return True

    try:
        is_flat = walk(_parser.parse(text), False)
    except (re.error, RecursionError, OverflowError):
        return None
    return count if is_flat else None


def _subpatterns(argument: Any) -> Iterator[Any]:
    """Yield the patterns in the argument of an operation of `re`'s parser."""
    if type(argument).__name__ == "SubPattern":
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _subpatterns(item)


# The validator


class _Steps(threading.local):
    """Keywords that this thread may still apply to a value; alternatives in recursive schemas
    multiply with its depth."""

    def __init__(self) -> None:
        self._left = 0

    def begin(self) -> None:
        """Begin with a value."""
        self._left = _MAX_STEPS

    def take(self) -> None:
        """Count one keyword. Raises `TooComplex`."""
        self._left -= 1
        if self._left < 0:
            raise TooComplex("is too complex to be checked")


_STEPS = _Steps()


def _make_validator(root: Any) -> Any:
    """Make the validator of a schema.

    It resolves references in the schema only: its registry is empty.
    """
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    dialect = root.get("$schema") if isinstance(root, Mapping) else None
    validator_class = _validator_class(dialect if isinstance(dialect, str) else "")
    try:
        validator_class.check_schema(root)
    except SchemaError as error:
        path = "/".join(map(str, error.absolute_path))
        raise SchemaFault(f"/{path} of its schema is invalid: {error.message[:200]}") from error
    return validator_class(root, registry=Registry())


@functools.lru_cache(maxsize=16)
def _validator_class(dialect: str) -> Any:
    """Return the validator of a dialect, by default draft 2020-12, with our types and bounds."""
    from jsonschema import Draft202012Validator, validators

    base: Any = validators.validator_for({"$schema": dialect}, default=Draft202012Validator)
    checker = base.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: _is_integer(value),
            "array": lambda _, value: isinstance(value, (list, tuple)),
            "object": lambda _, value: isinstance(value, Mapping),
        }
    )
    keywords = {
        **base.VALIDATORS,
        "pattern": _pattern_errors,
        "patternProperties": _pattern_properties_errors,
        "additionalProperties": _additional_properties_errors,
    }
    counted = {name: _counted(function) for name, function in keywords.items()}
    return validators.extend(base, counted, type_checker=checker)


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _counted(function: Any) -> Any:
    """Let a keyword of a validator count against the bound."""

    def apply(validator: Any, keyword_value: Any, instance: Any, schema: Any) -> Any:
        _STEPS.take()
        return function(validator, keyword_value, instance, schema)

    return apply


def _pattern_errors(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not Pattern.of(pattern).occurs_in(instance):
        yield ValidationError(f"does not match {pattern!r}")


def _pattern_properties_errors(
    validator: Any, patterns: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, Mapping):
        return
    for pattern, inner in patterns.items():
        for key, item in instance.items():
            if Pattern.of(pattern).occurs_in(key):
                yield from validator.descend(item, inner, path=key, schema_path=pattern)


def _additional_properties_errors(
    validator: Any, inner: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not isinstance(instance, Mapping):
        return
    named = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    for key, item in instance.items():
        if key in named or any(Pattern.of(pattern).occurs_in(key) for pattern in patterns):
            continue
        if inner is False:
            yield ValidationError(f"{key!r} is not known")
            return
        yield from validator.descend(item, inner, path=key)

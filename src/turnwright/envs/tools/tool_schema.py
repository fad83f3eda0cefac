"""OpenAI tool schemas from typed Python functions, and validation of arguments.

The rules are those of verl's `@function_tool`: hints give the types, a Google docstring the
descriptions; `*args` and `**kwargs` are rejected; a name or a complete schema can be given instead.

`tool_signature` makes the schema of a function, `ToolSignature.read` checks and converts the
arguments of a call. What a schema means for a value is in `schema_check.py`.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

from turnwright.envs.tools.schema_check import (
    Problem,
    QuickCheck,
    SchemaCheck,
    TooComplex,
    quick_checks_of,
    quoted,
    shortened,
)
from turnwright.errors import UsageError, suggest_or_list
from turnwright.types.json_schema import SchemaFault, read_schema

_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters", "Params")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?"
    r"|See Also|References|Todo)\s*:\s*$"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description (all text before the first section) and the text of each argument;
    empty if missing.

    Example: ``("Evaluate arithmetic.", {"expression": 'for example "(3 + 4) * 5".'})``
    """
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    starts = [number for number, line in enumerate(lines) if _SECTION.match(line)]
    ends = [*starts[1:], len(lines)]

    before_sections = lines[: starts[0]] if starts else lines
    description = " ".join(" ".join(before_sections).split())
    arguments: dict[str, str] = {}
    for start, end in zip(starts, ends, strict=False):
        if lines[start].strip().rstrip(": ") in _ARGUMENT_SECTIONS:
            arguments |= _arguments(lines[start + 1 : end])
    return description, arguments


def _arguments(lines: list[str]) -> dict[str, str]:
    """Parse an argument section; lines indented deeper than the first continue the previous
    argument."""
    lines = [line for line in lines if line.strip()]
    texts: dict[str, str] = {}
    current = ""
    indent = _depth(lines[0]) if lines else 0
    for line in lines:
        depth = _depth(line)
        if depth == 0:
            break
        match = _ARGUMENT.match(line.strip()) if depth <= indent else None
        if match:
            current = match[1]
            texts[current] = match[2].strip()
        elif current:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return texts


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def pydantic_hint(hint: Any) -> Any:
    """Replace each `typing.TypedDict` of a hint by one of typing_extensions, which pydantic needs
    on Python 3.11."""
    if typing.is_typeddict(hint):
        import typing_extensions

        members = {}
        for key, inner in get_type_hints(hint, include_extras=True).items():
            members[key] = pydantic_hint(inner)
        for key in hint.__optional_keys__:
            members[key] = typing_extensions.NotRequired[members[key]]
        return typing_extensions.TypedDict(hint.__name__, members)  # type: ignore[operator]

    if isinstance(hint, types.UnionType):
        alternatives = [pydantic_hint(member) for member in typing.get_args(hint)]
        return functools.reduce(operator.or_, alternatives)

    origin = typing.get_origin(hint)
    if origin not in (list, dict, tuple, set, frozenset, typing.Union):
        return hint
    if not any(map(typing.is_typeddict, _nested_hints(hint))):
        return hint
    return origin[tuple(pydantic_hint(member) for member in typing.get_args(hint))]


def _nested_hints(hint: Any) -> typing.Iterator[Any]:
    """Yield a hint and all hints within it."""
    yield hint
    for member in typing.get_args(hint):
        yield from _nested_hints(member)


_MAX_FLAT = 10_000
"""Schemas in a flattened schema: definitions that name others twice double it with each of them."""

_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are data, not schemas."""

_MAPS = ("properties", "patternProperties", "dependentSchemas")
"""Keywords whose values are schemas by name."""


def flatten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without references and titles, its keys in their order.

    Raises `ValueError` for a recursive type or too large a result, `KeyError` for a reference
    to anything but `$defs`.
    """
    definitions: Mapping[str, Any] = schema.get("$defs") or {}
    count = 0

    def walk(value: Any, inside: tuple[str, ...]) -> Any:
        """Return a flat value, `inside` the definitions of these names."""
        nonlocal count
        if isinstance(value, list):
            return [walk(item, inside) for item in value]
        if not isinstance(value, Mapping):
            return value
        count += 1
        if count > _MAX_FLAT:
            raise ValueError(f"it has over {_MAX_FLAT} schemas without its references")

        reference = value.get("$ref")
        if isinstance(reference, str):
            name = reference.removeprefix("#/$defs/")
            if name in inside:
                raise ValueError(f"the type {name} contains itself")
            beside = {key: inner for key, inner in value.items() if key != "$ref"}
            definition: dict[str, Any] = walk(definitions[name], (*inside, name))
            return definition | walk(beside, inside)

        # A union of plain types is a list of types, the usual form of an optional string in
        # prompts.
        members = value.get("anyOf")
        is_plain_union = members and "type" not in value and all(map(_is_bare_type, members))
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            if key in ("$defs", "title"):
                continue
            if key in _MAPS and isinstance(inner, Mapping):
                # A property may itself be called "title".
                flat[key] = {name: walk(member, inside) for name, member in inner.items()}
            elif key == "anyOf" and is_plain_union:
                flat["type"] = [member["type"] for member in inner]
            else:
                flat[key] = inner if key in _DATA else walk(inner, inside)
        return flat

    result: dict[str, Any] = walk(schema, ())
    return result


def _is_bare_type(member: Any) -> bool:
    """Whether a schema has one type and nothing else, apart from a title."""
    return (
        isinstance(member, Mapping)
        and isinstance(member.get("type"), str)
        and set(member) <= {"type", "title"}
    )


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolSchemaError(UsageError):
    """Function, class or schema that cannot be used as a tool."""


class InvalidArguments(ValueError):
    """Invalid arguments of a model's call; the message is sent to the model."""

    def __init__(self, message: str, cause: str = "wrong_type") -> None:
        super().__init__(message)
        self.cause = cause
        """`unknown_argument`, `missing_argument` or `wrong_type`."""


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """Schema of a tool and readers that convert its arguments.

    Raises `ToolSchemaError` for a schema whose arguments cannot be checked.
    """

    schema: Mapping[str, Any]
    """In OpenAI's shape, ``{"type": "function", "function": {...}}``."""
    readers: Mapping[str, Any]
    """One pydantic `TypeAdapter` per parameter that has a hint."""
    nullable: frozenset[str] = frozenset()
    """Arguments that may be null even where the schema does not say so."""
    _check: SchemaCheck = field(init=False, repr=False, compare=False)
    _quick_checks: Mapping[str, QuickCheck] = field(init=False, repr=False, compare=False)
    """Checks of those arguments that need no validator, if the arguments have no condition
    together."""
    _required: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, Mapping):
            raise ToolSchemaError(
                f"tool {self.name!r}: its parameters are no JSON schema of type object"
            )
        try:
            check = SchemaCheck.of(self._schema_with_null())
            quick_checks = quick_checks_of(check.resolved.root)
            if len(quick_checks) < len(check.root_keys.named) and not self.readers:
                # its author may have erred; schemas made from hints are valid
                check.make_validator()
        except SchemaFault as fault:
            raise ToolSchemaError(f"tool {self.name!r}: {fault}") from fault
        object.__setattr__(self, "_check", check)
        object.__setattr__(self, "_quick_checks", quick_checks)
        object.__setattr__(self, "_required", frozenset(check.resolved.root.get("required") or ()))

    def _schema_with_null(self) -> dict[str, Any]:
        """Return the schema of the arguments, with null for those that may be null."""
        schema = dict(self.parameters)
        if not self.nullable:
            return schema
        properties: dict[str, Any] = {}
        for key, inner in (schema.get("properties") or {}).items():
            if key in self.nullable and isinstance(inner, Mapping):
                inner = {**inner, "nullable": True}
            properties[key] = inner
        schema["properties"] = properties
        return schema

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the validator, which is made again."""
        return ToolSignature, (self.schema, self.readers, self.nullable)

    @property
    def name(self) -> str:
        """The tool's name."""
        return str(self.schema["function"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments object."""
        parameters: Mapping[str, Any] = self.schema["function"].get("parameters") or {}
        return parameters

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate arguments and convert them to the hinted types, such as nested dataclasses and
        tuples.

        An integer is accepted for a float, and a float such as 3.0 for an integer, which it
        becomes. Nothing else is coerced: no bool for a number, no string for either. Raises
        `InvalidArguments`.
        """
        if not self._is_valid(arguments):
            arguments = self._checked(arguments)
        readers = self.readers
        return {
            key: self._read_one(key, value, readers[key]) if key in readers else value
            for key, value in arguments.items()
        }

    def _is_valid(self, arguments: Mapping[str, Any]) -> bool:
        """Whether quick checks show that the arguments are valid: the validator takes 20 times as
        long."""
        quick_checks = self._quick_checks
        for key, value in arguments.items():
            quick_check = quick_checks.get(key)
            if quick_check is None or not quick_check(value):
                return False
        return bool(quick_checks) and self._required <= arguments.keys()

    def _checked(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return valid arguments, with integers for floats such as 3.0.

        Raises `InvalidArguments`.
        """
        check = self._check
        try:
            for key in arguments:
                if not check.schemas_of(key):
                    raise self._unknown(key)

            # The model reads the first problem alone.
            problems = list(check.problems(arguments))
            if problems:
                first = min(problems, key=lambda problem: self._rank(problem, arguments))
                raise self._refusal(first)
            for key, value in arguments.items():
                unknown = check.unknown_key(value, check.schemas_of(key), (key,))
                if unknown is not None:
                    raise self._refusal(unknown)

            converted = {}
            for key, value in arguments.items():
                converted[key] = check.with_integers(value, check.schemas_of(key))
            return converted
        except (TooComplex, RecursionError) as error:
            problem = str(error) if isinstance(error, TooComplex) else "is nested too deep"
            nested = [key for key, value in arguments.items() if isinstance(value, (list, dict))]
            key = (nested or list(arguments))[0]
            raise InvalidArguments(f"argument {quoted(key)} of {self.name} {problem}") from None

    @staticmethod
    def _rank(problem: Problem, arguments: Mapping[str, Any]) -> int:
        """Return the place of a problem: missing arguments come first, then the arguments in their
        order."""
        if not problem.path:
            return -1
        key = problem.path[0]
        return list(arguments).index(key) if key in arguments else 0

    def _unknown(self, key: Any) -> InvalidArguments:
        """Return the error of an argument that the tool does not have."""
        keys = self._check.root_keys
        patterns = ", ".join(shortened(pattern) for pattern, _ in keys.patterns)
        near = suggest_or_list(str(key), keys.named)
        if not near:
            near = f"its arguments match {patterns}" if patterns else "it takes none"
        return InvalidArguments(
            f"{self.name} has no argument {quoted(key)}; {near}", "unknown_argument"
        )

    def _refusal(self, problem: Problem) -> InvalidArguments:
        """Word a problem for the model."""
        if problem.unknown is not None and len(problem.path) == 1:
            return self._unknown(problem.unknown)
        if not problem.path and problem.missing:
            wanted = problem.text.removeprefix("lacks ")
            return InvalidArguments(f"{self.name} needs the argument {wanted}", "missing_argument")
        if not problem.path:
            return InvalidArguments(f"the arguments object of {self.name} {problem.text}")
        return InvalidArguments(
            f"argument {quoted(problem.path[0])} of {self.name} {problem.below(1)}"
        )

    def _read_one(self, key: str, value: Any, reader: Any) -> Any:
        """Convert one argument to its hinted type."""
        from pydantic import ValidationError

        try:
            # Through JSON, since strict mode reads enums and dataclasses from plain values only
            # there.
            return reader.validate_json(json.dumps(value), strict=True)
        except RecursionError:
            raise InvalidArguments(f"argument {key!r} of {self.name} is nested too deep") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            raise InvalidArguments(
                f"argument {key!r}{place} of {self.name}: {first['msg']}"
            ) from None


def tool_signature(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
    from_row: Sequence[str] = (),
) -> ToolSignature:
    """Read the signature of a function, without the `self` of a method; arguments as `tool`.

    `schema` has the outer `{"type": "function"}` or not.
    """
    where = f"tool {getattr(function, '__qualname__', None) or type(function).__name__}"
    parameters = _parameters(function, where, own_schema=schema is not None)
    for key in from_row:
        if key not in parameters:
            near = suggest_or_list(key, parameters) or "it takes none"
            raise ToolSchemaError(f"{where}: from_row names {key!r}, which is no parameter; {near}")
        del parameters[key]
    hints = _hints(function, where)

    # With a schema, hints only convert.
    if schema is not None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters_of(function).values())
        checked = _checked_schema(schema, name, parameters, where, takes_any)
        return ToolSignature(checked, _readers(parameters, hints, where, strict=False))

    # Without one, hints give the types and the docstring gives the texts.
    for parameter in parameters:
        if parameter not in hints:
            raise ToolSchemaError(
                f"{where}: parameter {parameter!r} has no type hint; write {parameter}: str, or "
                "give schema="
            )
    readers = _readers(parameters, hints, where, strict=True)
    description, texts = parse_docstring(function)
    if not description:
        raise ToolSchemaError(
            f"{where}: no docstring; describe the tool for the model in one (or give schema=)"
        )
    for key in texts:
        if key not in parameters and key not in from_row:
            near = suggest_or_list(key, parameters) or "it takes none"
            raise ToolSchemaError(
                f"{where}: the docstring describes {key!r}, which is no parameter; {near}"
            )

    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, details in parameters.items():
        properties[key] = _property(readers[key], details, texts.get(key), where)
        if details.default is details.empty:
            required.append(key)
    body: dict[str, Any] = {
        "name": checked_name(name or function.__name__, where),
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return ToolSignature({"type": "function", "function": body}, readers)


_cached_signature = functools.lru_cache(maxsize=256)(inspect.signature)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a callable's parameters; those of functions and classes, which every episode needs,
    are read once."""
    if isinstance(function, (types.FunctionType, type)):
        return _cached_signature(function).parameters
    return inspect.signature(function).parameters


def nullable_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters that take None: by their hint, or by their default."""
    try:
        hints = get_type_hints(function)
    except Exception:  # an unresolved hint; the defaults remain
        hints = {}
    nullable = set()
    for key, parameter in parameters_of(function).items():
        if parameter.default is None or type(None) in typing.get_args(hints.get(key)):
            nullable.add(key)
    return frozenset(nullable)


class RowParameters(NamedTuple):
    """Parameters of a callable that a row can set by name."""

    named: tuple[str, ...]
    needed: frozenset[str]
    """Parameters without a default."""
    takes_any: bool
    """Whether it has `**kwargs`."""


def _row_parameters(function: Callable[..., Any]) -> RowParameters:
    named = []
    needed = set()
    takes_any = False
    for key, parameter in parameters_of(function).items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and key != "self":
            named.append(key)
        if parameter.default is parameter.empty:
            needed.add(key)
        takes_any |= parameter.kind is parameter.VAR_KEYWORD
    return RowParameters(tuple(named), frozenset(needed), takes_any)


_cached_row_parameters = functools.lru_cache(maxsize=256)(_row_parameters)


def row_parameters(function: Callable[..., Any]) -> RowParameters:
    """Return what a row can set of a callable, read as `parameters_of` does."""
    if isinstance(function, (types.FunctionType, type)):
        return _cached_row_parameters(function)
    return _row_parameters(function)


def _parameters(
    function: Callable[..., Any], where: str, own_schema: bool
) -> dict[str, inspect.Parameter]:
    """Return the parameters that a call can give by name, without `self`."""
    try:
        parameters = parameters_of(function)
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(
            f"{where}: its signature cannot be read ({error}); wrap it in a function of your own"
        ) from error

    named: dict[str, inspect.Parameter] = {}
    for number, (key, parameter) in enumerate(parameters.items()):
        if number == 0 and key == "self" and parameter.annotation is parameter.empty:
            continue
        if parameter.kind is parameter.VAR_KEYWORD and own_schema:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ToolSchemaError(
                f"{where}: {stars}{key} cannot be described to a model; name each parameter"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolSchemaError(
                f"{where}: {key!r} is positional-only, and tools are called by name; remove the '/'"
            )
        named[key] = parameter
    return named


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the hints of a callable; raise `ToolSchemaError` for one without a type."""
    target: Any = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except Exception as error:
        raise ToolSchemaError(
            f"{where}: a type hint cannot be resolved ({error}); import or define its type"
        ) from error


def _readers(
    parameters: Mapping[str, Any], hints: Mapping[str, Any], where: str, strict: bool
) -> dict[str, Any]:
    """Make one reader per hinted parameter; unless strict, unreadable hints are skipped in favor of
    the given schema."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    readers: dict[str, Any] = {}
    for key in parameters:
        if key not in hints:
            continue
        try:
            readers[key] = TypeAdapter(pydantic_hint(hints[key]))
        except (PydanticUserError, TypeError) as error:
            if strict:
                text = getattr(hints[key], "__name__", hints[key])
                raise ToolSchemaError(
                    f"{where}: {key!r} is a {text}, which JSON cannot express; use plain types"
                ) from error
    return readers


def _property(
    reader: Any, parameter: inspect.Parameter, text: str | None, where: str
) -> dict[str, Any]:
    """Return the schema of a parameter, with its text and its default."""
    from pydantic.errors import PydanticInvalidForJsonSchema

    try:
        schema = flatten(reader.json_schema())
    except (PydanticInvalidForJsonSchema, ValueError) as error:
        raise ToolSchemaError(
            f"{where}: {parameter.name!r} cannot be described to a model ({error}); use plain types"
        ) from error
    if text:
        schema["description"] = text
    if parameter.default not in (parameter.empty, None):
        schema["default"] = reader.dump_python(parameter.default, mode="json", warnings=False)
    return schema


def _checked_schema(
    schema: Mapping[str, Any],
    name: str | None,
    parameters: Mapping[str, Any],
    where: str,
    takes_any: bool,
) -> dict[str, Any]:
    """Return a schema of the user's in OpenAI's shape, checked against the function's
    parameters."""
    body = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(body, Mapping) or not (name or isinstance(body.get("name"), str)):
        raise ToolSchemaError(
            f'{where}: schema= is an OpenAI tool schema: {{"name": ..., "parameters": {{"type": '
            '"object", ...}}'
        )
    arguments = body.get("parameters") or {"type": "object", "properties": {}}
    is_mapping = isinstance(arguments, Mapping)
    if not is_mapping or str(arguments.get("type", "object")).lower() != "object":
        raise ToolSchemaError(
            f'{where}: the "parameters" of schema= are a JSON schema of type object'
        )
    try:
        resolved = read_schema(arguments)
    except SchemaFault as fault:
        raise ToolSchemaError(f"{where}: {fault}") from fault

    keys = resolved.keys([resolved.root])
    for key in keys.named:
        if key not in parameters and not takes_any:
            raise ToolSchemaError(
                f"{where}: schema= has the parameter {key!r}, which the function does not take"
            )
    # A pattern, or a schema for all other keys, may mean a parameter that is not named.
    names_all = keys.closed and not keys.patterns and not keys.others
    for key, parameter in parameters.items():
        is_left_out = names_all and key not in keys.named
        if is_left_out and parameter.default is parameter.empty:
            raise ToolSchemaError(
                f"{where}: schema= leaves out the parameter {key!r}, which has no default"
            )

    checked = checked_name(name or body["name"], where)
    function = {**body, "name": checked, "parameters": dict(arguments)}
    return {"type": "function", "function": function}


def checked_name(name: str, where: str, remedy: str = "name=") -> str:
    """Return a tool name after checking that model servers accept it."""
    if not _NAME.fullmatch(name):
        raise ToolSchemaError(
            f"{where}: {name!r} cannot be a tool's name; use letters, digits, _ and - (give "
            f"{remedy})"
        )
    return name

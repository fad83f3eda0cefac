"""OpenAI tool schemas from typed Python functions, and validation of arguments.

The rules are those of verl's `@function_tool`: hints give the types, a Google docstring the
descriptions; `*args` and `**kwargs` are rejected; a name or a complete schema can be given instead.
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

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|References|Todo)\s*:\s*$"  # noqa: E501
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description (all text before the first section) and the text of each
    argument; empty if missing.

    Example: ``("Evaluate arithmetic.", {"expression": 'for example "(3 + 4) * 5".'})``
    """
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line)]
    description = " ".join(" ".join(lines[: starts[0] if starts else len(lines)]).split())
    arguments: dict[str, str] = {}
    for start in starts:
        if lines[start].strip().rstrip(": ") in ("Args", "Arguments", "Parameters", "Params"):
            end = next((index for index in starts if index > start), len(lines))
            arguments |= _arguments(lines[start + 1 : end])
    return description, arguments


def _arguments(lines: list[str]) -> dict[str, str]:
    """Parse an argument section; lines indented deeper than the first continue
    the previous argument."""
    found: dict[str, str] = {}
    current = ""
    indent = next((len(line) - len(line.lstrip()) for line in lines if line.strip()), 0)
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        match = _ARGUMENT.match(line.strip()) if depth <= indent else None
        if match:
            current = match[1]
            found[current] = match[2].strip()
        elif current:
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found


def pydantic_hint(hint: Any) -> Any:
    """Replace each `typing.TypedDict` of a hint by one of typing_extensions, which pydantic
    needs on Python 3.11."""
    if typing.is_typeddict(hint):
        import typing_extensions

        members = {
            key: pydantic_hint(inner)
            for key, inner in get_type_hints(hint, include_extras=True).items()
        }
        members |= {
            key: typing_extensions.NotRequired[members[key]] for key in hint.__optional_keys__
        }
        return typing_extensions.TypedDict(hint.__name__, members)  # type: ignore[operator]
    if isinstance(hint, types.UnionType):
        return functools.reduce(
            operator.or_, (pydantic_hint(member) for member in typing.get_args(hint))
        )
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, dict, tuple, set, frozenset, typing.Union) and any(
        map(typing.is_typeddict, _nested_hints(hint))
    ):
        return origin[tuple(pydantic_hint(member) for member in args)]
    return hint


def _nested_hints(hint: Any) -> typing.Iterator[Any]:
    yield hint
    for member in typing.get_args(hint):
        yield from _nested_hints(member)


_MAX_FLAT = 10_000
"""Schemas in a flattened schema: definitions that name others twice double it with each of them."""
_DATA = ("const", "default", "enum", "examples")
_MAPS = ("properties", "patternProperties", "dependentSchemas")


def flatten(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without references and titles, its keys in their order.

    Raises `ValueError` for a recursive type or too large a result, `KeyError` for a reference
    to anything but `$defs`.
    """
    definitions: Mapping[str, Any] = schema.get("$defs") or {}
    count = 0

    def walk(value: Any, inside: tuple[str, ...]) -> Any:
        nonlocal count
        if isinstance(value, list):
            return [walk(item, inside) for item in value]
        if not isinstance(value, Mapping):
            return value
        count += 1
        if count > _MAX_FLAT:
            raise ValueError(f"it has over {_MAX_FLAT} schemas without its references")

        if isinstance(reference := value.get("$ref"), str):
            name = reference.removeprefix("#/$defs/")
            if name in inside:
                raise ValueError(f"the type {name} contains itself")
            beside = {key: inner for key, inner in value.items() if key != "$ref"}
            meant: dict[str, Any] = walk(definitions[name], (*inside, name))
            return meant | walk(beside, inside)

        flat: dict[str, Any] = {}
        members = value.get("anyOf")
        for key, inner in value.items():
            if key in ("$defs", "title"):
                continue
            if key in _MAPS and isinstance(inner, Mapping):
                # A property may itself be called "title".
                flat[key] = {name: walk(member, inside) for name, member in inner.items()}
            elif (
                key == "anyOf"
                and "type" not in value
                and members
                and all(map(_is_bare_type, members))
            ):
                # a union of plain types is a list of types, the usual form of an
                # optional string in prompts
                flat["type"] = [member["type"] for member in members]
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
        self.cause = cause  # `unknown_argument`, `missing_argument` or `wrong_type`


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """Schema of a tool and readers that convert its arguments.

    Raises `ToolSchemaError` for a schema whose arguments cannot be checked.
    """

    schema: Mapping[str, Any]  # in OpenAI's shape, ``{"type": "function", "function": {...}}``
    readers: Mapping[str, Any]  # one pydantic `TypeAdapter` per parameter that has a hint
    # Arguments that may be null even where the schema does not say so.
    nullable: frozenset[str] = frozenset()
    _check: SchemaCheck = field(init=False, repr=False, compare=False)
    _quick_checks: Mapping[str, QuickCheck] = field(init=False, repr=False, compare=False)
    """Checks of those arguments that need no validator, if the arguments have
    no condition together."""
    _required: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, Mapping):
            raise ToolSchemaError(
                f"tool {self.name!r}: its parameters are no JSON schema of type object"
            )
        schema = dict(self.parameters)
        if self.nullable:
            properties: Mapping[str, Any] = schema.get("properties") or {}
            schema["properties"] = {
                key: {**inner, "nullable": True}
                if key in self.nullable and isinstance(inner, Mapping)
                else inner
                for key, inner in properties.items()
            }
        try:
            check = SchemaCheck.of(schema)
            quick_checks = quick_checks_of(check.resolved.root)
            if len(quick_checks) < len(check.root_keys.named) and not self.readers:
                # its author may have erred; schemas made from hints are valid
                check.make_validator()
        except SchemaFault as fault:
            raise ToolSchemaError(f"tool {self.name!r}: {fault}") from fault
        object.__setattr__(self, "_check", check)
        object.__setattr__(self, "_quick_checks", quick_checks)
        object.__setattr__(self, "_required", frozenset(check.resolved.root.get("required") or ()))

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
        found: Mapping[str, Any] = self.schema["function"].get("parameters") or {}
        return found

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate arguments and convert them to the hinted types, such as
        nested dataclasses and tuples.

        An integer is accepted for a float, and a float such as 3.0 for an integer,
        which it becomes. Nothing else is coerced: no bool for a number, no string for
        either. Raises `InvalidArguments`.
        """
        if not self._is_valid(arguments):
            arguments = self._checked(arguments)
        readers = self.readers
        return {
            key: self._read_one(key, value, readers[key]) if key in readers else value
            for key, value in arguments.items()
        }

    def _is_valid(self, arguments: Mapping[str, Any]) -> bool:
        """Whether quick checks show that the arguments are valid: the validator
        takes 20 times as long."""
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
            problems = list(check.problems(arguments))
            if problems:
                raise self._refusal(
                    min(problems, key=lambda problem: self._rank(problem, arguments))
                )
            for key, value in arguments.items():
                unknown = check.unknown_key(value, check.schemas_of(key), (key,))
                if unknown is not None:
                    raise self._refusal(unknown)
            return {
                key: check.with_integers(value, check.schemas_of(key))
                for key, value in arguments.items()
            }
        except (TooComplex, RecursionError) as error:
            problem = str(error) if isinstance(error, TooComplex) else "is nested too deep"
            nested = [
                key for key, value in arguments.items() if isinstance(value, (list, dict))
            ] or list(arguments)
            raise InvalidArguments(
                f"argument {quoted(nested[0])} of {self.name} {problem}"
            ) from None

    @staticmethod
    def _rank(problem: Problem, arguments: Mapping[str, Any]) -> int:
        """Return the place of a problem: missing arguments come first, then the
        arguments in their order."""
        if not problem.path:
            return -1
        return list(arguments).index(problem.path[0]) if problem.path[0] in arguments else 0

    def _unknown(self, key: Any) -> InvalidArguments:
        keys = self._check.root_keys
        patterns = ", ".join(shortened(pattern) for pattern, _ in keys.patterns)
        otherwise = f"its arguments match {patterns}" if patterns else "it takes none"
        near = suggest_or_list(str(key), keys.named) or otherwise
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
        from pydantic import ValidationError

        try:
            # through JSON, since strict mode reads enums and dataclasses from
            # plain values only there
            return reader.validate_json(json.dumps(value), strict=True)
        except RecursionError:
            raise InvalidArguments(f"argument {key!r} of {self.name} is nested too deep") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = "".join(f"[{part!r}]" for part in first["loc"])
            raise InvalidArguments(f"argument {key!r}{at} of {self.name}: {first['msg']}") from None


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
    if schema is not None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters_of(function).values())
        made = _given(schema, name, parameters, where, takes_any)
        return ToolSignature(made, _readers(parameters, hints, where, strict=False))
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
    for text in texts:
        if text not in parameters and text not in from_row:
            near = suggest_or_list(text, parameters) or "it takes none"
            raise ToolSchemaError(
                f"{where}: the docstring describes {text!r}, which is no parameter; {near}"
            )
    properties = {
        key: _property(readers[key], parameter, texts.get(key), where)
        for key, parameter in parameters.items()
    }
    required = [
        key for key, parameter in parameters.items() if parameter.default is parameter.empty
    ]
    body: dict[str, Any] = {
        "name": checked_name(name or function.__name__, where),
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return ToolSignature({"type": "function", "function": body}, readers)


_kept_signature = functools.lru_cache(maxsize=256)(inspect.signature)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a callable's parameters; those of functions and classes, which every episode
    needs, are read once."""
    kept = isinstance(function, (types.FunctionType, type))
    return (_kept_signature if kept else inspect.signature)(function).parameters


def nullable_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters that take None: by their hint, or by their default."""
    try:
        hints = get_type_hints(function)
    except Exception:  # an unresolved hint; the defaults remain
        hints = {}
    return frozenset(
        key
        for key, parameter in parameters_of(function).items()
        if parameter.default is None or type(None) in typing.get_args(hints.get(key))
    )


class RowParameters(NamedTuple):
    """Parameters of a callable that a row can set by name."""

    named: tuple[str, ...]
    needed: frozenset[str]
    """Parameters without a default."""
    takes_any: bool
    """Whether it has `**kwargs`."""


def _row_parameters(function: Callable[..., Any]) -> RowParameters:
    parameters = parameters_of(function)
    named = [
        key
        for key, p in parameters.items()
        if key != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    needed = frozenset(key for key, p in parameters.items() if p.default is p.empty)
    return RowParameters(
        tuple(named), needed, any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    )


_kept_row_parameters = functools.lru_cache(maxsize=256)(_row_parameters)


def row_parameters(function: Callable[..., Any]) -> RowParameters:
    """Return what a row can set of a callable, read as `parameters_of` does."""
    kept = isinstance(function, (types.FunctionType, type))
    return (_kept_row_parameters if kept else _row_parameters)(function)


def _parameters(
    function: Callable[..., Any], where: str, own_schema: bool
) -> dict[str, inspect.Parameter]:
    try:
        parameters = parameters_of(function)
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(
            f"{where}: its signature cannot be read ({error}); wrap it in a function of your own"
        ) from error
    found: dict[str, inspect.Parameter] = {}
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
        found[key] = parameter
    return found


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
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
    """Make one reader per hinted parameter; unless strict, unreadable hints are skipped in
    favor of the given schema."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    readers: dict[str, Any] = {}
    for key in filter(hints.__contains__, parameters):
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


def _given(
    schema: Mapping[str, Any],
    name: str | None,
    parameters: Mapping[str, Any],
    where: str,
    takes_any: bool,
) -> dict[str, Any]:
    body = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(body, Mapping) or not (name or isinstance(body.get("name"), str)):
        raise ToolSchemaError(
            f'{where}: schema= is an OpenAI tool schema: {{"name": ..., "parameters": {{"type": '
            '"object", ...}}'
        )
    given = body.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(given, Mapping) or str(given.get("type", "object")).lower() != "object":
        raise ToolSchemaError(
            f'{where}: the "parameters" of schema= are a JSON schema of type object'
        )
    try:
        resolved = read_schema(given)
    except SchemaFault as fault:
        raise ToolSchemaError(f"{where}: {fault}") from fault
    keys = resolved.keys([resolved.root])
    for key in keys.named:
        if key not in parameters and not takes_any:
            raise ToolSchemaError(
                f"{where}: schema= has the parameter {key!r}, which the function does not take"
            )
    for key, parameter in parameters.items():
        # a pattern, or a schema for all other keys, may mean it
        left_out = key not in keys.named and keys.closed and not keys.patterns and not keys.others
        if left_out and parameter.default is parameter.empty:
            raise ToolSchemaError(
                f"{where}: schema= leaves out the parameter {key!r}, which has no default"
            )
    made = {**body, "name": checked_name(name or body["name"], where), "parameters": dict(given)}
    return {"type": "function", "function": made}


def checked_name(name: str, where: str, remedy: str = "name=") -> str:
    """Return a tool name after checking that model servers accept it."""
    if not _NAME.fullmatch(name):
        raise ToolSchemaError(
            f"{where}: {name!r} cannot be a tool's name; use letters, digits, _ and - (give "
            f"{remedy})"
        )
    return name

"""From a typed Python function to an OpenAI tool schema, and arguments held to it before a call.

The rules are those that users know from verl's `@function_tool`: hints give the types, a Google docstring the descriptions;
`*args` and `**kwargs` are refused; a name or a whole schema can be given instead.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from turnwise.env.near import suggest_or_list
from turnwise.env.tools.docstring import parse_docstring
from turnwise.env.tools.jsontypes import describe_schema, flatten, pydantic_hint, schema_error
from turnwise.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolSchemaError(UsageError):
    """A function that cannot be a tool as it is written."""


class InvalidArguments(ValueError):
    """Arguments that a model gave and that do not fit; the message is worded for the model."""

    def __init__(self, said: str, cause: str = "wrong_type") -> None:
        super().__init__(said)
        self.cause = cause
        """`unknown_argument`, `missing_argument` or `wrong_type`."""


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """What a tool takes: its schema, and how arguments become what the function expects."""

    schema: Mapping[str, Any]
    """In OpenAI's shape, ``{"type": "function", "function": {...}}``."""
    readers: Mapping[str, Any]
    """One pydantic `TypeAdapter` per parameter that has a hint."""

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
        """Arguments as the function expects them (a nested dataclass made, a list as a tuple where that is the hint).

        A whole number is accepted for a float, but nothing else is converted: no bool for a number, no string for either.

        Raises:
            InvalidArguments: when one is unknown, missing or of the wrong type.
        """
        properties: Mapping[str, Any] = self.parameters.get("properties") or {}
        if self.parameters.get("additionalProperties", False) is False:
            for key in arguments:
                if key not in properties:
                    near = suggest_or_list(str(key), properties) or "it takes none"
                    raise InvalidArguments(f"{self.name} has no argument {key!r}; {near}", "unknown_argument")
        for key in self.parameters.get("required") or ():
            if key not in arguments:
                wanted = describe_schema(properties.get(key, {}))
                raise InvalidArguments(f"{self.name} needs the argument {key!r} ({wanted})", "missing_argument")
        return {key: self._read_one(key, value, properties.get(key, {})) for key, value in arguments.items()}

    def _read_one(self, key: str, value: Any, schema: Mapping[str, Any]) -> Any:
        reader = self.readers.get(key)
        if problem := schema_error(value, schema):
            raise InvalidArguments(f"argument {key!r} of {self.name} {problem}")
        if reader is None:
            return value
        from pydantic import ValidationError

        try:
            # through JSON, since only there strict still reads enums and dataclasses from their plain values
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
    """Read the signature of a tool function; the `self` of a method is left out.

    Args:
        name: instead of the function's own.
        schema: instead of one from hints and docstring; in OpenAI's shape, with or without the outer `{"type": "function"}`.
        from_row: parameters that the task's row gives, and that the model is not told of.

    Raises:
        ToolSchemaError: naming the function, the parameter and the remedy.
    """
    where = _where(function)
    parameters = _parameters(function, where, own_schema=schema is not None)
    for key in from_row:
        if key not in parameters:
            near = suggest_or_list(key, parameters) or "it takes none"
            raise ToolSchemaError(f"{where}: from_row names {key!r}, which is no parameter; {near}")
        del parameters[key]
    hints = _hints(function, where)
    if schema is not None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
        made = _given(schema, name, parameters, where, takes_any)
        return ToolSignature(made, _readers(parameters, hints, where, strict=False))
    for parameter in parameters:
        if parameter not in hints:
            raise ToolSchemaError(f"{where}: parameter {parameter!r} has no type hint; write {parameter}: str, or give schema=")
    readers = _readers(parameters, hints, where, strict=True)
    description, texts = parse_docstring(function)
    if not description:
        raise ToolSchemaError(
            f"{where}: no docstring; say in one what the tool does, since the model is told of it (or give schema=)"
        )
    for text in texts:
        if text not in parameters and text not in from_row:
            near = suggest_or_list(text, parameters) or "it takes none"
            raise ToolSchemaError(f"{where}: the docstring describes {text!r}, which is no parameter; {near}")
    properties = {key: _property(readers[key], parameter, texts.get(key), where) for key, parameter in parameters.items()}
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    body: dict[str, Any] = {
        "name": checked_name(name or function.__name__, where),
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return ToolSignature({"type": "function", "function": body}, readers)


def _where(function: Callable[..., Any]) -> str:
    return f"tool {getattr(function, '__qualname__', None) or type(function).__name__}"


def _parameters(function: Callable[..., Any], where: str, own_schema: bool) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(f"{where}: its signature cannot be read ({error}); wrap it in a function of your own") from error
    found: dict[str, inspect.Parameter] = {}
    for number, (key, parameter) in enumerate(parameters.items()):
        if number == 0 and key == "self" and parameter.annotation is parameter.empty:
            continue
        if parameter.kind is parameter.VAR_KEYWORD and own_schema:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ToolSchemaError(f"{where}: {stars}{key} cannot be told to a model; name each parameter")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolSchemaError(f"{where}: {key!r} is positional-only, and tools are called by name; remove the '/'")
        found[key] = parameter
    return found


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    target: Any = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except Exception as error:
        raise ToolSchemaError(f"{where}: a type hint cannot be resolved ({error}); import or define its type") from error


def _readers(parameters: Mapping[str, Any], hints: Mapping[str, Any], where: str, strict: bool) -> dict[str, Any]:
    """One reader per hinted parameter; unless strict, a hint that cannot be read is left to the given schema."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    readers: dict[str, Any] = {}
    for key in parameters:
        if key in hints:
            try:
                readers[key] = TypeAdapter(pydantic_hint(hints[key]))
            except (PydanticUserError, TypeError) as error:
                if strict:
                    shown = getattr(hints[key], "__name__", hints[key])
                    raise ToolSchemaError(f"{where}: {key!r} is a {shown}, which no JSON can say; use plain types") from error
    return readers


def _property(reader: Any, parameter: inspect.Parameter, text: str | None, where: str) -> dict[str, Any]:
    from pydantic.errors import PydanticInvalidForJsonSchema

    try:
        schema = flatten(reader.json_schema())
    except (PydanticInvalidForJsonSchema, ValueError) as error:
        raise ToolSchemaError(f"{where}: {parameter.name!r} cannot be told to a model ({error}); use plain types") from error
    if text:
        schema["description"] = text
    if parameter.default not in (parameter.empty, None):
        value = reader.dump_python(parameter.default, mode="json", warnings=False)
        schema["default"] = value
    return schema


def _given(
    schema: Mapping[str, Any], name: str | None, parameters: Mapping[str, Any], where: str, takes_any: bool
) -> dict[str, Any]:
    body = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(body, Mapping) or not (name or isinstance(body.get("name"), str)):
        raise ToolSchemaError(
            f'{where}: schema= is an OpenAI tool schema: {{"name": ..., "parameters": {{"type": "object", ...}}}}'
        )
    given = body.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise ToolSchemaError(f'{where}: the "parameters" of schema= are a JSON schema of type object')
    properties = given.get("properties") or {}
    for key in properties:
        if key not in parameters and not takes_any:
            raise ToolSchemaError(f"{where}: schema= has the parameter {key!r}, which the function does not take")
    for key, parameter in parameters.items():
        if key not in properties and parameter.default is parameter.empty:
            raise ToolSchemaError(f"{where}: schema= leaves out the parameter {key!r}, which has no default")
    return {
        "type": "function",
        "function": {**body, "name": checked_name(name or body["name"], where), "parameters": dict(given)},
    }


def checked_name(name: str, where: str, remedy: str = "name=") -> str:
    """A name that servers of models take.

    Raises:
        ToolSchemaError: for another.
    """
    if not _NAME.fullmatch(name):
        raise ToolSchemaError(f"{where}: {name!r} cannot be a tool's name; use letters, digits, _ and - (give {remedy})")
    return name

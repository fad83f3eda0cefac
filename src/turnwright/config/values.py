"""Values of single keys: pydantic checks their types and bounds, and errors are said in our words.

`reader` is pydantic's reader of a section and `why_refused` words its errors. Rules across keys are
in `validation.py`; the sections themselves are in `schema.py`.

Sections are dataclasses of the standard library, so importing them needs no pydantic (0.1 s).
Bounds are those of `annotated_types`, which `pydantic.Field(gt=0)` stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt

from turnwright.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails


@dataclass(frozen=True, slots=True)
class Valid:
    """Validator of pydantic for a field's `Annotated`, beyond type and bounds."""

    error: Callable[[Any], str]
    """Function that returns what is wrong with a value of the field's type, or an empty string."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return pydantic's schema of the field, which calls `error` last."""
        from pydantic_core import core_schema

        def validate(value: Any) -> Any:
            why = self.error(value)
            if why:
                raise ValueError(why)
            return value

        return core_schema.no_info_after_validator_function(validate, handler(source))


class PathKind(Enum):
    """Kind of a path in a recipe; relative paths are relative to the recipe."""

    DIRECTORY = "a directory, which may not exist yet"
    DATA = "a file or directory that exists, or an object of a file"
    OBJECT = "an object of a file, or a name that is no path"
    TEMPLATE = "a Jinja file, or a name that is no path"

    def is_path(self, value: str) -> bool:
        """Return whether a value is a path rather than a name."""
        if self is PathKind.OBJECT:
            return value.partition(":")[0].endswith(".py")
        if self is PathKind.TEMPLATE:
            return is_template_file(value)
        return bool(value)


def is_template_file(value: str) -> bool:
    """Return whether `model.template` is a file rather than the name of a built-in template."""
    is_path = "/" in value or "\\" in value
    return is_path or value.endswith((".jinja", ".jinja2", ".j2", ".txt"))


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Return the annotation of each field of a section, with bounds and path kinds."""
    return get_type_hints(cls, include_extras=True)


@cache
def path_kinds(cls: Any) -> dict[str, PathKind]:
    """Return the path kinds of a section's fields that hold paths."""
    kinds = {}
    for name, hint in hints_of(cls).items():
        for extra in _metadata(hint):
            if isinstance(extra, PathKind):
                kinds[name] = extra
    return kinds


def _metadata(hint: Any) -> Iterator[Any]:
    """Yield what `Annotated` adds to a type, its members and items."""
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        yield from _metadata(hint)
        yield from extras
    elif get_origin(hint) in (Union, UnionType, tuple):
        for member in get_args(hint):
            yield from _metadata(member)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a 1-tuple of the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def describe_type(hint: Any) -> str:
    """Describe a type in words: `an integer`, `one of "linear", "cosine"`."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        members = get_args(hint)
        words = [describe_type(member) for member in members if member is not NoneType]
        if NoneType in members:
            words.append('"none"')
        return " or ".join(words)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        return "a list of strings" if items[-1] is Ellipsis else f"a list of {len(items)} numbers"
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "a string in quotes"}
    return plain.get(hint, "a table")


def describe_bounds(hint: Any) -> str:
    """Describe the bounds of a number: `at least 1`, `from 0 to 1`."""
    words = []
    lowest = highest = None
    for bound in _metadata(hint):
        match bound:
            case Ge(ge=limit):
                lowest = limit
                words.append(f"at least {limit:g}")
            case Gt(gt=limit):
                words.append(f"above {limit:g}")
            case Lt(lt=limit):
                words.append(f"under {limit:g}")
            case Le(le=limit):
                highest = limit
                words.append(f"at most {limit:g}")

    if lowest is not None and highest is not None:
        return f"from {lowest:g} to {highest:g}"
    # Both numbers of a pair have the same bounds.
    return " and ".join(dict.fromkeys(words))


@cache
def reader(cls: Any, *, with_docstrings: bool = False) -> TypeAdapter[Any]:
    """Return pydantic's reader of a section or of the whole configuration.

    With docstrings it describes the fields, for which it reads the source once a section (0.7 s).
    """
    # Importing pydantic takes about 0.1 s, which `turnwright --help` avoids.
    from pydantic import ConfigDict, TypeAdapter

    settings = ConfigDict(
        allow_inf_nan=False,
        # A section that was made in Python was not checked when it was made.
        revalidate_instances="always",
        # From pydantic 2.11 on, also of dataclasses of the standard library.
        use_attribute_docstrings=with_docstrings,
    )
    # pydantic takes settings for no dataclass itself, only for a type around it.
    return TypeAdapter(cls | None, config=settings)


_OUT_OF_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")


def is_of_another_type(error: ErrorDetails) -> bool:
    """Return whether a value has another type than its field, rather than a wrong value of it."""
    return error["type"] not in (*_OUT_OF_BOUNDS, "finite_number", "value_error")


def why_refused(error: ErrorDetails, hint: Any) -> str:
    """Return what pydantic found wrong with the value of a field, in our words.

    `hint` is the annotation of the field.
    """
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "finite_number":
        return "must be a finite number"
    if error["type"] in _OUT_OF_BOUNDS:
        both = "both " if get_origin(hint) is tuple else ""
        return f"{both}must be {describe_bounds(hint)}"
    return f"must be {describe_type(hint)}"


def check_section(section: Any, place: str) -> None:
    """Raise `ConfigError` for the first wrong value of a section made in Python.

    `place` says where it was given: `tw.rollout(rules=...)`.
    """
    from pydantic import ValidationError

    cls = section.__class__
    try:
        reader(cls).validate_python(section, strict=True)
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]

        # The place of the error, down to the key: it may go deeper, to an item of a list.
        path = []
        value = section
        for part in error["loc"]:
            if not is_dataclass(value):
                break
            cls = value.__class__
            path.append(str(part))
            value = getattr(value, path[-1])

        why = why_refused(error, hints_of(cls)[path[-1]])
        raise ConfigError(f"{place}: {'.'.join(path)} = {value!r}: {why}") from None


@cache
def defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults of a section's fields."""
    values = {}
    for field in fields(cls):
        if field.default_factory is MISSING:
            values[field.name] = field.default
        else:
            values[field.name] = field.default_factory()
    return values


def changed(section: Any) -> dict[str, Any]:
    """Return the fields of a section that differ from their defaults.

    Those of a section in it are named `retries.turn`.
    """
    differing: dict[str, Any] = {}
    for name, default in defaults(section.__class__).items():
        value = getattr(section, name)
        if is_dataclass(value):
            differing |= {f"{name}.{inner}": item for inner, item in changed(value).items()}
        elif value != default:
            differing[name] = value
    return differing


def values_of(cls: Any, section: Any) -> dict[str, Any]:
    """Return the values that a section has of the fields of a class, its own or a base of it."""
    return {name: getattr(section, name) for name in defaults(cls)}

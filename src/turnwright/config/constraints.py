"""Metadata of configuration fields, declared in `Annotated`: bounds, names, path kinds, and required keys."""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from turnwright import plugins
from turnwright.errors import ConfigError, did_you_mean

FILE = "file.py:name"  # placeholder in a condition for any value that names an object of a file
Get = Callable[[str], Any]  # function that returns the value of a dotted key
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """Constraint on the value of one field."""

    error: Callable[[Any], str]  # function that returns what is wrong with a value, or an empty string; not called with None
    only_training: bool = False  # whether the value is unconstrained in a run that does not train


def bounds(
    *, ge: float = -math.inf, gt: float = -math.inf, le: float = math.inf, lt: float = math.inf, remedy: str = ""
) -> Check:
    """Constrain a number, or each number of a pair; `remedy` is appended to the error."""
    limits = (("at least", ge), ("above", gt), ("under", lt), ("at most", le))
    words = " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))
    if math.isfinite(ge) and math.isfinite(le):
        words = f"from {ge:g} to {le:g}"

    def within(number: Any) -> bool:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        return is_number and ge <= number <= le and gt < number < lt

    def error(value: Any) -> str:
        is_pair = isinstance(value, tuple)
        fits = all(map(within, value if is_pair else (value,)))
        return "" if fits else f"{'both ' if is_pair else ''}must be {words}{remedy and '; ' + remedy}"

    return Check(error)


OTHER_WORDS = {"ppo": "PPO needs a value network, which there is none of; reinforce_pp is the closest without one;"}
"""Answers to names that are well known but not available, instead of a similar one."""


def named(names: Collection[str], own: str = "file.py:function", marks: Collection[str] = (".py",)) -> Callable[[str], str]:
    """Return a function that tells what is wrong with a name; one with any of the `marks` is the user's, of the form `own`,
    unless that is empty."""

    def error(name: str) -> str:
        if name in names or (own and any(mark in name for mark in marks)):
            return ""
        near = OTHER_WORDS.get(name.lower(), "") or did_you_mean(name, names)
        return f"{near + ' ' if near else ''}there are {', '.join(names)}{own and f'; your own is {own}'}"

    return error


def or_installed(kind: plugins.Kind, error: Callable[[str], str]) -> Callable[[str], str]:
    """Return a function that tells what is wrong with a name that is neither right by `error` nor of an installed package."""

    def found(name: str) -> str:
        wrong = error(name)
        return "" if wrong and name in plugins.installed(kind) else wrong

    return found


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
        return is_template_file(value) if self is PathKind.TEMPLATE else bool(value)


def is_template_file(value: str) -> bool:
    """Return whether `model.template` is a file rather than the name of a built-in template."""
    return value.endswith((".jinja", ".jinja2", ".j2", ".txt")) or "/" in value or "\\" in value


class Needs:
    """Conditions for a key to have an effect, for a field's `Annotated` (`Needs("train.kl > 0")`); one of them must hold.

    A condition is `key > number`, `key = value | value`, `key != value`, `key given` or `key none`; `and` joins several.
    `env.` refers to the environment that the key belongs to.
    """

    def __init__(self, *conditions: str, unless: Collection[Any] = ()) -> None:
        """Take conditions as above, and values of the key that need none."""
        self.conditions, self.unless = conditions, unless

    def met(self, get: Get) -> bool:
        """Return whether one of the conditions holds."""
        return any(all(_holds(part, get) for part in condition.split(" and ")) for condition in self.conditions)

    def keys(self) -> set[str]:
        """Return the dotted keys in the conditions."""
        return {part.split()[0] for condition in self.conditions for part in condition.split(" and ")}

    def __str__(self) -> str:
        return ", or ".join(self.conditions)


OF_ENVIRONMENTS = Needs("rollout.function none")  # for environment keys that have no effect on a play function


@cache
def metadata(cls: Any) -> dict[str, tuple[Any, ...]]:
    """Return the metadata declared for each field of a configuration class."""
    return {name: tuple(_metadata(hint)) for name, hint in get_type_hints(cls, include_extras=True).items()}


def _metadata(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        base, *found = get_args(hint)
        yield from (*_metadata(base), *found)
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _metadata(member)


@cache
def declared(cls: Any) -> dict[str, tuple[Needs, ...]]:
    """Return the `Needs` of each field of a configuration class that has some."""
    found = ((name, tuple(one for one in extras if isinstance(one, Needs))) for name, extras in metadata(cls).items())
    return {name: needs for name, needs in found if needs}


def values_of(cls: Any, section: Any) -> dict[str, Any]:
    """Return the values that a section has of the fields of a class, which is its own or a base of it."""
    return {name: getattr(section, name) for name in defaults(cls)}


@cache
def path_kinds(cls: Any) -> dict[str, PathKind]:
    """Return the path kinds of a configuration class's fields that hold paths."""
    return {name: one for name, extras in metadata(cls).items() for one in extras if isinstance(one, PathKind)}


@cache
def help_texts(cls: Any) -> dict[str, str]:
    """Return the docstrings under the fields of a configuration class and its bases."""
    bases = (_docstrings(base.__module__).get(base.__name__, {}) for base in reversed(cls.__mro__[:-1]))
    return {name: text for base in bases for name, text in base.items()}


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
    found: dict[str, dict[str, str]] = {}
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        texts = found.setdefault(node.name, {})
        for pair in pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return found


def field_errors(section: Any, *, training: bool = True) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, error) for each field of a section that breaks its own constraint."""
    for name, extras in metadata(section.__class__).items():
        value = getattr(section, name)
        if any(isinstance(one, float) and not math.isfinite(one) for one in (value if isinstance(value, tuple) else (value,))):
            yield name, value, "must be a finite number"
        for check in extras if value is not None else ():
            if isinstance(check, Check) and (training or not check.only_training) and (error := check.error(value)):
                yield name, list(value) if isinstance(value, tuple) else value, error


def check_section(section: Any, place: str) -> None:
    """Raise `ConfigError` for the first invalid value of a section made in Python, named `place`: `tw.rollout(limits=...)`."""
    for name, value, error in field_errors(section):
        raise ConfigError(f"{place}: {name} = {value!r}: {error}")


def without_effect(
    prefix: str, section: Any, get: Get, newer: Callable[[str, Collection[str]], bool] = lambda key, others: False
) -> Iterator[tuple[str, Any, Needs]]:
    """Yield (key, value, unmet need) for keys of a section, such as `env.0`, that are no defaults and have no effect.

    `get` returns the value of a dotted key; `env.` refers to this environment. `newer` tells whether one of the keys that a key
    needs was set after it; such a key is not reported.
    """
    for name, value in changed(section).items():
        for need in declared(section.__class__).get(name, ()):
            if value not in need.unless and not need.met(get) and not newer(f"{prefix}.{name}", need.keys()):
                yield f"{prefix}.{name}", value, need


def check_rules_of_play(rules: Any, where: str) -> None:
    """Raise `ConfigError` for the first of `EnvRules`, named `where`, that has no effect on a play function."""
    for name, value in changed(rules).items():
        if OF_ENVIRONMENTS in declared(rules.__class__).get(name, ()):
            why = "has no effect on a play function, which handles this itself; leave it out"
            raise ConfigError(f"{where}: {name} = {value!r} {why}")


@cache
def defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults of a configuration class's fields."""
    return {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(cls)}


def changed(section: Any) -> dict[str, Any]:
    """Return the fields of a configuration dataclass that differ from their defaults."""
    known = defaults(section.__class__).items()
    return {name: value for name, default in known if (value := getattr(section, name)) != default}


def _holds(condition: str, get: Get) -> bool:
    key, sign, *rest = condition.split()
    value = get(key)
    if sign in ("given", "none"):
        return bool(value) == (sign == "given")
    if sign == ">":
        return value is not None and value > float(rest[0])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    same = text in rest or (FILE in rest and ".py" in text)
    return same if sign == "=" else not same

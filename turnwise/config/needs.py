"""What a key needs to have an effect, declared on its field: a setting that silently does nothing is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from turnwise.errors import ConfigError

FILE = "file.py:name"
"""Stands in a condition for any value that names an object of a file."""
Get = Callable[[str], Any]
"""Gives the value of a dotted key."""


class Needs:
    """Conditions of which one has to hold for a key to have an effect, for a field's `Annotated`.

    A condition is `key > number`, `key = value | value`, `key != value`, `key given` or `key none`; `and` joins several. `env.`
    stands for the environment that the key belongs to.

    Example: ``kl_in: Annotated[str | None, Needs("train.kl > 0")] = None``
    """

    def __init__(self, *conditions: str, unless: Collection[Any] = ()) -> None:
        """
        Args:
            conditions: as above; one of them has to hold.
            unless: values of the key that need nothing.
        """
        self.conditions, self.unless = conditions, unless

    def met(self, get: Get) -> bool:
        """Whether one of the conditions holds."""
        return any(all(_holds(part, get) for part in condition.split(" and ")) for condition in self.conditions)

    def keys(self) -> set[str]:
        """The dotted keys that the conditions name."""
        return {part.split()[0] for condition in self.conditions for part in condition.split(" and ")}

    def __str__(self) -> str:
        return ", or ".join(self.conditions)


OF_ENVIRONMENTS = Needs("rollout.function none")
"""For keys of environments that a play function has no use for."""


@cache
def declared(cls: type[Any]) -> dict[str, tuple[Needs, ...]]:
    """The needs of each field of a configuration class that has some."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if needs := tuple(extra for extra in get_args(hint) if isinstance(extra, Needs)):
            found[name] = needs
    return found


def without_effect(
    prefix: str, section: Any, get: Get, newer: Callable[[str, Collection[str]], bool] = lambda key, others: False
) -> Iterator[tuple[str, Any, Needs]]:
    """The keys of a section that differ from their defaults and have no effect, with what they need.

    Args:
        prefix: of the section's keys, `env.0` say.
        section: a configuration dataclass.
        get: gives the value of a dotted key, where `env.` stands for this environment.
        newer: whether what a key needs was set after the key itself; then that is meant, and the key is left alone.
    """
    kind: Any = type(section)
    for name, needs in declared(kind).items():
        value = getattr(section, name)
        if value == default_of(kind, name):
            continue
        for need in needs:
            if value not in need.unless and not need.met(get) and not newer(f"{prefix}.{name}", need.keys()):
                yield f"{prefix}.{name}", value, need


def check_rules_of_play(rules: Any, where: str) -> None:
    """Refuse rules that a play function has no use for.

    Args:
        rules: of the play function (`EnvRules`).
        where: what to call it.

    Raises:
        ConfigError: for the first of them.
    """
    kind: Any = type(rules)
    for name, needs in declared(kind).items():
        if OF_ENVIRONMENTS in needs and (value := getattr(rules, name)) != default_of(kind, name):
            raise ConfigError(
                f"{where}: {name} = {value!r} has no effect on a play function, which handles this itself; leave it out"
            )


@cache
def _fields(cls: Any) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(cls)}


def default_of(cls: Any, name: str) -> Any:
    """The default of a configuration class's field."""
    field = _fields(cls)[name]
    return field.default_factory() if field.default_factory is not MISSING else field.default


def changed(section: Any) -> dict[str, Any]:
    """The fields of a configuration dataclass that differ from their defaults."""
    kind: Any = type(section)
    return {name: value for name in _fields(kind) if (value := getattr(section, name)) != default_of(kind, name)}


def _holds(condition: str, get: Get) -> bool:
    key, sign, *rest = condition.split()
    value = get(key)
    if sign in ("given", "none"):
        return bool(value) == (sign == "given")
    if sign == ">":
        return value is not None and value > float(rest[0])
    told = str(value).lower() if isinstance(value, bool) else str(value)
    named = " ".join(rest).split(" | ")
    same = told in named or (FILE in named and ".py" in told)
    return same if sign == "=" else not same

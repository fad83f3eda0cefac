"""User code of other frameworks: what an adapter receives, and how adapters are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FRAMEWORKS: tuple[str, ...] = ("skyrl", "verl")
"""Modules of `turnwise.compat`, each with a `FRAMEWORK`. Named, not imported: a run imports none that it does not need."""


@dataclass(frozen=True, slots=True)
class ForeignObject:
    """An object that a recipe names and that is no `tw.Env`, agent function or factory known to be ours."""

    target: Any
    where: str
    """Its name in errors, as written in the recipe."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """`[env.args]`; the adapter checks and consumes them."""
    base: Path = Path()
    """Directory of relative paths in `args`."""
    faithful: bool = False
    """`env.faithful`: reproduce the framework's behavior where ours differs on purpose."""


Adapter = Callable[[ForeignObject], Any]
"""Returns a factory of `tw.Env` (its attributes as on an Env class), an agent function with the same attributes, or None where
the object is not of this framework. Raises `ConfigError` where it is, and cannot be used."""


@dataclass(frozen=True, slots=True)
class Framework:
    """Adapter of one framework."""

    name: str
    """Prefix of its registered ids in `use`: `name:id`."""
    adapt: Adapter
    find: Callable[[str], Any] | None = None
    """Object registered under an id; None for an unknown one."""
    ids: Callable[[], Iterable[str]] | None = None
    """Registered ids, for suggestions."""


@cache
def framework(name: str) -> Framework:
    """Return a framework by its name."""
    made: Framework = import_module(f"turnwise.compat.{name}").FRAMEWORK
    return made


def adapters() -> Iterator[Adapter]:
    """Yield our adapters, then those of installed packages.

    Packages register an `Adapter` as an entry point of the group `turnwise.environments`.
    """
    for name in FRAMEWORKS:
        yield framework(name).adapt
    for point in entry_points(group="turnwise.environments"):
        yield point.load()


def adapt(found: ForeignObject) -> Any:
    """Convert an object by the first adapter that knows it; None where none does."""
    made = (adapter(found) for adapter in adapters())
    return next((one for one in made if one is not None), None)

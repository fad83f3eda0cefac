"""User code of other frameworks: what an adapter receives, and how adapters are found.

A package adds a framework by an entry point of the group `turnwright.frameworks` (see
`plugins.py`), which is a `Framework`. `adapt` asks their adapters in turn about an object that is
no environment of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnwright import plugins
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import ConfigError, did_you_mean
from turnwright.types import Trajectory


@dataclass(frozen=True, slots=True)
class ForeignObject:
    """An object that a recipe names and that is no `tw.Env`, agent function or
    factory known to be ours."""

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
"""Returns a factory of `tw.Env` (its attributes as on an Env class), an agent function with the
same attributes, or None where the object is not of this framework. Raises `ConfigError` where it
is, and cannot be used."""


@dataclass(frozen=True, slots=True)
class Registered:
    """What `Framework.find` may return for an id that `[env.args]` complete: only that
    framework's adapter is asked."""

    framework: str
    id: str


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
    package: str = ""
    """Package whose import registers ids; they are unknown without it."""
    group_filter: (
        Callable[[Callable[..., Any]], Callable[[Sequence[Trajectory]], Any] | None] | None
    ) = None
    """Returns a function of a group's trajectories for a filter of the framework
    (`train.group_filter`); None for another."""
    recognizes: bool = True
    """Whether the adapter is asked about every object that is no `tw.Env` class; else it gets those
    of its registry alone."""


@cache
def framework(name: str) -> Framework:
    """Return a framework by its name."""
    loaded: Framework = plugins.load("frameworks", name)
    return loaded


def load_registered(name: str, id: str) -> Any:
    """Return the object that a framework's registry has under an id.

    Raises:
        ConfigError: for an unknown id, or a framework without a registry.
    """
    registry = framework(name)
    if registry.find is None:
        raise ConfigError(
            f"{name}:{id}: {name} has no registry; write file.py:Name or package.module:Name"
        )
    registered = registry.find(id) if id else None
    if registered is not None:
        return registered

    if registry.package and find_spec(registry.package.replace("-", "_")) is None:
        raise ConfigError(
            f"{name}:{id}: {name} has no {id!r}, and {registry.package} is not installed; pip "
            f"install {registry.package}"
        )
    ids = list(registry.ids()) if registry.ids is not None else []
    hint = did_you_mean(id, ids, 0.6)
    if not hint:
        hint = f"it has {len(ids)} ids"
        if ids:
            hint += ", such as " + ", ".join(ids[:8])
    raise ConfigError(f"{name}:{id}: {name} has no {id!r}; {hint}")


def adapters() -> Iterator[Adapter]:
    """Yield the adapters that recognize objects, in order of their frameworks' names."""
    for installed in plugins.importable("frameworks"):
        if installed.recognizes:
            yield installed.adapt


def adapt(found: ForeignObject) -> Any:
    """Convert an object by the first adapter that knows it; None where none does."""
    if isinstance(found.target, Registered):
        refuse_faithful(found)
        return framework(found.target.framework).adapt(found)
    for adapter in adapters():
        adapted = adapter(found)
        if adapted is not None:
            return adapted
    return None


def adapt_group_filter(
    function: Callable[..., Any],
) -> Callable[[Sequence[Trajectory]], Any] | None:
    """Return a function of a group's trajectories for a filter of an installed framework; None
    where none knows it."""
    filters = [installed.group_filter for installed in plugins.importable("frameworks")]
    for as_filter in filters:
        adapted = None if as_filter is None else as_filter(function)
        if adapted is not None:
            return adapted  # type: ignore[no-any-return]
    return None


def refuse_faithful(found: ForeignObject) -> None:
    """Raise `ConfigError` for `faithful` where it has no effect."""
    if found.faithful:
        raise ConfigError(
            f"{found.where}: faithful has no effect on it; it is for code of SkyRL, verl and TRL"
        )


def import_object(name: str, where: str, near: Path | None = None) -> Any:
    """Import `package.module:Name` or `package.module.Name`; a stand-in of ours where the package
    lacks the module.

    A module of the user's own is found around `near`, a file of theirs, and around the files that
    recipes name.
    """
    module_name, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not module_name:
        raise ConfigError(f"{where}: {name!r} names no module; write package.module.Name")
    try:
        module = import_foreign(module_name, near, attribute)
    except Exception as error:
        raise ConfigError(
            f"{where}: {name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{where}: the module {module_name} has no {attribute!r}")
    return getattr(module, attribute)

"""Registry of environments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from turnwright.envs.user_imports import import_foreign

from .. import error


@dataclass
class EnvSpec:
    """Registered environment."""

    id: str
    entry_point: Callable[..., Any] | str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id."""
        return self.id

    def make(self, **kwargs: Any) -> Any:
        """Make an environment."""
        return make(self, **kwargs)


registry: dict[str, EnvSpec] = {}


def register(id: str, entry_point: Callable[..., Any] | str | None = None, kwargs: dict[str, Any] | None = None) -> None:
    """Register a class, or `module:Class`, under an id; the same registration may repeat."""
    if entry_point is None:
        raise ValueError(f"register({id!r}) needs an entry_point: a class, or 'module:Class'")
    made = EnvSpec(id, entry_point, dict(kwargs or {}))
    if registry.setdefault(id, made) != made and not _reloaded(registry[id].entry_point, entry_point):
        raise error.RegistrationError(f"the environment {id!r} is registered already")
    registry[id] = made


def _reloaded(first: Any, second: Any) -> bool:
    """Whether two classes are one class of a file that was loaded twice."""
    names = [(getattr(one, "__qualname__", one), getattr(one, "__module__", "").rpartition("_")[0]) for one in (first, second)]
    return callable(first) and names[0] == names[1]


def deregister(id: str) -> None:
    """Remove an id."""
    del registry[spec(id).id]


def spec(env_id: str) -> EnvSpec:
    """Return a registered environment."""
    if env_id not in registry:
        raise error.Error(f"no registered environment {env_id!r}")
    return registry[env_id]


def load_env_creator(name: str) -> Any:
    """Import `module:Class`, also of the user's own files."""
    module, _, attribute = name.partition(":")
    return getattr(import_foreign(module), attribute)


def make(id: str | EnvSpec, **kwargs: Any) -> Any:
    """Make an environment by id."""
    found = id if isinstance(id, EnvSpec) else spec(id)
    creator = load_env_creator(found.entry_point) if isinstance(found.entry_point, str) else found.entry_point
    assert creator is not None
    env = creator(**(copy.deepcopy(found.kwargs) | kwargs))
    env.spec = found
    return env


def pprint_registry(
    print_registry: dict[str, EnvSpec] = registry, *, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print the ids, or return them as text."""
    ids = sorted(print_registry)
    text = "\n".join("  ".join(ids[at : at + num_cols]) for at in range(0, len(ids), num_cols)) or "no environments registered"
    if disable_print:
        return text
    print(text)
    return None

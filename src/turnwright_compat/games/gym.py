"""Gymnasium: environments of its registry by id, `gym:FrozenLake-v1`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from turnwright.envs.foreign import ForeignObject, Framework, Registered
from turnwright.envs.gym import gym_env
from turnwright_compat.games.registries import call_with_args, library, with_functions


def adapt(found: ForeignObject) -> Any:
    """Make the factory of an id; `[env.args]` are the arguments of `tw.gym_env`."""
    args = with_functions(found.args, ("action", "observation", "tasks"), found)
    return call_with_args(partial(gym_env, found.target.id), args, found.where)


def find(id: str) -> Registered | None:
    """Return an id for `adapt`; None for an unknown one."""
    gymnasium = library("gymnasium", "gymnasium")
    try:
        gymnasium.spec(id)
    except (gymnasium.error.Error, ModuleNotFoundError):
        return None
    return Registered("gym", id)


def ids() -> Iterable[str]:
    """Return the registered ids."""
    return sorted(library("gymnasium", "gymnasium").registry)


FRAMEWORK = Framework("gym", adapt, find, ids, recognizes=False)

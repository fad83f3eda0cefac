"""Rewards by name; schedulers too, which older plugins import from here."""

from typing import Any

from .orm import ORM, AsyncORM, orms
from .prm import PRM, prms
from .rm_plugin import rm_plugins

__all__ = ["ORM", "PRM", "AsyncORM", "orms", "prms", "rm_plugins"]


def __getattr__(name: str) -> Any:
    if name not in ("MultiTurnScheduler", "multi_turns"):
        raise AttributeError(f"swift.rewards has no {name!r}")
    from swift.rollout import multi_turn  # imports the rewards

    return getattr(multi_turn, name)

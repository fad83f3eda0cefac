"""What the built-in environments share in drawing tasks: two splits that no seed mixes, no task twice, and what they need."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec

from turnwise.errors import ConfigError
from turnwise.types import Task

_HELD_OUT_SHARE = 4
_MOST_DRAWS = 1000
"""Draws in a row that give nothing new, after which there is nothing new."""


def sample_tasks(world: str, split: str, n: int, seed: int, draw: Callable[[random.Random], tuple[str, Task]]) -> list[Task]:
    """Up to `n` different tasks of a split; fewer where there are no more.

    Args:
        draw: gives a key and a task. Tasks of one key are on one side of the split, about a quarter of the keys held out.

    Raises:
        ValueError: for another split than `train` and `eval`.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"a split is 'train' or 'eval', not {split!r}")
    rng = random.Random(f"{world}/{split}/{seed}")
    tasks: dict[str, Task] = {}
    idle = 0
    while len(tasks) < n and idle < _MOST_DRAWS:
        key, task = draw(rng)
        idle += 1
        if is_held_out(world, key) == (split == "eval") and task.id not in tasks:
            tasks[task.id] = task
            idle = 0
    return list(tasks.values())


def require_extra(extra: str, package: str) -> None:
    """See that the package of an extra is installed, without importing it.

    Raises:
        ConfigError: when it is not.
    """
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; pip install 'turnwise[{extra}]'")


def is_held_out(world: str, key: str) -> bool:
    """Whether tasks of a key are for evaluation: about a quarter are, by hash."""
    digest = blake2b(key.encode(), digest_size=8, key=world.encode()).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0

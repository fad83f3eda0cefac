"""Tasks that are no more than a seed, for worlds that make themselves from one."""

from __future__ import annotations

import random
from hashlib import blake2b

from turnwise.types import Task

SEEDS = 1 << 31


def seed_of(task: Task) -> int:
    """What seeds the world of a task, from 0 to 2**31 - 1: its `info["seed"]`, else a hash of its id."""
    given = task.info.get("seed")
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    return int.from_bytes(blake2b(task.id.encode(), digest_size=8).digest(), "big") % SEEDS


def seeded_tasks(split: str, n: int, seed: int) -> list[Task]:
    """One task per seed: even ones to train on, odd ones held out; 1000 where none are asked for."""
    rng = random.Random(f"{split} {seed}")
    drawn = rng.sample(range(SEEDS // 2), n or 1000)
    return [Task(info={"seed": 2 * number + (split != "train")}) for number in drawn]

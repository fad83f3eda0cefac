"""Tasks that are no more than a seed, for worlds that make themselves from one; what adapters of such worlds share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from turnwise.env.drive import Speak
from turnwise.env.tasks import TaskSource
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What a person says of a world of another library beside what that library needs; the fields are those of an Env class."""

    system: str | None = None
    """A system message for tasks that have none."""
    max_turns: int | None = None
    tasks: TaskSource | None = seeded_tasks
    solver: Speak | None = None
    demonstrator: Speak | None = None
    single_turn_best: float | None = None

    def opening(self, task: Task) -> list[Any]:
        """The task's messages, behind the system message where they have none."""
        messages: list[Any] = list(task.messages)
        if self.system is not None and not any(message.role == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

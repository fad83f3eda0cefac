"""Hop with a finite list of training tasks of which four of five have a wrong answer; the
held-out ones are right."""

import random
from dataclasses import replace

from turnwright import Task
from turnwright.envs.builtin.hop import CODES, Hop

TASKS, WRONG = 400, 0.8


def tasks(split: str, n: int, seed: int) -> list[Task]:
    """Return all training tasks, whatever `n`, or `n` held-out ones."""
    if split == "eval":
        return Hop.tasks(split, n, seed)
    rng = random.Random(f"{seed}/labels")
    wrong = set(rng.sample(range(TASKS), int(WRONG * TASKS)))
    return [
        replace(task, answer=rng.choice([code for code in CODES if code != task.answer]))
        if number in wrong
        else task
        for number, task in enumerate(Hop.tasks("train", TASKS, seed))
    ]

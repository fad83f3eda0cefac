"""Environment of `real_model.py`'s part `trainer`: a story that is told in four turns, with
replies of unequal length."""

from __future__ import annotations

import random

import turnwright as tw

TURNS = 4
PEOPLE = [
    "a baker",
    "a sailor",
    "a teacher",
    "a farmer",
    "a painter",
    "a doctor",
    "a miller",
    "a pilot",
]
PLACES = [
    "in a small town",
    "by the sea",
    "on a hill",
    "in a large city",
    "at a river",
    "in the north",
]
FINDS = ["a key", "a letter", "an old map", "a lost dog", "a silver coin", "a broken clock"]


class Story(tw.Env):
    """A user asks for a story and then three times for more.

    The reward says nothing, but differs within a group.
    """

    max_turns = TURNS

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        """Ask for a story."""
        self.told = 0
        return (
            f"Tell me a story about {task.info['about']}. Tell it in four short parts, and "
            "stop after each. Begin."
        )

    def step(self, action: tw.Action) -> tw.Step:
        """Ask for more."""
        self.told += 1
        if self.told == TURNS:
            return tw.Step(reward=float(len(action.text) % 2), terminated=True)
        return tw.Step(f"That was part {self.told}. Please go on with the next part of the story.")

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[tw.Task]:
        """Return what stories are about."""
        draw = random.Random(f"{split}/{seed}")
        wholes = [
            f"{person} {place} who finds {find}"
            for person in PEOPLE
            for place in PLACES
            for find in FINDS
        ]
        return [tw.Task(id=about, info={"about": about}) for about in draw.sample(wholes, n)]

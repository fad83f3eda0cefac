"""Bring a level to a mark by steps, then say that it stands there."""

import random

import numpy as np

import turnwright as tw

LEVELS = 6
WIDTH = 8  # pixels of a step


def draw(level, mark, shade):
    """Draw a bar from the left up to the level, and the mark above it."""
    image = np.full((32, WIDTH * LEVELS, 3), shade, np.uint8)
    image[18:28, : WIDTH * (level + 1)] = (60, 120, 240)
    image[4:14, WIDTH * mark : WIDTH * (mark + 1)] = (240, 200, 40)
    return image


class LevelTuning(tw.Env):
    """`more` and `less` move the level; `done` is right where it stands under the mark."""

    single_turn_best = 0.0
    max_turns = 8

    def reset(self, task, *, seed=None):
        self.level, self.mark, self.shade = (
            task.info["level"],
            task.info["mark"],
            task.info["shade"],
        )
        return self.show()

    def step(self, action):
        word = action.text.strip()
        if word == "done":
            return tw.Step(reward=float(self.level == self.mark), terminated=True)
        if word not in ("more", "less"):
            raise tw.InvalidAction("say more, less or done")
        self.level = min(max(self.level + (1 if word == "more" else -1), 0), LEVELS - 1)
        return tw.Step(self.show())

    def show(self):
        return [
            tw.Image(
                draw(self.level, self.mark, self.shade), alt=f"level {self.level} mark {self.mark}"
            )
        ]

    @staticmethod
    def tasks(split, n, seed):
        every = [
            (level, mark, shade)
            for level in range(LEVELS)
            for mark in range(LEVELS)
            for shade in range(0, 60, 6)
            if level != mark and (shade % 30 == 0) == (split == "eval")
        ]
        chosen = random.Random(seed).sample(every, min(n, len(every)))
        return [
            tw.Task(info={"level": level, "mark": mark, "shade": shade})
            for level, mark, shade in chosen
        ]

    @staticmethod
    def solver(messages, rng):
        _, level, _, mark = messages[-1].text_with_alt.split()
        return "done" if level == mark else "more" if int(level) < int(mark) else "less"

    @staticmethod
    def demonstrator(messages, rng):
        return (
            LevelTuning.solver(messages, rng)
            if rng.random() < 0.6
            else rng.choice(("more", "less", "done"))
        )

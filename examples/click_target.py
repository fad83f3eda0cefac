"""Click the named one of three targets on a screen."""

import random

import numpy as np

import turnwright as tw

COLORS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (60, 90, 240)}
CELLS = [column + row for column in "abcd" for row in "1234"]
CELL = 16  # pixels per side
SCREENS = 3


def draw(places):
    """Draw a square of each color in its cell, columns `a` to `d` from the left, rows 1 to 4 from the top."""  # noqa: E501
    image = np.full((4 * CELL, 4 * CELL, 3), 24, np.uint8)
    for color, cell in places.items():
        left, top = CELL * "abcd".index(cell[0]), CELL * "1234".index(cell[1])
        image[top + 2 : top + CELL - 2, left + 2 : left + CELL - 2] = COLORS[color]
    return image


class ClickTarget(tw.Env):
    """Three screens, each with three targets: `click CELL` must hit the
    named one on all of them."""

    single_turn_best = 0.0
    max_turns = 6

    def reset(self, task, *, seed=None):
        self.screens = [(target, dict(places)) for target, places in task.info["screens"]]
        return self.show()

    def step(self, action):
        words = action.text.split()
        if len(words) != 2 or words[0] != "click" or words[1] not in CELLS:
            raise tw.InvalidAction("say click CELL, from a1 to d4")
        target, places = self.screens.pop(0)
        if words[1] != places[target]:
            return tw.Step("missed", terminated=True)
        if not self.screens:
            return tw.Step("done", reward=1.0, terminated=True)
        return tw.Step(self.show())

    def show(self):
        target, places = self.screens[0]
        alt = " ".join(f"{color} {cell}" for color, cell in places.items())
        return [f"click {target}", tw.Image(draw(places), alt=alt)]

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(40 * n):
            screens = [
                [rng.choice(list(COLORS)), dict(zip(COLORS, rng.sample(CELLS, 3), strict=True))]
                for _ in range(SCREENS)
            ]
            first = screens[0][1]
            if (sum(map(CELLS.index, first.values())) % 5 == 0) == (split == "eval"):
                task = tw.Task(info={"screens": screens})
                tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        words = messages[-1].text_with_alt.replace("click ", "").split()
        target, places = words[0], words[1:]
        return (
            f"click {places[places.index(target) + 1]}"
            if target in places
            else f"click {rng.choice(CELLS)}"
        )

    @staticmethod
    def demonstrator(messages, rng):
        return (
            ClickTarget.solver(messages, rng)
            if rng.random() < 0.75
            else f"click {rng.choice(CELLS)}"
        )

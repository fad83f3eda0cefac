"""Count the dots of a picture, half by half."""

import random

import numpy as np

import turnwright as tw


def draw(counts):
    """Draw a half, or with both counts the whole picture: dots that touch, too dense to count."""
    image = np.zeros((32, 32, 3), np.uint8)
    if len(counts) == 1:
        for number in range(counts[0]):
            top, left = 4 + 14 * (number // 2), 4 + 14 * (number % 2)
            image[top : top + 10, left : left + 10] = (255, 200, 40)
    else:
        image[12:20, 2:30] = (90, 90, 200)
    return image


class ZoomCount(tw.Env):
    """`left` and `right` zoom into a half with one to four dots; `total N` answers."""

    single_turn_best = 0.25
    max_turns = 4

    def reset(self, task, *, seed=None):
        self.counts = task.info["counts"]
        return self.show(self.counts)

    def step(self, action):
        words = action.text.split()
        if words in (["left"], ["right"]):
            return tw.Step(self.show([self.counts[words[0] == "right"]]))
        if len(words) != 2 or words[0] != "total":
            raise tw.InvalidAction("say left, right, or total N")
        return tw.Step(reward=float(words[1] == str(sum(self.counts))), terminated=True)

    def show(self, counts):
        alt = f"dots {counts[0]}" if len(counts) == 1 else "picture"
        return [tw.Image(draw(counts), alt=alt)]

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        return [
            tw.Task(
                info={
                    "counts": [rng.randrange(1, 5), rng.randrange(1, 5)],
                    "number": f"{split} {i}",
                }
            )
            for i in range(n)
        ]

    @staticmethod
    def solver(messages, rng):
        dots = [
            int(message.text_with_alt.split()[1])
            for message in messages
            if message.text_with_alt.startswith("dots ")
        ]
        return ("left", "right")[len(dots)] if len(dots) < 2 else f"total {sum(dots)}"

    @staticmethod
    def demonstrator(messages, rng):
        return (
            ZoomCount.solver(messages, rng)
            if rng.random() < 0.75
            else rng.choice(("left", "right", f"total {rng.randrange(2, 9)}"))
        )

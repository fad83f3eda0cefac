"""Sort parcels from a belt by the rule of the opening."""

import random

import numpy as np

import turnwright as tw

SHAPES = ("box", "bar", "cross", "ring")
BINS = ("one", "two", "three", "four")
INKS = ((240, 220, 180), (150, 220, 240), (240, 160, 160))
PARCELS = 4


def draw(shape, ink, across, down):
    """Draw a parcel of 20 pixels at a place of an image of 32 x 32."""
    stamp = np.zeros((20, 20, 1), bool)
    if shape == "box":
        stamp[:] = True
    elif shape == "bar":
        stamp[6:14] = True
    elif shape == "cross":
        stamp[7:13] = stamp[:, 7:13] = True
    else:
        stamp[:] = True
        stamp[5:15, 5:15] = False
    image = np.full((32, 32, 3), 20, np.uint8)
    part = image[down : down + 20, across : across + 20]
    np.copyto(part, np.array(INKS[ink], np.uint8), where=stamp)
    return image


class BeltSorting(tw.Env):
    """The opening tells a bin for each shape; every parcel must go into its own.

    A wrong bin ends the episode.
    """

    single_turn_best = 0.0
    max_turns = 6

    def reset(self, task, *, seed=None):
        self.rule = dict(zip(SHAPES, task.info["bins"], strict=True))
        self.parcels = list(task.info["parcels"])
        rule = " ".join(f"{shape} {place}" for shape, place in self.rule.items())
        return [f"{rule} now", self.show()]

    def step(self, action):
        words = action.text.split()
        if len(words) != 2 or words[0] != "bin" or words[1] not in BINS:
            raise tw.InvalidAction("say bin NUMBER")
        shape = self.parcels.pop(0)[0]
        if words[1] != self.rule[shape]:
            return tw.Step("wrong bin", terminated=True)
        if not self.parcels:
            return tw.Step("sorted", reward=1.0, terminated=True)
        return tw.Step([self.show()])

    def show(self):
        shape, *rest = self.parcels[0]
        return tw.Image(draw(shape, *rest), alt=f" {shape}")

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(40 * n):
            bins = rng.sample(BINS, 4)
            parcels = [
                [rng.choice(SHAPES), rng.randrange(3), rng.randrange(1, 12), rng.randrange(1, 12)]
                for _ in range(PARCELS)
            ]
            places = sum(across + down for _, _, across, down in parcels)
            if (places % 5 == 0) == (split == "eval"):
                task = tw.Task(info={"bins": bins, "parcels": parcels})
                tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        words = messages[0].text_with_alt.split()
        rule = dict(zip(words[:8:2], words[1:8:2], strict=True))
        shape = messages[-1].text_with_alt.split()[-1]
        return f"bin {rule.get(shape, BINS[0])}"

    @staticmethod
    def demonstrator(messages, rng):
        return (
            BeltSorting.solver(messages, rng) if rng.random() < 0.85 else f"bin {rng.choice(BINS)}"
        )

"""Geometry that a tiny model can learn in minutes: circles of four radii, and a control whose rewards are shuffled."""

import random

import turnwise as tw
from turnwise.envs.builtin.geometry import KINDS, Geometry, format_number


def circles(split, n, seed):
    """Circles with the radii 2 to 5, in four turns and three inks; those of the third ink are held out."""
    rows = [(a, turned, ink) for a in range(2, 6) for turned in range(4) for ink in ((2,) if split == "eval" else (0, 1))]
    random.Random(seed).shuffle(rows)
    return [
        tw.Task(
            answer=format_number(KINDS["circle"].solve(a, 0)),
            info={"kind": "circle", "a": a, "b": 0, "turned": turned, "ink": ink},
        )
        for a, turned, ink in rows
    ]


class Shuffled(Geometry):
    """The control: in training, the rewards of a group's episodes change places, so that nothing can be learned from them."""

    @staticmethod
    def group_reward(trajectories):
        own = [trajectory.reward for trajectory in trajectories]
        key = trajectories[0].key
        dealt = random.Random(f"{key.step}/{key.task}").sample(own, len(own))
        return [other - mine for other, mine in zip(dealt, own, strict=True)]

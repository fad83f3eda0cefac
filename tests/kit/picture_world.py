"""A world that shows images, at the top of a file: processes find it."""

from __future__ import annotations

import os

import numpy as np
from PIL import Image as Pillow

import turnwright as tw
from turnwright.errors import InvalidAction


class Painter(tw.Env):
    """Paints each observation on one canvas; what it paints follows from the task, the
    seed and the replies."""

    turns = 4

    def reset(self, task, *, seed=None):
        self.rng = np.random.default_rng([seed or 0, len(task.id)])
        self.canvas = np.zeros((64, 64, 3), np.uint8)
        self.turn = 0
        return [
            {"role": "system", "content": "Paint."},
            {"role": "user", "content": ["It is ", self.paint("start"), "."]},
        ]

    def paint(self, said: str):
        corner = self.rng.integers(0, 32, 2)
        self.canvas[corner[0] : corner[0] + 32, corner[1] : corner[1] + 32] = (
            len(said) * 7 % 256,
            self.turn * 40 % 256,
            99,
        )
        return tw.Image(self.canvas, alt=f"turn {self.turn}")

    def step(self, action):
        self.turn += 1
        if action.text == "nothing":
            raise InvalidAction("say what to paint")
        image = self.paint(action.text)
        over = self.turn >= self.turns
        if self.turn % 2:
            return tw.Step(["Now ", image], reward=0.25, terminated=over)
        still = tw.Video([Pillow.fromarray(self.canvas), self.canvas[::-1]], fps=2, alt="a clip")
        return tw.Step([still, "both"], reward=0.25, terminated=over)


class Fails(Painter):
    """Fails at the turn that the task names, as long as the file that it names is
    there, which is once."""

    def reset(self, task, *, seed=None):
        self.info = task.info
        return super().reset(task, seed=seed)

    def step(self, action):
        if self.info["turn"] == self.turn and os.path.exists(self.info["file"]):
            os.unlink(self.info["file"])
            raise ConnectionError("the brush broke")
        return super().step(action)


class Remembers(Fails):
    """The same with snapshots."""

    def snapshot(self):
        return self.turn, self.canvas.copy(), self.rng.bit_generator.state

    def restore(self, state):
        self.turn = state[0]
        self.canvas[:] = state[1]
        self.rng.bit_generator.state = state[2]

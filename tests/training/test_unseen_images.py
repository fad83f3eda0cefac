"""A model without vision reads the alternative texts of images, and the run says so once."""

import numpy as np
import pytest

import turnwright as tw


class Shade(tw.Env):
    """Say whether a picture is dark."""

    def reset(self, task, *, seed=None):
        self.dark = task.info["dark"]
        pixels = np.full((16, 16, 3), 0 if self.dark else 255, np.uint8)
        return tw.Image(pixels, alt="dark" if self.dark else "light")

    def step(self, action):
        return tw.Step(
            reward=float(action.text.strip() == ("dark" if self.dark else "light")), terminated=True
        )

    @staticmethod
    def tasks(split, n, seed):
        return [
            tw.Task(info={"dark": number % 2 == 0, "number": f"{split} {number}"})
            for number in range(8)
        ]

    @staticmethod
    def solver(messages, rng):
        return messages[-1].text_with_alt


@pytest.mark.parametrize("vision", [False, True])
@pytest.mark.parametrize("demos", [0, 8])
def test_unseen_images_are_noted_once(tmp_path, capsys, vision, demos):
    tw.train(
        model=tw.tiny(hidden=32, layers=1, vision=vision),
        env=Shade,
        out=tmp_path / "run",
        display="plain",
        warmup={"demos": demos, **({"steps": 1, "gate_success": 0.0} if demos else {})},
        rollout={"groups": 2, "group_size": 2},
        train={"steps": 1},
        eval={"tasks": 8, "greedy": False},
    )
    told = capsys.readouterr()
    assert (told.out + told.err).count("it reads their alt texts; set model.vision = true") == (
        not vision
    )

"""An interaction environment that returns pictures."""

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from PIL import Image


class PictureEnv(BaseInteractionEnv):
    def __init__(self, colours):
        self.colours = list(colours)

    def reset(self):
        return {}, {}

    def step(self, response_text):
        if not self.colours:
            return {}, True, {"reward": float("red" in response_text)}
        picture = Image.new("RGB", (28, 28), self.colours.pop(0))
        return {"obs_str": "and this?", "multi_modal_data": {"image": [picture]}}, False, {}


def build_env(sample=None, args=None):
    return PictureEnv(sample.metadata["colours"])

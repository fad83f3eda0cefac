"""An interaction environment with the imports of Miles."""

from examples.geo3k_vlm.multi_turn.base_env import BaseInteractionEnv
from miles.rollout.rm_hub.math_utils import extract_answer
from miles.utils.types import Sample


class MilesEnv(BaseInteractionEnv):
    def __init__(self, sample: Sample, max_turns):
        self.label, self.max_turns, self.turn = sample.label, max_turns, 0

    def reset(self):
        self.turn = 0
        return {}, {}

    def step(self, response_text):
        self.turn += 1
        found = extract_answer(response_text)
        return (
            {"obs_str": f"{self.max_turns - self.turn} left"},
            found is not None,
            {"reward": float(found == self.label)},
        )


def build_env(sample=None, args=None, **_):
    return MilesEnv(sample, args.max_turns)

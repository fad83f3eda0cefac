"""An interaction environment as slime's geometry example has it: asks for a number, gives hints."""

import re

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime.rollout.rm_hub.math_utils import extract_answer
from slime.utils.types import Sample

SEEN = []


class GuessEnv(BaseInteractionEnv):
    def __init__(self, *, ground_truth, max_turns):
        self.truth, self.max_turns, self.turn = ground_truth, max_turns, 0

    def reset(self):
        self.turn = 0
        return {}, {"ground_truth_available": True}

    def step(self, response_text):
        SEEN.append(response_text)
        self.turn += 1
        answer = extract_answer(response_text)
        if answer is not None and re.search(r"<\|im_end\|>$", response_text):
            return {"obs_str": "done", "role": "tool"}, True, {"answer": answer}
        return (
            {"obs_str": f"turn {self.turn} of {self.max_turns}: box it"},
            False,
            {"turn": self.turn},
        )


def build_env(sample: Sample | None = None, args=None, **_):
    return GuessEnv(ground_truth=sample.label, max_turns=args.max_turns)

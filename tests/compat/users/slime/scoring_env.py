"""An interaction environment whose tool scores the answer that it gets."""

import json
import re

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime.rollout.rm_hub.math_utils import grade_answer_verl


class ScoringEnv(BaseInteractionEnv):
    def __init__(self, label, max_turns):
        self.label, self.left, self.scores = label, max_turns, []

    def reset(self):
        return {}, {}

    def step(self, response_text):
        self.left -= 1
        found = re.search(r"<tool_call>(.*?)</tool_call>", response_text)
        if found is None:
            return {"obs_str": "over"}, True, {}
        answer = json.loads(found[1])["arguments"]["answer"]
        self.scores.append(float(grade_answer_verl(f"\\boxed{{{answer}}}", self.label)))
        return (
            {"obs_str": f"score {self.scores[-1]}, {self.left} left"},
            self.left == 0,
            {"score": self.scores[-1]},
        )


def build_env(sample=None, args=None, **_):
    return ScoringEnv(sample.label, args.max_turns)

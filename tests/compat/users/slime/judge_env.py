"""An interaction environment whose step asks a judge for the reward of each turn."""

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv


def judge(question, text):
    return float("good" in text) + 0.5 * len(question)


class JudgeEnv(BaseInteractionEnv):
    def __init__(self, question):
        self.question, self.turn = question, 0

    def reset(self):
        self.turn = 0

    def step(self, response_text):
        self.turn += 1
        score = judge(self.question, response_text)
        return {"obs_str": f"judged {score}"}, self.turn == 2, {"reward": score}


def build_env(sample=None, args=None):
    return JudgeEnv(sample.metadata["question"])

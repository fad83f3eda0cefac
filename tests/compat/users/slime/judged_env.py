"""An interaction environment whose step waits for a judge, which is down for the first
call of each question."""

from threading import Barrier

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv

ASKED = set()
TOGETHER = Barrier(8, timeout=60)
"""Answers come to eight questions at once: a loop in which one waits for another
would never get them."""


def judge(question, text, turn):
    if question not in ASKED:
        ASKED.add(question)
        raise ConnectionError("the judge is down")
    if turn == 1:
        TOGETHER.wait()
    return float("good" in text)


class JudgedEnv(BaseInteractionEnv):
    def __init__(self, question):
        self.question, self.turn = question, 0

    def reset(self):
        self.turn = 0

    def step(self, response_text):
        self.turn += 1
        score = judge(self.question, response_text, self.turn)
        return {"obs_str": f"{score}"}, self.turn == 2, {"reward": score}


def build_env(sample=None, args=None):
    return JudgedEnv(sample.metadata["question"])

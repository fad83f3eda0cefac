"""An interaction environment written to slime's interface: pictures of a goal around the
middle, and one word for each, the way to the goal. A judge scores the word over HTTP, in
the synchronous `step`."""

from functools import cache

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime_judge import ask, start
from slime_rows import draw

own_judge = cache(start)


class RadarEnv(BaseInteractionEnv):
    """The first picture is the row's; each reply but the last is answered by the next."""

    def __init__(self, pictures, judge):
        self.pictures, self.judge, self.turn = pictures, judge, 0

    def reset(self):
        self.turn = 0
        return {}, {}

    def step(self, response_text):
        reply = response_text.partition("<|im_end|>")[0].strip()
        score = ask(self.judge, self.pictures[self.turn]["goal"], reply)
        self.turn += 1
        info = {"reward": score / len(self.pictures), "score": score}
        if self.turn == len(self.pictures):
            return {}, True, info
        return (
            {"obs_str": "", "multi_modal_data": {"image": [draw(**self.pictures[self.turn])]}},
            False,
            info,
        )


def build_env(sample=None, args=None):
    judge = args.judge if hasattr(args, "judge") else own_judge()
    return RadarEnv(sample.metadata["pictures"], judge)

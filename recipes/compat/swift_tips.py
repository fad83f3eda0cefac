"""A scheduler and a reward written for ms-swift: after a wrong sum, go back to before the
answer and look again."""

import re

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

ANSWER = re.compile(r"#### (-?\d+)$")
TIP = "But wait. "


def right(text, solution):
    found = ANSWER.search(text.strip())
    return found is not None and found[1] == solution


class SumTips(MultiTurnScheduler):
    """Backtracks once, inside the message of the assistant."""

    def check_finished(self, infer_request, response_choice, current_turn):
        text = infer_request.messages[-1]["content"]
        if TIP in text or right(text, infer_request.data_dict["solution"]):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request, response_choice, current_turn):
        text, ids = response_choice.message.content, list(response_choice.token_ids)
        kept = text.partition("####")[0]
        size = max(
            n for n in range(len(ids) + 1) if kept.startswith(self.tokenizer.decode(ids[:n]))
        )
        tip = self.tokenizer.encode(TIP, add_special_tokens=False)
        infer_request.messages[-1]["content"] = self.tokenizer.decode(ids[:size]) + TIP
        return {
            "infer_request": infer_request,
            "response_token_ids": ids[:size] + tip,
            "response_loss_mask": [1] * size + [0] * len(tip),
            "rollout_infos": {"tips": 1},
        }


class SumReward(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [
            float(right(text, expected))
            for text, expected in zip(completions, solution, strict=True)
        ]


multi_turns["sum_tips"] = SumTips
orms["sum_reward"] = SumReward

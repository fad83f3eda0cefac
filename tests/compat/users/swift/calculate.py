"""A tool whose result stands in the message of the assistant, with ids and masks."""

from typing import Dict  # noqa: UP035

from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest
from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Calculate(MultiTurnScheduler):
    def check_finished(
        self,
        infer_request: "RolloutInferRequest",
        response_choice: "ChatCompletionResponseChoice",
        current_turn: int,
    ) -> bool:
        if "Action:" not in response_choice.message.content:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self,
        infer_request: "RolloutInferRequest",
        response_choice: "ChatCompletionResponseChoice",
        current_turn: int,
    ) -> Dict:  # noqa: UP006
        first, second = response_choice.message.content.removeprefix("Action:").split("+")
        result = f"[{int(first) + int(second)}]"
        infer_request.messages[-1]["content"] += result
        ids, mask = response_choice.token_ids, [1] * len(response_choice.token_ids)
        new = self.tokenizer.encode(result, add_special_tokens=False)
        ids.extend(new)
        mask.extend([0] * len(new))
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": mask,
            "rollout_infos": {"calls": current_turn},
        }


class Sums(ORM):
    def __call__(self, completions, solution, messages, **kwargs):
        return [float(s in row[-1]["content"]) for s, row in zip(solution, messages, strict=True)]


multi_turns["calculate"] = Calculate
orms["sums"] = Sums

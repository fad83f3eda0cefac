"""Schedulers that cannot be used."""

from swift.rollout.multi_turn import MultiTurnScheduler


class NoStep(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        return True


class WrongStep(MultiTurnScheduler):
    def step(self, infer_request):
        return infer_request


class TrainsTips(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        tip = self.tokenizer.encode(" no", add_special_tokens=False)
        infer_request.messages[-1]["content"] += " no"
        ids = list(response_choice.token_ids) + tip
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": [1] * len(ids),
        }

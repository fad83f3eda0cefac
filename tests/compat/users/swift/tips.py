"""New turns and continuations, in both forms of `step`."""

from swift.plugin import ORM, orms
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns


class AskAgain(MultiTurnScheduler):
    """The form of 3.6: a request, with what the reward reads."""

    def check_finished(self, infer_request, result, current_turn):
        right = infer_request.data_dict["solution"] in result.message.content
        return right or super().check_finished(infer_request, result, current_turn)

    def step(self, infer_request, result, current_turn):
        infer_request.messages.append(
            {"role": "user", "content": f"Wrong, try {current_turn + 1}."}
        )
        return infer_request, {"said": result.message.content}


class GoBack(MultiTurnScheduler):
    """Back to before the answer, by text alone: the kept ids are those that were sampled."""

    tip = " But wait,"

    def check_finished(self, infer_request, result, current_turn):
        done = self.tip in infer_request.messages[-1]["content"]
        return done or super().check_finished(infer_request, result, current_turn)

    def step(self, infer_request, result, current_turn):
        text = infer_request.messages[-1]["content"]
        infer_request.messages[-1]["content"] = text[: text.index(" Answer")] + self.tip
        return infer_request


class Said(ORM):
    def __call__(self, completions, solution, multi_turn_infos, messages, **kwargs):
        turns = [len(infos.get("said", ())) for infos in multi_turn_infos]
        return [
            float(s in c) / (1 + n) for c, s, n in zip(completions, solution, turns, strict=True)
        ]


multi_turns["ask_again"] = AskAgain
multi_turns["go_back"] = GoBack
orms["said"] = Said

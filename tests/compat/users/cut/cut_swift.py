"""ms-swift: two replies at most; `check_finished` sees a cut reply, and the reward punishes it."""

from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Cut(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        self.seen = response_choice.finish_reason
        return (
            super().check_finished(infer_request, response_choice, current_turn)
            or current_turn == 2
        )

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "Again."})
        return {"infer_request": infer_request}


class Punished(ORM):
    def __call__(self, completions, is_truncated, **kwargs):
        return [
            -1.0 if cut else float("good" in text)
            for text, cut in zip(completions, is_truncated, strict=True)
        ]


class Rounds(Cut):
    """Each round tells what the environment has given so far; one that is cut is punished."""

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        total = -1.0 if response_choice.finish_reason == "length" else 0.5 * current_turn
        return {"rollout_infos": {"total_reward": total}}


class Stubborn(Rounds):
    """Asks on after a reply that was cut."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn == 3


multi_turns["rounds"], multi_turns["stubborn"] = Rounds, Stubborn
multi_turns["cut"], orms["punished"] = Cut, Punished

"""Hop whose reward comes from a judge alone: the world does not tell whether an answer is right,
and one call in ten fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

import turnwright as tw
from turnwright.envs.builtin import Hop

RUBRIC = "10 when the assistant's last message is `answer CODE` with the right code, else 0."


class Examiner:
    """Stands where `tw.ChatJudge(url, model)` stands with a real model: the same question, an
    answer of the same form.

    Args:
        fails: the share of its calls that fail, the same questions each time.
    """

    def __init__(self, fails: float = 0.0) -> None:
        self.fails = fails

    async def ask(self, messages: Sequence[tw.Message]) -> str:
        """Its thoughts, and its verdict."""
        rules, question = messages[0].text, messages[1].text
        if (
            int.from_bytes(blake2b(question.encode(), digest_size=4).digest(), "big")
            < self.fails * 2**32
        ):
            raise tw.JudgeError("injected", "this call was made to fail")
        mark = rules.split()[-2]
        told, _, shown = question.partition(f"BEGIN {mark}\n")
        code = json.loads(told.split("in JSON:")[1])
        said = [json.loads(line) for line in shown.splitlines()[:-1]]
        last = [row["content"] for row in said if row["role"] == "assistant"][-1]
        return (
            f"It said {last!r}; the code is {code}.\nVERDICT {mark} "
            f"{10 if last.split() == ['answer', code] else 0}"
        )


REWARD = tw.rewards(
    judge=tw.judged(Examiner(fails=0.1), RUBRIC, reference=True, on_failure="none"), range=(0, 1)
)


class JudgedHop(Hop):
    """Hop, judged when it is over; where the judge fails, the episode has no reward and its
    siblings go on without it."""

    async def step(self, action: tw.Action) -> tw.Step:
        """Hop's step without its reward."""
        return (await super().step(action))._replace(reward=0.0, info={})

    async def reward(self, trajectory: tw.Trajectory) -> tw.Scores:
        """The judge's verdict on the whole conversation."""
        return await REWARD(trajectory)

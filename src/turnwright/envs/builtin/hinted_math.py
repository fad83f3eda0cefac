"""Hinted math: two-step word problems made from templates. A wrong answer gets a hint, at most two.

::

    user       Mira has 12 bags of 5 marbles and gives away 8. How many are left?
    assistant  12 * 5 = 50
               50 - 8 = 42
               #### 42
    user       That is wrong. How many marbles are there at first?
    assistant  ...

The answer follows a single ``####`` at the end, as in GSM8K. With ``form = "continuation"`` the
hint replaces the answer inside the model's own message and the model continues; the removed answer
is not trained.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from turnwright.envs.builtin.common import sample_tasks
from turnwright.envs.env import Action, Env, InlineObservation, Step
from turnwright.errors import EnvError
from turnwright.types import Message, Task

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_WHO = ("Mira", "Tarn", "Elsu", "Joren", "Pila", "Runa")
_STORIES = (
    ("{who} has {a} bags of {b} marbles and gives away {c}. How many are left?", "*-", "How many marbles are there at first?"),  # noqa: E501
    ("{who} has {a} coins and finds {b} more. Each buys {c} nuts. How many nuts?", "+*", "How many coins are there?"),  # noqa: E501
    ("{who} bakes {a} trays of {b} rolls, and {c} more. How many rolls?", "*+", "How many rolls are on the trays?"),  # noqa: E501
    ("{who} reads {a} pages, {b} of them twice, for {c} days. How many pages?", "+*", "How many pages are read in a day?"),  # noqa: E501
)  # fmt: skip
"""(story, the two operations, first hint)."""
_ANSWER = re.compile(r"####[ \t]*(-?\d{1,12})\s*$", re.ASCII)
_HINTS = 2


class HintedMath(Env):
    """Word problems with hints after wrong answers.

    Args:
        form: `round`: a hint is a separate message; `continuation`: it is inserted into the model's
            message.
        rules: open with a system message that states the rules.
    """

    max_turns: ClassVar[int] = _HINTS + 1
    single_turn_best: ClassVar[float] = 1.0
    rule: ClassVar[str] = "Work it out a line at a time, and end with #### and the number."

    def __init__(
        self, form: Literal["round", "continuation"] = "round", rules: bool = False
    ) -> None:
        self._form = form
        self._rules = rules
        self._hints: list[str] = []
        self._answer = ""

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        if not isinstance(task.info.get("hints"), list) or not task.answer:
            raise EnvError(
                f"task {task.id} is not one of hinted_math's: it needs info['hints'] and an answer"
            )
        self._hints = list(task.info["hints"])
        self._answer = str(task.answer)
        return (Message("system", self.rule), *task.messages) if self._rules else task.messages

    async def step(self, action: Action) -> Step:
        """End the episode at the right answer; give a hint for a wrong one while hints are left."""
        answer = _ANSWER.search(action.text)
        is_right = (
            answer is not None and action.text.count("####") == 1 and answer[1] == self._answer
        )
        if is_right or not self._hints:
            info = {"right": is_right, "hints": _HINTS - len(self._hints)}
            return Step(reward=float(is_right), terminated=True, info=info)

        hint = self._hints.pop(0)
        if self._form == "round":
            return Step(f"That is wrong. {hint}", info={"right": False})
        answer_start = action.raw.find("####")
        inserted = InlineObservation(
            f"\nWait, that is wrong. {hint}\n",
            keep_chars=answer_start if answer_start >= 0 else None,
            tail="untrained",
        )
        return Step(inserted, info={"right": False})

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[Task]:
        """Return stories with three numbers; no story with the same numbers is in both splits."""

        def draw(rng: random.Random) -> tuple[str, Task]:
            story, signs, hint = rng.choice(_STORIES)
            a, b, c = rng.randint(6, 30), rng.randint(2, 5), rng.randint(2, 9)
            steps = _steps(signs, a, b, c)
            hints = [hint, f"{steps[0]}. And then?"]
            key = f"{story} {a} {b} {c}"
            question = story.format(who=rng.choice(_WHO), a=a, b=b, c=c)
            return key, Task(question, answer=steps[1].split()[-1], info={"hints": hints})

        return sample_tasks("hinted_math", split, n, seed, draw)

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally, knowing the templates."""
        steps = _solve(messages)
        return f"{steps[0]}\n{steps[1]}\n#### {steps[1].split()[-1]}"

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: make an error in the first line with probability 0.75, after a hint 0.5."""
        first, second = _solve(messages)
        is_hinted = "wrong." in messages[-1].text
        if rng.random() < (0.5 if is_hinted else 0.75):
            term, _, value = first.rpartition(" ")
            wrong = int(value) + rng.choice((-2, -1, 1, 2))
            _, sign, last, _, _ = second.split()
            first = f"{term} {wrong}"
            second = f"{wrong} {sign} {last} = {_OPERATORS[sign](wrong, int(last))}"
        return f"{first}\n{second}\n#### {second.split()[-1]}"


def _steps(signs: str, a: int, b: int, c: int) -> tuple[str, str]:
    """Return the two lines of the solution, such as ``12 * 5 = 60`` and ``60 - 8 = 52``."""
    first = signs[0]
    second = signs[1]
    middle = _OPERATORS[first](a, b)
    result = _OPERATORS[second](middle, c)
    return f"{a} {first} {b} = {middle}", f"{middle} {second} {c} = {result}"


def _solve(messages: Sequence[Message]) -> tuple[str, str]:
    """Return the two lines of the solution of a conversation's question."""
    question = next(message.text for message in messages if message.role == "user")
    for story, signs, _ in _STORIES:
        pattern = re.escape(story).replace(r"\{who\}", r"\w+")
        for name in "abc":
            pattern = pattern.replace(rf"\{{{name}\}}", rf"(?P<{name}>\d+)")
        match = re.fullmatch(pattern, question)
        if match:
            return _steps(signs, *(int(match[name]) for name in "abc"))
    return "0 + 0 = 0", "0 + 0 = 0"

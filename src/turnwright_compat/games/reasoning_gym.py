"""Reasoning Gym: its datasets by id, `reasoning_gym:chain_sum`.

A row is a task, `score_answer` the reward of one reply.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from turnwright.envs.env import Action, Env, Step
from turnwright.envs.foreign import ForeignObject, Framework, Registered
from turnwright.envs.scripted_play import Speak
from turnwright.errors import EnvError
from turnwright.types import Message, Task
from turnwright_compat.games.registries import call_with_args, library

# rows that tasks are drawn from, `size` in [env.args]; few datasets generate all of them at once
_SIZE = 10_000
_DRAWS = 16  # rows drawn for one task at most, where a dataset repeats its questions
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def adapt(found: ForeignObject) -> ReasoningGymFactory:
    """Make the factory of a dataset; `[env.args]` are the fields of its
    configuration, and `system`."""
    args = dict(found.args)
    system = args.pop("system", None)
    factory = ReasoningGymFactory(found.target.id, system, args)
    call_with_args(factory.configuration, {}, found.where)
    return factory


@dataclass(slots=True)
class ReasoningGymFactory:
    """Factory of the environment of one dataset."""

    id: str
    system: str | None
    args: Mapping[str, Any]
    max_turns: int = 1
    _made: Any = field(default=None, repr=False, compare=False)
    _rows: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    _answers: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self) -> ReasoningGymEnv:
        """Make an environment, which shares the dataset."""
        return ReasoningGymEnv(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReasoningGymFactory, (self.id, self.system, self.args)

    def configuration(self) -> Any:
        """Make the configuration of the dataset; its seed is 0 unless given."""
        kind = library("reasoning_gym.factory", "reasoning-gym").DATASETS[self.id][1]
        made = kind(**{"seed": 0, "size": _SIZE, **self.args})
        if hasattr(made, "validate"):
            made.validate()
        return made

    @property
    def dataset(self) -> Any:
        """The dataset, made when it is first used."""
        if self._made is None:
            self._made = library("reasoning_gym.factory", "reasoning-gym").DATASETS[self.id][0](
                config=self.configuration()
            )
        return self._made

    def row(self, index: int) -> Any:
        """Return a row, generated when it is first used; some datasets take a second for one."""
        if index not in self._rows:
            self._rows[index] = self.dataset[index]
        return self._rows[index]

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Draw up to `n` rows of different questions, by default 1000; the question decides
        whether a row is held out."""
        n = n or 1000
        found: dict[str, Task] = {}
        rng = random.Random(seed)  # the same order for both splits, which share the rows
        rows = range(len(self.dataset))
        draws = rng.sample(rows, min(len(rows), n * _DRAWS))
        repeated = 0
        for index in draws:
            row = self.row(index)
            question, answer = str(row["question"]), row["answer"]
            held_out = (
                blake2b(question.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] % 2
                == 1
            )
            repeated += question in found
            if question in found or held_out != (split == "eval"):
                if repeated > 2 * n:  # a small dataset is exhausted
                    break
                continue
            if answer is not None:
                self._answers[question] = str(answer)
            found[question] = Task(
                question, None if answer is None else str(answer), info={"index": index}
            )
            if len(found) == n:
                break
        return list(found.values())

    @property
    def solver(self) -> Speak | None:
        """Player that answers with the row's own answer; None where that of the
        first row is not scored 1."""
        first = self.row(0)
        right = (
            first["answer"] is not None
            and self.dataset.score_answer(answer=str(first["answer"]), entry=first) >= 1
        )
        return self._solve if right else None

    def _solve(self, messages: Sequence[Message], rng: random.Random) -> str:
        return self._answers.get(messages[-1].text, "")


class ReasoningGymEnv(Env):
    """One question; the episode ends with the reply."""

    def __init__(self, factory: ReasoningGymFactory) -> None:
        self._factory = factory
        self._index = -1

    def reset(self, task: Task, *, seed: int | None = None) -> list[Message]:
        """Ask the question."""
        index = task.info.get("index")
        if type(index) is not int:
            raise EnvError(
                f"reasoning_gym:{self._factory.id}: task {task.id} has no row number in "
                'info["index"]'
            )
        self._index = index
        system = self._factory.system
        return [*([] if system is None else [Message("system", system)]), *task.messages]

    def step(self, action: Action) -> Step:
        """Score the reply, or what it has between the last <answer> and </answer>."""
        factory = self._factory
        found = _ANSWER.findall(action.text)
        answer = (found[-1] if found else action.text).strip()
        try:
            score = float(
                factory.dataset.score_answer(answer=answer, entry=factory.row(self._index))
            )
        except Exception as error:  # scorers parse the answer
            return Step(
                None,
                0.0,
                terminated=True,
                info={"unreadable": f"{type(error).__name__}: {error}"[:200]},
            )
        return Step(None, score, terminated=True)


def find(id: str) -> Registered | None:
    """Return an id for `adapt`; None for an unknown one."""
    return Registered("reasoning_gym", id) if id in ids() else None


def ids() -> Iterable[str]:
    """Return the registered ids."""
    library("reasoning_gym", "reasoning-gym")
    return sorted(library("reasoning_gym.factory", "reasoning-gym").DATASETS)


FRAMEWORK = Framework("reasoning_gym", adapt, find, ids, recognizes=False)

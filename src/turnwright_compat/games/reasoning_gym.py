"""Reasoning Gym: its datasets by id, `reasoning_gym:chain_sum`.

A row is a task, `score_answer` the reward of one reply. `ReasoningGymFactory.tasks` draws the rows,
and `ReasoningGymEnv.step` scores a reply; an episode has one turn.
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

_SIZE = 10_000
"""Rows that tasks are drawn from, `size` in `[env.args]`; few datasets generate all of them at
once."""
_DRAWS = 16
"""Rows drawn for one task at most, where a dataset repeats its questions."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def adapt(found: ForeignObject) -> ReasoningGymFactory:
    """Make the factory of a dataset; `[env.args]` are the fields of its configuration, and
    `system`."""
    args = dict(found.args)
    system = args.pop("system", None)
    factory = ReasoningGymFactory(found.target.id, system, args)
    # A field that the configuration does not have is an error here, not in the first episode.
    call_with_args(factory.configuration, {}, found.where)
    return factory


@dataclass(slots=True)
class ReasoningGymFactory:
    """Factory of the environment of one dataset."""

    id: str
    system: str | None
    args: Mapping[str, Any]
    max_turns: int = 1
    _dataset: Any = field(default=None, repr=False, compare=False)
    _rows: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    _answers: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self) -> ReasoningGymEnv:
        """Make an environment, which shares the dataset."""
        return ReasoningGymEnv(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReasoningGymFactory, (self.id, self.system, self.args)

    def configuration(self) -> Any:
        """Make the configuration of the dataset; its seed is 0 unless given."""
        configuration_class = _registered_datasets()[self.id][1]
        configuration = configuration_class(**{"seed": 0, "size": _SIZE, **self.args})
        if hasattr(configuration, "validate"):
            configuration.validate()
        return configuration

    @property
    def dataset(self) -> Any:
        """The dataset, made when it is first used."""
        if self._dataset is None:
            dataset_class = _registered_datasets()[self.id][0]
            self._dataset = dataset_class(config=self.configuration())
        return self._dataset

    def row(self, index: int) -> Any:
        """Return a row, generated when it is first used; some datasets take a second for one."""
        if index not in self._rows:
            self._rows[index] = self.dataset[index]
        return self._rows[index]

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Draw up to `n` rows of different questions, by default 1000; the question decides whether
        a row is held out."""
        n = n or 1000

        # The same order for both splits, which share the rows.
        rng = random.Random(seed)
        rows = range(len(self.dataset))
        drawn_rows = rng.sample(rows, min(len(rows), n * _DRAWS))

        tasks: dict[str, Task] = {}
        repeated = 0
        for index in drawn_rows:
            row = self.row(index)
            question = str(row["question"])
            answer = None if row["answer"] is None else str(row["answer"])

            is_repeated = question in tasks
            repeated += is_repeated
            if is_repeated or _is_held_out(question) != (split == "eval"):
                # A small dataset is exhausted.
                if repeated > 2 * n:
                    break
                continue

            if answer is not None:
                self._answers[question] = answer
            tasks[question] = Task(question, answer, info={"index": index})
            if len(tasks) == n:
                break

        return list(tasks.values())

    @property
    def solver(self) -> Speak | None:
        """Player that answers with the row's own answer; None where that of the first row is not
        scored 1."""
        row = self.row(0)
        if row["answer"] is None:
            return None

        score = self.dataset.score_answer(answer=str(row["answer"]), entry=row)
        return self._solve if score >= 1 else None

    def _solve(self, messages: Sequence[Message], rng: random.Random) -> str:
        return self._answers.get(messages[-1].text, "")


def _registered_datasets() -> Any:
    """Return the class of each dataset and that of its configuration, by id."""
    return library("reasoning_gym.factory", "reasoning-gym").DATASETS


def _is_held_out(question: str) -> bool:
    """Return whether a question is of the `eval` split: a hash decides, so half of them are."""
    digest = blake2b(question.encode("utf-8", "surrogatepass"), digest_size=1).digest()
    return digest[0] % 2 == 1


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

        messages = list(task.messages)
        if self._factory.system is not None:
            messages.insert(0, Message("system", self._factory.system))
        return messages

    def step(self, action: Action) -> Step:
        """Score the reply, or what it has between the last <answer> and </answer>."""
        factory = self._factory
        tagged_answers = _ANSWER.findall(action.text)
        answer = (tagged_answers[-1] if tagged_answers else action.text).strip()

        try:
            row = factory.row(self._index)
            score = float(factory.dataset.score_answer(answer=answer, entry=row))
        except Exception as error:
            # Scorers parse the answer, and may raise anything for it.
            reason = f"{type(error).__name__}: {error}"[:200]
            return Step(None, 0.0, terminated=True, info={"unreadable": reason})

        return Step(None, score, terminated=True)


def find(id: str) -> Registered | None:
    """Return an id for `adapt`; None for an unknown one."""
    return Registered("reasoning_gym", id) if id in ids() else None


def ids() -> Iterable[str]:
    """Return the registered ids."""
    library("reasoning_gym", "reasoning-gym")
    return sorted(_registered_datasets())


FRAMEWORK = Framework("reasoning_gym", adapt, find, ids, recognizes=False)

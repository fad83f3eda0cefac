"""What every teacher does: choose the ids that it scores, and put its hint before what it reads.

`Teacher` is the base of the teachers in this process (`local.py`), on servers (`remote.py`) and
with another tokenizer (`aligned.py`); `Teachers` are all those of one policy. Which ids a step
trains on because a teacher answered is in `credits.py`; what an answer does to the loss, in
`loss.teacher_advantage` and `forward/divergence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from turnwright.config import TeacherConfig
from turnwright.envs.resolve import call_error, load_object
from turnwright.envs.user_code import user_location
from turnwright.errors import ConfigError, TurnwrightError, UsageError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.vision import PixelCache
from turnwright.training.advantages import CreditSettings
from turnwright.training.credit import StepCredits, exclusion_reason
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.forward import ForwardPass, LogitDistribution
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.training.teachers.credits import (
    Answered,
    credits_beside_rewards,
    credits_of_teachers,
)
from turnwright.training.untrained_reasons import FAILED
from turnwright.types import Group, Trajectory
from turnwright.types.media import placements_between
from turnwright.types.messages import as_messages

T = TypeVar("T")


class RunPasses(Protocol):
    """`MicroBatchLimit.run`, which halves passes after an out-of-memory error."""

    def __call__(self, batch: TrainingBatch, work: Callable[[], T]) -> T:
        """Run work over a batch's passes."""


@dataclass(frozen=True, slots=True)
class TaughtPolicy:
    """The trained policy as its teachers see it."""

    forward: ForwardPass
    distribution: LogitDistribution
    """Distribution the engine samples from; the teachers' probabilities are of the same."""
    vocabulary: int
    micro_tokens: int
    pixels: PixelCache | None
    run: RunPasses
    as_reference: Callable[[], AbstractContextManager[None]]
    """Switches the policy's model to the reference policy."""


class Hint:
    """Messages that a teacher reads before the ids of an episode, by a user's function of the
    trajectory."""

    def __init__(self, spec: str, renderer: ChatRenderer) -> None:
        """Load ``file.py:function``; raise `ConfigError` for something else."""
        self.spec = spec
        self._renderer = renderer
        self._function: Callable[[Trajectory], Any] = load_object(spec)
        if not callable(self._function):
            raise ConfigError(
                f"teacher.hint = {spec!r}: is {type(self._function).__name__}, not a function of a "
                "trajectory"
            )
        wrong = call_error(self._function, None)
        if wrong:
            raise ConfigError(
                f"teacher.hint = {spec!r}: must take one argument, the trajectory ({wrong})"
            )

    def ids(self, trajectory: Trajectory) -> list[int]:
        """Return the ids of the messages, without the start of a reply; none where the function
        returns none."""
        key = trajectory.key
        where = f"teacher.hint = {self.spec!r}, task {key.task!r}, sample {key.sample}"
        try:
            messages = as_messages(self._function(trajectory))
        except Exception as error:
            location = user_location(error)
            place = f" ({location})" if location else ""
            raise UsageError(f"{where}: {type(error).__name__}: {error}{place}") from error
        if not messages:
            return []

        preamble = self._renderer.preamble(messages)
        if preamble.media:
            raise UsageError(f"{where}: the messages have images; a hint is text")
        return list(preamble.ids)


class Teacher:
    """One teacher of a policy: filters, hint, and the ids that it answered for, by trajectory of
    the current step."""

    def __init__(
        self, config: TeacherConfig, name: str, policy: TaughtPolicy, hint: Hint | None
    ) -> None:
        self.config = config
        self.name = name
        self.policy = policy
        self._hint = hint
        self._answered: dict[int, Answered] = {}
        """By the `id` of a trajectory, as `_hints`."""
        self._hints: dict[int, list[int] | None] = {}
        """None where the teacher is not for an episode."""

    @property
    def context(self) -> int | None:
        """Maximum number of ids that the teacher reads; None if unknown."""
        return None

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        """Start a step: find out which ids the teacher answers for."""
        self._answered = {}
        self._hints = {}
        for trajectory in trajectories:
            hint = self._hint_of(trajectory) if self.covers(trajectory) else None
            self._hints[id(trajectory)] = hint
            self._answered[id(trajectory)] = self._readable(trajectory)

    def answered(self, trajectory: Trajectory) -> Answered:
        """Return the ids that it answered for, of a trajectory of the step."""
        return self._answered.get(id(trajectory), {})

    def covers(self, trajectory: Trajectory) -> bool:
        """Return whether the teacher is for an episode."""
        return not self.config.environments or trajectory.task.env in self.config.environments

    def score(self, batch: TrainingBatch) -> TeacherScores:
        """Score the ids of a batch of the step, before its first update."""
        raise NotImplementedError

    def preamble(self, trajectory: Trajectory) -> list[int]:
        """Return the ids that precede the episode's."""
        return self._hints.get(id(trajectory)) or []

    def _hint_of(self, trajectory: Trajectory) -> list[int]:
        return [] if self._hint is None else self._hint.ids(trajectory)

    def _readable(self, trajectory: Trajectory) -> Answered:
        """Return the ids that fit the filters and, with all before them, the teacher's context."""
        hint = self._hints[id(trajectory)]
        if hint is None or (self.config.self and not hint):
            return {}

        # Ids before the last that it reads.
        room = math.inf if self.context is None else self.context - len(hint)
        agents = self.config.agents
        readable: dict[int, Sequence[bool]] = {}
        for number, span in enumerate(trajectory.spans):
            if span.sampled and (not agents or span.agent in agents):
                readable[number] = [span.start + offset <= room for offset in range(len(span.ids))]
        return readable

    def rows(self, batch: TrainingBatch) -> tuple[list[TrainingRow], torch.Tensor]:
        """Return the rows that the teacher reads, and which tokens of the batch their targets
        are."""
        rows: list[TrainingRow] = []
        tokens: list[int] = []
        first = 0
        for row in batch.rows:
            trajectory = batch.trajectories[row.trajectory]
            answered = self.answered(trajectory)
            chosen = [
                index
                for index, (span, offset) in enumerate(row.slots)
                if span in answered and answered[span][offset]
            ]
            if chosen:
                rows.append(with_preamble(row, self.preamble(trajectory), chosen))
                tokens += [first + index for index in chosen]
            first += len(row.places)
        return rows, torch.tensor(tokens, dtype=torch.long, device=batch.weights_n.device)


def with_preamble(row: TrainingRow, ids: Sequence[int], chosen: Sequence[int]) -> TrainingRow:
    """Return a row of some of the targets, with ids before all others; the others are verbatim."""
    shift = len(ids)
    places = [row.places[index] for index in chosen]
    media = placements_between(row.media, 0, places[-1])
    return replace(
        row,
        ids=[*ids, *row.ids[: places[-1]]],
        places=[place + shift for place in places],
        targets=[row.targets[index] for index in chosen],
        weights=[row.weights[index] for index in chosen],
        logprobs=[row.logprobs[index] for index in chosen],
        slots=[row.slots[index] for index in chosen],
        media=tuple(block.shifted(shift) for block in media),
        routes=None,
    )


class Teachers:
    """The teachers of one policy."""

    def __init__(self, teachers: Sequence[Teacher], reward_weight: float) -> None:
        self.teachers = list(teachers)
        self.reward_weight = reward_weight

    @property
    def include_self(self) -> bool:
        """Whether the policy is one of its teachers."""
        return any(teacher.config.self for teacher in self.teachers)

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        """Start a step with its trajectories."""
        for teacher in self.teachers:
            teacher.ask(trajectories)

    def answered(self, trajectory: Trajectory) -> Answered:
        """Return for which ids of a trajectory any teacher answered."""
        by_any: dict[int, Sequence[bool]] = {}
        for teacher in self.teachers:
            for span, has in teacher.answered(trajectory).items():
                if span in by_any:
                    by_any[span] = [a or b for a, b in zip(by_any[span], has, strict=True)]
                else:
                    by_any[span] = has
        return by_any

    def credits(
        self,
        groups: Sequence[Group],
        settings: CreditSettings,
        by_rewards: Callable[[Sequence[Group]], StepCredits],
    ) -> StepCredits:
        """Ask the teachers about a step's groups and return its credits, with those of rewards
        unless their weight is 0."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self.ask(
            [trajectory for trajectory in trajectories if exclusion_reason(trajectory) != FAILED]
        )
        if self.reward_weight:
            return credits_beside_rewards(
                by_rewards(groups), self.answered, settings.scale, self.reward_weight
            )
        return credits_of_teachers(
            groups, self.answered, settings.scale, overlong_filter=settings.overlong_filter
        )

    def score(self, batch: TrainingBatch) -> list[TeacherScores]:
        """Return each teacher's answers for a batch."""
        return [teacher.score(batch) for teacher in self.teachers]


MakeTeachers = Callable[[TaughtPolicy], Teachers]


def refuse_ranks(ranks: int) -> None:
    """Raise `ConfigError` for teachers with several ranks."""
    if ranks > 1:
        raise ConfigError(
            "[[teacher]] needs a trainer of one process: teachers are not distributed; start it "
            "without torchrun"
        )


def no_answer(name: str) -> TurnwrightError:
    """Return the error for a support that was not computed."""
    return TurnwrightError(
        f"teacher {name}: the policy's top-p/top-k/min-p support is unknown; score the batch first"
    )

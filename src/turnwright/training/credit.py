"""What the comparison of episodes comes to: an advantage for each sampled id, or the reason why it
is not trained, and an account in which every sampled id is once.

`advantages.py` makes credits from rewards, `teachers/credits.py` from teachers;
`forward/batch.py` makes batches of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwright.errors import RewardError
from turnwright.training.loss_weights import TokenWeights, trained_ids
from turnwright.training.untrained_reasons import (
    FAILED,
    NO_CONTEXT,
    NO_REWARD,
    NO_SIGNAL,
    NO_TEACHER,
    TRAINED,
)
from turnwright.types import Trajectory


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What a critic learns of a trajectory: span index -> a number for each of its ids."""

    targets: Mapping[int, Sequence[float]]
    """Lambda-returns; NaN where the critic was not asked."""
    returns: Mapping[int, Sequence[float]]
    """Returns that came, without a critic's help."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantage of one trajectory's sampled ids, or the reason why they get weight 0."""

    trajectory: Trajectory
    advantage: float | None
    """Mean over its ids; None exactly if `reason` is set."""
    reason: str | None
    tokens: int
    """Sampled ids that can carry loss: of spans that are not `untrained`, with a weight over 0."""
    values: Mapping[int, Sequence[float]] | None = None
    """Span index -> advantage per id, if ids differ."""
    weights: TokenWeights | None = None
    """Loss scale; None is 1 everywhere."""
    for_critic: ValueTargets | None = None
    """What the critic learns of it, if there is one."""

    @property
    def counted(self) -> bool:
        """Whether it counts in the loss denominators; no signal is an advantage of 0, so it
        counts."""
        return self.reason is None or self.reason == NO_SIGNAL

    def advantages_of(self, slots: Sequence[tuple[int, int]]) -> list[float]:
        """Return the advantages of ids by (span, offset)."""
        assert self.advantage is not None
        if self.values is None:
            return [self.advantage] * len(slots)
        return [self.values[span][offset] for span, offset in slots]


@dataclass(frozen=True, slots=True)
class StepCredits:
    """Credits of one step, in canonical order, and the account of every sampled id."""

    credits: tuple[Credit, ...]
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled ids by outcome: `trained`, or the reason for weight 0. They sum to `sampled`."""
    sampled: int = 0
    rejected: tuple[str, ...] = ()
    """Reasons that `train.group_filter` gave, one for each group that it left out with one."""

    @property
    def trained(self) -> list[Credit]:
        """Credits whose ids carry loss."""
        return [credit for credit in self.credits if credit.reason is None]


def count_ids(credits: Sequence[Credit]) -> StepCredits:
    """Count every sampled id under `trained` or the reason for its weight of 0; check their sum."""
    tokens: Counter[str] = Counter()
    for credit in credits:
        if credit.reason is not None:
            tokens[credit.reason] += credit.trajectory.sampled_tokens
        else:
            tokens[TRAINED] += credit.tokens
            _count_untrained(credit, tokens)

    sampled = sum(credit.trajectory.sampled_tokens for credit in credits)
    assert sum(tokens.values()) == sampled, (
        f"{sampled} ids were sampled, {sum(tokens.values())} are accounted for: {tokens}"
    )
    return StepCredits(tuple(credits), +tokens, sampled)


def _count_untrained(credit: Credit, tokens: Counter[str]) -> None:
    """Count the ids of a trained trajectory that carry no loss themselves."""
    for index, span in enumerate(credit.trajectory.spans):
        if span.sampled and span.untrained is not None:
            tokens[span.untrained] += len(span.ids) - span.trained
        if span.start == 0 and span.trained:
            tokens[NO_CONTEXT] += 1

        if credit.weights is not None:
            without_teacher = credit.weights.no_teacher.get(index, 0)
            could_carry = trained_ids(credit.trajectory, index)
            do_carry = trained_ids(credit.trajectory, index, credit.weights)
            tokens[credit.weights.reason] += could_carry - without_teacher - do_carry
            tokens[NO_TEACHER] += without_teacher


def sort_key(trajectory: Trajectory) -> tuple[str, int, str, int, int]:
    """Return the canonical sort key of a trajectory."""
    key = trajectory.key
    return key.phase, key.step, key.task, key.sample, key.attempt


def exclusion_reason(trajectory: Trajectory) -> str | None:
    """Return why a trajectory cannot be trained on, or None.

    Raises:
        RewardError: for a reward that is NaN or infinite.
    """
    # An error while the environment was closed came after the reward, which remains valid.
    if trajectory.error is not None and trajectory.error.phase != "close":
        return FAILED
    if trajectory.stop is not None and trajectory.stop.failed:
        return FAILED

    if trajectory.reward is None:
        return NO_REWARD
    if not math.isfinite(trajectory.reward):
        key = trajectory.key
        raise RewardError(
            f"the reward of task {key.task!r}, sample {key.sample} (step {key.metrics_step}) is "
            f"{trajectory.reward}; a reward is a finite number, or None if it could not be "
            "computed: check the reward function"
        )
    return None

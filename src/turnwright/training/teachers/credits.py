"""Credits of a step with teachers: which ids are trained, and the account of the
others. No tensors here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from turnwright.training.credit import Credit, StepCredits, count_ids, exclusion_reason, sort_key
from turnwright.training.loss_weights import LossScale, TokenWeights, trainable_tokens, trained_ids
from turnwright.training.untrained_reasons import (
    CUT_BY_LENGTH,
    FAILED,
    GROUP_TOO_SMALL,
    NO_REWARD,
    NO_SIGNAL,
    NO_TEACHER,
    OVERLONG,
)
from turnwright.types import Group, Trajectory

Answered = Mapping[int, Sequence[bool]]
"""Span index -> whether a teacher answered for each of its ids; spans that are
missing have no answer."""
WITHOUT_REWARD = (NO_SIGNAL, GROUP_TOO_SMALL, NO_REWARD)
"""Reasons that concern rewards alone: a teacher trains such trajectories."""


def credits_of_teachers(
    groups: Sequence[Group],
    answered: Callable[[Trajectory], Answered],
    scale: LossScale,
    *,
    overlong_filter: bool,
) -> StepCredits:
    """Return the credits of a step that teachers alone train: every trajectory that did not fail,
    with or without a reward."""
    found = []
    for trajectory in sorted((t for group in groups for t in group.trajectories), key=sort_key):
        reason = exclusion_reason(trajectory)
        reason = None if reason == NO_REWARD else reason
        if overlong_filter and trajectory.stop in CUT_BY_LENGTH:
            reason = reason or OVERLONG
        credit = Credit(
            trajectory, None, reason or NO_TEACHER, trainable_tokens(trajectory, scale(trajectory))
        )
        found.append(
            credit if reason else taught(credit, answered(trajectory), scale(trajectory)) or credit
        )
    return count_ids(found)


def credits_beside_rewards(
    rewarded: StepCredits,
    answered: Callable[[Trajectory], Answered],
    scale: LossScale,
    reward_weight: float,
) -> StepCredits:
    """Return the credits of a step with the advantages of rewards times their weight, and with the
    trajectories that only a teacher trains."""
    found = []
    for credit in rewarded.credits:
        if credit.reason in WITHOUT_REWARD and exclusion_reason(credit.trajectory) != FAILED:
            credit = taught(credit, answered(credit.trajectory), scale(credit.trajectory)) or credit
        elif credit.advantage is not None and reward_weight != 1.0:
            values = credit.values and {
                span: [reward_weight * v for v in given] for span, given in credit.values.items()
            }
            credit = replace(credit, advantage=reward_weight * credit.advantage, values=values)
        found.append(credit)
    return replace(count_ids(found), rejected=rewarded.rejected)


def taught(credit: Credit, answered: Answered, weights: TokenWeights | None) -> Credit | None:
    """Return the credit of a trajectory that a teacher alone trains, whose other ids have weight 0;
    None without an answer."""
    trajectory = credit.trajectory
    kept = only_answered(trajectory, answered, weights)
    tokens = trainable_tokens(trajectory, kept)
    return Credit(trajectory, 0.0, None, tokens, None, kept) if tokens else None


def only_answered(
    trajectory: Trajectory, answered: Answered, weights: TokenWeights | None
) -> TokenWeights | None:
    """Return the loss weights with 0 for ids without an answer."""
    by_span: dict[int, Sequence[float]] = dict(weights.by_span) if weights else {}
    lacking: dict[int, int] = {}
    for index, span in enumerate(trajectory.spans):
        if not span.sampled:
            continue
        before = by_span.get(index, (1.0,) * len(span.ids))
        has = answered.get(index, (False,) * len(span.ids))
        if not all(has):
            by_span[index] = tuple(
                weight if one else 0.0 for weight, one in zip(before, has, strict=True)
            )
            masked = TokenWeights(by_span, NO_TEACHER)
            lacking[index] = trained_ids(trajectory, index, weights) - trained_ids(
                trajectory, index, masked
            )
    return (
        TokenWeights(by_span, weights.reason if weights else NO_TEACHER, lacking)
        if lacking
        else weights
    )

"""Credits of a step with teachers: which ids are trained, and the account of the others. No tensors
here.

Teachers alone (`credits_of_teachers`) train every trajectory that did not fail; beside rewards
(`credits_beside_rewards`) they add those that rewards alone would leave out. The credits of rewards
are made by `advantages.advantages`.
"""

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
"""Span index -> whether a teacher answered for each of its ids; spans that are missing have no
answer."""
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
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    credits = []
    for trajectory in sorted(trajectories, key=sort_key):
        reason = exclusion_reason(trajectory)
        if reason == NO_REWARD:
            reason = None
        if overlong_filter and trajectory.stop in CUT_BY_LENGTH:
            reason = reason or OVERLONG

        tokens = trainable_tokens(trajectory, scale(trajectory))
        credit = Credit(trajectory, None, reason or NO_TEACHER, tokens)
        if reason is None:
            credit = taught(credit, answered(trajectory), scale(trajectory)) or credit
        credits.append(credit)
    return count_ids(credits)


def credits_beside_rewards(
    rewarded: StepCredits,
    answered: Callable[[Trajectory], Answered],
    scale: LossScale,
    reward_weight: float,
) -> StepCredits:
    """Return the credits of a step with the advantages of rewards times their weight, and with the
    trajectories that only a teacher trains."""
    credits = []
    for credit in rewarded.credits:
        trajectory = credit.trajectory
        if credit.reason in WITHOUT_REWARD and exclusion_reason(trajectory) != FAILED:
            credit = taught(credit, answered(trajectory), scale(trajectory)) or credit
        elif credit.advantage is not None and reward_weight != 1.0:
            credit = _weighted(credit, credit.advantage, reward_weight)
        credits.append(credit)
    return replace(count_ids(credits), rejected=rewarded.rejected)


def _weighted(credit: Credit, advantage: float, reward_weight: float) -> Credit:
    values = credit.values
    if values:
        values = {
            span: [reward_weight * value for value in span_values]
            for span, span_values in values.items()
        }
    return replace(credit, advantage=reward_weight * advantage, values=values)


def taught(credit: Credit, answered: Answered, weights: TokenWeights | None) -> Credit | None:
    """Return the credit of a trajectory that a teacher alone trains, whose other ids have weight 0;
    None without an answer."""
    trajectory = credit.trajectory
    kept = only_answered(trajectory, answered, weights)
    tokens = trainable_tokens(trajectory, kept)
    if not tokens:
        return None
    return Credit(trajectory, 0.0, None, tokens, None, kept)


def only_answered(
    trajectory: Trajectory, answered: Answered, weights: TokenWeights | None
) -> TokenWeights | None:
    """Return the loss weights with 0 for ids without an answer."""
    by_span: dict[int, Sequence[float]] = dict(weights.by_span) if weights else {}
    lacking: dict[int, int] = {}
    for index, span in enumerate(trajectory.spans):
        if not span.sampled:
            continue
        span_weights = by_span.get(index, (1.0,) * len(span.ids))
        has_answer = answered.get(index, (False,) * len(span.ids))
        if all(has_answer):
            continue

        by_span[index] = tuple(
            weight if has else 0.0 for weight, has in zip(span_weights, has_answer, strict=True)
        )
        masked = TokenWeights(by_span, NO_TEACHER)
        trained = trained_ids(trajectory, index, weights)
        lacking[index] = trained - trained_ids(trajectory, index, masked)
    if not lacking:
        return weights
    return TokenWeights(by_span, weights.reason if weights else NO_TEACHER, lacking)

"""What each trajectory of a group is worth, and an account of every sampled id. No tensors here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnwise.errors import RewardError
from turnwise.types import Group, Trajectory

FAILED = "failed"
"""The episode broke or was cut off from outside: whatever reward it has cannot be trusted."""
NO_REWARD = "no_reward"
"""The reward was not computed."""
SIBLING_FAILED = "sibling_failed"
"""Another episode of the group failed, and a failure drops its group."""
GROUP_TOO_SMALL = "group_too_small"
"""Fewer than `min_group` siblings were left to compare with."""
NO_SIGNAL = "no_signal"
"""All siblings that are left have the same reward, so there is nothing to learn from their difference."""
NO_CONTEXT = "no_context"
"""The very first id of a path: no position stands before it that could predict it."""
TRAINED = "trained"
"""Not a reason: the ids that carry loss."""

STD_FLOOR = 1e-4
"""Added to the standard deviation, as TRL does, so that tiny differences of reward are not blown up."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What one trajectory's sampled ids are worth: an advantage, or the reason why they get weight 0."""

    trajectory: Trajectory
    advantage: float | None
    """None exactly where `reason` says why."""
    reason: str | None
    tokens: int
    """Sampled ids that carry loss when the trajectory does: those of spans that are not `untrained`."""

    @property
    def counted(self) -> bool:
        """Whether it counts in the denominators of the loss. No signal is an advantage of 0, so it does."""
        return self.reason is None or self.reason == NO_SIGNAL


@dataclass(frozen=True, slots=True)
class Ledger:
    """The credits of one step, in canonical order, and where every sampled id went (invariant 1)."""

    credits: tuple[Credit, ...]
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled ids: `trained`, and every reason for weight 0. They sum to `sampled`."""
    sampled: int = 0

    @property
    def trained(self) -> list[Credit]:
        """The credits whose ids carry loss."""
        return [credit for credit in self.credits if credit.reason is None]


def advantages(
    groups: Sequence[Group],
    *,
    kind: Literal["std", "mean"] = "std",
    min_group: int = 2,
    on_failure: Literal["drop_group", "survivors"] = "survivors",
    exclude: Callable[[Trajectory], str | None] | None = None,
) -> Ledger:
    """Compare the trajectories of each group with one another (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-4)`` over the siblings that have a reward; with ``kind="mean"`` without the division
    (Dr. GRPO, arXiv 2503.20783). `std` is that of a sample (divided by n - 1), as in TRL and verl.

    Args:
        groups: of any sizes; failed trajectories and those without a reward are left out of the baseline.
        min_group: groups with fewer trajectories left are dropped, and counted.
        on_failure: what a failed trajectory does to its group: `drop_group` trains none of it, `survivors` compares the others
            with one another. Both bias: the first towards tasks that seldom fail, the second towards ways that seldom do.
        exclude: gives the reason why a trajectory shall not be trained on, or None.

    Returns:
        One credit per trajectory, sorted by key, so that the order in which episodes finished plays no part.

    Raises:
        RewardError: for a reward that is NaN or infinite.
    """
    credits: list[Credit] = []
    for group in groups:
        reasons = [_unusable(trajectory) or (exclude(trajectory) if exclude else None) for trajectory in group.trajectories]
        rewards = [float(t.reward) for t, reason in zip(group.trajectories, reasons, strict=True) if reason is None]  # type: ignore[arg-type]
        dropped = SIBLING_FAILED if on_failure == "drop_group" and FAILED in reasons else _dropped(rewards, min_group)
        values = iter(() if dropped else _compare(rewards, kind))
        for trajectory, unusable in zip(group.trajectories, reasons, strict=True):
            reason = unusable or dropped
            value = None if reason else next(values)
            credits.append(Credit(trajectory, value, reason, trainable_tokens(trajectory)))
    credits.sort(key=lambda credit: order(credit.trajectory))
    return account(credits)


def account(credits: Sequence[Credit]) -> Ledger:
    """Count every sampled id of the credits under `trained` or under the reason for its weight of 0.

    Raises:
        AssertionError: when the counts do not sum to the ids sampled, which would be a bug here (invariant 1).
    """
    tokens: Counter[str] = Counter()
    for credit in credits:
        if credit.reason is not None:
            tokens[credit.reason] += credit.trajectory.sampled_tokens
            continue
        tokens[TRAINED] += credit.tokens
        for span in credit.trajectory.spans:
            if span.sampled and span.untrained is not None:
                tokens[span.untrained] += len(span.ids) - span.trained
            if span.start == 0 and span.trained:
                tokens[NO_CONTEXT] += 1
    sampled = sum(credit.trajectory.sampled_tokens for credit in credits)
    assert sum(tokens.values()) == sampled, f"{sampled} ids were sampled, {sum(tokens.values())} are accounted for: {tokens}"
    return Ledger(tuple(credits), +tokens, sampled)


def trainable_tokens(trajectory: Trajectory) -> int:
    """How many of a trajectory's sampled ids can carry loss."""
    return sum(span.trained - (1 if span.start == 0 else 0) for span in trajectory.spans if span.trained)


def order(trajectory: Trajectory) -> tuple[str, int, str, int, int]:
    """The canonical order of trajectories: that of their keys."""
    key = trajectory.key
    return key.phase, key.step, key.task, key.sample, key.attempt


def _unusable(trajectory: Trajectory) -> str | None:
    # What broke while the environment was closed came behind the reward, which stands.
    if trajectory.error is not None and trajectory.error.phase != "close":
        return FAILED
    if trajectory.stop is not None and trajectory.stop.failed:
        return FAILED
    if trajectory.reward is None:
        return NO_REWARD
    if not math.isfinite(trajectory.reward):
        key = trajectory.key
        raise RewardError(
            f"the reward of task {key.task!r}, sample {key.sample} (step {key.step}) is {trajectory.reward}; a reward is a "
            "finite number, or None where it could not be computed: look at the reward function"
        )
    return None


def _dropped(rewards: Sequence[float], min_group: int) -> str | None:
    if len(rewards) < max(min_group, 1):
        return GROUP_TOO_SMALL
    low, high = min(rewards), max(rewards)
    # Sums of reward components may differ in the last bit; that is no difference.
    return NO_SIGNAL if high - low <= 1e-12 * max(1.0, abs(low), abs(high)) else None


def _compare(rewards: Sequence[float], kind: str) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    if kind == "mean":
        return [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + STD_FLOOR) for reward in rewards]

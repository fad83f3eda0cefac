"""What each trajectory of a group is worth, and an account of every sampled id. No tensors here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnwise.errors import RewardError
from turnwise.training.credit import CreditRules, GroupMember, TokenWeights, trainable_tokens, trained_ids
from turnwise.types import Group, Trajectory

Advantage = Literal["std", "mean", "rloo", "batch", "group_batch"]

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
FILTERED = "filtered"
"""The same where such groups are replaced by others (`train.refill`): it is in no denominator."""
NO_CONTEXT = "no_context"
"""The very first id of a path: no position stands before it that could predict it."""
MISMATCH = "mismatch"
"""A correction left it out: trainer and engine disagree too much about it, or about its trajectory."""
TRAINED = "trained"
"""Not a reason: the ids that carry loss."""

FLAT = 1e-12
"""Relative difference under which returns are the same."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as TRL does, so that tiny differences of reward are not blown up."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What one trajectory's sampled ids are worth: an advantage, or the reason why they get weight 0."""

    trajectory: Trajectory
    advantage: float | None
    """The mean over its ids, None exactly where `reason` says why."""
    reason: str | None
    tokens: int
    """Sampled ids that carry loss when the trajectory does: those of spans that are not `untrained`, with a weight over 0."""
    values: Mapping[int, Sequence[float]] | None = None
    """Span index -> the advantage of each of its ids, where they differ."""
    weights: TokenWeights | None = None
    """The loss scale; None is 1 everywhere."""

    @property
    def counted(self) -> bool:
        """Whether it counts in the denominators of the loss. No signal is an advantage of 0, so it does."""
        return self.reason is None or self.reason == NO_SIGNAL

    def advantage_of(self, span: int, offset: int) -> float:
        """The advantage of one id."""
        assert self.advantage is not None
        return self.advantage if self.values is None else self.values[span][offset]


@dataclass(frozen=True, slots=True)
class StepCredits:
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
    kind: Advantage = "std",
    min_group: int = 2,
    on_failure: Literal["drop_group", "survivors"] = "survivors",
    exclude: Callable[[Trajectory], str | None] | None = None,
    rules: CreditRules | None = None,
    no_signal: str = NO_SIGNAL,
) -> StepCredits:
    """Compare trajectories with one another: those of each group, or those of the whole batch.

    With G_ik the return of trajectory i from its unit k on (the whole reward, or with ``rules.credit = "turn"`` the rewards of
    turn k and later), 0 where i ended before k, so that what ended is a state like any other::

        mean         G_ik - mean_j G_jk                       over the n of the group (Dr. GRPO, arXiv 2503.20783)
        std          (G_ik - mean_j G_jk) / (s + 1e-4)        s^2 = sum_jk (G_jk - mean_k)^2 / ((n - 1) K)
                                                              (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2)
        rloo         G_ik - mean_{j != i} G_jk                (RLOO, arXiv 2402.14740)
        batch        (G - mean) / (s + 1e-4)                  over all trained ids of the batch, s dividing by their number
        group_batch  the same of G_ik - mean_j G_jk           (REINFORCE++, arXiv 2501.03262)

    K is the most units of the group, 1 unless credit is by turn; `std` is then that of a sample (n - 1), as in TRL and verl.
    The baseline of `rloo` knows nothing of trajectory i, neither its rewards nor where it ended, so at every turn it leaves the
    policy gradient unbiased; that of `mean` is (n - 1) / n of it at every turn. A mean over the siblings that got as far as
    turn k would not: where few did, it would shrink the advantages of those that did.

    Args:
        groups: of any sizes; failed trajectories and those without a reward are left out of the baseline.
        min_group: groups with fewer trajectories left are dropped, and counted; `batch` compares with no group and drops none.
        on_failure: what a failed trajectory does to its group: `drop_group` trains none of it, `survivors` compares the others
            with one another. Both bias: the first towards tasks that seldom fail, the second towards ways that seldom do.
        exclude: gives the reason why a trajectory shall not be trained on, or None.
        rules: how a trajectory's reward is spread over it; by default all of its ids have all of it.
        no_signal: the reason that groups without a difference are given: `NO_SIGNAL`, or `FILTERED`.

    Returns:
        One credit per trajectory, sorted by key, so that the order in which episodes finished plays no part.

    Raises:
        RewardError: for a reward that is NaN or infinite.
    """
    rules = rules or CreditRules()
    least = 1 if kind == "batch" else max(min_group, 1)
    by_token = kind == "batch"
    found: list[tuple[Trajectory, str | None, GroupMember | None]] = []
    for group in groups:
        reasons = [
            exclusion_reason(trajectory) or (exclude(trajectory) if exclude else None) for trajectory in group.trajectories
        ]
        left = [t for t, reason in zip(group.trajectories, reasons, strict=True) if reason is None]
        dropped = SIBLING_FAILED if on_failure == "drop_group" and FAILED in reasons else None
        dropped = dropped or (GROUP_TOO_SMALL if len(left) < least else None)
        members = [] if dropped else [GroupMember.of(t, rules, by_token=by_token) for t in left]
        if members and kind != "batch" and not set_group_values(members, kind) and kind != "group_batch":
            dropped = no_signal
        rest = iter(members)
        for trajectory, reason in zip(group.trajectories, reasons, strict=True):
            member = next(rest, None) if reason is None else None
            found.append((trajectory, reason or dropped, member))
    found.sort(key=lambda row: sort_key(row[0]))
    alive = [member for _, reason, member in found if reason is None and member is not None]
    flat = kind in ("batch", "group_batch") and bool(alive) and not normalize_batch(alive)
    return count_ids([_credit(trajectory, NO_SIGNAL if flat and not reason else reason, m) for trajectory, reason, m in found])


def _credit(trajectory: Trajectory, reason: str | None, member: GroupMember | None) -> Credit:
    weights = None if member is None else member.weights
    tokens = trainable_tokens(trajectory, weights)
    if reason is not None or member is None:
        return Credit(trajectory, None, reason, tokens, None, weights)
    values = member.by_span()
    if values is None:
        return Credit(trajectory, member.values[0], None, tokens, None, weights)
    if member.token_values is not None:
        every = [value for given in member.token_values.values() for value in given]
        return Credit(trajectory, math.fsum(every) / max(len(every), 1), None, tokens, values, weights)
    counts = member.trainable_per_unit()
    mean = math.fsum(v * n for v, n in zip(member.values, counts, strict=True)) / max(sum(counts), 1)
    return Credit(trajectory, mean, None, tokens, values, weights)


def count_ids(credits: Sequence[Credit]) -> StepCredits:
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
        for index, span in enumerate(credit.trajectory.spans):
            if span.sampled and span.untrained is not None:
                tokens[span.untrained] += len(span.ids) - span.trained
            if span.start == 0 and span.trained:
                tokens[NO_CONTEXT] += 1
            if credit.weights is not None:
                able = trained_ids(credit.trajectory, index)
                tokens[credit.weights.reason] += able - trained_ids(credit.trajectory, index, credit.weights)
    sampled = sum(credit.trajectory.sampled_tokens for credit in credits)
    assert sum(tokens.values()) == sampled, f"{sampled} ids were sampled, {sum(tokens.values())} are accounted for: {tokens}"
    return StepCredits(tuple(credits), +tokens, sampled)


def sort_key(trajectory: Trajectory) -> tuple[str, int, str, int, int]:
    """The canonical order of trajectories: that of their keys."""
    key = trajectory.key
    return key.phase, key.step, key.task, key.sample, key.attempt


def exclusion_reason(trajectory: Trajectory) -> str | None:
    """Why a trajectory cannot be trained on whatever the others are; None where it can.

    Raises:
        RewardError: for a reward that is NaN or infinite.
    """
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


def set_group_values(members: Sequence[GroupMember], kind: Advantage) -> bool:
    """Set the values of a group's members.

    Returns:
        Whether they differ at all: sums of reward components may differ in the last bit, which is no difference.
    """
    n, longest = len(members), max(len(member.units) for member in members)
    squares: list[float] = []
    signal = False
    for unit in range(longest):
        column = [member.return_from(unit) for member in members]
        total = math.fsum(column)
        mean = total / n
        signal = signal or max(column) - min(column) > FLAT * max(1.0, abs(max(column)), abs(min(column)))
        squares += [(value - mean) ** 2 for value in column]
        for member, value in zip(members, column, strict=True):
            if unit < len(member.units):
                member.values.append((value * n - total) / (n - 1) if kind == "rloo" and n > 1 else value - mean)
    if kind == "std" and n > 1:
        std = math.sqrt(math.fsum(squares) / ((n - 1) * longest))
        for member in members:
            member.values = [value / (std + STD_FLOOR) for value in member.values]
    return signal


def normalize_batch(members: Sequence[GroupMember]) -> bool:
    """Set the values of a batch's members: minus the mean over trained ids, divided by their standard deviation.

    Returns:
        Whether they differ at all.
    """
    rows: list[tuple[float, int]] = []
    for member in members:
        if member.penalties is not None:
            member.token_values = {
                span: [0.0] * len(member.trajectory.spans[span].ids) for unit in member.units for span in unit
            }
            for span, offset, value in member.token_returns():
                member.token_values[span][offset] = value
            rows += [(value, 1) for value in _trained_values(member)]
        else:
            member.values = member.values or list(member.returns)
            rows += list(zip(member.values, member.trainable_per_unit(), strict=True))
    count = sum(n for _, n in rows)
    known = [value for value, n in rows if n]
    if not known or max(known) - min(known) <= FLAT * max(1.0, abs(max(known)), abs(min(known))):
        return False
    mean = math.fsum(value * n for value, n in rows) / count
    scale = math.sqrt(math.fsum(n * (value - mean) ** 2 for value, n in rows) / count) + STD_FLOOR
    for member in members:
        member.values = [(value - mean) / scale for value in member.values]
        for given in (member.token_values or {}).values():
            given[:] = [(value - mean) / scale for value in given]
    return True


def _trained_values(member: GroupMember) -> list[float]:
    """The values of the ids that carry loss."""
    found = []
    for span, values in (member.token_values or {}).items():
        first = 1 if member.trajectory.spans[span].start == 0 else 0
        given = None if member.weights is None else member.weights.by_span.get(span)
        trained = range(first, member.trajectory.spans[span].trained)
        found += [values[offset] for offset in trained if given is None or given[offset]]
    return found

"""Advantages of a step's trajectories, and the account of every sampled id. No tensors here."""

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
"""The episode failed or was interrupted from outside; a reward it has cannot be trusted."""
NO_REWARD = "no_reward"
"""The reward was not computed."""
SIBLING_FAILED = "sibling_failed"
"""Another episode of the group failed, and `on_failure` drops the group."""
GROUP_TOO_SMALL = "group_too_small"
"""Fewer than `min_group` trajectories of the group are usable."""
NO_SIGNAL = "no_signal"
"""Zero-variance group: all usable trajectories have the same reward."""
FILTERED = "filtered"
"""Zero-variance group that dynamic sampling replaces (`train.refill`); in no denominator."""
NO_CONTEXT = "no_context"
"""First id of a path: no earlier position predicts it."""
MISMATCH = "mismatch"
"""Excluded by a correction: engine and trainer disagree too much about the id or its trajectory."""
TRAINED = "trained"
"""Not a reason: ids that carry loss."""

FLAT = 1e-12
"""Relative difference below which returns are equal."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL, so that tiny reward differences are not amplified."""


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

    @property
    def counted(self) -> bool:
        """Whether it counts in the loss denominators; no signal is an advantage of 0, so it counts."""
        return self.reason is None or self.reason == NO_SIGNAL

    def advantage_of(self, span: int, offset: int) -> float:
        """Return the advantage of one id."""
        assert self.advantage is not None
        return self.advantage if self.values is None else self.values[span][offset]


@dataclass(frozen=True, slots=True)
class StepCredits:
    """Credits of one step, in canonical order, and the account of every sampled id (invariant 1)."""

    credits: tuple[Credit, ...]
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled ids by outcome: `trained`, or the reason for weight 0. They sum to `sampled`."""
    sampled: int = 0

    @property
    def trained(self) -> list[Credit]:
        """Credits whose ids carry loss."""
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
    """Compute advantages by comparing trajectories within each group, or within the batch.

    G_ik is the return of trajectory i from its unit k on: the full reward, or with ``rules.credit = "turn"`` the rewards of
    turn k and later. It is 0 if i ended before k: the end is a state like any other::

        mean         G_ik - mean_j G_jk                       over the n of the group (Dr. GRPO, arXiv 2503.20783)
        std          (G_ik - mean_j G_jk) / (s + 1e-4)        s^2 = sum_jk (G_jk - mean_k)^2 / ((n - 1) K)
                                                              (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2)
        rloo         G_ik - mean_{j != i} G_jk                (RLOO, arXiv 2402.14740)
        batch        (G - mean) / (s + 1e-4)                  over all trained ids of the batch, s dividing by their number
        group_batch  the same of G_ik - mean_j G_jk           (REINFORCE++, arXiv 2501.03262)

    K is the group's largest number of units, 1 unless credit is by turn. `std` then is the sample deviation (n - 1), as in TRL
    and verl. The `rloo` baseline is independent of trajectory i, of its rewards and its end, so the policy gradient is unbiased
    at every turn; with `mean` it is (n - 1) / n of that. A mean over only the siblings that reached turn k would be biased:
    it would shrink the advantages of the few that did.

    Args:
        groups: of any sizes; failed trajectories and those without a reward are excluded from the baseline.
        min_group: minimum usable trajectories; smaller groups are dropped and counted. `batch` drops none.
        on_failure: effect of a failed trajectory on its group: `drop_group` trains none of it, `survivors` compares the
            others. Both bias: the first towards tasks that seldom fail, the second towards behavior that seldom does.
        exclude: returns the reason why a trajectory must not be trained on, or None.
        rules: credit assignment within a trajectory; by default every id gets the full reward.
        no_signal: reason given to zero-variance groups: `NO_SIGNAL` or `FILTERED`.

    Returns:
        One credit per trajectory, sorted by key, independent of the order in which episodes finished.

    Raises:
        RewardError: for a reward that is NaN or infinite.
    """
    rules = rules or CreditRules()
    min_group = 1 if kind == "batch" else max(min_group, 1)
    by_token = kind == "batch"
    found: list[tuple[Trajectory, str | None, GroupMember | None]] = []
    for group in groups:
        reasons = [
            exclusion_reason(trajectory) or (exclude(trajectory) if exclude else None) for trajectory in group.trajectories
        ]
        usable = [t for t, reason in zip(group.trajectories, reasons, strict=True) if reason is None]
        dropped = SIBLING_FAILED if on_failure == "drop_group" and FAILED in reasons else None
        dropped = dropped or (GROUP_TOO_SMALL if len(usable) < min_group else None)
        members = [] if dropped else [GroupMember.of(t, rules, by_token=by_token) for t in usable]
        if members and kind != "batch" and not set_group_values(members, kind) and kind != "group_batch":
            dropped = no_signal
        remaining = iter(members)
        for trajectory, reason in zip(group.trajectories, reasons, strict=True):
            member = next(remaining, None) if reason is None else None
            found.append((trajectory, reason or dropped, member))
    found.sort(key=lambda row: sort_key(row[0]))
    included = [member for _, reason, member in found if reason is None and member is not None]
    no_variance = kind in ("batch", "group_batch") and bool(included) and not normalize_batch(included)
    return count_ids(
        [_credit(trajectory, NO_SIGNAL if no_variance and not reason else reason, m) for trajectory, reason, m in found]
    )


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
    """Count every sampled id under `trained` or under the reason for its weight of 0.

    Raises:
        AssertionError: when the counts do not sum to the sampled ids, a bug here (invariant 1).
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
                trainable = trained_ids(credit.trajectory, index)
                tokens[credit.weights.reason] += trainable - trained_ids(credit.trajectory, index, credit.weights)
    sampled = sum(credit.trajectory.sampled_tokens for credit in credits)
    assert sum(tokens.values()) == sampled, f"{sampled} ids were sampled, {sum(tokens.values())} are accounted for: {tokens}"
    return StepCredits(tuple(credits), +tokens, sampled)


def sort_key(trajectory: Trajectory) -> tuple[str, int, str, int, int]:
    """Return the canonical sort key of a trajectory."""
    key = trajectory.key
    return key.phase, key.step, key.task, key.sample, key.attempt


def exclusion_reason(trajectory: Trajectory) -> str | None:
    """Return why a trajectory cannot be trained on, independent of its group; None if it can.

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
            f"the reward of task {key.task!r}, sample {key.sample} (step {key.step}) is {trajectory.reward}; a reward is a "
            "finite number, or None if it could not be computed: check the reward function"
        )
    return None


def set_group_values(members: Sequence[GroupMember], kind: Advantage) -> bool:
    """Set the values of a group's members.

    Returns:
        Whether they differ by more than rounding of the summed reward components.
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
    """Set the values of a batch's members: standardized over trained ids.

    Returns:
        Whether they differ.
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
    """Return the values of the ids that carry loss."""
    found = []
    for span, values in (member.token_values or {}).items():
        first = 1 if member.trajectory.spans[span].start == 0 else 0
        given = None if member.weights is None else member.weights.by_span.get(span)
        trained = range(first, member.trajectory.spans[span].trained)
        found += [values[offset] for offset in trained if given is None or given[offset]]
    return found

"""From rewards to advantages: each episode is compared with the others of its task.

`advantages` reads from top to bottom: which trajectories of a group are usable, what each of their
units (all of it, its turns, or its rows) returned, the formula, and an account of every sampled id.
There are no tensors here. What an id weighs in the loss is in `loss_weights.py`, what comes out is
a `Credit` (`credit.py`), of which `forward/batch.py` makes batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from turnwright.config import TrainConfig
from turnwright.config.names import ADVANTAGES, CRITIC_ADVANTAGES, GROUPLESS_ADVANTAGES
from turnwright.config.schema import CreditUnit, OnFailedEpisode
from turnwright.envs.resolve import call_error, load_object
from turnwright.errors import ConfigError, RewardError, UsageError
from turnwright.training.credit import (
    Credit,
    StepCredits,
    ValueTargets,
    count_ids,
    exclusion_reason,
    sort_key,
)
from turnwright.training.gae import GaeSettings, set_gae
from turnwright.training.group_member import (
    STD_FLOOR,
    GroupMember,
    Penalties,
    PerId,
    differ,
    discounted_returns,
)
from turnwright.training.loss_weights import (
    TURN_WEIGHTS,
    LossScale,
    loss_scale,
    trainable_tokens,
    with_turn_weights,
)
from turnwright.training.step_groups import StepGroupSettings, gagpo, gigpo, state_rloo, state_std
from turnwright.training.untrained_reasons import (
    CUT_BY_LENGTH,
    FAILED,
    FILTERED,
    GROUP_TOO_SMALL,
    NO_SIGNAL,
    OVERLONG,
    SIBLING_FAILED,
)
from turnwright.types import Group, Trajectory

PerTrajectory = Callable[[Trajectory], PerId | None]
"""Gives a number for each id of a trajectory that carries loss; None if it has no such id."""
BY_STATE = {"gigpo": gigpo, "gagpo": gagpo, "state_rloo": state_rloo, "state_std": state_std}
"""Formulas that compare turns that began in equal states."""


@dataclass(frozen=True, slots=True)
class CreditChoice:
    """What a recipe says of credit, or its algorithm where the recipe leaves it open."""

    advantage: str
    credit: CreditUnit
    discount: float
    gae_lambda: float | None
    refill: int


@dataclass(frozen=True, slots=True)
class CreditSettings:
    """How a step's rewards become advantages; `advantages` has the formulas."""

    kind: str = "std"
    """Name of the formula."""
    own: OwnAdvantage | None = None
    """In place of the formula; a group whose advantages are all 0 has no signal."""
    credit: CreditUnit = "trajectory"
    discount: float = 1.0
    """Factor on a reward one turn later."""
    by_state: StepGroupSettings = field(default_factory=StepGroupSettings)
    """How turns that began in equal states are compared."""
    gae: GaeSettings = field(default_factory=GaeSettings)
    """Lambda and token discounts of generalized advantages."""
    scale: LossScale = TURN_WEIGHTS
    """Weights of a trajectory's ids in the loss; ids of weight 0 are not trained."""
    overlong_tokens: int | None = None
    """Length from which an episode loses a full point of reward; None takes none."""
    overlong_buffer: float = 0.2
    """Share of `overlong_tokens`, at its end, over which that penalty grows linearly."""
    overlong_filter: bool = False
    """Whether episodes cut by a length limit are compared, but not trained."""
    keep_group: KeepGroup | None = None
    """Groups that it does not keep are `FILTERED`."""
    kept_share: float = 1.0
    """Share of the groups that are kept, by the deviation of their rewards; others are
    `FILTERED`."""
    min_group: int = 2
    """Minimum usable trajectories; smaller groups are dropped and counted. `batch` and `running`
    drop none."""
    on_failure: OnFailedEpisode = "survivors"
    """Effect of a failed trajectory on its group: `drop_group` trains none of it, `survivors`
    compares the others. Both bias: the first towards tasks that seldom fail, the second towards
    behavior that seldom does."""
    no_signal: str = NO_SIGNAL
    """Reason given to zero-variance groups: `NO_SIGNAL`, or `FILTERED` where they are replaced."""

    @classmethod
    def of(cls, config: TrainConfig, choice: CreditChoice, running: OwnAdvantage) -> CreditSettings:
        """Return the settings of a recipe and its algorithm.

        `running` is what sets the advantages of that kind. Raise `ConfigError` for an unusable
        function.
        """
        kind = choice.advantage
        own: OwnAdvantage | None = None
        if kind == "running":
            own = running
        elif kind not in ADVANTAGES:
            own = own_advantage(kind)

        keep_group = None if config.group_filter is None else group_filter(config.group_filter)
        # A filter decides which groups are replaced; what it keeps without a signal stays.
        replaced = choice.refill and keep_group is None

        return cls(
            kind=kind,
            own=own,
            credit=choice.credit,
            discount=choice.discount,
            by_state=StepGroupSettings(config.state, choice.gae_lambda, config.step_weight),
            gae=GaeSettings(
                1.0 if choice.gae_lambda is None else choice.gae_lambda,
                config.token_discount,
                config.token_lambda,
            ),
            scale=with_turn_weights(loss_scale(config.loss_scale)),
            overlong_tokens=config.overlong_tokens,
            overlong_buffer=config.overlong_buffer,
            overlong_filter=config.overlong_filter,
            keep_group=keep_group,
            kept_share=config.keep_groups,
            min_group=config.min_group,
            on_failure=config.on_failure,
            no_signal=FILTERED if replaced else NO_SIGNAL,
        )

    @property
    def has_critic(self) -> bool:
        """Whether advantages need the values of a critic."""
        return self.kind in CRITIC_ADVANTAGES

    @property
    def has_running_baseline(self) -> bool:
        """Whether the baseline is a running average of each agent's rewards, so that each agent of
        an episode is compared by itself."""
        return self.kind == "running"


def advantages(
    groups: Sequence[Group],
    settings: CreditSettings | None = None,
    penalty: PerTrajectory | None = None,
    values: PerTrajectory | None = None,
) -> StepCredits:
    """Compute advantages by comparing trajectories within each group, or within the batch.

    G_ik is the return of trajectory i from its unit k on: the full reward, or with
    ``credit = "turn"`` the rewards of turn k and later. It is 0 if i ended before k: the end is a
    state like any other::

        mean         G_ik - mean_j G_jk                  over the n of the group
                                                         (Dr. GRPO, arXiv 2503.20783)
        std          (G_ik - mean_j G_jk) / (s + 1e-4)   s^2 = sum_jk (G_jk - mean_k)^2
                                                         / ((n - 1) K)
                                                         (GRPO: DeepSeekMath, arXiv 2402.03300,
                                                         section 4.1.2)
        rloo         G_ik - mean_{j != i} G_jk           (RLOO, arXiv 2402.14740)
        maxrl        (G_ik - mean_j G_jk) / mean_j G_j0  (MaxRL, arXiv 2602.02710)
        running      G_ik - average                      over earlier episodes of the agent
                                                         (RAE, arXiv 2506.24119), see `baselines.py`
        batch        (G - mean) / (s + 1e-4)             over all trained ids of the batch, s
                                                         dividing by their number
        group_batch  the same of G_ik - mean_j G_jk      (REINFORCE++, arXiv 2501.03262)

    `gigpo`, `gagpo`, `state_rloo` and `state_std` compare the turns that began in equal states
    instead, see `step_groups.py`. `gae`, `gae_turn` and `gae_bilevel` compare an episode with what
    a critic expected of it, see `gae.py`, and normalize over the batch as `batch` does.

    K is the group's largest number of units, 1 unless credit is by turn. `std` then is the sample
    deviation (n - 1), as in TRL and verl. The `rloo` baseline is independent of trajectory i, of
    its rewards and its end, so the policy gradient is unbiased at every turn; with `mean` it is (n
    - 1) / n of that. A mean over only the siblings that reached turn k would be biased: it would
    shrink the advantages of the few that did.

    Where an agent function gave its rows rewards of their own, G_ir is the reward of row r of
    trajectory i, and the baseline is made of the trajectories' means m_j over their rows: a
    trajectory with many rows weighs as much as one with few::

        mean         G_ir - mean_j m_j
        std          (G_ir - mean_j m_j) / (s + 1e-4)    s^2 = sum_j mean_r (G_jr - mean_j m_j)^2
                                                         / (n - 1)
        rloo         G_ir - mean_{j != i} m_j

    Args:
        groups: of any sizes; failed trajectories and those without a reward are excluded from the
            baseline.
        settings: the formula, credit within a trajectory, and which groups and ids are left out; by
            default `std` of the full reward.
        penalty: what is subtracted from a trajectory's reward, per id.
        values: what the critic expects before each id that carries loss, for the last three.

    Returns:
        Credits, one per trajectory, sorted by key, so that they do not depend on the order in
        which episodes finished, and the account of every sampled id.

    Raises:
        RewardError: for a reward that is NaN or infinite, or negative with `maxrl`.
    """
    settings = settings or CreditSettings()
    own = None if settings.own is None else settings.own(groups)

    reasons_by_group = []
    comparisons = []
    for group in groups:
        reasons = [exclusion_reason(trajectory) for trajectory in group.trajectories]
        reasons_by_group.append(reasons)
        comparisons.append(_compare(group, reasons, settings, own, penalty, values))
    comparisons = _most_varied(comparisons, settings.kept_share)
    rejected = [compared.rejected for compared in comparisons if compared.rejected]

    # Each trajectory was compared, or has a reason why none of its ids is trained.
    outcomes: list[tuple[Trajectory, str | None, GroupMember | None]] = []
    for group, reasons, compared in zip(groups, reasons_by_group, comparisons, strict=True):
        remaining = iter(compared.members)
        for trajectory, reason in zip(group.trajectories, reasons, strict=True):
            member = next(remaining, None) if reason is None else None
            reason = reason or compared.dropped
            if settings.overlong_filter and trajectory.stop in CUT_BY_LENGTH:
                reason = reason or OVERLONG
            outcomes.append((trajectory, reason, member))
    outcomes.sort(key=lambda row: sort_key(row[0]))

    # Some formulas compare with the complete batch, whose trajectories are known only now.
    included = [member for _, reason, member in outcomes if reason is None and member is not None]
    of_batch = settings.kind in ("batch", "group_batch") or settings.has_critic
    by_batch = of_batch and bool(included)
    no_variance = by_batch and not normalize_batch(included)

    credits = []
    for trajectory, reason, member in outcomes:
        if no_variance:
            reason = reason or NO_SIGNAL
        credits.append(_credit(trajectory, reason, member))
    return replace(count_ids(credits), rejected=tuple(rejected))


def without_signal(groups: Sequence[Group], settings: CreditSettings) -> list[bool]:
    """Return of each group whether it has no signal, so that dynamic sampling replaces it: a
    zero-variance one (length penalty included), or one that `train.group_filter` rejects."""
    reasons = (FILTERED, NO_SIGNAL) if settings.keep_group is None else (FILTERED,)
    # The share is that of the groups which are trained after others were replaced.
    settings = replace(settings, kept_share=1.0)
    if settings.has_critic:
        # Compared with a critic, a group of equal rewards has a signal.
        settings = replace(settings, kind="batch")
        reasons = (FILTERED,)
    credits = advantages(groups, settings).credits
    tied = {id(credit.trajectory) for credit in credits if credit.reason in reasons}
    return [any(id(trajectory) in tied for trajectory in group.trajectories) for group in groups]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A group whose usable trajectories were compared, or why they were not."""

    members: Sequence[GroupMember] = ()
    """One for each usable trajectory."""
    dropped: str | None = None
    """Reason why none of the group is trained."""
    rejected: str = ""
    """What the filter of groups gave as its reason."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the rewards of usable trajectories; 0 of a group that its filter
        leaves out, or that is replaced."""
        if self.dropped == FILTERED:
            return 0.0
        rewards = [member.trajectory.reward for member in self.members]
        return statistics.pstdev(reward for reward in rewards if reward is not None)


def _compare(
    group: Group,
    reasons: Sequence[str | None],
    settings: CreditSettings,
    own: SetValues | None,
    penalty: PerTrajectory | None,
    values: PerTrajectory | None,
) -> _Comparison:
    """Compare the trajectories of a group that have no reason against it."""
    if settings.on_failure == "drop_group" and FAILED in reasons:
        return _Comparison(dropped=SIBLING_FAILED)
    # Where others are compared than those of the group, one trajectory is enough.
    fewest = 1 if settings.kind in GROUPLESS_ADVANTAGES else max(settings.min_group, 1)
    if reasons.count(None) < fewest:
        return _Comparison(dropped=GROUP_TOO_SMALL)

    usable = []
    for trajectory, reason in zip(group.trajectories, reasons, strict=True):
        if reason is None:
            usable.append(trajectory)
    members = _members_of(usable, settings, penalty)
    if settings.keep_group is not None:
        choice = settings.keep_group(usable)
        if not choice.keep:
            return _Comparison(members, FILTERED, choice.reason)

    if own is not None:
        has_signal = own(members)
    elif settings.kind == "batch":
        has_signal = True  # compared with the batch instead
    elif settings.has_critic:
        _set_generalized(members, settings, values)
        has_signal = True
    else:
        has_signal = set_group_values(members, settings) or settings.kind == "group_batch"
    return _Comparison(members, None if has_signal else settings.no_signal)


def _most_varied(comparisons: Sequence[_Comparison], share: float) -> list[_Comparison]:
    """Return comparisons of which only the share with the largest deviations of rewards is trained;
    of equal ones, the first by key."""
    compared = [number for number, one in enumerate(comparisons) if one.members]
    kept = max(1, round(share * len(compared)))
    if kept >= len(compared):
        return list(comparisons)

    def rank(number: int) -> tuple[float, tuple[str, int, str, int, int]]:
        comparison = comparisons[number]
        first = min(sort_key(member.trajectory) for member in comparison.members)
        return -comparison.deviation, first

    chosen = list(comparisons)
    for number in sorted(compared, key=rank)[kept:]:
        chosen[number] = replace(chosen[number], dropped=FILTERED)
    return chosen


def _set_generalized(
    members: Sequence[GroupMember],
    settings: CreditSettings,
    values: PerTrajectory | None,
) -> None:
    if values is None:
        raise UsageError(
            f'advantage = "{settings.kind}" compares with a critic, whose values only a Trainer '
            "computes; call Trainer.step_credits instead of advantages"
        )
    for member in members:
        set_gae(member, settings.kind, values(member.trajectory) or {}, settings.gae)


def _members_of(
    usable: Sequence[Trajectory],
    settings: CreditSettings,
    penalty: PerTrajectory | None,
) -> list[GroupMember]:
    # Where one trajectory has rewards by row, the others are compared with it as wholes.
    if any(trajectory.row_rewards for trajectory in usable):
        settings = replace(settings, credit="trajectory")

    members = []
    for trajectory in usable:
        penalties = None if penalty is None else penalty(trajectory)
        members.append(_member_of(trajectory, settings, penalties))
    return members


def _member_of(
    trajectory: Trajectory, settings: CreditSettings, penalties: Penalties | None
) -> GroupMember:
    """Assign a trajectory's reward to its units, less the penalties of its ids.

    Where advantages are normalized over the batch, penalties stay with their ids for
    `GroupMember.token_returns`.
    """
    assert trajectory.reward is not None
    row_units = trajectory.row_units()
    if row_units:
        units = _spans_of(trajectory, [turns for turns, _ in row_units])
    elif settings.credit == "turn" and trajectory.turns:
        units = _spans_of(trajectory, [[number] for number in range(len(trajectory.turns))])
    else:
        units = [[index for index, span in enumerate(trajectory.spans) if span.sampled]]

    # The reward of each unit, and how much of it the unit before returns.
    if row_units:
        rewards = [reward for _, reward in row_units]
        discount = 0.0
    elif len(units) > 1:
        rewards = [turn.reward or 0.0 for turn in trajectory.turns]
        # The last turn also gets what the episode's reward exceeds the sum of its turns' by.
        rewards[-1] += trajectory.reward - sum(rewards)
        discount = settings.discount
    else:
        rewards = [float(trajectory.reward)]
        discount = 1.0

    # What length and distance from the reference cost.
    if settings.overlong_tokens is not None:
        added = overlong_penalty(trajectory, settings.overlong_tokens, settings.overlong_buffer)
        if row_units:
            rewards = [reward + added for reward in rewards]
        else:
            rewards[-1] += added
    keeps_penalties = settings.kind in ("batch", "gae")
    if penalties is not None and not keeps_penalties:
        for unit, spans in enumerate(units):
            rewards[unit] -= sum(sum(penalties.get(span, ())) for span in spans)

    return GroupMember(
        trajectory=trajectory,
        weights=settings.scale(trajectory),
        units=units,
        rewards=rewards,
        returns=discounted_returns(rewards, discount),
        penalties=penalties if keeps_penalties else None,
        discount=discount,
    )


def _spans_of(trajectory: Trajectory, units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the spans of units that are given by their turns.

    Spans without a turn were sampled in failed attempts, and no row has their turn; they carry no
    loss, and the last unit has them.
    """
    spans_by_unit = []
    for turns in units:
        spans_by_unit.append([span for turn in turns for span in trajectory.turns[turn].spans])
    assigned = {span for spans in spans_by_unit for span in spans}
    for index, span in enumerate(trajectory.spans):
        if span.sampled and index not in assigned:
            spans_by_unit[-1].append(index)
    return spans_by_unit


def _credit(trajectory: Trajectory, reason: str | None, member: GroupMember | None) -> Credit:
    weights = None if member is None else member.weights
    for_critic = None
    if member is not None and member.targets is not None:
        for_critic = ValueTargets(member.targets, member.spread(member.returns))
    tokens = trainable_tokens(trajectory, weights)
    if reason is not None or member is None:
        return Credit(trajectory, None, reason, tokens, None, weights, for_critic)

    # The mean over the ids, for metrics and the viewer.
    values = member.by_span()
    if values is None:
        mean = member.values[0]
    elif member.token_values is not None:
        id_values = [value for span in member.token_values.values() for value in span]
        mean = math.fsum(id_values) / max(len(id_values), 1)
    else:
        counts = member.trainable_per_unit()
        total = math.fsum(value * count for value, count in zip(member.values, counts, strict=True))
        mean = total / max(sum(counts), 1)
    return Credit(trajectory, mean, None, tokens, values, weights, for_critic)


def set_group_values(members: Sequence[GroupMember], settings: CreditSettings) -> bool:
    """Set the values of a group's members; return whether they differ by more than rounding of the
    summed reward components."""
    kind = settings.kind
    if kind == "maxrl":
        _refuse_negative(members)
    if any(member.trajectory.row_rewards for member in members):
        return _set_row_values(members, kind)
    if kind in BY_STATE:
        return BY_STATE[kind](members, settings.by_state)

    n = len(members)
    longest = max(len(member.units) for member in members)
    squares: list[float] = []
    has_signal = False
    for unit in range(longest):
        returns = [member.return_from(unit) for member in members]
        total = math.fsum(returns)
        mean = total / n
        has_signal = has_signal or differ(returns)
        squares += [(value - mean) ** 2 for value in returns]

        for member, value in zip(members, returns, strict=True):
            if unit >= len(member.units):
                continue  # it ended before: compared, but without an id to give the value to
            if kind == "rloo" and n > 1:
                member.values.append((value * n - total) / (n - 1))
            else:
                member.values.append(value - mean)

    if kind == "std" and n > 1:
        _divide(members, math.sqrt(math.fsum(squares) / ((n - 1) * longest)))
    if kind == "maxrl":
        return _divide_by_mean(members, [member.returns[0] for member in members])
    return has_signal


def _set_row_values(members: Sequence[GroupMember], kind: str) -> bool:
    """Set the values of a group's members whose units are rows, as `set_group_values` does."""
    n = len(members)
    means = [math.fsum(member.returns) / len(member.returns) for member in members]
    total = math.fsum(means)
    squares = []
    for member, mean in zip(members, means, strict=True):
        if kind in ("rloo", "state_rloo", "state_std") and n > 1:
            baseline = (total - mean) / (n - 1)
        else:
            baseline = total / n
        member.values = [value - baseline for value in member.returns]
        deviations = math.fsum((value - total / n) ** 2 for value in member.returns)
        squares.append(deviations / len(member.returns))

    if kind in ("std", "gigpo", "gagpo", "state_std") and n > 1:
        _divide(members, math.sqrt(math.fsum(squares) / (n - 1)))
    has_signal = differ([value for member in members for value in member.returns])
    if kind == "maxrl":
        return _divide_by_mean(members, means) and has_signal
    return has_signal


def _refuse_negative(members: Sequence[GroupMember]) -> None:
    for member in members:
        reward = member.trajectory.reward
        if reward is not None and reward < 0:
            key = member.trajectory.key
            raise RewardError(
                f"the reward of task {key.task!r}, sample {key.sample} (step {key.metrics_step}) "
                f'is {reward}; advantage = "maxrl" divides by the mean reward of a task, which '
                "needs rewards of at least 0: shift them, or choose another algorithm"
            )


def _divide_by_mean(members: Sequence[GroupMember], returns: Sequence[float]) -> bool:
    """Divide the values by the mean return; return whether there is one."""
    mean = math.fsum(returns) / len(returns)
    if mean <= 0 or not differ(returns):
        for member in members:
            member.values = [0.0] * len(member.values)
        return False
    for member in members:
        member.values = [value / mean for value in member.values]
    return True


def _divide(members: Sequence[GroupMember], deviation: float) -> None:
    for member in members:
        member.values = [value / (deviation + STD_FLOOR) for value in member.values]


def normalize_batch(members: Sequence[GroupMember]) -> bool:
    """Set the values of a batch's members, standardized over all ids that carry loss; return
    whether they differ."""
    # Values with the number of ids that have them.
    weighted: list[tuple[float, int]] = []
    for member in members:
        if member.penalties is None and member.token_values is None:
            member.values = member.values or list(member.returns)
            weighted += zip(member.values, member.trainable_per_unit(), strict=True)
        else:
            if member.token_values is None:
                member.set_token_values()
            weighted += [(value, 1) for value in member.trained_values()]

    trained = [value for value, count in weighted if count]
    if not trained or not differ(trained):
        return False

    ids = sum(count for _, count in weighted)
    mean = math.fsum(value * count for value, count in weighted) / ids
    variance = math.fsum(count * (value - mean) ** 2 for value, count in weighted) / ids
    scale = math.sqrt(variance) + STD_FLOOR
    for member in members:
        member.values = [(value - mean) / scale for value in member.values]
        for span_values in (member.token_values or {}).values():
            span_values[:] = [(value - mean) / scale for value in span_values]
    return True


def overlong_penalty(trajectory: Trajectory, max_tokens: int, buffer: float) -> float:
    """Compute DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) in points of reward,
    from 0 to -1.

    With n the trajectory's sampled tokens over all turns, and c = buffer *
    max_tokens (0 < buffer <= 1)::

        0                             n <= max_tokens - c
        (max_tokens - c - n) / c      max_tokens - c < n <= max_tokens
        -1                            n > max_tokens
    """
    length = trajectory.sampled_tokens
    cache = buffer * max_tokens
    return min(0.0, max(-1.0, (max_tokens - cache - length) / cache))


SetValues = Callable[[Sequence[GroupMember]], bool]
"""Sets the values of a group's members; returns whether one is not 0."""
OwnAdvantage = Callable[[Sequence[Group]], SetValues]
"""Returns what sets the values in the groups of a step."""


class GroupChoice(NamedTuple):
    """Whether a group is trained, and the filter's reason where it is not."""

    keep: bool
    reason: str = ""


KeepGroup = Callable[[Sequence[Trajectory]], GroupChoice]
"""Decides from a group's usable trajectories whether it is trained."""


def own_advantage(spec: str) -> OwnAdvantage:
    """Load ``file.py:function(trajectories, returns)``.

    It gets the usable trajectories of a group and, for each, its returns from every unit on (one,
    or one per turn with ``credit = "turn"``). It returns their advantages in the same form, or a
    number for each trajectory.

    Raises:
        ConfigError: for something else than such a function. Its calls raise `UsageError` with
            what is wrong with the result.
    """
    function = _own_function(spec, "advantage", 2)

    def set_values(members: Sequence[GroupMember]) -> bool:
        def refuse(why: str) -> UsageError:
            return UsageError(
                f"train.advantage = {spec!r}, task {members[0].trajectory.key.task!r}: {why}"
            )

        trajectories = [member.trajectory for member in members]
        returns = [tuple(member.returns) for member in members]
        try:
            entries = list(function(trajectories, returns))
        except Exception as error:
            raise refuse(f"raised {type(error).__name__}: {error}") from error
        if len(entries) != len(members):
            raise refuse(f"returned {len(entries)} entries for {len(members)} trajectories")

        for number, (entry, member) in enumerate(zip(entries, members, strict=True)):
            per_unit = entry if isinstance(entry, Sequence) else [entry] * len(member.units)
            try:
                values = [float(value) for value in per_unit]
            except (TypeError, ValueError):
                raise refuse(
                    f"entry {number}: {entry!r:.60} is neither a number nor numbers"
                ) from None
            if len(values) != len(member.units) or not all(map(math.isfinite, values)):
                raise refuse(
                    f"entry {number}: must be {len(member.units)} finite numbers, not {entry!r:.60}"
                )
            member.values = values
        return any(value for member in members for value in member.values)

    return lambda groups: set_values


def group_filter(spec: str) -> KeepGroup:
    """Load ``file.py:function(trajectories) -> bool``, or a filter of an installed framework, such
    as slime's ``function(args, samples, **kwargs)``; any may return slime's
    ``DynamicFilterOutput``.

    Raises:
        ConfigError: for something else. Calls raise `UsageError` for an error in it and for
            another result.
    """
    from turnwright.envs.foreign import adapt_group_filter

    function = adapt_group_filter(load_object(spec)) or _own_function(spec, "group_filter", 1)

    def keep(trajectories: Sequence[Trajectory]) -> GroupChoice:
        where = f"train.group_filter = {spec!r}, task {trajectories[0].key.task!r}"
        try:
            answer = function(list(trajectories))
            choice = GroupChoice(answer) if isinstance(answer, bool) else read_choice(answer)
        except Exception as error:
            raise UsageError(f"{where}: raised {type(error).__name__}: {error}") from error
        if choice is None:
            raise UsageError(
                f"{where}: returned {answer!r:.60}; return True to train the group, False to leave "
                "it out"
            )
        return choice

    return keep


def read_choice(answer: Any) -> GroupChoice | None:
    """Read a `DynamicFilterOutput`, whose `keep` may be a tensor; None for another object.

    No spare groups are sampled here, so a group that it keeps when there are too few is kept.
    """
    if not (hasattr(answer, "keep") and hasattr(answer, "reason")):
        return None
    if bool(answer.keep) or bool(getattr(answer, "keep_when_insufficient", False)):
        return GroupChoice(True)
    return GroupChoice(False, str(answer.reason or ""))


def _own_function(spec: str, key: str, arguments: int) -> Callable[..., Any]:
    function: Any = load_object(spec)
    if not callable(function):
        raise ConfigError(f"train.{key} = {spec!r}: is {type(function).__name__}, not a function")
    if wrong := call_error(function, *[None] * arguments):
        names = ("the trajectories of a group", "their returns")[:arguments]
        raise ConfigError(f"train.{key} = {spec!r}: must take {' and '.join(names)} ({wrong})")
    checked: Callable[..., Any] = function
    return checked

"""Credit of a step's sampled ids: returns, loss weights, advantages, and the account of
every id. No tensors here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from turnwright.config import TrainConfig
from turnwright.config.names import ADVANTAGES, loss_scale_error
from turnwright.config.schema import CreditUnit, OnFailedEpisode
from turnwright.envs.resolve import call_error, load_object
from turnwright.errors import ConfigError, RewardError, UsageError
from turnwright.types import Group, StopReason, Trajectory


def overlong_penalty(trajectory: Trajectory, max_tokens: int, buffer: float) -> float:
    """Compute DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) in points
    of reward, from 0 to -1.

    With n the trajectory's sampled tokens over all turns, and c = buffer *
    max_tokens (0 < buffer <= 1)::

        0                             n <= max_tokens - c
        (max_tokens - c - n) / c      max_tokens - c < n <= max_tokens
        -1                            n > max_tokens
    """
    length, cache = trajectory.sampled_tokens, buffer * max_tokens
    return min(0.0, max(-1.0, (max_tokens - cache - length) / cache))


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
OVERLONG = "overlong"
"""The episode was cut by a length limit, and `overlong_filter` trains no such episode."""
NO_CONTEXT = "no_context"
"""First id of a path: no earlier position predicts it."""
EARLIER_ROUND = "earlier_round"
"""Not in the last round, the only one trained with `loss_scale = "last_round"`."""
WEIGHED = "weighed"
"""An agent function gave its reply's ids weight 0."""
LOSS_SCALE = "loss_scale"
"""A custom loss scale returned weight 0."""
NO_TEACHER = "no_teacher"
"""No reward trains the id, and no teacher answered for it."""
MISMATCH = "mismatch"
"""Excluded by a correction: engine and trainer disagree too much about the id or its trajectory."""
REJECTED = "groups_filtered."
"""Start of the metrics that count groups by the reason of `train.group_filter`."""
TRAINED = "trained"
"""Not a reason: ids that carry loss."""

CUT_BY_LENGTH = frozenset((StopReason.TURN_LENGTH, StopReason.EPISODE_TOKENS, StopReason.CONTEXT))

FLAT = 1e-12
"""Relative difference below which returns are equal."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL, so that tiny reward differences are not amplified."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weight of each id in a trajectory's sampled spans."""

    by_span: Mapping[int, Sequence[float]]
    """Span index -> weight per id; missing spans have weight 1."""
    reason: str
    """Reason under which ids of weight 0 are counted."""
    no_teacher: Mapping[int, int] = field(default_factory=dict)
    """Span index -> how many of them are `NO_TEACHER` instead."""

    def of(self, span: int, offset: int) -> float:
        """Return the weight of one id."""
        found = self.by_span.get(span)
        return 1.0 if found is None else found[offset]


LossScale = Callable[[Trajectory], TokenWeights | None]


def loss_scale(spec: str) -> LossScale | None:
    """Resolve `train.loss_scale`, None if all sampled ids count alike; raise `ConfigError` for no
    function of a trajectory."""
    if wrong := loss_scale_error(spec):
        raise ConfigError(f"train.loss_scale = {spec!r}: {wrong}")
    if spec == "default":
        return None
    if spec == "last_round":
        return last_round
    function = load_object(spec)
    if not callable(function):
        raise ConfigError(
            f"train.loss_scale = {spec!r}: is {type(function).__name__}, not a function of a "
            "trajectory"
        )
    if wrong := call_error(function, None):
        raise ConfigError(
            f"train.loss_scale = {spec!r}: must take one argument, the trajectory ({wrong})"
        )
    return lambda trajectory: custom_weights(function, spec, trajectory)


def last_round(trajectory: Trajectory) -> TokenWeights:
    """Return weight 1 for each agent's replies after the last user message, 0 for earlier ones. A
    message that the environment writes as the user counts; a tool result does not."""
    last_replies: set[int] = set()
    last = {turn.agent: index for index, turn in enumerate(trajectory.turns)}
    for index in last.values():
        for number in reversed(trajectory.turn_chain(index)):
            turn = trajectory.turns[number]
            last_replies.update(turn.spans)
            if any(message.role == "user" for message in turn.messages):
                break
    if not trajectory.turns:
        return TokenWeights({}, EARLIER_ROUND)
    earlier = [
        i for i, span in enumerate(trajectory.spans) if span.sampled and i not in last_replies
    ]
    return TokenWeights({i: (0.0,) * len(trajectory.spans[i].ids) for i in earlier}, EARLIER_ROUND)


def custom_weights(
    function: Callable[[Trajectory], Any], spec: str, trajectory: Trajectory
) -> TokenWeights:
    """Call a custom loss scale; raise `UsageError` unless each turn gets a weight, or one per id,
    finite and not negative."""

    def refuse(why: str) -> UsageError:
        key = trajectory.key
        return UsageError(
            f"train.loss_scale = {spec!r}, task {key.task!r}, sample {key.sample}: {why}"
        )

    try:
        found = list(function(trajectory))
    except Exception as error:
        raise refuse(f"raised {type(error).__name__}: {error}") from error
    if len(found) != len(trajectory.turns):
        raise refuse(f"returned {len(found)} entries for {len(trajectory.turns)} turns")
    by_span: dict[int, Sequence[float]] = {}
    for number, (given, turn) in enumerate(zip(found, trajectory.turns, strict=True)):
        spans = [(index, len(trajectory.spans[index].ids)) for index in turn.spans]
        size = sum(length for _, length in spans)
        try:
            numbers = (
                [float(given)] * size
                if isinstance(given, int | float)
                else [float(value) for value in given]
            )
        except (TypeError, ValueError):
            raise refuse(
                f"turn {number + 1}: {given!r:.60} is neither a number nor numbers"
            ) from None
        if len(numbers) != size:
            raise refuse(f"turn {number + 1}: {len(numbers)} weights for {size} sampled ids")
        if not all(math.isfinite(value) and value >= 0 for value in numbers):
            raise refuse(f"turn {number + 1}: weights must be finite and at least 0")
        for index, length in spans:
            by_span[index] = tuple(numbers[:length])
            numbers = numbers[length:]
    return TokenWeights(by_span, LOSS_SCALE)


def with_turn_weights(scale: LossScale | None) -> LossScale:
    """Return a loss scale times the weights that agent functions gave their replies."""

    def scaled(trajectory: Trajectory) -> TokenWeights | None:
        found, given = None if scale is None else scale(trajectory), trajectory.turn_weights()
        if not given:
            return found
        if found is None:
            return TokenWeights(given, WEIGHED)
        both = {
            index: tuple(found.of(index, offset) * weight for offset, weight in enumerate(weights))
            for index, weights in given.items()
        }
        return TokenWeights({**found.by_span, **both}, found.reason)

    return scaled


TURN_WEIGHTS = with_turn_weights(None)
"""The weights that agent functions gave their replies, and no other."""

Penalties = Mapping[int, Sequence[float]]
"""Span index -> penalty per id, in points of reward."""


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
    def of(
        cls,
        config: TrainConfig,
        kind: str,
        refill: int,
        running: OwnAdvantage | None = None,
    ) -> CreditSettings:
        """Return the settings of a recipe and its algorithm.

        `kind` and `refill` are the algorithm's where the recipe leaves them open; `running` is
        what sets the advantages of that kind. Raise `ConfigError` for an unusable function.
        """
        if kind == "running":
            own = running
        else:
            own = None if kind in ADVANTAGES else own_advantage(kind)

        keep_group = None if config.group_filter is None else group_filter(config.group_filter)
        # A filter decides which groups are replaced; what it keeps without a signal stays.
        replaced = refill and keep_group is None

        return cls(
            kind=kind,
            own=own,
            credit=config.credit,
            discount=config.discount,
            scale=with_turn_weights(loss_scale(config.loss_scale)),
            overlong_tokens=config.overlong_tokens,
            overlong_buffer=config.overlong_buffer,
            overlong_filter=config.overlong_filter,
            keep_group=keep_group,
            min_group=config.min_group,
            on_failure=config.on_failure,
            no_signal=FILTERED if replaced else NO_SIGNAL,
        )

    @property
    def by_agent(self) -> bool:
        """Whether each agent of an episode is compared by itself."""
        return self.kind == "running"


@dataclass(slots=True)
class GroupMember:
    """Trajectory being compared, as units (turns, rows, or all of it) with a return each."""

    trajectory: Trajectory
    weights: TokenWeights | None
    units: list[list[int]]
    """Spans of each unit, in order of time."""
    returns: list[float]
    """Discounted rewards from a unit to the end; includes penalties unless
    they are kept per token."""
    penalties: Penalties | None
    discount: float
    values: list[float] = field(default_factory=list)
    """Advantage per unit."""
    token_values: dict[int, list[float]] | None = None
    """Advantage per id of a span, if ids of a unit differ."""

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        settings: CreditSettings,
        penalties: Penalties | None,
    ) -> GroupMember:
        """Assign a trajectory's reward to its units, less the penalties of its ids.

        Where advantages are normalized over the batch, penalties stay with their ids for
        `token_returns`.
        """
        assert trajectory.reward is not None
        by_row = trajectory.row_units()
        by_turn = settings.credit == "turn" and bool(trajectory.turns)

        # Units: all of the trajectory, or its rows, or its turns.
        sampled = [index for index, span in enumerate(trajectory.spans) if span.sampled]
        units = [sampled]
        if by_row or by_turn:
            chosen = [turns for turns, _ in by_row]
            if not by_row:
                chosen = [[number] for number in range(len(trajectory.turns))]
            units = []
            for turns in chosen:
                units.append([span for turn in turns for span in trajectory.turns[turn].spans])
            assigned = {span for spans in units for span in spans}
            # Spans without a turn were sampled in failed attempts, and no row has their turn; they
            # carry no loss.
            units[-1] += [span for span in sampled if span not in assigned]

        # The reward of each unit.
        rewards = [float(trajectory.reward)]
        if by_row:
            rewards = [reward for _, reward in by_row]
        elif len(units) > 1:
            # The last turn also gets what the episode's reward exceeds the
            # sum of the turns' own by.
            rewards = [turn.reward or 0.0 for turn in trajectory.turns]
            rewards[-1] += trajectory.reward - sum(rewards)

        # What length and distance from the reference cost.
        if settings.overlong_tokens is not None:
            added = overlong_penalty(trajectory, settings.overlong_tokens, settings.overlong_buffer)
            if by_row:
                rewards = [reward + added for reward in rewards]
            else:
                rewards[-1] += added
        keeps_penalties = settings.kind == "batch"
        if penalties is not None and not keeps_penalties:
            for unit, spans in enumerate(units):
                rewards[unit] -= sum(sum(penalties.get(span, ())) for span in spans)

        # A row's return is its own reward.
        discount = settings.discount if len(units) > 1 else 1.0
        if by_row:
            discount = 0.0
        return cls(
            trajectory,
            settings.scale(trajectory),
            units,
            discounted_returns(rewards, discount),
            penalties if keeps_penalties else None,
            discount,
        )

    def return_from(self, unit: int) -> float:
        """Return the return from a unit on; 0 after the last unit."""
        return self.returns[unit] if unit < len(self.returns) else 0.0

    def trainable_per_unit(self) -> list[int]:
        """Count the ids of each unit that carry loss."""
        return [
            sum(trained_ids(self.trajectory, span, self.weights) for span in spans)
            for spans in self.units
        ]

    def token_returns(self) -> Iterator[tuple[int, int, float]]:
        """Yield (span, offset, return from that id on) of every sampled id, latest first,
        with per-token penalties."""
        later = 0.0
        for unit in reversed(range(len(self.units))):
            penalty = self.discount * later
            for span in reversed(self.units[unit]):
                values = (self.penalties or {}).get(span)
                for offset in reversed(range(len(self.trajectory.spans[span].ids))):
                    penalty += values[offset] if values is not None else 0.0
                    yield span, offset, self.returns[unit] - penalty
            later = penalty

    def by_span(self) -> dict[int, Sequence[float]] | None:
        """Return the advantage of each sampled id; None if all are equal."""
        if self.token_values is not None:
            return dict(self.token_values)
        if len(self.values) == 1:
            return None
        ids = self.trajectory.spans
        return {
            span: (value,) * len(ids[span].ids)
            for value, spans in zip(self.values, self.units, strict=True)
            for span in spans
        }


SetValues = Callable[[Sequence[GroupMember]], bool]
"""Sets the values of a group's members; returns whether one is not 0."""
OwnAdvantage = Callable[[Sequence[Group]], SetValues]
"""Returns what sets the values in the groups of a step."""


class GroupChoice(NamedTuple):
    """Whether a group is trained, and the filter's reason where it is not."""

    keep: bool
    reason: str = ""


KeepGroup = Callable[[Sequence[Trajectory]], GroupChoice]


def own_advantage(spec: str) -> OwnAdvantage:
    """Load ``file.py:function(trajectories, returns)``, of the usable trajectories of a group and,
    for each, its returns from every unit on (one, or one per turn with ``credit = "turn"``). It
    returns their advantages in the same form, or a number for each trajectory. Raise `ConfigError`
    for something else; calls raise `UsageError` with what is wrong with the result."""
    function = _own_function(spec, "advantage", 2)

    def set_values(members: Sequence[GroupMember]) -> bool:
        def refuse(why: str) -> UsageError:
            return UsageError(
                f"train.advantage = {spec!r}, task {members[0].trajectory.key.task!r}: {why}"
            )

        returns = [tuple(member.returns) for member in members]
        try:
            found = list(function([member.trajectory for member in members], returns))
        except Exception as error:
            raise refuse(f"raised {type(error).__name__}: {error}") from error
        if len(found) != len(members):
            raise refuse(f"returned {len(found)} entries for {len(members)} trajectories")
        for number, (given, member) in enumerate(zip(found, members, strict=True)):
            try:
                values = [
                    float(one)
                    for one in (
                        given if isinstance(given, Sequence) else [given] * len(member.units)
                    )
                ]
            except (TypeError, ValueError):
                raise refuse(
                    f"entry {number}: {given!r:.60} is neither a number nor numbers"
                ) from None
            if len(values) != len(member.units) or not all(map(math.isfinite, values)):
                raise refuse(
                    f"entry {number}: must be {len(member.units)} finite numbers, not {given!r:.60}"
                )
            member.values = values
        return any(value for member in members for value in member.values)

    return lambda groups: set_values


def group_filter(spec: str) -> KeepGroup:
    """Load ``file.py:function(trajectories) -> bool``, or a filter of an installed framework, such
    as slime's ``function(args, samples, **kwargs)``; any may return slime's
    ``DynamicFilterOutput``. Raise `ConfigError` for something else. Calls raise `UsageError` for an
    error in it and for another result."""
    from turnwright.envs.foreign import adapt_group_filter

    function = adapt_group_filter(load_object(spec)) or _own_function(spec, "group_filter", 1)

    def keep(trajectories: Sequence[Trajectory]) -> GroupChoice:
        where = f"train.group_filter = {spec!r}, task {trajectories[0].key.task!r}"
        try:
            found = function(list(trajectories))
            choice = (found, "") if isinstance(found, bool) else read_choice(found)
        except Exception as error:
            raise UsageError(f"{where}: raised {type(error).__name__}: {error}") from error
        if choice is None:
            raise UsageError(
                f"{where}: returned {found!r:.60}; return True to train the group, False to leave "
                "it out"
            )
        return GroupChoice(*choice)

    return keep


def read_choice(found: Any) -> tuple[bool, str] | None:
    """Read a `DynamicFilterOutput`, whose `keep` may be a tensor, as whether the group is trained
    and the reason why not; None for another object. No spare groups are sampled here, so a group
    that it keeps when there are too few is kept."""
    if not (hasattr(found, "keep") and hasattr(found, "reason")):
        return None
    keep = bool(found.keep) or bool(getattr(found, "keep_when_insufficient", False))
    return keep, "" if keep else str(found.reason or "")


def _own_function(spec: str, key: str, arguments: int) -> Callable[..., Any]:
    function: Any = load_object(spec)
    if not callable(function):
        raise ConfigError(f"train.{key} = {spec!r}: is {type(function).__name__}, not a function")
    if wrong := call_error(function, *[None] * arguments):
        names = ("the trajectories of a group", "their returns")[:arguments]
        raise ConfigError(f"train.{key} = {spec!r}: must take {' and '.join(names)} ({wrong})")
    own: Callable[..., Any] = function
    return own


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute returns-to-go: ``G_k = r_k + discount * G_{k+1}``."""
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        found.append(later)
    return found[::-1]


def trained_ids(trajectory: Trajectory, index: int, weights: TokenWeights | None = None) -> int:
    """Count the ids of a span that can carry loss; the first id of a path
    cannot, nothing predicts it."""
    span = trajectory.spans[index]
    first = 1 if span.start == 0 else 0
    given = None if weights is None else weights.by_span.get(index)
    if given is None or not span.trained:
        return max(0, span.trained - first)
    return sum(1 for weight in given[first : span.trained] if weight)


def trainable_tokens(trajectory: Trajectory, weights: TokenWeights | None = None) -> int:
    """Count a trajectory's sampled ids that can carry loss."""
    return sum(trained_ids(trajectory, index, weights) for index in range(len(trajectory.spans)))


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
        """Whether it counts in the loss denominators; no signal is an
        advantage of 0, so it counts."""
        return self.reason is None or self.reason == NO_SIGNAL

    def advantages_of(self, slots: Sequence[tuple[int, int]]) -> list[float]:
        """Return the advantages of ids by (span, offset)."""
        assert self.advantage is not None
        if self.values is None:
            return [self.advantage] * len(slots)
        return [self.values[span][offset] for span, offset in slots]


@dataclass(frozen=True, slots=True)
class StepCredits:
    """Credits of one step, in canonical order, and the account of every
    sampled id (invariant 1)."""

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


def advantages(
    groups: Sequence[Group],
    settings: CreditSettings | None = None,
    penalty: Callable[[Trajectory], Penalties | None] | None = None,
) -> StepCredits:
    """Compute advantages by comparing trajectories within each group, or within the batch.

    G_ik is the return of trajectory i from its unit k on: the full reward, or with
    ``credit = "turn"`` the rewards of turn k and later. It is 0 if i ended before k: the end is a
    state like any other::

        mean         G_ik - mean_j G_jk                       over the n of the group (Dr. GRPO, arXiv 2503.20783)
        std          (G_ik - mean_j G_jk) / (s + 1e-4)        s^2 = sum_jk (G_jk - mean_k)^2 / ((n - 1) K)
                                                              (GRPO: DeepSeekMath, arXiv
                                                              2402.03300, section 4.1.2)
        rloo         G_ik - mean_{j != i} G_jk                (RLOO, arXiv 2402.14740)
        running      G_ik - average                           over earlier episodes of the agent (RAE, arXiv 2506.24119);
                                                              `own` has it, see `baselines.py`
        batch        (G - mean) / (s + 1e-4)                  over all trained ids of the batch, s dividing by their number
        group_batch  the same of G_ik - mean_j G_jk           (REINFORCE++, arXiv 2501.03262)

    K is the group's largest number of units, 1 unless credit is by turn. `std` then is the sample
    deviation (n - 1), as in TRL and verl. The `rloo` baseline is independent of trajectory i, of
    its rewards and its end, so the policy gradient is unbiased at every turn; with `mean` it is (n
    - 1) / n of that. A mean over only the siblings that reached turn k would be biased: it would
    shrink the advantages of the few that did.

    Where an agent function gave its rows rewards of their own, G_ir is the reward of row r of
    trajectory i, and the baseline is made of the trajectories' means m_j over their rows: a
    trajectory with many rows weighs as much as one with few::

        mean         G_ir - mean_j m_j
        std          (G_ir - mean_j m_j) / (s + 1e-4)         s^2 = sum_j mean_r (G_jr - mean_j m_j)^2 / (n - 1)
        rloo         G_ir - mean_{j != i} m_j

    Args:
        groups: of any sizes; failed trajectories and those without a reward are
            excluded from the baseline.
        settings: the formula, credit within a trajectory, and which groups and ids are left out; by
            default `std` of the full reward.
        penalty: what is subtracted from a trajectory's reward, per id.

    Credits, one per trajectory, are sorted by key, independent of the order in which episodes
    finished. Raise `RewardError` for a reward that is NaN or infinite.
    """  # noqa: E501
    settings = settings or CreditSettings()
    own = None if settings.own is None else settings.own(groups)

    outcomes: list[tuple[Trajectory, str | None, GroupMember | None]] = []
    rejected: list[str] = []
    for group in groups:
        reasons = [exclusion_reason(trajectory) for trajectory in group.trajectories]
        usable = [
            t for t, reason in zip(group.trajectories, reasons, strict=True) if reason is None
        ]

        # Compare the usable trajectories of the group, unless the group is left out.
        dropped = _why_not_compared(reasons, settings)
        members: list[GroupMember] = []
        if dropped is None:
            members = _members_of(usable, settings, penalty)
            choice = GroupChoice(True)
            if settings.keep_group is not None:
                choice = settings.keep_group(usable)
            if not choice.keep:
                dropped = FILTERED
                rejected += [choice.reason] if choice.reason else []
            elif not _compare(members, settings.kind, own):
                dropped = settings.no_signal

        # Each trajectory was compared, or has a reason why none of its ids is trained.
        remaining = iter(members)
        for trajectory, reason in zip(group.trajectories, reasons, strict=True):
            member = next(remaining, None) if reason is None else None
            reason = reason or dropped
            if settings.overlong_filter and trajectory.stop in CUT_BY_LENGTH:
                reason = reason or OVERLONG
            outcomes.append((trajectory, reason, member))
    outcomes.sort(key=lambda row: sort_key(row[0]))

    # Two formulas compare with the complete batch, whose trajectories are known only now.
    included = [member for _, reason, member in outcomes if reason is None and member is not None]
    by_batch = settings.kind in ("batch", "group_batch") and bool(included)
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
    credits = advantages(groups, settings).credits
    tied = {id(credit.trajectory) for credit in credits if credit.reason in reasons}
    return [any(id(trajectory) in tied for trajectory in group.trajectories) for group in groups]


def _why_not_compared(reasons: Sequence[str | None], settings: CreditSettings) -> str | None:
    """Return why the usable trajectories of a group are not compared, or None."""
    if settings.on_failure == "drop_group" and FAILED in reasons:
        return SIBLING_FAILED
    # Where others are compared than those of the group, one trajectory is enough.
    fewest = 1 if settings.kind in ("batch", "running") else max(settings.min_group, 1)
    return GROUP_TOO_SMALL if reasons.count(None) < fewest else None


def _members_of(
    usable: Sequence[Trajectory],
    settings: CreditSettings,
    penalty: Callable[[Trajectory], Penalties | None] | None,
) -> list[GroupMember]:
    # Where one trajectory has rewards by row, the others are compared with it as wholes.
    if any(trajectory.row_rewards for trajectory in usable):
        settings = replace(settings, credit="trajectory")
    members = []
    for trajectory in usable:
        penalties = None if penalty is None else penalty(trajectory)
        members.append(GroupMember.of(trajectory, settings, penalties))
    return members


def _compare(members: Sequence[GroupMember], kind: str, own: SetValues | None) -> bool:
    """Set the values of a group's members; return whether the group has a signal."""
    if own is not None:
        return own(members)
    if kind == "batch":
        return True  # compared with the batch instead
    differ = set_group_values(members, kind)
    return differ or kind == "group_batch"


def _credit(trajectory: Trajectory, reason: str | None, member: GroupMember | None) -> Credit:
    weights = None if member is None else member.weights
    tokens = trainable_tokens(trajectory, weights)
    if reason is not None or member is None:
        return Credit(trajectory, None, reason, tokens, None, weights)
    values = member.by_span()
    if values is None:
        mean = member.values[0]
    elif member.token_values is not None:
        every = [value for given in member.token_values.values() for value in given]
        mean = math.fsum(every) / max(len(every), 1)
    else:
        counts = member.trainable_per_unit()
        mean = math.fsum(v * n for v, n in zip(member.values, counts, strict=True)) / max(
            sum(counts), 1
        )
    return Credit(trajectory, mean, None, tokens, values, weights)


def count_ids(credits: Sequence[Credit]) -> StepCredits:
    """Count every sampled id under `trained` or the reason for its weight of 0; check
    their sum (invariant 1)."""
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
                lacking = credit.weights.no_teacher.get(index, 0)
                trainable = trained_ids(credit.trajectory, index) - lacking
                tokens[credit.weights.reason] += trainable - trained_ids(
                    credit.trajectory, index, credit.weights
                )
                tokens[NO_TEACHER] += lacking
    sampled = sum(credit.trajectory.sampled_tokens for credit in credits)
    assert sum(tokens.values()) == sampled, (
        f"{sampled} ids were sampled, {sum(tokens.values())} are accounted for: {tokens}"
    )
    return StepCredits(tuple(credits), +tokens, sampled)


def sort_key(trajectory: Trajectory) -> tuple[str, int, str, int, int]:
    """Return the canonical sort key of a trajectory."""
    key = trajectory.key
    return key.phase, key.step, key.task, key.sample, key.attempt


def exclusion_reason(trajectory: Trajectory) -> str | None:
    """Return why a trajectory cannot be trained on, or None; raise `RewardError` for a reward
    that is NaN or infinite."""
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


def set_group_values(members: Sequence[GroupMember], kind: str) -> bool:
    """Set the values of a group's members; return whether they differ by more than rounding of the
    summed reward components."""
    if any(member.trajectory.row_rewards for member in members):
        return _set_row_values(members, kind)
    n, longest = len(members), max(len(member.units) for member in members)
    squares: list[float] = []
    signal = False
    for unit in range(longest):
        column = [member.return_from(unit) for member in members]
        total = math.fsum(column)
        mean = total / n
        signal = signal or max(column) - min(column) > FLAT * max(
            1.0, abs(max(column)), abs(min(column))
        )
        squares += [(value - mean) ** 2 for value in column]
        for member, value in zip(members, column, strict=True):
            if unit < len(member.units):
                member.values.append(
                    (value * n - total) / (n - 1) if kind == "rloo" and n > 1 else value - mean
                )
    if kind == "std" and n > 1:
        std = math.sqrt(math.fsum(squares) / ((n - 1) * longest))
        for member in members:
            member.values = [value / (std + STD_FLOOR) for value in member.values]
    return signal


def _set_row_values(members: Sequence[GroupMember], kind: str) -> bool:
    """Set the values of a group's members whose units are rows, as `set_group_values` does."""
    n = len(members)
    means = [math.fsum(member.returns) / len(member.returns) for member in members]
    total = math.fsum(means)
    squares = []
    for member, own in zip(members, means, strict=True):
        baseline = (total - own) / (n - 1) if kind == "rloo" and n > 1 else total / n
        member.values = [value - baseline for value in member.returns]
        squares.append(
            math.fsum((value - total / n) ** 2 for value in member.returns) / len(member.returns)
        )
    if kind == "std" and n > 1:
        std = math.sqrt(math.fsum(squares) / (n - 1))
        for member in members:
            member.values = [value / (std + STD_FLOOR) for value in member.values]
    every = [value for member in members for value in member.returns]
    return max(every) - min(every) > FLAT * max(1.0, abs(max(every)), abs(min(every)))


def normalize_batch(members: Sequence[GroupMember]) -> bool:
    """Set the values of a batch's members: standardized over trained ids;
    return whether they differ."""
    rows: list[tuple[float, int]] = []
    for member in members:
        if member.penalties is not None:
            member.token_values = {
                span: [0.0] * len(member.trajectory.spans[span].ids)
                for unit in member.units
                for span in unit
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

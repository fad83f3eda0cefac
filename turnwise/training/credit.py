"""Credit assignment: returns per turn or trajectory, loss weights, length penalty."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.config.schema import loss_scale_error
from turnwise.envs.resolve import load_object
from turnwise.errors import ConfigError, UsageError
from turnwise.types import Trajectory


def overlong_penalty(trajectory: Trajectory, max_tokens: int, buffer: float) -> float:
    """Compute DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) in points of reward, from 0 to -1.

    With n the trajectory's sampled tokens over all turns, and c = buffer * max_tokens::

        0                             n <= max_tokens - c
        (max_tokens - c - n) / c      max_tokens - c < n <= max_tokens
        -1                            n > max_tokens

    Args:
        max_tokens: length from which on the full point is lost.
        buffer: share of `max_tokens`, over 0 and at most 1.
    """
    length, cache = trajectory.sampled_tokens, buffer * max_tokens
    return min(0.0, max(-1.0, (max_tokens - cache - length) / cache))


EARLIER_ROUND = "earlier_round"
"""Not in the last round, the only one trained with `loss_scale = "last_round"`."""
LOSS_SCALE = "loss_scale"
"""A custom loss scale returned weight 0."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weight of each id in a trajectory's sampled spans."""

    by_span: Mapping[int, Sequence[float]]
    """Span index -> weight per id; missing spans have weight 1."""
    reason: str
    """Reason under which ids of weight 0 are counted."""

    def of(self, span: int, offset: int) -> float:
        """Return the weight of one id."""
        found = self.by_span.get(span)
        return 1.0 if found is None else found[offset]


LossScale = Callable[[Trajectory], TokenWeights | None]


def loss_scale(spec: str) -> LossScale | None:
    """Resolve `train.loss_scale`; None if all sampled ids count alike.

    Raises:
        ConfigError: for an unknown name, or a function that does not take one trajectory.
    """
    if wrong := loss_scale_error(spec):
        raise ConfigError(f"train.loss_scale = {spec!r}: {wrong}")
    if spec == "default":
        return None
    if spec == "last_round":
        return last_round
    function = load_object(spec)
    if not callable(function):
        raise ConfigError(f"train.loss_scale = {spec!r}: is {type(function).__name__}, not a function of a trajectory")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"train.loss_scale = {spec!r}: must take one argument, the trajectory ({error})") from None
    except ValueError:
        pass
    return lambda trajectory: custom_weights(function, spec, trajectory)


def last_round(trajectory: Trajectory) -> TokenWeights:
    """Return weight 1 for each agent's replies after the last user message, 0 for earlier ones.

    A user message starts a round, also one that the environment writes as the user; a tool result does not.
    """
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
    earlier = [i for i, span in enumerate(trajectory.spans) if span.sampled and i not in last_replies]
    return TokenWeights({i: (0.0,) * len(trajectory.spans[i].ids) for i in earlier}, EARLIER_ROUND)


def custom_weights(function: Callable[[Trajectory], Any], spec: str, trajectory: Trajectory) -> TokenWeights:
    """Call a custom loss scale and check its result.

    It returns one entry per turn: a number, or one number per id sampled in that turn. Weights are finite and not negative.

    Raises:
        UsageError: when the function raises or returns something else.
    """

    def refuse(why: str) -> UsageError:
        key = trajectory.key
        return UsageError(f"train.loss_scale = {spec!r}, task {key.task!r}, sample {key.sample}: {why}")

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
            numbers = [float(given)] * size if isinstance(given, int | float) else [float(value) for value in given]
        except (TypeError, ValueError):
            raise refuse(f"turn {number + 1}: {given!r:.60} is neither a number nor numbers") from None
        if len(numbers) != size:
            raise refuse(f"turn {number + 1}: {len(numbers)} weights for {size} sampled ids")
        if not all(math.isfinite(value) and value >= 0 for value in numbers):
            raise refuse(f"turn {number + 1}: weights must be finite and at least 0")
        for index, length in spans:
            by_span[index] = tuple(numbers[:length])
            numbers = numbers[length:]
    return TokenWeights(by_span, LOSS_SCALE)


CreditUnit = Literal["trajectory", "turn"]
Penalties = Mapping[int, Sequence[float]]
"""Span index -> penalty per id, in points of reward."""


@dataclass(frozen=True, slots=True)
class CreditRules:
    """How rewards are assigned to units of a trajectory before trajectories are compared."""

    credit: CreditUnit = "trajectory"
    discount: float = 1.0
    """Factor on a reward one turn later."""
    scale: LossScale | None = None
    shape: Callable[[Trajectory], float] | None = None
    """Added to the reward, at its end."""
    penalty: Callable[[Trajectory], Penalties | None] | None = None
    """Subtracted from the reward, per id."""


@dataclass(slots=True)
class GroupMember:
    """Trajectory being compared, as units (turns, or all of it) with a return each."""

    trajectory: Trajectory
    weights: TokenWeights | None
    units: list[list[int]]
    """Spans of each unit, in order of time."""
    returns: list[float]
    """Discounted rewards from a unit to the end; includes penalties unless they are kept per token."""
    penalties: Penalties | None
    discount: float
    values: list[float] = field(default_factory=list)
    """Advantage per unit."""
    token_values: dict[int, list[float]] | None = None
    """Advantage per id of a span, if ids of a unit differ."""

    @classmethod
    def of(cls, trajectory: Trajectory, rules: CreditRules, *, by_token: bool) -> GroupMember:
        """Assign a trajectory's reward to its units.

        Args:
            by_token: keep penalties separate for `token_returns` instead of subtracting them from the units' rewards.
        """
        units = _units(trajectory, rules.credit)
        rewards = _rewards(trajectory, len(units))
        if rules.shape is not None:
            rewards[-1] += rules.shape(trajectory)
        penalties = rules.penalty(trajectory) if rules.penalty is not None else None
        if penalties is not None and not by_token:
            for unit, spans in enumerate(units):
                rewards[unit] -= sum(sum(penalties.get(span, ())) for span in spans)
        discount = rules.discount if len(units) > 1 else 1.0
        weights = rules.scale(trajectory) if rules.scale is not None else None
        return cls(trajectory, weights, units, discounted_returns(rewards, discount), penalties if by_token else None, discount)

    def return_from(self, unit: int) -> float:
        """Return the return from a unit on; 0 after the last unit."""
        return self.returns[unit] if unit < len(self.returns) else 0.0

    def trainable_per_unit(self) -> list[int]:
        """Count the ids of each unit that carry loss."""
        return [sum(trained_ids(self.trajectory, span, self.weights) for span in spans) for spans in self.units]

    @property
    def tokens(self) -> int:
        """Number of ids that carry loss."""
        return trainable_tokens(self.trajectory, self.weights)

    def token_returns(self) -> Iterator[tuple[int, int, float]]:
        """Yield (span, offset, return from that id on) of every sampled id, latest first, with per-token penalties."""
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
            span: (value,) * len(ids[span].ids) for value, spans in zip(self.values, self.units, strict=True) for span in spans
        }


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute returns-to-go: ``G_k = r_k + discount * G_{k+1}``."""
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        found.append(later)
    return found[::-1]


def _units(trajectory: Trajectory, credit: CreditUnit) -> list[list[int]]:
    sampled = [index for index, span in enumerate(trajectory.spans) if span.sampled]
    if credit == "trajectory" or not trajectory.turns:
        return [sampled]
    units = [list(turn.spans) for turn in trajectory.turns]
    assigned = {span for spans in units for span in spans}
    # Spans without a turn were sampled in failed attempts; they carry no loss.
    units[-1] += [span for span in sampled if span not in assigned]
    return units


def _rewards(trajectory: Trajectory, units: int) -> list[float]:
    """Return the reward of each unit: a turn's own; the last also gets what the episode's reward exceeds their sum by."""
    assert trajectory.reward is not None
    if units == 1:
        return [float(trajectory.reward)]
    rewards = [turn.reward or 0.0 for turn in trajectory.turns]
    rewards[-1] += trajectory.reward - sum(rewards)
    return rewards


def trained_ids(trajectory: Trajectory, index: int, weights: TokenWeights | None = None) -> int:
    """Count the ids of a span that can carry loss; the first id of a path cannot, nothing predicts it."""
    span = trajectory.spans[index]
    trained = span.trained
    if not trained:
        return 0
    first = 1 if span.start == 0 else 0
    given = None if weights is None else weights.by_span.get(index)
    if given is None:
        return trained - first
    return sum(1 for weight in given[first:trained] if weight)


def trainable_tokens(trajectory: Trajectory, weights: TokenWeights | None = None) -> int:
    """Count a trajectory's sampled ids that can carry loss."""
    return sum(trained_ids(trajectory, index, weights) for index in range(len(trajectory.spans)))

"""Which sampled ids share a reward, what comes of it from there on, and where a trained id stands. No tensors here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnwise.train.credit.scale import LossScale, TokenWeights
from turnwise.types import Trajectory

CreditUnit = Literal["trajectory", "turn"]
Penalties = Mapping[int, Sequence[float]]
"""Span index -> a penalty for each of its ids, in points of reward."""


@dataclass(frozen=True, slots=True)
class CreditRules:
    """How rewards are spread over a trajectory before trajectories are compared."""

    credit: CreditUnit = "trajectory"
    discount: float = 1.0
    """What a reward one turn later is worth."""
    scale: LossScale | None = None
    shape: Callable[[Trajectory], float] | None = None
    """Added to the reward, at its end."""
    penalty: Callable[[Trajectory], Penalties | None] | None = None
    """Taken off the reward, where it falls due."""


@dataclass(slots=True)
class GroupMember:
    """A trajectory that is compared with others: its units (turns, or all of it), and the return from each."""

    trajectory: Trajectory
    weights: TokenWeights | None
    units: list[list[int]]
    """Spans of each unit, in order of time."""
    returns: list[float]
    """Discounted rewards from a unit to the end; penalties are in here unless they are kept by token."""
    penalties: Penalties | None
    discount: float
    values: list[float] = field(default_factory=list)
    """What came of the comparison, per unit."""
    token_values: dict[int, list[float]] | None = None
    """The same per id of a span, where ids of a unit differ."""

    @classmethod
    def of(cls, trajectory: Trajectory, rules: CreditRules, *, by_token: bool) -> GroupMember:
        """Spread a trajectory's reward over its units.

        Args:
            by_token: keep penalties apart, for `token_returns`, instead of taking them off the rewards of units.
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
        """The return from a unit on; 0 behind the last, where nothing more comes."""
        return self.returns[unit] if unit < len(self.returns) else 0.0

    def trainable_per_unit(self) -> list[int]:
        """How many ids of each unit carry loss."""
        return [sum(trained_ids(self.trajectory, span, self.weights) for span in spans) for spans in self.units]

    @property
    def tokens(self) -> int:
        """How many ids carry loss."""
        return trainable_tokens(self.trajectory, self.weights)

    def token_returns(self) -> Iterator[tuple[int, int, float]]:
        """(span, offset, return from that id on) of every sampled id, latest first, for penalties that fall due by token."""
        later = 0.0
        for unit in reversed(range(len(self.units))):
            owed = self.discount * later
            for span in reversed(self.units[unit]):
                due = (self.penalties or {}).get(span)
                for offset in reversed(range(len(self.trajectory.spans[span].ids))):
                    owed += due[offset] if due is not None else 0.0
                    yield span, offset, self.returns[unit] - owed
            later = owed

    def by_span(self) -> dict[int, Sequence[float]] | None:
        """The value of each sampled id; None where all have the same."""
        if self.token_values is not None:
            return dict(self.token_values)
        if len(self.values) == 1:
            return None
        ids = self.trajectory.spans
        return {
            span: (value,) * len(ids[span].ids) for value, spans in zip(self.values, self.units, strict=True) for span in spans
        }


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Returns-to-go: ``G_k = r_k + discount * G_{k+1}``."""
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
    told = {span for spans in units for span in spans}
    # What no turn claims was sampled in attempts that failed; it carries no loss.
    units[-1] += [span for span in sampled if span not in told]
    return units


def _rewards(trajectory: Trajectory, units: int) -> list[float]:
    """The reward of each unit: a turn's own, and what the episode has beyond its turns at the last."""
    assert trajectory.reward is not None
    if units == 1:
        return [float(trajectory.reward)]
    rewards = [turn.reward or 0.0 for turn in trajectory.turns]
    rewards[-1] += trajectory.reward - sum(rewards)
    return rewards


def trained_ids(trajectory: Trajectory, index: int, weights: TokenWeights | None = None) -> int:
    """How many ids of a span can carry loss; the first id of a path cannot, since nothing stands before it."""
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
    """How many of a trajectory's sampled ids can carry loss."""
    return sum(trained_ids(trajectory, index, weights) for index in range(len(trajectory.spans)))


def holders(trajectory: Trajectory) -> Iterator[list[tuple[int, int]]]:
    """For each row of `trajectory.samples()`, the span that holds each id and the id's place in it."""
    for leaf in trajectory.leaves():
        chain = trajectory.chain(leaf)
        if any(trajectory.spans[index].sampled and used for index, used in chain):
            yield [(index, offset) for index, used in chain for offset in range(used)]

"""A trajectory while it is compared with others: its units, what each was rewarded with and
returned, and the advantage that a formula gives it. No tensors here.

The formulas are in `advantages.py`, and those that need more than returns in `step_groups.py` and
`gae.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from turnwright.training.loss_weights import TokenWeights, trained_ids, trained_offsets
from turnwright.types import Trajectory
from turnwright.types.trajectory import Slot

FLAT = 1e-12
"""Relative difference below which returns are equal."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL, so that tiny reward differences are not amplified."""

PerId = Mapping[int, Sequence[float]]
"""Span index -> a number for each of its ids."""
Penalties = PerId
"""Penalty per id, in points of reward."""


@dataclass(slots=True)
class GroupMember:
    """Trajectory being compared, as units (turns, rows, or all of it) with a return each."""

    trajectory: Trajectory
    weights: TokenWeights | None
    units: list[list[int]]
    """Spans of each unit, in order of time."""
    rewards: list[float]
    """Reward of each unit; includes penalties unless they are kept per token."""
    returns: list[float]
    """Discounted rewards from a unit to the end."""
    penalties: Penalties | None
    discount: float
    """Factor on the rewards of the next unit; 0 where units are rows, which nothing follows."""
    values: list[float] = field(default_factory=list)
    """Advantage per unit."""
    token_values: dict[int, list[float]] | None = None
    """Advantage per id of a span, if ids of a unit differ."""
    targets: dict[int, list[float]] | None = None
    """What a critic's value of each id should have been; NaN where it is not asked."""

    def spread(self, per_unit: Sequence[float]) -> PerId:
        """Return for each sampled id the number of its unit."""
        per_id: dict[int, Sequence[float]] = {}
        for value, spans in zip(per_unit, self.units, strict=True):
            for span in spans:
                per_id[span] = (value,) * len(self.trajectory.spans[span].ids)
        return per_id

    @property
    def units_are_turns(self) -> bool:
        """Whether each unit is one turn, in order."""
        turns = len(self.trajectory.turns)
        return bool(turns) and len(self.units) == turns and not self.trajectory.row_rewards

    def return_from(self, unit: int) -> float:
        """Return the return from a unit on; 0 after the last unit."""
        return self.returns[unit] if unit < len(self.returns) else 0.0

    def trainable_per_unit(self) -> list[int]:
        """Count the ids of each unit that carry loss."""
        return [
            sum(trained_ids(self.trajectory, span, self.weights) for span in spans)
            for spans in self.units
        ]

    def slots_of(self, unit: int) -> list[Slot]:
        """Return the ids of a unit that carry loss, in order of time."""
        slots = []
        for span in self.units[unit]:
            for offset in trained_offsets(self.trajectory, span, self.weights):
                slots.append((span, offset))
        return slots

    def per_id(self, fill: float) -> dict[int, list[float]]:
        """Return a number for each sampled id."""
        return {
            span: [fill] * len(self.trajectory.spans[span].ids)
            for spans in self.units
            for span in spans
        }

    def set_token_values(self) -> None:
        """Set `token_values` to the returns from each sampled id on, with penalties per id."""
        self.token_values = self.per_id(0.0)
        for span, offset, value in self.token_returns():
            self.token_values[span][offset] = value

    def token_returns(self) -> Iterator[tuple[int, int, float]]:
        """Yield (span, offset, return from that id on) of every sampled id, latest first, with
        per-token penalties."""
        later = 0.0
        for unit in reversed(range(len(self.units))):
            penalty = self.discount * later
            for span in reversed(self.units[unit]):
                values = (self.penalties or {}).get(span)
                for offset in reversed(range(len(self.trajectory.spans[span].ids))):
                    penalty += values[offset] if values is not None else 0.0
                    yield span, offset, self.returns[unit] - penalty
            later = penalty

    def trained_values(self) -> list[float]:
        """Return the `token_values` of the ids that carry loss."""
        assert self.token_values is not None
        trained = []
        for index, values in self.token_values.items():
            for offset in trained_offsets(self.trajectory, index, self.weights):
                trained.append(values[offset])
        return trained

    def by_span(self) -> PerId | None:
        """Return the advantage of each sampled id; None if all are equal."""
        if self.token_values is not None:
            return dict(self.token_values)
        return None if len(self.values) == 1 else self.spread(self.values)


def differ(values: Sequence[float]) -> bool:
    """Return whether values differ by more than rounding."""
    largest, smallest = max(values), min(values)
    return largest - smallest > FLAT * max(1.0, abs(largest), abs(smallest))


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Compute returns-to-go: ``G_k = r_k + discount * G_{k+1}``."""
    returns = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        returns.append(later)
    return returns[::-1]

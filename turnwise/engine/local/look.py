"""What the rows of one pass of the engine see."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.engine.local.tower import Features


@dataclass(slots=True)
class Look:
    """What the rows of a pass see."""

    turns: tuple[list[int], list[int], list[int]]
    """Rotary positions of the rows in time, height and width."""
    places: list[int] = field(default_factory=list)
    """Rows at which features stand, rising."""
    features: list[Features] = field(default_factory=list)
    """These, one after another."""

"""What the rows of one pass of the engine see."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.engine.local.tower import ImageFeatures


@dataclass(slots=True)
class RowMedia:
    """What the rows of a pass see."""

    rotary_positions: tuple[list[int], list[int], list[int]]
    """Rotary positions of the rows in time, height and width."""
    feature_rows: list[int] = field(default_factory=list)
    """Rows at which features stand, rising."""
    features: list[ImageFeatures] = field(default_factory=list)
    """These, one after another."""

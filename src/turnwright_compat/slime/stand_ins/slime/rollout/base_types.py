"""Results of functions for a complete step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Samples by data set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None

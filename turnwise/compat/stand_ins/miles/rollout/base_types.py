"""What Miles' generate functions take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerateFnInput:
    """A sample to generate."""

    state: Any
    sample: Any
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Any:
        """Arguments of the run."""
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """One sample, or several."""

    samples: Any

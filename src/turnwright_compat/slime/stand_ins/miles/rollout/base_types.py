"""What Miles' generate functions take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput


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


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What a class for a complete step is made with."""

    args: Any
    data_source: Any


@dataclass(frozen=True)
class RolloutFnTrainInput:
    """A step of training."""

    rollout_id: int
    weight_version: int | None = None


@dataclass(frozen=True)
class RolloutFnEvalInput:
    """An evaluation."""

    rollout_id: int


RolloutFnInput = RolloutFnTrainInput | RolloutFnEvalInput
RolloutFnOutput = RolloutFnTrainOutput | RolloutFnEvalOutput

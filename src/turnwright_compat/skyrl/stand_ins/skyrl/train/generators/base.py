"""Interface of generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from ...backends.skyrl_train.inference_servers.base import ConversationType

TrainingPhase = Literal["train", "eval"]


@dataclass
class TrajectoryID:
    """Task and number of an episode."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return both as one text."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class BatchMetadata:
    """Step and phase of a batch."""

    global_step: int
    training_phase: TrainingPhase


class GeneratorInput(TypedDict, total=False):
    """Batch of tasks."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]] | None
    sampling_params: dict[str, Any] | None
    trajectory_ids: list[TrajectoryID] | None
    batch_metadata: BatchMetadata | None


class GeneratorOutput(TypedDict, total=False):
    """Batch of episodes."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: list[TrajectoryID] | None
    is_last_step: list[bool] | None
    env_metrics: list[dict[str, Any]] | None


class GeneratorInterface(ABC):
    """Generator of episodes."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Generate the episodes of a batch."""

"""What generators of SkyRL are written against: their batches, and what they
exchange with the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

MessageType = dict[str, str]
ConversationType = list[MessageType]


class InferenceEngineInput(TypedDict, total=False):
    """Prompts, as messages or as ids, and sampling parameters."""

    prompts: list[ConversationType] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    session_ids: list[Any] | None
    cache_salt: str | None


class InferenceEngineOutput(TypedDict, total=False):
    """Replies in the order of the prompts."""

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None


class InferenceEngineInterface(ABC):
    """Engine."""

    @abstractmethod
    async def generate(
        self, input_batch: InferenceEngineInput, model: str | None = None
    ) -> InferenceEngineOutput:
        """Sample a reply to each prompt."""


def get_sampling_params_for_backend(backend: str, sampling_params: Any) -> dict[str, Any]:
    """Return the parameters as vLLM names them."""
    if backend != "vllm":
        raise ValueError(f"the backend is vllm, not {backend!r}")

    stop = sampling_params.stop
    params = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": sampling_params.max_generate_length,
        "logprobs": sampling_params.logprobs,
        "stop": None if stop is None else list(stop),
    }
    for key in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(sampling_params, key, None)
        if value is not None:
            params[key] = value
    for key, value in (getattr(sampling_params, "additional_kwargs", None) or {}).items():
        params.setdefault(key, value)
    return params


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

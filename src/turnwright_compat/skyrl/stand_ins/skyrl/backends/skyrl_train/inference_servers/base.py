"""What generators exchange with the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

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
    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        """Sample a reply to each prompt."""

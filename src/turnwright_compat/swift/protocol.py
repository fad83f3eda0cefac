"""Requests and responses of ms-swift's engines, as its schedulers and plugins see them.

`RolloutInferRequest` goes in, `RolloutOutput` comes out; fields and defaults are those of ms-swift.
The engines that run a model of their own are here by name only: they need ms-swift.
"""

from __future__ import annotations

import os
from base64 import b64encode
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4


@dataclass
class InferRequest:
    """A conversation, and the media that `<image>`, `<video>` and `<audio>` in its texts stand
    for."""

    messages: list[dict[str, Any]]
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[Any] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutInferRequest(InferRequest):
    """One trajectory; `data_dict` has the other columns of its row."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None


@dataclass
class RequestConfig:
    """Sampling parameters; None and the defaults are the run's."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False


@dataclass
class UsageInfo:
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatMessage:
    """A reply."""

    role: str
    content: Any
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """A reply with its ids and logprobs (`{"content": [{"logprob": ...}, ...]}`)."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


RolloutResponseChoice = ChatCompletionResponseChoice


@dataclass
class ChatCompletionResponse:
    """What the engine answers."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    prompt_token_ids: list[int] | None = None


@dataclass
class RolloutOutput:
    """One row of a trajectory. A flat list is that of one turn."""

    response: ChatCompletionResponse
    messages: list[dict[str, Any]] | None = None
    response_token_ids: list[list[int]] = field(default_factory=list)
    response_loss_mask: list[list[int]] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("response_token_ids", "response_loss_mask", "rollout_logprobs"):
            values = getattr(self, name)
            if values and isinstance(values[0], (int, float)):
                setattr(self, name, [values])

        # Media that the scheduler hands on reach the rewards as text, as they are sent from
        # ms-swift's server.
        for key in ("images", "audios", "videos"):
            if key in self.rollout_infos:
                media = self.rollout_infos[key]
                items = media if isinstance(media, list) else [media]
                self.rollout_infos[key] = [_as_text(item) for item in items]


def _as_text(value: Any) -> Any:
    """Return an image, bytes or a file as base64; any other value, such as a list of frames, as it
    is."""
    if isinstance(value, dict) and "bytes" in value:
        value = value["bytes"] or value["path"]

    if isinstance(value, str):
        if not os.path.isfile(value):
            return value
        value = Path(value).read_bytes()
    elif hasattr(value, "save"):
        # An image of Pillow.
        file = BytesIO()
        value.save(file, format="png")
        value = file.getvalue()

    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value


class TransformersEngine:
    """An engine of its own, which a reward may call; it needs ms-swift."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError("an engine of its own needs ms-swift; pip install ms-swift")


PtEngine = TransformersEngine

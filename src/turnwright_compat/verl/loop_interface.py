"""What agent loops of verl are written against: their base class, what they and
servers return, timers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, Field

T = TypeVar("T", bound=type)

LOOPS: dict[str, type] = {}
"""Loops by the name that rows have in `agent_name`."""


class AgentLoopMetrics(BaseModel):
    """Times of an episode, in seconds."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """One episode."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None


class DictConfigWrap:
    """Configuration that is passed as it is."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Tools that are passed as they are."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


@dataclass(frozen=True)
class MergeResult:
    """Ids after something was appended to them."""

    token_ids: list[int]
    appended_token_count: int
    kind: str = "context"
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


class AgentLoopBase(ABC):
    """Loop of one episode."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any,
        data_config: DictConfigWrap,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.mm_processor_kwargs = self.data_config.get("mm_processor_kwargs", {})
        self.loop = asyncio.get_event_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play the episode of a row."""

    def _render(self, messages: list[Any], tools: Any, prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=prompt,
            tokenize=False,
            **self.apply_chat_template_kwargs,
        )
        return text

    async def process_multi_modal_info(self, messages: list[Any]) -> dict[str, Any]:
        """Return the images of messages."""
        images = []
        for message in messages:
            if not isinstance(message["content"], list):
                continue
            for part in message["content"]:
                if part.get("type") == "image":
                    images.append(part["image"])
        return {"images": images} if images else {}

    async def process_vision_info(self, messages: list[Any]) -> dict[str, Any]:
        """Return the images of messages."""
        return await self.process_multi_modal_info(messages)

    async def apply_chat_template(
        self,
        messages: list[Any],
        tools: Any = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Render messages to ids; with `remove_system_prompt` without what a conversation of no
        system message begins with."""
        text = self._render(messages, tools, True)
        if remove_system_prompt:
            # Two equal messages render as the opening and twice the message, one as the opening
            # and the message: the difference is the message, the rest the opening.
            message = {"role": "user", "content": ""}
            once = self._render([message], None, False)
            twice = self._render([message] * 2, None, False)
            opening_length = max(2 * len(once) - len(twice), 0)
            text = text.removeprefix(once[:opening_length])
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def ct_build_initial_tokens(
        self,
        messages: list[Any],
        tools: Any = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        **_: Any,
    ) -> list[int]:
        """Render the opening to ids."""
        text = self._render(messages, tools, True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids[-self.rollout_config.prompt_length :]

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append a reply."""
        count = len(assistant_token_ids)
        logprobs = None
        if response_logprobs is not None:
            logprobs = [*response_logprobs, *(assistant_logprobs or [0.0] * count)]
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], count, "assistant")
        return merged, [*response_mask, *[1] * count], logprobs

    async def ct_merge_context_msg(
        self,
        previous_messages: list[Any],
        updated_messages: list[Any],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Any = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append messages, and what the template writes between the reply and them."""
        before = self._render(previous_messages, tools, False)
        text = self._render(updated_messages, tools, True)
        end = self.tokenizer.eos_token
        if not text.startswith(before) or end not in before:
            raise ValueError(
                "the template renders earlier messages differently once others follow; use one "
                "that keeps them"
            )

        # What follows the reply: its end token unless it was sampled, and often a line break.
        closing = before[before.rindex(end) :]
        if runtime_token_ids and runtime_token_ids[-1] == self.tokenizer.eos_token_id:
            closing = closing.removeprefix(end)
        inserted = self.tokenizer.encode(closing, add_special_tokens=False) if closing else []
        added = self.tokenizer.encode(text[len(before) :], add_special_tokens=False)

        count = len(inserted) + len(added)
        logprobs = None
        if response_logprobs is not None:
            logprobs = [*response_logprobs, *[0.0] * count]
        merged = MergeResult(
            [*runtime_token_ids, *inserted, *added], len(added), "context", inserted
        )
        return merged, [*response_mask, *[0] * count], logprobs


def register(agent_name: str) -> Callable[[T], T]:
    """Return a decorator that registers a loop by name."""

    def decorator(subclass: T) -> T:
        LOOPS[agent_name] = subclass
        return subclass

    return decorator


class TokenOutput(BaseModel):
    """Reply of a server."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to a dict, by name."""
    began = time.monotonic()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.monotonic() - began


F = TypeVar("F", bound=Callable[..., object])


def rollout_trace_op(func: F) -> F:
    """Return the function unchanged."""
    return func

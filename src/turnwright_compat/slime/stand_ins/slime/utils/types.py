"""Samples of slime's rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """How the generation of a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_Status = Status


@dataclass
class Sample:
    """A prompt with what was generated for it."""

    Status = _Status

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or the one that `args.reward_key` names."""
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Number of trained ids."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {**asdict(self), "status": self.status.value}

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append ids to the response: sampled ones with their logprobs, or with `trainable=False` others.

        Raises:
            ValueError: for sampled ids without one logprob each, or logprobs of other ids.
        """
        new = [int(one) for one in tokens or ()]
        if new and trainable and (log_probs is None or len(log_probs) != len(new)):
            raise ValueError(f"{len(new)} trainable ids and {'no' if log_probs is None else len(log_probs)} logprobs")
        if new and not trainable and log_probs is not None:
            raise ValueError("ids that are not trainable have no logprobs")
        before = self.response_length
        self.response += text or ""
        if new:
            # In place, as slime does it: user code may keep one of the lists in a variable.
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * before
            self.loss_mask += [int(trainable)] * len(new)
            self.rollout_log_probs += [0.0] * len(new) if log_probs is None else [float(one) for one in log_probs]
            self.tokens += new
            self.response_length = before + len(new)
        if meta_info and update_terminal_info:
            kinds = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
            self.status = kinds.get((meta_info.get("finish_reason") or {}).get("type", ""), self.status)

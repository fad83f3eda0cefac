"""What user code of slime and Miles is written against: samples, results of a step,
environments, filters of groups."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
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
        if getattr(args, "reward_key", None):
            return self.reward[args.reward_key]
        return self.reward

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
        """Append ids to the response: sampled ones with their logprobs, or with
        `trainable=False` others.

        Raises:
            ValueError: for sampled ids without one logprob each, or logprobs of other ids.
        """
        new_ids = [int(token_id) for token_id in tokens or ()]
        if new_ids and trainable and (log_probs is None or len(log_probs) != len(new_ids)):
            raise ValueError(
                f"{len(new_ids)} trainable ids and "
                f"{'no' if log_probs is None else len(log_probs)} logprobs"
            )
        if new_ids and not trainable and log_probs is not None:
            raise ValueError("ids that are not trainable have no logprobs")

        length_before = self.response_length
        self.response += text or ""
        if new_ids:
            # In place, as slime does it: user code may keep one of the lists in a variable.
            if self.loss_mask is None:
                self.loss_mask = [1] * length_before
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * length_before
            if log_probs is None:
                log_probs = [0.0] * len(new_ids)
            self.loss_mask += [int(trainable)] * len(new_ids)
            self.rollout_log_probs += [float(logprob) for logprob in log_probs]
            self.tokens += new_ids
            self.response_length = length_before + len(new_ids)

        if meta_info and update_terminal_info:
            statuses = {
                "length": Status.TRUNCATED,
                "abort": Status.ABORTED,
                "stop": Status.COMPLETED,
            }
            finish_type = (meta_info.get("finish_reason") or {}).get("type", "")
            self.status = statuses.get(finish_type, self.status)


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


class BaseInteractionEnv:
    """An environment that answers each reply of the model."""

    def reset(self) -> Any:
        """Start the episode."""
        raise NotImplementedError

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Return the observation for a reply, whether the episode is over, and information."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the environment holds."""

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return a user message with the media of an observation, then its text."""
        observation = observation or {}
        content: list[dict[str, Any]] = []
        for items in (observation.get("multi_modal_data") or {}).values():
            content += [{"type": "image", "image": item} for item in items]
        content.append({"type": "text", "text": observation.get("obs_str", "")})
        return {"role": "user", "content": content}


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained, and why not."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


SMALLEST = 1e-6
"""Deviation of rewards under which they count as equal."""


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    rewards = [float(sample.get_reward_value(args)) for sample in _flat(samples)]
    if len(rewards) > 1 and statistics.stdev(rewards) > SMALLEST:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Any], **options: Any
) -> DynamicFilterOutput:
    """Prefer a group whose rewards differ, and keep another one where there are too few."""
    output = check_reward_nonzero_std(args, samples, **options)
    output.keep_when_insufficient = True
    return output


def check_no_aborted(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group without an aborted sample."""
    if any(sample.status == type(sample).Status.ABORTED for sample in _flat(samples)):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    return DynamicFilterOutput(keep=True)


def _flat(samples: Sequence[Any]) -> Iterator[Any]:
    """Yield the samples of a group, of which some may be lists: the rows of one episode."""
    for item in samples:
        yield from item if isinstance(item, list) else [item]

"""What generators of SkyRL make their rows with: ids of messages with a
mask, metrics of a batch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from turnwright.envs.user_imports import import_for_user
from turnwright_compat.skyrl.generator_interface import ConversationType

_BASE: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]
"""Conversation that messages are rendered after, so that no template writes its own
system message before them."""


def _render(
    messages: list[Any], tokenizer: Any, given: dict[str, Any] | None, prompt: bool = False
) -> list[int]:
    options = {
        "tokenize": True,
        "return_dict": False,
        "add_generation_prompt": prompt,
        **(given or {}),
    }
    return list(tokenizer.apply_chat_template(messages, **options))


def get_generation_prompt_ids(
    tokenizer: Any, tokenizer_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Return the ids that a template writes before a reply."""
    empty = [{"role": "user", "content": ""}]
    before = _render(empty, tokenizer, tokenizer_kwargs)
    return _render(empty, tokenizer, tokenizer_kwargs, prompt=True)[len(before) :]


def encode_messages_subset(
    messages: ConversationType, tokenizer: Any, tokenizer_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Return the ids of messages within a conversation."""
    if not messages:
        raise AssertionError("there are no messages to encode")
    before = _render(_BASE, tokenizer, tokenizer_kwargs)
    return _render([*_BASE, *messages], tokenizer, tokenizer_kwargs)[len(before) :]


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType,
    tokenizer: Any,
    assistant_logprobs: list[list[float]] | None = None,
    tokenizer_kwargs: dict[str, Any] | None = None,
) -> tuple[list[int], list[int], list[float] | None]:
    """Return ids, mask and logprobs of messages; replies are trained from after the generation
    prompt to their end token."""
    prompt = get_generation_prompt_ids(tokenizer, tokenizer_kwargs)
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    logprobs_of_replies = iter(assistant_logprobs or ())

    for message in messages:
        ids = encode_messages_subset([message], tokenizer, tokenizer_kwargs)
        is_reply = message["role"] == "assistant"
        start = end = len(ids)
        if is_reply:
            # The last id of the generation prompt may be one with the first of the reply.
            start = len(prompt) if ids[: len(prompt)] == prompt else len(prompt) - 1
            if ids[:start] != prompt[:start]:
                raise AssertionError(
                    "the template writes a reply otherwise than after its generation prompt"
                )
            if tokenizer.eos_token_id in ids:
                end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        elif message["role"] not in ("user", "tool"):
            raise ValueError(
                f"a message of role {message['role']!r} is neither of user, tool nor assistant"
            )

        response += ids
        mask += [0] * start + [1] * (end - start) + [0] * (len(ids) - end)
        if assistant_logprobs is not None:
            sampled = list(next(logprobs_of_replies, ())) if is_reply else []
            if len(sampled) != end - start:
                raise ValueError(f"a reply of {end - start} ids has {len(sampled)} logprobs")
            logprobs += [0.0] * start + sampled + [0.0] * (len(ids) - end)

    return response, mask, None if assistant_logprobs is None else logprobs


def apply_overlong_filtering(
    loss_masks: list[list[int]], stop_reasons: list[str]
) -> list[list[int]]:
    """Return the masks, zeros for the rows that were cut."""
    pairs = zip(loss_masks, stop_reasons, strict=True)
    return [list(mask) if reason == "stop" else [0] * len(mask) for mask, reason in pairs]


def get_rollout_metrics(
    responses: list[list[int]],
    rewards: list[float] | list[list[float]],
    env_metrics: list[dict[str, Any]] | None = None,
    env_classes: list[str] | None = None,
    loss_masks: list[list[int]] | None = None,
    trajectory_completion_times: list[float] | None = None,
    trajectory_time_splits: dict[str, list[float]] | None = None,
) -> dict[str, Any]:
    """Return the numbers of a batch that SkyRL logs; environments aggregate their own."""
    lengths = np.array([len(response) for response in responses], dtype=float)
    totals = np.array([float(np.sum(reward)) for reward in rewards])
    metrics: dict[str, Any] = {}
    for name in ("min", "max", "avg", "std"):
        metrics[f"generate/{name}_num_tokens"] = _statistic(name, lengths)
    metrics["generate/avg_tokens_non_zero_rewards"] = _statistic("avg", lengths[totals > 0])
    metrics["generate/avg_tokens_zero_rewards"] = _statistic("avg", lengths[totals == 0])

    if loss_masks is not None:
        trained = np.array([sum(mask) for mask in loss_masks], dtype=float)
        for name in ("min", "max", "avg", "std"):
            metrics[f"generate/{name}_assistant_tokens"] = _statistic(name, trained)

    times = {"completion": trajectory_completion_times, **(trajectory_time_splits or {})}
    for name, seconds in times.items():
        if not seconds:
            continue
        values = np.array(seconds, dtype=float)
        metrics[f"generate/trajectory_time_{name}_mean"] = _statistic("avg", values)
        metrics[f"generate/trajectory_time_{name}_p90"] = float(np.percentile(values, 90))
        metrics[f"generate/trajectory_time_{name}_max"] = _statistic("max", values)

    by_env: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for episode_metrics, env_class in zip(env_metrics or (), env_classes or (), strict=False):
        by_env[env_class].append(episode_metrics)
    for env_class, metrics_of_env in by_env.items():
        module = import_for_user("skyrl_gym.metrics", fromlist=("aggregate_for_environment",))
        aggregated = module.aggregate_for_environment(env_class, metrics_of_env)
        metrics |= {f"environment/{key}": value for key, value in aggregated.items()}
    return metrics


def _statistic(name: str, values: Any) -> float:
    functions: dict[str, Any] = {"min": np.min, "max": np.max, "avg": np.mean, "std": np.std}
    return float(functions[name](values)) if len(values) else 0.0

"""Reward functions of TRL; those that compare answers need the extra `math`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

_THINKING = re.compile(r"<think>((?!<think>).)*?</think>((?!<think>).)*", re.DOTALL)

Completions = Sequence[Sequence[dict[str, str]]]


def accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1.0 for the right answer, 0.0 for another one, and None for a
    solution that cannot be read."""
    from turnwright_compat.graders.verified import by_trl

    rewards = [
        by_trl(messages[0]["content"], right)
        for messages, right in zip(completions, solution, strict=True)
    ]
    if log_extra is not None:
        log_extra("solution", list(solution))
    return rewards


def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return what `accuracy_reward` does for the text after the first delimiter that is
    there, and 0.0 without one."""
    from turnwright_compat.graders.verified import by_trl

    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    rewards: list[float | None] = []
    for messages, right in zip(completions, solution, strict=True):
        content = messages[0]["content"]
        delimiter = next((text for text in delimiters if text in content), None)
        if delimiter is None:
            rewards.append(0.0)
        else:
            rewards.append(by_trl(content.rpartition(delimiter)[2], right))
    if log_extra is not None:
        log_extra("solution", list(solution))
    return rewards


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Return a reward for accuracy that falls with the length along a cosine, and rises
    with it for wrong answers."""

    def cosine_scaled_reward(
        completions: Completions,
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for correct, ids in zip(
            accuracy_reward(completions, solution), completion_ids, strict=True
        ):
            if correct is None:
                rewards.append(None)
                continue
            low, high = (
                (min_value_correct, max_value_correct)
                if correct
                else (max_value_wrong, min_value_wrong)
            )
            cosine = math.cos(math.pi * min(len(ids) / max_len, 1.0))
            rewards.append(low + 0.5 * (high - low) * (1.0 + cosine))
        return rewards

    return cosine_scaled_reward


def think_format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    """Return 1.0 for completions that begin with one thinking block, else 0.0."""
    return [
        float(_THINKING.fullmatch(messages[0]["content"]) is not None) for messages in completions
    ]


def get_repetition_penalty_reward(
    ngram_size: int = 3, max_penalty: float = -1.0
) -> Callable[..., list[float]]:
    """Return a penalty by the share of repeated sequences of `ngram_size` ids,
    at most `max_penalty`."""
    if max_penalty > 0:
        raise ValueError(f"max_penalty {max_penalty} should not be positive")

    def repetition_penalty_reward(
        completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        rewards = []
        for ids in completion_ids:
            sequences = [
                tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)
            ]
            repeated = 1 - len(set(sequences)) / len(sequences) if sequences else 0.0
            rewards.append(repeated * max_penalty if repeated else 0.0)
        return rewards

    return repetition_penalty_reward


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """Return a reward that falls from 0 to -1 over the last `soft_punish_cache`
    tokens before the limit."""
    start = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(
        completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        sizes = (len(ids) for ids in completion_ids)
        return [
            0.0 if size <= start else max(-1.0, (start - size) / soft_punish_cache)
            for size in sizes
        ]

    return soft_overlong_punishment_reward

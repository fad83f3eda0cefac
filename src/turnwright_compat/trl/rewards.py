"""Reward functions of TRL; those that compare answers need the extra `math`.

A reward takes the completions of a batch, each a list of messages, and the columns of their rows
as keyword arguments, each a list as long. It returns a number for each completion, or None where
there is nothing to judge. What is named `get_...` makes a reward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

_THINKING = re.compile(r"<think>((?!<think>).)*?</think>((?!<think>).)*", re.DOTALL)
"""One thinking block at the start, and no other after it."""

Completions = Sequence[Sequence[dict[str, str]]]


def accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1.0 for the right answer, 0.0 for another one, and None for a solution that cannot
    be read."""
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
    """Return what `accuracy_reward` does for the text after a delimiter, and 0.0 without one.

    The delimiter is the first of `reasoning_delimiters` that the text has; of one that it has
    several times, the last counts.
    """
    from turnwright_compat.graders.verified import by_trl

    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    rewards: list[float | None] = []
    for messages, right in zip(completions, solution, strict=True):
        content = messages[0]["content"]
        delimiter = next((text for text in delimiters if text in content), None)
        if delimiter is None:
            rewards.append(0.0)
        else:
            answer = content.rpartition(delimiter)[2]
            rewards.append(by_trl(answer, right))

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
    """Return a reward for accuracy that falls with the length along a cosine, and rises with it
    for wrong answers.

    Lengths are in ids; from `max_len` on the reward stays what it is there.
    """

    def cosine_scaled_reward(
        completions: Completions,
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        rewards: list[float | None] = []
        correctness = accuracy_reward(completions, solution)
        for correct, ids in zip(correctness, completion_ids, strict=True):
            if correct is None:
                rewards.append(None)
                continue

            if correct:
                longest, shortest = min_value_correct, max_value_correct
            else:
                longest, shortest = max_value_wrong, min_value_wrong
            cosine = math.cos(math.pi * min(len(ids) / max_len, 1.0))
            rewards.append(longest + 0.5 * (shortest - longest) * (1.0 + cosine))

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
    """Return a penalty: the share of repeated sequences of `ngram_size` ids, times `max_penalty`.

    Raises `ValueError` for a positive `max_penalty`.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty {max_penalty} should not be positive")

    def repetition_penalty_reward(
        completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        rewards = []
        for ids in completion_ids:
            starts = range(len(ids) - ngram_size + 1)
            sequences = [tuple(ids[start : start + ngram_size]) for start in starts]
            repeated_share = 1 - len(set(sequences)) / len(sequences) if sequences else 0.0
            # A product with 0 would be -0.0.
            rewards.append(repeated_share * max_penalty if repeated_share else 0.0)
        return rewards

    return repetition_penalty_reward


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """Return a reward that falls from 0 to -1 over the last `soft_punish_cache` tokens before the
    limit, and stays there."""
    start = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(
        completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        rewards = []
        for ids in completion_ids:
            length = len(ids)
            if length <= start:
                rewards.append(0.0)
            else:
                rewards.append(max(-1.0, (start - length) / soft_punish_cache))
        return rewards

    return soft_overlong_punishment_reward

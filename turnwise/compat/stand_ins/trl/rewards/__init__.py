"""Reward functions without further packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_THINKING = re.compile(r"<think>((?!<think>).)*?</think>((?!<think>).)*", re.DOTALL)


def think_format_reward(completions: Sequence[Sequence[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Return 1.0 for completions that begin with one thinking block, else 0.0."""
    return [float(_THINKING.fullmatch(messages[0]["content"]) is not None) for messages in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return a reward that falls from 0 to -1 over the last `soft_punish_cache` tokens before the limit."""
    start = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        sizes = (len(ids) for ids in completion_ids)
        return [0.0 if size <= start else max(-1.0, (start - size) / soft_punish_cache) for size in sizes]

    return soft_overlong_punishment_reward

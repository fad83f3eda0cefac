"""What a request is held to before it reaches the loop: a fault in it is its caller's, and no other call meets it."""

from __future__ import annotations

from math import isfinite
from operator import index
from typing import Any

from turnwise.engine.base import Request
from turnwise.engine.stops import StopText
from turnwise.types import Sampling

COLDEST = 1e-4
"""Least temperature but 0: below, logits divided by it leave the range of float32."""
MOST_SEED = 2**64


def ids_of(request: Request) -> tuple[list[int], str]:
    """The ids of a context as ints, and what is wrong with them."""
    try:
        ids = list(request.ids)
        if set(map(type, ids)) != {int}:
            ids = [index(one) for one in ids if not isinstance(one, bool) or _no_id(one)]
    except (TypeError, OverflowError) as error:
        return [], f"the context holds what is no id: {error}"
    return ids, ""


def fault_of(request: Request, vocabulary: int) -> str:
    """What is wrong with a request beside its context; empty for nothing."""
    if type(request.max_tokens) is not int or request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens!r:.80}; at least 1"
    if not isinstance(request.session, str) or not isinstance(request.group, str):
        return "session and group are texts"
    if type(request.seed) is not int or not -MOST_SEED < request.seed < MOST_SEED:
        return f"the seed is {request.seed!r:.80}; a whole number of at most 64 bits"
    if type(request.routes_from) is not int or request.routes_from < 0:
        return f"routes_from is {request.routes_from!r:.80}; a position"
    if request.stop_text is not None and not isinstance(request.stop_text, StopText):
        return f"stop_text is {request.stop_text!r:.80}; a StopText"
    return _of_sampling(request.sampling) or _of_bans(request.banned_ids, vocabulary)


def _of_sampling(sampling: Sampling) -> str:
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if not _is_number(temperature) or (temperature != 0 and not COLDEST <= temperature <= 1 / COLDEST):
        return f"the temperature is {temperature!r:.80}; 0, or from {COLDEST:g} to {1 / COLDEST:g}"
    if not _is_number(top_p) or not 0 < top_p <= 1:
        return f"top_p is {top_p!r:.80}; over 0 and at most 1"
    if type(top_k) is not int or not 0 <= top_k < 2**31:
        return f"top_k is {top_k!r:.80}; 0 for all, or how many ids"
    return ""


def _of_bans(banned: Any, vocabulary: int) -> str:
    if not banned:
        return ""
    if not isinstance(banned, frozenset) or any(type(one) is not int for one in banned):
        return "banned_ids is a frozenset of ids"
    low, high = min(banned), max(banned)
    if low < 0 or high >= vocabulary:
        return f"banned_ids: id {low if low < 0 else high} is not in the vocabulary of {vocabulary} ids"
    return "banned_ids: every id of the vocabulary is banned" if len(banned) == vocabulary else ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _no_id(one: Any) -> bool:
    raise TypeError(f"{one!r}")

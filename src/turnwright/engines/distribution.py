"""Sampling distribution from logits: one definition for the engine, this trainer and others.

Works on NumPy, PyTorch, JAX and CuPy arrays through the array API standard, and imports none of
these libraries.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

from turnwright.types import Sampling, SamplingDistribution


def token_logprobs(logits: Any, ids: Any, sampling: SamplingDistribution) -> Any:
    """Compute the logprobs of sampled ids, as in `Sample.logprobs`.

    Example::

        >>> import numpy as np
        >>> ids = np.array([0, 2, 1])
        >>> logits = np.array([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
        >>> sampling = tw.SamplingDistribution(temperature=0.5, banned_ids=frozenset({0}))
        >>> shifted = logits[:-1]  # the logits at position t belong to the id at t + 1
        >>> [round(float(logprob), 3) for logprob in tw.token_logprobs(shifted, ids[1:], sampling)]
        [-0.018, -0.127]

    Args:
        logits: [n, vocabulary] from any array library; float16 and bfloat16 are computed in
            float32. Gradients flow through it.
        ids: [n] integers of the same library and device.
        sampling: the sample's distribution, `Sample.sampling`.

    Returns:
        [n], natural logarithms; minus infinity for a banned id. A sampled id always counts
        as part of the min-p/top-k/top-p support, so that small differences from the
        engine's logits exclude none.

    Raises:
        ValueError: when the shapes do not match.
    """
    xp = _namespace(logits)
    if logits.ndim != 2 or tuple(ids.shape) != tuple(logits.shape[:1]):
        raise ValueError(
            "token_logprobs: logits must be [n, vocabulary] and ids [n], not "
            f"{tuple(logits.shape)} and {tuple(ids.shape)}; logits[:-1] belong to ids[1:]"
        )

    scores = masked_scores(logits, Sampling(sampling.temperature), sampling.banned_ids)
    if sampling.temperature > 0 and not sampling.is_unmodified:
        vocabulary = xp.arange(scores.shape[-1], device=scores.device)
        is_sampled = vocabulary[None, :] == ids[:, None]
        scores = xp.where(is_sampled, scores, truncate(scores, sampling))

    # log softmax of the sampled ids; subtracting the maximum keeps exp from overflowing.
    peak = xp.max(scores, axis=-1, keepdims=True)
    total = xp.log(xp.sum(xp.exp(scores - peak), axis=-1, keepdims=True))
    return (xp.take_along_axis(scores, ids[:, None], axis=-1) - peak - total)[:, 0]


def masked_scores(logits: Any, sampling: Sampling, banned: frozenset[int] = frozenset()) -> Any:
    """Compute scores whose softmax is the sampling distribution.

    Logits and scores are [n, vocabulary]; scores have at least float32, and minus infinity outside
    the support.
    """
    xp = _namespace(logits)
    scores = xp.astype(logits, xp.result_type(logits.dtype, xp.float32), copy=False)

    if banned:
        scores = scores + _penalty(xp, banned, scores.shape[-1], scores.dtype, logits.device)
    if sampling.temperature <= 0:
        return scores
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    return scores if sampling.is_unmodified else truncate(scores, sampling)


def truncate(scores: Any, sampling: Sampling) -> Any:
    """Set the scores of all ids outside min_p, top_k and top_p to minus infinity.

    The three apply in this order. The nucleus of top_p is the smallest set of ids whose
    probabilities reach top_p; ties are broken by id.
    """
    xp = _namespace(scores)

    # Which ranks stay, from the highest score down.
    ranked = xp.sort(scores, axis=-1, descending=True)
    rank = xp.arange(scores.shape[-1], device=scores.device)
    keep = xp.ones(scores.shape, dtype=xp.bool, device=scores.device)
    if sampling.min_p > 0:
        keep = keep & (ranked >= ranked[:, :1] + math.log(sampling.min_p))
    if sampling.top_k > 0:
        keep = keep & (rank < sampling.top_k)
    if sampling.top_p < 1.0:
        weights = xp.where(keep, xp.exp(ranked - ranked[:, :1]), 0.0)
        weights = weights / xp.sum(weights, axis=-1, keepdims=True)
        before = xp.cumulative_sum(weights, axis=-1) - weights
        keep = keep & ((before < sampling.top_p) | (rank == 0))  # one id always stays

    # Which ids have these ranks: all above the lowest score kept, and of those that have exactly
    # this score as many as ranks were kept, the lowest ids first.
    lowest = xp.min(xp.where(keep, ranked, xp.inf), axis=-1, keepdims=True)
    is_tie = scores == lowest
    ties_kept = xp.sum(xp.astype(keep & (ranked == lowest), xp.int64), axis=-1, keepdims=True)
    tie_number = xp.cumulative_sum(xp.astype(is_tie, xp.int64), axis=-1)
    inside = (scores > lowest) | (is_tie & (tie_number <= ties_kept))
    return xp.where(inside, scores, -xp.inf)


def _namespace(array: Any) -> Any:
    from array_api_compat import array_namespace

    return array_namespace(array)


@lru_cache(maxsize=64)
def _penalty(
    xp: ModuleType, banned: frozenset[int], vocabulary: int, dtype: Any, device: Any
) -> Any:
    """Return [vocabulary]: minus infinity for the banned ids, else 0."""
    ids = xp.asarray(sorted(banned), dtype=xp.int64, device=device)
    row = xp.arange(vocabulary, dtype=xp.int64, device=device)
    return xp.astype(xp.where(xp.isin(row, ids), -xp.inf, 0.0), dtype)

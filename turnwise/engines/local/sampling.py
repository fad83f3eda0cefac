"""Sampler and counter-based noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from turnwise.engines.base import Request
from turnwise.engines.distribution import masked_scores
from turnwise.types import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S40 = (np.uint64(shift) for shift in (30, 27, 31, 40))


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> _S30)) * _FIRST
    value = (value ^ (value >> _S27)) * _SECOND
    mixed: np.ndarray = value ^ (value >> _S31)
    return mixed


def counter_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), one per (seed, position).

    The generator is splitmix64 (Steele, Lea and Flood, 2014): its n-th output is a mix of ``state + n * golden``, so it can be
    asked for any position at once. The seed is mixed first, since callers may count seeds up.

    Args:
        seeds: [n] uint64.
        positions: [n] uint64, position within the reply.

    Returns:
        [n] float32 with 24 random bits each, so never rounded up to 1.
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    drawn: np.ndarray = (mixed >> _S40).astype(np.float32) * np.float32(2.0**-24)
    return drawn


ROWS = 16
"""Batches are padded to a multiple of this many rows: vector code then has no scalar tail, matrix products take one path."""


def round_up_rows(count: int) -> int:
    """The least multiple of `ROWS` that holds `count` rows, at least one multiple."""
    return max(ROWS, -(-count // ROWS) * ROWS)


class RowDraw(Protocol):
    """What the sampler needs to know of a row: whose reply it is, and how far that is."""

    @property
    def request(self) -> Request:
        """The call that the row answers."""
        ...

    @property
    def position(self) -> int:
        """Position within the reply of the id to draw."""
        ...


class Sampler:
    """Draws one id per row. A subclass may override `pick`, to force the ids of a benchmark, say."""

    def __call__(self, logits: torch.Tensor, draws: Sequence[RowDraw]) -> tuple[list[int], list[float]]:
        """Draw one id per row from its request's distribution.

        Rows of unlike distributions are drawn in batches of their own; a row's result depends on its logits and its (seed,
        position) alone.

        Args:
            logits: [m, vocabulary], m at least the padded number of `draws`; rows behind that number are ignored.
            draws: one per row.

        Returns:
            ids and logprobs, one per draw. A logprob that is not finite says that the row had no distribution.
        """
        kinds: dict[tuple[Sampling, frozenset[int]], list[int]] = {}
        for index, draw in enumerate(draws):
            kinds.setdefault((draw.request.sampling, draw.request.banned_ids), []).append(index)
        if len(kinds) == 1:
            (sampling, banned) = next(iter(kinds))
            ids, logprobs = self._draw(logits[: round_up_rows(len(draws))], draws, sampling, banned)
            return ids[: len(draws)], logprobs[: len(draws)]
        ids, logprobs = [0] * len(draws), [0.0] * len(draws)
        for (sampling, banned), rows in kinds.items():
            take = torch.tensor(rows + rows[:1] * (round_up_rows(len(rows)) - len(rows)), device=logits.device)
            some, their = self._draw(logits[take], [draws[row] for row in rows], sampling, banned)
            for row, id_, logprob in zip(rows, some, their, strict=False):
                ids[row], logprobs[row] = id_, logprob
        return ids, logprobs

    def pick(self, cdf: torch.Tensor, draws: Sequence[RowDraw]) -> torch.Tensor:
        """The ids at which the cumulated weights pass the uniform numbers of the rows.

        Args:
            cdf: [m, vocabulary] cumulated weights, not normalised, never falling.
            draws: one per row; rows behind their number are padding.

        Returns:
            [m] int64.
        """
        seeds = np.array([draw.request.seed & 0xFFFFFFFFFFFFFFFF for draw in draws], dtype=np.uint64)
        positions = np.array([draw.position for draw in draws], dtype=np.uint64)
        noise = np.zeros(cdf.shape[0], dtype=np.float32)
        noise[: len(draws)] = counter_uniforms(seeds, positions)
        total = cdf[:, -1]
        # The product may round up to the total itself, behind the last id: the next number below it stands for that.
        target = torch.minimum(torch.from_numpy(noise).to(cdf.device) * total, torch.nextafter(total, torch.zeros_like(total)))
        # `right` takes the first id whose cumulated weight is above the target: an id of weight 0 is never taken.
        return torch.searchsorted(cdf, target[:, None], right=True).squeeze(1)

    def _draw(
        self, logits: torch.Tensor, draws: Sequence[RowDraw], sampling: Sampling, banned: frozenset[int]
    ) -> tuple[list[int], list[float]]:
        scores = masked_scores(logits, sampling, banned)
        peak = scores.amax(1, keepdim=True)
        cdf = (scores - peak).exp_().cumsum_(1)
        ids = scores.argmax(1) if sampling.temperature <= 0 else self.pick(cdf, draws)
        ids = ids.clamp(max=scores.shape[1] - 1)  # rows of NaN end behind the vocabulary; their logprob tells
        logprobs = (scores.gather(1, ids[:, None]) - peak - cdf[:, -1:].log()).squeeze(1)
        return ids.tolist(), logprobs.tolist()

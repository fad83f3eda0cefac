"""Sampler and counter-based random numbers.

A row's draw depends on its logits and on (seed, position) only, so a reply is the same whichever
calls share its steps. The distribution itself is `masked_scores` in `engines/distribution.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from turnwright.engines.distribution import masked_scores
from turnwright.types import Alternatives, Sampling

if TYPE_CHECKING:
    from turnwright.engines.local.step_rows import RowDraw

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
    """Return uniform numbers in [0, 1), one per (seed, position).

    The generator is splitmix64 (Steele, Lea and Flood, 2014). Its n-th output is a mix of
    ``state + n * golden``, which gives random access to positions. The seed is mixed first, since
    callers may use consecutive seeds. Both arguments are [n] uint64, the result is [n] float32 with
    24 random bits each, so none rounds up to 1.
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    drawn: np.ndarray = (mixed >> _S40).astype(np.float32) * np.float32(2.0**-24)
    return drawn


ROWS = 16
"""Batches are padded to a multiple of this many rows, for a single code path: no scalar tail, one
kind of matrix product."""


def round_up_rows(count: int) -> int:
    """Round a row count up to a multiple of `ROWS`, at least one multiple."""
    return max(ROWS, -(-count // ROWS) * ROWS)


def padded_rows(
    tokens: list[int],
    positions: list[int],
    slots: list[int],
    count: int,
    scratch: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return ids, positions and slots of rows as a tensor [3, count], filled up with rows of the
    slot `scratch`."""
    padding = count - len(tokens)
    rows = [tokens + [0] * padding, positions + [0] * padding, slots + [scratch] * padding]
    return torch.tensor(rows, device=device)


class Sampler:
    """Samples one id per row.

    Subclasses may override `pick`, for instance to force ids in a benchmark.
    """

    def __call__(
        self, logits: torch.Tensor, draws: Sequence[RowDraw]
    ) -> tuple[list[int], list[float]]:
        """Sample one id per row from its request's distribution.

        Rows with different distributions form separate batches. A row's result depends only on its
        logits and (seed, position). Logits are [m, vocabulary], m at least the padded number of
        `draws`; further rows are ignored.

        Return ids and logprobs, one per draw. A non-finite logprob means that the row has no
        distribution.
        """
        sampling = draws[0].request.sampling
        banned = draws[0].request.banned_ids

        # One rollout's requests have the same objects, which are compared much faster than hashed.
        rows_of_kind: dict[tuple[Sampling, frozenset[int]], list[int]] = {}
        if not all(
            draw.request.sampling is sampling and draw.request.banned_ids is banned
            for draw in draws
        ):
            for row, draw in enumerate(draws):
                kind = (draw.request.sampling, draw.request.banned_ids)
                rows_of_kind.setdefault(kind, []).append(row)
        if len(rows_of_kind) <= 1:
            padded_logits = logits[: round_up_rows(len(draws))]
            ids, logprobs = self._draw(padded_logits, draws, sampling, banned)
            return ids[: len(draws)], logprobs[: len(draws)]

        ids = [0] * len(draws)
        logprobs = [0.0] * len(draws)
        for (sampling, banned), rows in rows_of_kind.items():
            padding = rows[:1] * (round_up_rows(len(rows)) - len(rows))
            taken = torch.tensor(rows + padding, device=logits.device)
            kind_draws = [draws[row] for row in rows]
            kind_ids, kind_logprobs = self._draw(logits[taken], kind_draws, sampling, banned)
            for row, id_, logprob in zip(rows, kind_ids, kind_logprobs, strict=False):
                ids[row] = id_
                logprobs[row] = logprob
        return ids, logprobs

    def alternatives(
        self, logits: torch.Tensor, draws: Sequence[RowDraw]
    ) -> dict[int, Alternatives]:
        """Return the most likely ids of the rows whose requests ask for them, by row.

        They are those of the distribution that the row is sampled from, likeliest first, equally
        likely ones by id. As a sample, they depend on nothing but the row's logits.
        """
        rows_of_kind: dict[tuple[Sampling, frozenset[int], int], list[int]] = {}
        for row, draw in enumerate(draws):
            request = draw.request
            if request.alternatives:
                kind = (request.sampling, request.banned_ids, request.alternatives)
                rows_of_kind.setdefault(kind, []).append(row)

        likeliest: dict[int, Alternatives] = {}
        for (sampling, banned, count), rows in rows_of_kind.items():
            padding = rows[:1] * (round_up_rows(len(rows)) - len(rows))
            taken = torch.tensor(rows + padding, device=logits.device)
            scores = masked_scores(logits[taken], sampling, banned)
            peak, cdf = _cumulate(scores)
            ids, top_scores = _highest(scores, min(count, scores.shape[1]))
            logprobs = top_scores - peak - cdf[:, -1:].log()
            for row, row_ids, row_logprobs in zip(
                rows, ids.tolist(), logprobs.tolist(), strict=False
            ):
                pairs = zip(row_ids, row_logprobs, strict=True)
                likeliest[row] = [pair for pair in pairs if math.isfinite(pair[1])]
        return likeliest

    def pick(self, cdf: torch.Tensor, draws: Sequence[RowDraw]) -> torch.Tensor:
        """Return the first ids, [m] int64, whose cumulative weight exceeds the rows' uniform
        numbers.

        `cdf` has cumulative weights [m, vocabulary], unnormalized, nondecreasing; rows after the
        number of `draws` are padding.
        """
        seeds_64 = [draw.request.seed & 0xFFFFFFFFFFFFFFFF for draw in draws]
        seeds = np.array(seeds_64, dtype=np.uint64)
        positions = np.array([draw.position for draw in draws], dtype=np.uint64)
        uniforms = np.zeros(cdf.shape[0], dtype=np.float32)
        uniforms[: len(draws)] = counter_uniforms(seeds, positions)

        # The product may round up to the total, past the last id; the next smaller number
        # replaces it.
        total = cdf[:, -1]
        target = torch.minimum(
            torch.from_numpy(uniforms).to(cdf.device) * total,
            torch.nextafter(total, torch.zeros_like(total)),
        )
        # `right` takes the first id whose cumulative weight is above the target: ids of
        # weight 0 are never sampled.
        return torch.searchsorted(cdf, target[:, None], right=True).squeeze(1)

    def _draw(
        self,
        logits: torch.Tensor,
        draws: Sequence[RowDraw],
        sampling: Sampling,
        banned: frozenset[int],
    ) -> tuple[list[int], list[float]]:
        """Return ids and logprobs of rows of one distribution, padding included."""
        scores = masked_scores(logits, sampling, banned)
        peak, cdf = _cumulate(scores)
        ids = scores.argmax(1) if sampling.temperature <= 0 else self.pick(cdf, draws)
        # Rows of NaN end past the vocabulary; their logprob is NaN.
        ids = ids.clamp(max=scores.shape[1] - 1)
        logprobs = (scores.gather(1, ids[:, None]) - peak - cdf[:, -1:].log()).squeeze(1)
        return ids.tolist(), logprobs.tolist()


def _cumulate(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' highest scores, [m, 1], and cumulative weights relative to them,
    [m, vocabulary]."""
    peak = scores.amax(1, keepdim=True)
    return peak, (scores - peak).exp_().cumsum_(1)


def _highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the rows' highest scores and the scores, [m, count] each, highest first;
    of equal scores the lower id.

    `topk` alone promises no order of equal scores, which rounded logits have.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lowest = scores.topk(count, 1).values[:, -1:]
    is_above = scores > lowest
    is_tie = scores == lowest
    ties_kept = count - is_above.sum(1, keepdim=True)
    is_kept = is_above | (is_tie & (is_tie.cumsum(1) <= ties_kept))

    # As many in each row, in the order of their ids.
    ids = is_kept.nonzero()[:, 1].view(-1, count)
    kept_scores, order = scores.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), kept_scores

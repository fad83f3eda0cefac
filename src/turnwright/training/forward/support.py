"""Ids that may be sampled under top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """Ids that may be sampled at each of M targets under top-k and top-p."""

    ends: Tensor
    """(M + 1,): the ids of target m are ``ids[ends[m] : ends[m + 1]]``."""
    ids: Tensor

    @classmethod
    def of(cls, excluded_mv: Tensor) -> SamplingSupport:
        """Build it from a mask (M, V), true for excluded ids."""
        allowed_mv = ~excluded_mv
        ends = torch.nn.functional.pad(allowed_mv.sum(1).cumsum(0), (1, 0))
        return cls(ends, allowed_mv.nonzero()[:, 1])

    @classmethod
    def join(cls, parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """Concatenate several supports."""
        counts = torch.cat([part.counts for part in parts])
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return cls(ends, torch.cat([part.ids for part in parts]))

    @property
    def counts(self) -> Tensor:
        """(M,): number of ids per target."""
        return self.ends.diff()

    def take(self, index_k: Tensor) -> SamplingSupport:
        """Select targets."""
        counts_k = self.counts[index_k]
        ends = torch.nn.functional.pad(counts_k.cumsum(0), (1, 0))

        # Of each id that is selected: its place within its target, and where that target's begin.
        places = torch.arange(int(ends[-1]), device=self.ids.device)
        places = places - torch.repeat_interleave(ends[:-1], counts_k)
        begins = torch.repeat_interleave(self.ends[:-1][index_k], counts_k)
        return SamplingSupport(ends, self.ids[places + begins])

    def excluded(self, width: int) -> Tensor:
        """Return a mask (M, width), true for ids that cannot be sampled."""
        counts = self.counts
        excluded_mv = torch.ones((len(counts), width), dtype=torch.bool, device=self.ids.device)
        rows = torch.repeat_interleave(torch.arange(len(counts), device=self.ids.device), counts)
        excluded_mv[rows, self.ids] = False
        return excluded_mv

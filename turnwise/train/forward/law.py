"""How an engine samples from logits, as a trainer must see it: temperature, banned ids, and what top-k and top-p leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnwise.engine import Sampling
from turnwise.engine.distribution import masked_scores
from turnwise.train.loss.terms import TokenStats, banned_mask, token_stats


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """The ids that may be sampled in place of each of M targets, where top-k or top-p left the others out."""

    ends: Tensor
    """(M + 1,): those of target m are ``ids[ends[m] : ends[m + 1]]``."""
    ids: Tensor

    @classmethod
    def of(cls, shut_mv: Tensor) -> SamplingSupport:
        """All that is not shut."""
        open_mv = ~shut_mv
        ends = torch.nn.functional.pad(open_mv.sum(1).cumsum(0), (1, 0))
        return cls(ends, open_mv.nonzero()[:, 1])

    @classmethod
    def join(cls, parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """Those of several, one behind another."""
        counts = torch.cat([part.counts for part in parts])
        return cls(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.cat([part.ids for part in parts]))

    @property
    def counts(self) -> Tensor:
        """(M,): how many each target has."""
        return self.ends.diff()

    def take(self, index_k: Tensor) -> SamplingSupport:
        """Those of some targets."""
        counts = self.counts[index_k]
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        at = torch.arange(int(ends[-1]), device=self.ids.device) - torch.repeat_interleave(ends[:-1], counts)
        return SamplingSupport(ends, self.ids[at + torch.repeat_interleave(self.ends[:-1][index_k], counts)])

    def excluded(self, width: int) -> Tensor:
        """(M, width): true for what may not be sampled."""
        counts = self.counts
        shut_mv = torch.ones((len(counts), width), dtype=torch.bool, device=self.ids.device)
        rows = torch.repeat_interleave(torch.arange(len(counts), device=self.ids.device), counts)
        shut_mv[rows, self.ids] = False
        return shut_mv


@dataclass(slots=True)
class SamplingDistribution:
    """The distribution that an engine samples from, made of logits: divided by the temperature, without banned ids, and
    renormalised over what top-k and top-p leave (sampling-mask replay).

    What is left is found from the trainer's logits before a step's first update, and stays the same for all of its updates:
    else an id that was sampled could fall out of it, and its ratio would compare two sets. What was sampled is always in it.
    """

    temperature: float = 1.0
    banned_ids: Iterable[int] = ()
    top_p: float = 1.0
    top_k: int = 0
    _masks: dict[tuple[int, torch.device], Tensor | None] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether ids are left out beside the banned ones."""
        return self.top_p < 1.0 or self.top_k > 0

    def banned(self, logits: Tensor) -> Tensor | None:
        """(V,), true for the banned ids; None where there are none."""
        place = (logits.shape[-1], logits.device)
        if place not in self._masks:
            self._masks[place] = banned_mask(self.banned_ids, *place)
        return self._masks[place]

    def excluded(self, wide_mv: Tensor, targets_m: Tensor, kept: SamplingSupport | None = None) -> Tensor | None:
        """Booleans (V,) or (M, V), true for what is not sampled; None where all may be.

        Args:
            wide_mv: logits in float32 or better, not yet divided by the temperature.
            kept: what was left before; none finds it here.
        """
        banned_v = self.banned(wide_mv)
        if not self.truncates:
            return banned_v
        if kept is not None:
            return kept.excluded(wide_mv.shape[-1])
        with torch.no_grad():
            sampling = Sampling(self.temperature, self.top_p, self.top_k)
            shut_mv: Tensor = masked_scores(wide_mv.detach(), sampling, frozenset(self.banned_ids)).isneginf()
            return shut_mv.scatter_(1, targets_m[:, None], False)

    def stats(self, logits_mv: Tensor, targets_m: Tensor, kept: SamplingSupport | None = None, *, entropy: bool) -> TokenStats:
        """Of logits in whatever precision: float32 or better from here on."""
        wide_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32))
        shut = self.excluded(wide_mv, targets_m, kept)
        return token_stats(wide_mv, targets_m, temperature=self.temperature, banned_v=shut, entropy=entropy)

    def support(self, logits_mv: Tensor, targets_m: Tensor) -> SamplingSupport | None:
        """What is left of logits; None where nothing is cut."""
        if not self.truncates:
            return None
        shut_mv = self.excluded(logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32)), targets_m)
        return None if shut_mv is None else SamplingSupport.of(shut_mv)

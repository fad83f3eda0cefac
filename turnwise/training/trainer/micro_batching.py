"""Loops over micro-batches; out-of-memory retry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from turnwise.errors import TurnwiseError
from turnwise.renderers.vision import PixelCache
from turnwise.training.distributed import Ranks
from turnwise.training.forward.batch import MicroBatch, TrainingBatch
from turnwise.training.forward.forward import ForwardPass
from turnwise.training.forward.head import SamplingDistribution, SamplingSupport
from turnwise.training.loss import PolicyTerms, TokenStats
from turnwise.training.trainer.objective import Objective

Stats = Callable[..., TokenStats]
"""`ForwardPass.stats`, or what stands for it where the model is sharded."""


def sampling_support(
    forward: ForwardPass, batch: TrainingBatch, pixels: PixelCache | None, law: SamplingDistribution
) -> SamplingSupport | None:
    """What top-k and top-p leave for each of a batch's targets under the policy as it is, N; None where nothing is cut."""
    found = [forward.sampling_support(micro, pixels, law) for micro in batch.micros]
    parts = [part for part in found if part is not None]
    if not parts:
        return None
    order_n = torch.cat([micro.tokens_m for micro in batch.micros])
    return SamplingSupport.join(parts).take(order_n.argsort())


def _kept(batch: TrainingBatch, micro: MicroBatch) -> SamplingSupport | None:
    return None if batch.kept is None else batch.kept.take(micro.tokens_m)


def score_batch(
    stats: Stats, ranks: Ranks, batch: TrainingBatch, pixels: PixelCache | None, law: SamplingDistribution
) -> Tensor:
    """The logprobs of a batch's targets, float64, N, from the passes of all ranks; no gradient."""
    logp_n = torch.zeros_like(batch.weights_n)
    with torch.no_grad():
        for micro, own in ranks.passes(batch.micros):
            found = stats(micro, pixels, law, _kept(batch, micro), entropy=False)
            if own:
                logp_n[micro.tokens_m] = found.logprobs_m.double()
    return ranks.sum_(logp_n)


def supervised_backward(
    stats: Stats, ranks: Ranks, batch: TrainingBatch, pixels: PixelCache | None, law: SamplingDistribution
) -> float:
    """Forward and backward of the cross entropy, weighted; its value in nats, over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=batch.weights_n.device)
    for micro, own in ranks.passes(batch.micros):
        logp_m = stats(micro, pixels, law, entropy=False).logprobs_m
        loss = -(logp_m * batch.weights_n[micro.tokens_m].to(logp_m.dtype)).sum()
        (loss if own else 0.0 * loss).backward()
        total += loss.detach() if own else 0.0
    return float(ranks.sum_(total))


def policy_backward(
    stats: Stats,
    ranks: Ranks,
    batch: TrainingBatch,
    pixels: PixelCache | None,
    law: SamplingDistribution,
    objective: Objective,
    sequence_n: Tensor | None,
) -> list[tuple[MicroBatch, PolicyTerms, Tensor, Tensor]]:
    """Forward and backward of this rank's passes: of each its terms, entropies and logprobs, all without a graph.

    Args:
        sequence_n: as `Objective.sequence` gave it.
    """
    made = []
    for micro, own in ranks.passes(batch.micros):
        found = stats(micro, pixels, law, _kept(batch, micro), entropy=True)
        terms = objective.terms(batch, micro, found.logprobs_m, sequence_n)
        (terms.loss if own else 0.0 * terms.loss).backward()
        if own:
            made.append((micro, replace(terms, loss=terms.loss.detach()), found.entropy_m, found.logprobs_m.detach()))
    return made


T = TypeVar("T")

_log = logging.getLogger(__name__)


class MicroBatchLimit:
    """The tokens of a pass: `train.micro_tokens`, until memory runs out for the first time, and half of it from then on.

    Once, since twice would hide that something else fills the memory; the result does not depend on it.
    """

    def __init__(self, tokens: int, *, alone: bool = True, on_note: Callable[[str], None] | None = None) -> None:
        """
        Args:
            alone: whether this process trains by itself. Several would have to halve together, and one that ran out of memory
                cannot tell the others in the middle of a pass.
            on_note: receives a line when it is halved; a warning is logged by default.
        """
        self.tokens = tokens
        self.alone = alone
        self.halved = False
        self._on_note = on_note or _log.warning

    def run(self, batch: TrainingBatch, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Do work that goes over the passes of a batch; where memory runs out, once more over passes of half the size.

        Args:
            work: starts from the first pass whenever it is called; gradients are then as they were before the first call.
            undo: what is left of an attempt that failed is taken back by it.

        Raises:
            TurnwiseError: when memory runs out though the passes were halved before.
        """
        if self.halved:
            batch.repack(self.tokens)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            told = _first_line(error)
            if self.halved or self.tokens < 2 or not self.alone:
                raise TurnwiseError(_full(told, self.tokens, self.halved)) from None
        # Out here the exception is gone, and with it the frames that held the tensors of the failed pass.
        undo()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.halved = True
        self._on_note(
            f"memory ran out ({told}): from here on a forward pass takes {self.tokens // 2} tokens instead of {self.tokens}; "
            f"set train.micro_tokens = {self.tokens // 2} to begin with that"
        )
        self.tokens //= 2
        batch.repack(self.tokens)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            told = _first_line(error)
        undo()
        raise TurnwiseError(_full(told, self.tokens, True))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no more memory"])[0].partition(". ")[0]


def _full(told: str, tokens: int, halved: bool) -> str:
    again = ", which is half of train.micro_tokens already" if halved else ""
    return (
        f"memory ran out with forward passes of {tokens} tokens{again} ({told}). The weights were left as they are. Shorten "
        "episodes (limits.context, limits.episode_tokens), lower train.micro_tokens, freeze what need not be trained, or give "
        "the engine less"
    )

"""Loops over micro-batches, with one retry after running out of memory."""

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
from turnwise.training.forward.head import LogitDistribution, SamplingSupport
from turnwise.training.loss import PolicyTerms, TokenStats
from turnwise.training.trainer.objective import Objective

Stats = Callable[..., TokenStats]
"""`ForwardPass.stats`, or its replacement for a sharded model."""


def sampling_support(
    forward: ForwardPass, batch: TrainingBatch, pixels: PixelCache | None, distribution: LogitDistribution
) -> SamplingSupport | None:
    """Compute the top-k/top-p support of a batch's targets under the current policy, N; None without truncation."""
    found = [forward.sampling_support(micro, pixels, distribution) for micro in batch.micros]
    parts = [part for part in found if part is not None]
    if not parts:
        return None
    order_n = torch.cat([micro.tokens_m for micro in batch.micros])
    return SamplingSupport.join(parts).take(order_n.argsort())


def _support_of(batch: TrainingBatch, micro: MicroBatch) -> SamplingSupport | None:
    return None if batch.support is None else batch.support.take(micro.tokens_m)


def score_batch(
    stats: Stats, ranks: Ranks, batch: TrainingBatch, pixels: PixelCache | None, distribution: LogitDistribution
) -> Tensor:
    """Compute logprobs of a batch's targets from the passes of all ranks, float64, N; no gradient."""
    logp_n = torch.zeros_like(batch.weights_n)
    with torch.no_grad():
        for micro, own in ranks.passes(batch.micros):
            found = stats(micro, pixels, distribution, _support_of(batch, micro), entropy=False)
            if own:
                logp_n[micro.tokens_m] = found.logprobs_m.double()
    return ranks.sum_(logp_n)


def supervised_backward(
    stats: Stats, ranks: Ranks, batch: TrainingBatch, pixels: PixelCache | None, distribution: LogitDistribution
) -> float:
    """Run forward and backward of the weighted cross entropy; return its value in nats, over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=batch.weights_n.device)
    for micro, own in ranks.passes(batch.micros):
        logp_m = stats(micro, pixels, distribution, entropy=False).logprobs_m
        loss = -(logp_m * batch.weights_n[micro.tokens_m].to(logp_m.dtype)).sum()
        (loss if own else 0.0 * loss).backward()
        total += loss.detach() if own else 0.0
    return float(ranks.sum_(total))


def policy_backward(
    stats: Stats,
    ranks: Ranks,
    batch: TrainingBatch,
    pixels: PixelCache | None,
    distribution: LogitDistribution,
    objective: Objective,
    sequence_n: Tensor | None,
) -> list[tuple[MicroBatch, PolicyTerms, Tensor, Tensor]]:
    """Run forward and backward of this rank's passes; return each one's terms, entropies and logprobs, detached.

    Args:
        sequence_n: result of `Objective.sequence`.
    """
    made = []
    for micro, own in ranks.passes(batch.micros):
        found = stats(micro, pixels, distribution, _support_of(batch, micro), entropy=True)
        terms = objective.terms(batch, micro, found.logprobs_m, sequence_n)
        (terms.loss if own else 0.0 * terms.loss).backward()
        if own:
            made.append((micro, replace(terms, loss=terms.loss.detach()), found.entropy_m, found.logprobs_m.detach()))
    return made


T = TypeVar("T")

_log = logging.getLogger(__name__)


class MicroBatchLimit:
    """Micro-batch size in tokens; halved once after an out-of-memory error.

    Only once: a second time would hide that something else fills the memory. Results do not depend on the size.
    """

    def __init__(self, tokens: int, *, alone: bool = True, on_note: Callable[[str], None] | None = None) -> None:
        """
        Args:
            alone: whether this process trains by itself. Several ranks would have to halve together, and one that runs out of
                memory cannot notify the others during a pass.
            on_note: receives a line when the size is halved; a warning is logged by default.
        """
        self.tokens = tokens
        self.alone = alone
        self.halved = False
        self._on_note = on_note or _log.warning

    def run(self, batch: TrainingBatch, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Run work over a batch's passes; after an out-of-memory error, retry once with passes of half the size.

        Args:
            work: starts from the first pass at each call; gradients are then as before the first call.
            undo: discards the results of a failed attempt.

        Raises:
            TurnwiseError: when memory runs out although the passes were halved before.
        """
        if self.halved:
            batch.repack(self.tokens)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            reason = _first_line(error)
            if self.halved or self.tokens < 2 or not self.alone:
                raise TurnwiseError(_out_of_memory(reason, self.tokens, self.halved)) from None
        # Outside the handler the exception is gone, and with it the frames that held tensors of the failed pass.
        undo()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.halved = True
        self._on_note(
            f"out of memory ({reason}): forward passes now take {self.tokens // 2} tokens instead of {self.tokens}; set "
            f"train.micro_tokens = {self.tokens // 2} to start with that"
        )
        self.tokens //= 2
        batch.repack(self.tokens)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            reason = _first_line(error)
        undo()
        raise TurnwiseError(_out_of_memory(reason, self.tokens, True))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no more memory"])[0].partition(". ")[0]


def _out_of_memory(reason: str, tokens: int, halved: bool) -> str:
    already = ", already half of train.micro_tokens" if halved else ""
    return (
        f"out of memory with forward passes of {tokens} tokens{already} ({reason}). The weights are unchanged. Shorten "
        "episodes (limits.context, limits.episode_tokens), lower train.micro_tokens, freeze parts of the model, or give the "
        "engine less memory"
    )

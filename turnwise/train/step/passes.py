"""What is done over the forward passes of a batch, from the first one on whenever it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from turnwise.render.vision import PixelCache
from turnwise.train.forward.batch import MicroBatch, TrainingBatch
from turnwise.train.forward.forward import ForwardPass
from turnwise.train.forward.law import SamplingDistribution, SamplingSupport
from turnwise.train.loss.terms import PolicyTerms, TokenStats
from turnwise.train.ranks.ranks import Ranks
from turnwise.train.step.objective import Objective

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

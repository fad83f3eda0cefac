"""What a training step tells of itself: means over its tokens, its teachers, and the account of its
sampled ids."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnwright.records.episode_metrics import top_counts
from turnwright.training.credit import StepCredits
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.ranks import Ranks
from turnwright.training.loss import PolicyTerms, effective_sample_share, k3, logprob_mismatch
from turnwright.training.trainer.optimizer import Agreement
from turnwright.training.untrained_reasons import MISMATCH, REJECTED, TRAINED


@dataclass(slots=True)
class StepMetrics:
    """Metrics of a step's forward passes; every mean is over tokens, independent of
    micro-batching."""

    ratio: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    start: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Logprobs of the trainer, from before the first update, and of the engine, of tokens of the
    current version."""
    corrections: list[Tensor] = field(default_factory=list)
    """Correction weights of each batch."""
    updates: list[tuple[float, float]] = field(default_factory=list)
    """Loss and gradient norm (before clipping) of each optimizer step."""
    most_differ: bool = False
    """Whether most ids of a batch differ from the engine's by more than `mismatch_bound`."""
    agreement: Agreement | None = None
    """Agreement of the step's first gradient with the momentum of earlier steps."""
    good_kl: float | None = None
    """KL divergence of the policy after the step from that before it, over good episodes
    (`StepLimit`)."""
    step_share: float = 1.0
    """Share of the step that was made."""

    def add(
        self, terms: PolicyTerms, entropy_m: Tensor, reference: tuple[Tensor, Tensor] | None
    ) -> None:
        """Add one pass; `reference` is (policy logprobs, reference logprobs)."""
        self.ratio.append(terms.ratio_m)
        self.clipped.append(terms.clipped_m)
        self.entropy.append(entropy_m)
        if reference is not None:
            self.kl.append(k3(reference[0].double(), reference[1]))

    @property
    def masked(self) -> int:
        """Number of ids excluded by a correction."""
        return sum(int((weights_n == 0).sum()) for weights_n in self.corrections)

    def reduce(self, ranks: Ranks) -> None:
        """Add the passes of the other ranks."""
        for parts in (self.ratio, self.clipped, self.entropy, self.kl):
            parts[:] = ranks.gather(parts)

    def metrics(self) -> dict[str, float]:
        """Return means over the step; without an update, `loss` and `grad_norm` are 0, and there is
        only the mismatch beside them."""
        metrics = self._of_updates() if self.updates else {"loss": 0.0, "grad_norm": 0.0}
        if not self.start:
            return metrics
        trainer = torch.cat([trainer for trainer, _ in self.start])
        engine = torch.cat([engine for _, engine in self.start])
        return metrics | logprob_mismatch(trainer, engine)

    def _of_updates(self) -> dict[str, float]:
        losses = [loss for loss, _ in self.updates]
        norms = [norm for _, norm in self.updates]
        metrics = {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "ratio_mean": _mean(self.ratio),
            "clip_fraction": _mean(self.clipped),
            "entropy": _mean(self.entropy),
        }
        if self.agreement is not None:
            metrics["gradient_agreement"] = self.agreement.cosine
            metrics["gradient_agreement_scaled"] = self.agreement.scaled
        if self.good_kl is not None:
            metrics["step_kl"] = self.good_kl
            metrics["step_share"] = self.step_share
        if self.kl:
            metrics["kl"] = _mean(self.kl)
        if self.corrections:
            weights_n = torch.cat(self.corrections)
            metrics["correction_mean"] = float(weights_n.mean())
            metrics["correction_ess"] = effective_sample_share(weights_n)
            metrics["correction_masked"] = self.masked / weights_n.numel()
        return metrics


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())


def teacher_figures(batches: Sequence[TrainingBatch]) -> dict[str, float]:
    """Return each teacher's figures of a step: the share of trained ids that it answered for, the
    mean of log p_policy - log p_teacher there before the first update, and the share over its
    bound."""
    figures: dict[str, float] = {}
    if not batches:
        return figures

    for number, first in enumerate(batches[0].teachers):
        gap_n = torch.cat(
            [
                -batch.teachers[number].gap(slice(None), batch.start_n)
                for batch in batches
                if batch.start_n is not None
            ]
        )
        figures |= _figures_of(first, gap_n)
    return figures


def _figures_of(scores: TeacherScores, gap_n: Tensor) -> dict[str, float]:
    name = f"teacher.{scores.name}"
    answered_n = gap_n.isfinite()
    figures = {f"{name}.answered": float(answered_n.double().mean())}
    if scores.chunk_n is not None:
        figures[f"{name}.unaligned"] = scores.unaligned
    if not bool(answered_n.any()):
        return figures

    gap_k = gap_n[answered_n]
    figures[f"{name}.kl"] = float(gap_k.mean())
    if scores.teacher.signal == "advantage":
        over_k = gap_k.abs() > scores.teacher.bound
        figures[f"{name}.bounded"] = float(over_k.double().mean())
    return figures


def accounting_metrics(step_credits: StepCredits, masked: int = 0) -> dict[str, float]:
    """Account for a step's trajectories and sampled ids (sum: `tokens_sampled`), some `masked` by a
    correction."""
    counts = step_credits.tokens - Counter({TRAINED: masked}) + Counter({MISMATCH: masked})
    metrics = {"tokens_trained": 0.0, "tokens_sampled": float(step_credits.sampled)}
    for reason, count in sorted(counts.items()):
        metrics[f"tokens_{reason}"] = float(count)

    credits = step_credits.credits
    advantages = [credit.advantage for credit in credits if credit.advantage is not None]
    metrics["trajectories"] = float(len(credits))
    metrics["trajectories_trained"] = float(len(advantages))
    metrics["advantage_abs"] = 0.0
    if advantages:
        metrics["advantage_abs"] = math.fsum(map(abs, advantages)) / len(advantages)

    for reason, count in top_counts(step_credits.rejected).items():
        metrics[f"{REJECTED}{reason}"] = float(count)
    return metrics

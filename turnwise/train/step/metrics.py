"""Figures of one training step, gathered over its forward passes."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from turnwise.train.credit.advantage import MISMATCH, TRAINED, StepCredits
from turnwise.train.loss.kl import k3
from turnwise.train.loss.terms import PolicyTerms, effective_sample_share, logprob_mismatch
from turnwise.train.ranks.ranks import Ranks


class StepMetrics:
    """Gathers what the passes of a step measured; every mean is over tokens, whatever pass they were in."""

    def __init__(self) -> None:
        self._ratio: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._kl: list[Tensor] = []
        self._trainer: list[Tensor] = []
        self._engine: list[Tensor] = []
        self._corrections: list[Tensor] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self.agreement: float | None = None
        """Of the step's first gradient with the momentum of earlier steps."""

    @property
    def updates(self) -> int:
        """Optimizer steps taken."""
        return len(self._losses)

    def add(self, terms: PolicyTerms, entropy_m: Tensor, reference: tuple[Tensor, Tensor] | None) -> None:
        """Take one pass's figures; `reference` is (logprobs of the policy, of the reference)."""
        self._ratio.append(terms.ratio_m)
        self._clipped.append(terms.clipped_m)
        self._entropy.append(entropy_m)
        if reference is not None:
            self._kl.append(k3(reference[0].double(), reference[1]))

    def measured(self, trainer_n: Tensor, engine_n: Tensor) -> None:
        """Take logprobs of the trainer, from before the first update, and of the engine."""
        self._trainer.append(trainer_n)
        self._engine.append(engine_n)

    def corrected(self, weights_n: Tensor) -> None:
        """Take the weights that a correction gave a batch."""
        self._corrections.append(weights_n)

    @property
    def masked(self) -> int:
        """Ids that a correction left out."""
        return sum(int((weights_n == 0).sum()) for weights_n in self._corrections)

    def updated(self, loss: float, grad_norm: float) -> None:
        """Take an optimizer step's loss and gradient norm (before clipping)."""
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def reduce(self, ranks: Ranks) -> None:
        """Take what the passes of other ranks measured too."""
        if ranks.size > 1:
            self._ratio, self._clipped, self._entropy, self._kl = (
                ranks.gather(parts) for parts in (self._ratio, self._clipped, self._entropy, self._kl)
            )

    def metrics(self) -> dict[str, float]:
        """Means over the step; with nothing to train on, `loss` and `grad_norm` are 0 and the rest is missing."""
        if not self._losses:
            return {"loss": 0.0, "grad_norm": 0.0}
        figures = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": sum(self._norms) / len(self._norms),
            "ratio_mean": _mean(self._ratio),
            "clip_fraction": _mean(self._clipped),
            "entropy": _mean(self._entropy),
        }
        if self.agreement is not None:
            figures["agreement"] = self.agreement
        if self._kl:
            figures["kl"] = _mean(self._kl)
        if self._corrections:
            weights_n = torch.cat(self._corrections)
            figures["correction_mean"] = float(weights_n.mean())
            figures["correction_ess"] = effective_sample_share(weights_n)
            figures["correction_masked"] = self.masked / weights_n.numel()
        return figures | logprob_mismatch(torch.cat(self._trainer), torch.cat(self._engine))


def accounting_metrics(ledger: StepCredits, masked: int = 0) -> dict[str, float]:
    """What became of a step's sampled ids and trajectories; the counts of ids sum to `tokens_sampled`.

    Args:
        masked: ids that carry no loss since a correction left them out.
    """
    counts = ledger.tokens - Counter({TRAINED: masked}) + Counter({MISMATCH: masked})
    figures = {f"tokens_{reason}": float(count) for reason, count in sorted(counts.items())}
    values = [credit.advantage for credit in ledger.credits if credit.advantage is not None]
    return (
        {"tokens_trained": 0.0, "tokens_sampled": float(ledger.sampled)}
        | figures
        | {
            "trajectories": float(len(ledger.credits)),
            "trajectories_trained": float(len(values)),
            "advantage_abs": math.fsum(map(abs, values)) / len(values) if values else 0.0,
        }
    )


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())

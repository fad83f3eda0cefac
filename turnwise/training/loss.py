"""Policy loss, KL estimators, importance correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turnwise.config import TrainConfig
from turnwise.training.algorithms.base import TokenBatch, TokenLoss

Kind = Literal["none", "tis", "sequence_mis", "sequence_mis_mean", "icepop"]

BOUNDS: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "sequence_mis": (0.0, 3.0),
    "sequence_mis_mean": (0.99, 1.01),
    "icepop": (0.2, 5.0),
}
"""Default bounds of the ratio: TIS as its authors, sequence MIS as TRL, IcePop as INTELLECT-3."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance correction for the mismatch of engine and trainer, with its bounds."""

    kind: Kind
    low: float
    high: float

    @classmethod
    def of(cls, config: TrainConfig) -> Correction | None:
        """Return the recipe's correction; None if it has none."""
        if config.correction == "none":
            return None
        low, high = BOUNDS[config.correction]
        low = low if config.correction_low is None else config.correction_low
        return cls(config.correction, low, high if config.correction_high is None else config.correction_high)

    def weights(self, trainer_n: Tensor, engine_n: Tensor, trajectory_n: Tensor) -> Tensor:
        """Compute the weight of each token's policy loss, N.

        - `tis`: ``min(r_t, high)`` (truncated importance sampling; Yao et al., "Your efficient RL framework secretly brings you
          off-policy RL training", 2025);
        - `sequence_mis`: ``R = prod_t r_t`` over the trajectory if in [low, high], else 0 (masked importance sampling; Liu et
          al., "When speed kills stability", 2025);
        - `sequence_mis_mean`: 1 if the geometric mean of r_t over the trajectory is in [low, high], else 0 (same source): a
          filter, not a weight, for trajectories too long for the product to be meaningful;
        - `icepop`: ``r_t`` if in [low, high], else 0 (IcePop; INTELLECT-3, arXiv 2512.16144, eq. 1).

        Args:
            trainer_n: logprobs before the step's first update.
            engine_n: logprobs of the engine, none missing.
            trajectory_n: index of each token's trajectory, from 0.
        """
        log_ratio_n = trainer_n - engine_n
        if self.kind == "tis":
            return log_ratio_n.exp().clamp(max=self.high)
        if self.kind == "icepop":
            ratio_n = log_ratio_n.exp()
            return torch.where((ratio_n >= self.low) & (ratio_n <= self.high), ratio_n, 0.0)
        if self.kind == "sequence_mis":
            ratio_n = per_trajectory(log_ratio_n, trajectory_n, mean=False).exp()
            return torch.where((ratio_n >= self.low) & (ratio_n <= self.high), ratio_n, 0.0)
        ratio_n = per_trajectory(log_ratio_n, trajectory_n, mean=True).exp()
        return ((ratio_n >= self.low) & (ratio_n <= self.high)).to(log_ratio_n.dtype)


def per_trajectory(values_n: Tensor, trajectory_n: Tensor, *, mean: bool) -> Tensor:
    """Compute the sum (or mean) of each trajectory's values, at each of its tokens, across rows."""
    size = int(trajectory_n.max()) + 1 if trajectory_n.numel() else 0
    total = values_n.new_zeros(size).index_add_(0, trajectory_n, values_n)
    if mean:
        total /= values_n.new_zeros(size).index_add_(0, trajectory_n, torch.ones_like(values_n)).clamp(min=1.0)
    return total[trajectory_n]


def k1(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """Estimate KL(policy || reference) by ``log(policy / reference)``; unbiased, single values may be negative.

    J. Schulman, "Approximating KL divergence", 2020. As a reward penalty, its policy gradient is that of the KL. In a loss,
    its gradient is ``grad logp``, whose mean is 0, so it constrains nothing.
    """
    return logp_m - reference_m


def k2(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """Estimate the KL by ``log(policy / reference)^2 / 2``: never negative, biased as a value.

    Same source. In a loss, its gradient is ``log(policy / reference) * grad logp``, whose mean over tokens of the policy is
    the gradient of KL(policy || reference).
    """
    return 0.5 * (logp_m - reference_m) ** 2


def k3(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """Estimate KL(policy || reference) by ``r - 1 - log r``, r = reference / policy; unbiased and never negative.

    Same source; DeepSeekMath, arXiv 2402.03300, eq. 4. In a loss, its gradient is ``(1 - r) * grad logp``, whose mean over
    tokens of the policy is the gradient of KL(reference || policy).
    """
    log_ratio = reference_m - logp_m
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


ENTROPY_CHUNK = 1 << 22
"""Maximum elements of the copy that the entropy is computed on: 16 MB in float32."""
BANNED_LOGIT = -1e30
"""Replacement for minus infinity: probability exactly 0, and 0 times its log-probability is 0 instead of NaN."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Log-probabilities and entropy at M targets; only `logprobs_m` carries a gradient."""

    logprobs_m: Tensor
    entropy_m: Tensor
    """Of the full distribution, in nats."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Terms of a policy loss over M tokens; differentiate `loss`, the rest is for metrics."""

    loss: Tensor
    """Scalar: the weighted sum of token losses."""
    policy: Tensor
    kl: Tensor
    ratio_m: Tensor
    clipped_m: Tensor
    """Whether a bound changed the gradient."""


def banned_mask(banned_ids: Iterable[int], vocabulary: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return a boolean row, true for banned ids; None if there are none. Ids beyond the vocabulary are ignored."""
    ids = sorted(i for i in banned_ids if 0 <= i < vocabulary)
    if not ids:
        return None
    mask_v = torch.zeros(vocabulary, dtype=torch.bool)
    mask_v[ids] = True
    return mask_v.to(device)


def token_stats(
    logits_mv: Tensor, targets_m: Tensor, *, temperature: float, banned_v: Tensor | None, entropy: bool
) -> TokenStats:
    """Compute log-probabilities of the targets under the distribution an engine samples from.

    That is the softmax of ``logits / temperature`` without banned ids; any difference from the sampler biases the ratio.
    """
    if temperature != 1.0:
        logits_mv = logits_mv / temperature
    if banned_v is not None:
        logits_mv = logits_mv.masked_fill(banned_v, BANNED_LOGIT)
    logp_mv = torch.log_softmax(logits_mv, dim=-1)
    chosen_m = logp_mv.gather(1, targets_m[:, None]).squeeze(1)
    if not entropy:
        return TokenStats(chosen_m, chosen_m.new_zeros(0))
    return TokenStats(chosen_m, _entropy(logp_mv.detach()))


def _entropy(logp_mv: Tensor) -> Tensor:
    # A few rows at a time: with a large vocabulary another copy of the log-probabilities would be the peak of memory.
    rows = max(1, ENTROPY_CHUNK // logp_mv.shape[-1])
    return torch.cat([-(part.exp() * part).sum(-1) for part in logp_mv.split(rows)])


def policy_terms(
    tokens: TokenBatch,
    algorithm: Callable[[TokenBatch], TokenLoss],
    weights_m: Tensor,
    *,
    correction_m: Tensor | None = None,
    reference_m: Tensor | None = None,
    kl: float = 0.0,
    estimator: Callable[[Tensor, Tensor], Tensor] = k3,
) -> PolicyTerms:
    """Compute the loss of M tokens: ``sum_t w_t * (c_t * loss_t + [c_t > 0] * kl * estimator(logp_t, ref_t))``.

    Args:
        algorithm: computes ``loss_t``.
        weights_m: the token's share of the loss, denominators and loss scale included.
        correction_m: ``c_t``, weight of the importance correction; None is 1.
        reference_m: log-probabilities under the reference policy; None omits the KL term.
    """
    made = algorithm(tokens)
    scaled_m = made.loss if correction_m is None else made.loss * correction_m
    policy = (scaled_m * weights_m).sum()
    penalty = tokens.logp.new_zeros(())
    if reference_m is not None and kl:
        penalty_weights_m = weights_m if correction_m is None else weights_m * (correction_m > 0)
        penalty = kl * (estimator(tokens.logp, reference_m) * penalty_weights_m).sum()
    return PolicyTerms(policy + penalty, policy.detach(), penalty.detach(), made.ratio, made.clipped)


def effective_sample_share(weights_n: Tensor) -> float:
    """Compute the effective sample size of importance weights per token: ``(sum w)^2 / (n sum w^2)`` (Kong 1992)."""
    squares = (weights_n**2).sum()
    return float(weights_n.sum() ** 2 / (weights_n.numel() * squares)) if squares > 0 else 0.0


def logprob_mismatch(trainer_n: Tensor, engine_n: Tensor) -> dict[str, float]:
    """Measure the difference of engine and trainer logprobs, over tokens that have both.

    Returns:
        `mismatch_mean`, `mismatch_p95` and `mismatch_max` of the absolute difference in nats; `mismatch_kl`, an estimate of
        KL(engine || trainer) per token; `importance_ess`, the effective sample share of importance weights trainer / engine.
        Empty if the engine returned no logprobs.
    """
    both = torch.isfinite(engine_n)
    if not bool(both.any()):
        return {}
    log_ratio = trainer_n[both].double() - engine_n[both].double()
    gap = log_ratio.abs().sort().values
    weight = log_ratio.exp()
    return {
        "mismatch_mean": gap.mean().item(),
        "mismatch_p95": gap[int(0.95 * (gap.numel() - 1))].item(),
        "mismatch_max": gap[-1].item(),
        "mismatch_kl": (torch.expm1(log_ratio) - log_ratio).mean().item(),
        "importance_ess": effective_sample_share(weight),
    }

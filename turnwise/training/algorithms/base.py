"""Interface of an algorithm: advantages from rewards, and a loss per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "trajectory", "fixed"]
Advantage = Literal["std", "mean", "rloo", "batch", "group_batch"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """M sampled tokens of one forward pass, the input of an algorithm. Tensors have shape (M,), logprobs are in nats."""

    logp: Tensor
    """Log-probabilities under the trained policy; the only tensor with a gradient."""
    old: Tensor
    """Log-probabilities under the policy in the ratio's denominator."""
    advantage: Tensor
    sequence: Tensor
    """Mean of ``logp - old`` over all tokens of the token's trajectory, across rows and passes: the log of the trajectory's
    ratio, per token. Scored before this pass, without gradient."""
    clip_low: float
    clip_high: float

    @property
    def ratio(self) -> Tensor:
        """``exp(logp - old)``, with gradient."""
        return torch.exp(self.logp - self.old)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of M tokens, before their weights in the step."""

    loss: Tensor
    """(M,), with gradient."""
    ratio: Tensor
    """(M,): ratio in the loss."""
    clipped: Tensor
    """(M,), booleans: whether a bound changed the gradient."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Loss per token, and default values of the keys that a recipe leaves open."""

    name: str
    loss: Callable[[TokenBatch], TokenLoss]
    advantage: Advantage = "std"
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    sequence: bool = False
    """Whether it uses `TokenBatch.sequence`, which costs a scored pass before each update but the first."""
    overlong: bool = False
    """Whether trajectories near the maximum length lose reward."""
    refill: int = 0
    """Maximum rounds per step that replace zero-variance groups by further tasks."""
    defining: tuple[str, ...] = ()
    """Keys whose values define the algorithm."""


def clipped(ratio: Tensor, tokens: TokenBatch) -> TokenLoss:
    """Compute ``-min(r A, clip(r, 1 - low, 1 + high) A)`` (PPO, arXiv 1707.06347, eq. 7, with separate bounds)."""
    free = ratio * tokens.advantage
    bounded = ratio.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high) * tokens.advantage
    return TokenLoss(-torch.minimum(free, bounded), ratio.detach(), (bounded < free).detach())


def surrogate(tokens: TokenBatch) -> TokenLoss:
    """Compute `clipped` with each token's own ratio."""
    return clipped(tokens.ratio, tokens)

"""What an algorithm is: how rewards become advantages, and advantages the loss of a token."""

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
    """M sampled tokens of one forward pass, as an algorithm sees them. Every tensor has shape (M,); logprobs are in nats."""

    logp: Tensor
    """Under the policy that is trained: the only one with a gradient."""
    old: Tensor
    """Under the policy that the ratio is taken against."""
    advantage: Tensor
    sequence: Tensor
    """The mean of ``logp - old`` over all tokens of the token's trajectory, in whatever rows and passes they are: the log of
    the trajectory's ratio, per token. Scored before this pass, without gradient."""
    clip_low: float
    clip_high: float

    @property
    def ratio(self) -> Tensor:
        """``exp(logp - old)``, with gradient."""
        return torch.exp(self.logp - self.old)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an algorithm makes of M tokens, before the shares of tokens in the step."""

    loss: Tensor
    """(M,), with gradient."""
    ratio: Tensor
    """(M,): the ratio that was used."""
    clipped: Tensor
    """(M,), booleans: where a bound changed the gradient."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A loss per token, and what the keys that it leaves open are when a recipe leaves them open."""

    name: str
    loss: Callable[[TokenBatch], TokenLoss]
    advantage: Advantage = "std"
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    sequence: bool = False
    """Whether it reads `TokenBatch.sequence`, which costs a scored pass before each update but the first."""
    overlong: bool = False
    """Whether trajectories that near what the limits allow lose reward."""
    refill: int = 0
    """Times at most that a step's groups without signal are replaced by those of further tasks."""
    defining: tuple[str, ...] = ()
    """Keys that set it apart from the others."""


def clipped(ratio: Tensor, tokens: TokenBatch) -> TokenLoss:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` (PPO, arXiv 1707.06347, eq. 7, with a bound of its own for each side)."""
    free = ratio * tokens.advantage
    bounded = ratio.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high) * tokens.advantage
    return TokenLoss(-torch.minimum(free, bounded), ratio.detach(), (bounded < free).detach())


def surrogate(tokens: TokenBatch) -> TokenLoss:
    """`clipped` with the ratio of each token by itself."""
    return clipped(tokens.ratio, tokens)

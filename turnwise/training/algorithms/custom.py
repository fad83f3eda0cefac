"""One's own algorithm: a function of `TokenBatch` that gives a loss per token, checked before it trains anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwise.envs.resolve import load_object
from turnwise.errors import ConfigError
from turnwise.training.algorithms.base import Algorithm, TokenBatch, TokenLoss

Own = Callable[[TokenBatch], Tensor]


def load_custom(spec: str) -> Algorithm:
    """The algorithm that ``file.py:function`` names.

    The function takes `TokenBatch` and returns the loss of each token, (M,). It is multiplied with the token's share of the
    step outside; the other keys are GRPO's where the recipe is silent.

    Raises:
        ConfigError: when there is no such function, or it fails `check_custom`.
    """
    function = load_object(spec)
    check_custom(function, spec)

    def loss(tokens: TokenBatch) -> TokenLoss:
        made = function(tokens)
        ratio = tokens.ratio.detach()
        return TokenLoss(made, ratio, torch.zeros_like(ratio, dtype=torch.bool))

    return Algorithm(spec, loss, sequence=True)


def check_custom(function: Any, spec: str) -> None:
    """Try a function on a tiny example: 6 sampled tokens of two trajectories among 9 positions.

    Looked at are its signature, the shape of what it returns, that it is finite and that its gradient is, that a gradient
    reaches the policy, at sampled positions alone, and that the loss of a token does not depend on which others share its pass
    (a mean over the pass would make the result depend on the micro-batches).

    Raises:
        ConfigError: for what is wrong, with what to do.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"train.algorithm = {spec!r}: {why}")

    if not callable(function):
        raise refuse(f"is {type(function).__name__}, not a function of the tokens of a pass")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise refuse(f"must take one argument, the tokens of a pass ({error}); write def {_name(spec)}(tokens)") from None
    except ValueError:
        pass  # a builtin without a signature
    logits = torch.linspace(-1.0, 1.0, 9 * 5, dtype=torch.float64).reshape(9, 5).sin().requires_grad_()
    tokens = _example(logits)
    kept = {name: getattr(tokens, name).detach().clone() for name in ("logp", "old", "advantage", "sequence")}
    loss = _call(function, tokens, refuse)
    if any(not torch.equal(getattr(tokens, name).detach(), before) for name, before in kept.items()):
        raise refuse("changes the tensors that it is given; make new ones")
    if not loss.requires_grad:
        raise refuse("no gradient reaches the policy: the result must be computed from tokens.logp (or tokens.ratio)")
    (slope,) = torch.autograd.grad(loss.sum(), logits, allow_unused=True)
    if slope is None or not bool(slope[SAMPLED].any()):
        raise refuse("no gradient reaches the policy: the result must be computed from tokens.logp (or tokens.ratio)")
    if not bool(torch.isfinite(slope).all()):
        raise refuse("its gradient is not finite on an example with ordinary logprobs; look for logs and divisions")
    others = [position for position in range(9) if position not in SAMPLED]
    if bool(slope[others].any()):
        raise refuse("has a gradient at positions whose token was not sampled")
    _check_alone(function, loss, slope, logits, refuse)


SAMPLED = [0, 1, 3, 4, 6, 8]
"""Positions of the example that predict a sampled token."""


def _example(logits: Tensor, part: slice = slice(None)) -> TokenBatch:
    targets = torch.tensor([0, 3, 1, 4, 2, 2])
    logp = torch.log_softmax(logits, -1)[SAMPLED].gather(1, targets[:, None]).squeeze(1)
    shift = torch.tensor([0.0, 0.1, -0.3, 0.5, -0.05, 0.02], dtype=torch.float64)
    old = logp.detach() + shift
    advantage = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5], dtype=torch.float64)
    sequence = torch.cat([-shift[:3].mean().expand(3), -shift[3:].mean().expand(3)])
    return TokenBatch(logp[part], old[part], advantage[part], sequence[part], 0.2, 0.28)


def _call(function: Any, tokens: TokenBatch, refuse: Callable[[str], ConfigError]) -> Tensor:
    size = tokens.logp.numel()
    try:
        loss = function(tokens)
    except Exception as error:
        raise refuse(f"raised {type(error).__name__} on {size} tokens: {error}") from error
    if not isinstance(loss, Tensor):
        raise refuse(f"returned {type(loss).__name__}, not a tensor with one loss per token")
    if loss.shape != (size,):
        raise refuse(
            f"returned a tensor of shape {tuple(loss.shape)} for {size} tokens; return one loss per token, without mean or sum"
        )
    if not loss.is_floating_point() or not bool(torch.isfinite(loss).all()):
        raise refuse("returned losses that are not finite on an example with ordinary logprobs")
    return loss


def _check_alone(function: Any, loss: Tensor, whole: Tensor, logits: Tensor, refuse: Callable[[str], ConfigError]) -> None:
    """See that halves of the example give what the whole gave, values and gradients."""
    slopes: list[Tensor | None] = []
    for part in (slice(0, 2), slice(2, None)):
        alone = _call(function, _example(logits, part), refuse)
        if not torch.allclose(alone, loss[part], rtol=1e-9, atol=1e-12):
            slopes = []
            break
        slopes.append(torch.autograd.grad(alone.sum(), logits, allow_unused=True)[0])
    found = [slope for slope in slopes if slope is not None]
    if not found or not torch.allclose(sum(found, torch.zeros_like(whole)), whole, rtol=1e-9, atol=1e-12):
        raise refuse(
            "the loss of a token depends on which others share its pass, so the result would depend on train.micro_tokens; "
            "leave out means and sums over tokens (tokens.sequence has the mean over a trajectory)"
        )


def _name(spec: str) -> str:
    return spec.rpartition(":")[2]

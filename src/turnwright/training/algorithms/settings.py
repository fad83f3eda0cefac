"""Algorithm settings: the recipe's keys, else the algorithm's values; custom algorithms are
checked before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwright.config import TrainConfig
from turnwright.config.names import algorithm_error
from turnwright.envs.resolve import call_error, load_object
from turnwright.errors import ConfigError
from turnwright.training.algorithms import (
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from turnwright.training.loss import Algorithm, AlgorithmSettings, TokenBatch, TokenLoss

BUILT_IN: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM
    for module in (grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, gspo, cispo)
}


def resolve_settings(config: TrainConfig) -> AlgorithmSettings:
    """Resolve every key: the recipe's value if set, else the algorithm's; raise `ConfigError`
    for what does not fit."""
    for key, why in config.conflicts():
        raise ConfigError(f"train.{key} = {getattr(config, key)!r} {why}")
    chosen = BUILT_IN.get(config.algorithm)
    if chosen is None:
        if wrong := algorithm_error(config.algorithm):
            raise ConfigError(f"train.algorithm = {config.algorithm!r}: {wrong}")
        chosen = load_custom(config.algorithm)
    estimator, place = config.kl_estimator or chosen.kl_estimator, config.kl_in or chosen.kl_in
    if place == "reward" and estimator != "k1":
        if config.kl_estimator is not None:
            raise ConfigError(
                f"train.kl_estimator = {estimator!r}: {chosen.name} subtracts KL from the reward, "
                "which needs k1; set "
                'train.kl_in = "loss" to use it in the loss'
            )
        estimator = "k1"
    return AlgorithmSettings(
        chosen,
        config.advantage or chosen.advantage,
        config.aggregation or chosen.aggregation,
        chosen.clip_low if config.clip_low is None else config.clip_low,
        chosen.clip_high if config.clip_high is None else config.clip_high,
        estimator,
        place,
        (chosen.refill if config.refill is None else config.refill) if config.reward_weight else 0,
        tuple(_notes(config, chosen, estimator, place)),
    )


def _notes(config: TrainConfig, chosen: Algorithm, estimator: str, place: str) -> list[str]:
    notes = []
    for key in chosen.defining:
        configured, own = getattr(config, key), getattr(chosen, key)
        if configured is not None and configured != own:
            notes.append(
                f"train.{key} = {configured!r} replaces {chosen.name}'s own {own!r}, which defines "
                "the algorithm"
            )
    if config.kl and estimator == "k1" and place == "loss":
        notes.append(
            'train.kl_estimator = "k1" in the loss has a mean gradient of 0, so it constrains '
            'nothing; use k2, or kl_in = "reward"'
        )
    return notes


def load_custom(spec: str) -> Algorithm:
    """Load ``file.py:function``: the loss of each token, (M,), before its weight; other
    keys default to GRPO's."""
    function = load_object(spec)
    check_custom(function, spec)

    def loss(tokens: TokenBatch) -> TokenLoss:
        made = function(tokens)
        ratio = tokens.ratio.detach()
        return TokenLoss(made, ratio, torch.zeros_like(ratio, dtype=torch.bool))

    return Algorithm(spec, loss, sequence=True)


def check_custom(function: Any, spec: str) -> None:
    """Call a function on 6 sampled tokens of two trajectories among 9 positions; raise
    `ConfigError` with a defect and its remedy.

    Checks the signature, the shape of the result, and that it and its gradient are finite. The
    gradient must reach the policy, only at sampled positions. A token's loss must not depend on the
    other tokens of its pass: a mean over the pass would make the result depend on micro-batches.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"train.algorithm = {spec!r}: {why}")

    if not callable(function):
        raise refuse(f"is {type(function).__name__}, not a function of a TokenBatch")
    if wrong := call_error(function, None):
        raise refuse(
            f"must take one argument, a TokenBatch ({wrong}); write def "
            f"{spec.rpartition(':')[2]}(tokens)"
        )
    logits = (
        torch.linspace(-1.0, 1.0, 9 * 5, dtype=torch.float64).reshape(9, 5).sin().requires_grad_()
    )
    tokens = _example(logits)
    inputs = {
        name: getattr(tokens, name).detach().clone()
        for name in ("logp", "old", "advantage", "sequence")
    }
    loss = _call(function, tokens, refuse)
    if any(
        not torch.equal(getattr(tokens, name).detach(), before) for name, before in inputs.items()
    ):
        raise refuse("modifies its input tensors in place; return new ones")
    slope = (
        torch.autograd.grad(loss.sum(), logits, allow_unused=True)[0]
        if loss.requires_grad
        else None
    )
    if slope is None or not bool(slope[SAMPLED].any()):
        raise refuse(
            "no gradient reaches the policy: the result must be computed from tokens.logp (or "
            "tokens.ratio)"
        )
    if not bool(torch.isfinite(slope).all()):
        raise refuse(
            "its gradient is not finite on an example with ordinary logprobs; check logs and "
            "divisions"
        )
    others = [position for position in range(9) if position not in SAMPLED]
    if bool(slope[others].any()):
        raise refuse("has a gradient at positions whose token was not sampled")
    _check_independence(function, loss, slope, logits, refuse)


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
            f"returned a tensor of shape {tuple(loss.shape)} for {size} tokens; return one loss "
            "per token, without mean or sum"
        )
    if not loss.is_floating_point() or not bool(torch.isfinite(loss).all()):
        raise refuse("returned losses that are not finite on an example with ordinary logprobs")
    return loss


def _check_independence(
    function: Any, loss: Tensor, slope: Tensor, logits: Tensor, refuse: Callable[[str], ConfigError]
) -> None:
    """Check that halves of the example give the values and gradients of the full example."""
    slopes: list[Tensor | None] = []
    for part in (slice(0, 2), slice(2, None)):
        separate = _call(function, _example(logits, part), refuse)
        if not torch.allclose(separate, loss[part], rtol=1e-9, atol=1e-12):
            slopes = []
            break
        slopes.append(torch.autograd.grad(separate.sum(), logits, allow_unused=True)[0])
    found = [part for part in slopes if part is not None]
    if not found or not torch.allclose(
        sum(found, torch.zeros_like(slope)), slope, rtol=1e-9, atol=1e-12
    ):
        raise refuse(
            "the loss of a token depends on the others of its pass, so the result would depend on "
            "train.micro_tokens; avoid means and sums over tokens (tokens.sequence has the mean "
            "over a trajectory)"
        )

"""Which algorithm a recipe names, and with which values: `resolve_settings`.

A key that the recipe sets counts; one that it leaves open is the algorithm's. An algorithm of the
user's own (`file.py:function`) is checked on an example before anything is trained: `check_custom`.
The built-in ones are a file each beside this one, which opens with formula and source; their losses
are made of `turnwright.training.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turnwright.config import TrainConfig
from turnwright.config.names import CRITIC_ADVANTAGES, STATE_ADVANTAGES, algorithm_error
from turnwright.envs.resolve import call_error, load_object
from turnwright.errors import ConfigError
from turnwright.training.algorithms import (
    bilevel_ppo,
    cispo,
    dapo,
    dr_grpo,
    gagpo,
    gigpo,
    grpo,
    gspo,
    maxrl,
    ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    state_grpo,
    state_rloo,
    turn_ppo,
)
from turnwright.training.loss import Algorithm, AlgorithmSettings, TokenBatch, TokenLoss

MODULES = (
    *(grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, gspo, cispo, maxrl),
    *(gigpo, gagpo, state_rloo, state_grpo, ppo, turn_ppo, bilevel_ppo),
)

BUILT_IN: dict[str, Algorithm] = {module.ALGORITHM.name: module.ALGORITHM for module in MODULES}


def resolve_settings(config: TrainConfig) -> AlgorithmSettings:
    """Resolve every key: the recipe's value if set, else the algorithm's; raise `ConfigError`
    for what does not fit."""
    for key, why in config.conflicts():
        raise ConfigError(f"train.{key} = {getattr(config, key)!r} {why}")

    algorithm = BUILT_IN.get(config.algorithm)
    if algorithm is None:
        wrong = algorithm_error(config.algorithm)
        if wrong:
            raise ConfigError(f"train.algorithm = {config.algorithm!r}: {wrong}")
        algorithm = load_custom(config.algorithm)

    # KL in the reward needs an estimate whose gradient there is that of the KL: k1 alone.
    estimator = config.kl_estimator or algorithm.kl_estimator
    place = config.kl_in or algorithm.kl_in
    if place == "reward" and estimator != "k1":
        if config.kl_estimator is not None:
            raise ConfigError(
                f"train.kl_estimator = {estimator!r}: {algorithm.name} subtracts KL from the "
                'reward, which needs k1; set train.kl_in = "loss" to use it in the loss'
            )
        estimator = "k1"

    clip_low = algorithm.clip_low if config.clip_low is None else config.clip_low
    clip_high = algorithm.clip_high if config.clip_high is None else config.clip_high

    # Groups are replaced for want of different rewards, which do not matter without a weight.
    refill = algorithm.refill if config.refill is None else config.refill
    if not config.reward_weight:
        refill = 0

    advantage = config.advantage or algorithm.advantage
    credit = config.credit or algorithm.credit
    if advantage in STATE_ADVANTAGES or advantage in CRITIC_ADVANTAGES:
        credit = "turn"

    return AlgorithmSettings(
        algorithm=algorithm,
        advantage=advantage,
        credit=credit,
        discount=algorithm.discount if config.discount is None else config.discount,
        gae_lambda=algorithm.gae_lambda if config.gae_lambda is None else config.gae_lambda,
        aggregation=config.aggregation or algorithm.aggregation,
        clip_low=clip_low,
        clip_high=clip_high,
        kl_estimator=estimator,
        kl_in=place,
        refill=refill,
        notes=tuple(_notes(config, algorithm, estimator, place)),
    )


def _notes(config: TrainConfig, algorithm: Algorithm, estimator: str, place: str) -> list[str]:
    notes = []
    for key in algorithm.defining:
        configured = getattr(config, key)
        defining = getattr(algorithm, key)
        if configured is not None and configured != defining:
            notes.append(
                f"train.{key} = {configured!r} replaces {algorithm.name}'s own {defining!r}, which "
                "defines the algorithm"
            )

    if config.kl and estimator == "k1" and place == "loss":
        notes.append(
            'train.kl_estimator = "k1" in the loss has a mean gradient of 0, so it constrains '
            'nothing; use k2, or kl_in = "reward"'
        )
    return notes


def load_custom(spec: str) -> Algorithm:
    """Load ``file.py:function``: the loss of each token, (M,), before its weight.

    The keys that the recipe leaves open default to GRPO's.
    """
    function = load_object(spec)
    check_custom(function, spec)

    def loss(tokens: TokenBatch) -> TokenLoss:
        loss_m = function(tokens)
        ratio_m = tokens.ratio.detach()
        none_clipped_m = torch.zeros_like(ratio_m, dtype=torch.bool)
        return TokenLoss(loss_m, ratio_m, none_clipped_m)

    return Algorithm(spec, loss, sequence=True, turn=True)


def check_custom(function: Any, spec: str) -> None:
    """Call a function on 6 sampled tokens of two trajectories among 9 positions.

    Checks the signature, the shape of the result, and that it and its gradient are finite. The
    gradient must reach the policy, only at sampled positions. A token's loss must not depend on the
    other tokens of its pass: a mean over the pass would make the result depend on micro-batches.

    Raises:
        ConfigError: with the defect and its remedy.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"train.algorithm = {spec!r}: {why}")

    if not callable(function):
        raise refuse(f"is {type(function).__name__}, not a function of a TokenBatch")
    wrong = call_error(function, None)
    if wrong:
        raise refuse(
            f"must take one argument, a TokenBatch ({wrong}); write def "
            f"{spec.rpartition(':')[2]}(tokens)"
        )

    # An example whose logprobs are those of logits, so that gradients show what they reach.
    spread = torch.linspace(-1.0, 1.0, 9 * 5, dtype=torch.float64)
    logits = spread.reshape(9, 5).sin().requires_grad_()
    tokens = _example(logits)
    copies = {}
    for name in ("logp", "old", "advantage", "sequence", "turn"):
        copies[name] = getattr(tokens, name).detach().clone()

    loss = _call(function, tokens, refuse)
    for name, copy in copies.items():
        if not torch.equal(getattr(tokens, name).detach(), copy):
            raise refuse("modifies its input tensors in place; return new ones")

    slope = None
    if loss.requires_grad:
        slope = torch.autograd.grad(loss.sum(), logits, allow_unused=True)[0]
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
    turn = torch.cat([-shift[:3].sum().expand(3), -shift[3:].sum().expand(3)])
    return TokenBatch(logp[part], old[part], advantage[part], sequence[part], turn[part], 0.2, 0.28)


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
    function: Any,
    loss: Tensor,
    slope: Tensor,
    logits: Tensor,
    refuse: Callable[[str], ConfigError],
) -> None:
    """Check that halves of the example give the values and gradients of the full example."""
    dependent = refuse(
        "the loss of a token depends on the others of its pass, so the result would depend on "
        "train.micro_tokens; avoid means and sums over tokens (tokens.sequence has the mean "
        "over a trajectory)"
    )

    # The first part cuts a trajectory in two, as passes may.
    slopes: list[Tensor] = []
    for part in (slice(0, 2), slice(2, None)):
        part_loss = _call(function, _example(logits, part), refuse)
        if not torch.allclose(part_loss, loss[part], rtol=1e-9, atol=1e-12):
            raise dependent
        part_slope = torch.autograd.grad(part_loss.sum(), logits, allow_unused=True)[0]
        if part_slope is not None:
            slopes.append(part_slope)

    total = sum(slopes, torch.zeros_like(slope))
    if not slopes or not torch.allclose(total, slope, rtol=1e-9, atol=1e-12):
        raise dependent

"""Does the engine sample the policy that is trained? The checks of a step before its update.

`check_mismatch` compares the logprobs of both, `check_fingerprints` the templates that episodes
were rendered with, `check_finite` looks at the loss and its gradient. Each raises before the
update that it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from turnwright.config import TrainConfig
from turnwright.errors import SyncError, TurnwrightError, UsageError
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.forward.forward import BANNED_LOGIT, LogitDistribution
from turnwright.training.loss import logprob_mismatch
from turnwright.types import Trajectory

EXACT = 1e-3
"""Default of the maximum mismatch in float32, nats."""
MAX_KL = 0.1
"""Default of the largest mean KL(engine || trainer), nats a token. Rounding stays far below in any
precision, and a diverging run reaches it."""
ROUNDED_SHARE = 0.01
ROUNDED_K3 = 1e-5
"""With activations in fp8 this share of ids may be over `mismatch_bound`, if the mean k3 is no
larger than this."""
ROUNDED_PART = 0.25
"""With more such ids the mean difference may be this part of what rounding changes."""
ROUNDED_BOUND = 0.5
"""Largest difference of a single id in both cases, in nats."""
ROUNDED_STEPS = 2
"""Steps in a row in which most ids may be over `mismatch_bound`. A crossing in a prompt that all
episodes share ends with the next update. A fault of the engine remains, and one in the last layer
changes less than rounding does."""


def mismatch_bound(config: TrainConfig, dtype: torch.dtype) -> float:
    """Return the maximum allowed |logprob of trainer - of engine|, nats.

    The default is 1e-3 in float32 (a correct engine is within 1e-4), also with a correction. There
    is none in lower precision, where rounding alone reaches 0.2.
    """
    if config.max_mismatch is not None:
        return config.max_mismatch
    return math.inf if dtype in (torch.bfloat16, torch.float16) else EXACT


def check_mismatch(
    batch: TrainingBatch,
    config: TrainConfig,
    dtype: torch.dtype,
    distribution: LogitDistribution,
    *,
    rounding_effect: Callable[[], float] | None = None,
    differing_steps: int = 0,
) -> bool:
    """Compare the trainer's logprobs before the first update with the engine's.

    Tokens of older versions differ by training; they are for `train.correction`. With activations
    in fp8, sums in another order can cross a rounding boundary and move an id by 1e-2, or all ids
    after a prompt that every episode shares.

    Args:
        rounding_effect: returns the mean |change of logprobs| by rounding activations, where they
            are rounded; an engine that rounds them differently differs by about that.
        differing_steps: number of steps in a row before this one in which most ids were over the
            bound.

    Returns:
        Whether most ids were over `mismatch_bound`.

    Raises:
        TurnwrightError: for an id without probability.
        SyncError: when a token of the current version differs by more than `mismatch_bound`, or
            the mean KL of those exceeds the allowed divergence.
    """
    assert batch.start_n is not None
    _refuse_impossible(batch)
    current_n = batch.current_n
    if not bool(current_n.any()):
        return False

    gap_n = (batch.start_n - batch.engine_n).abs().nan_to_num(0.0).masked_fill(~current_n, 0.0)
    worst = int(gap_n.argmax())
    mismatch = logprob_mismatch(batch.start_n[current_n], batch.engine_n[current_n])

    bound = mismatch_bound(config, dtype)
    over = int((gap_n > bound).sum())
    current = int(current_n.sum())
    most_are_over = 2 * over > current

    # What differently rounded activations explain is allowed.
    if rounding_effect is not None and config.max_mismatch is None and gap_n[worst] > bound:
        few = over <= max(1.0, ROUNDED_SHARE * current) and mismatch["mismatch_kl"] <= ROUNDED_K3
        remains = most_are_over and differing_steps >= ROUNDED_STEPS
        if few or (not remains and mismatch["mismatch_mean"] <= ROUNDED_PART * rounding_effect()):
            bound = ROUNDED_BOUND

    if gap_n[worst] > bound:
        over_n = gap_n > bound
        raise SyncError(
            "engine and trainer disagree on sampled ids: |logprob of trainer - of engine| is "
            f"{gap_n[worst]:.3g} at most, {mismatch['mismatch_mean']:.3g} on average, and over "
            f"train.max_mismatch = {bound:g} for {int(over_n.sum())} of {current} ids (worst in "
            f"{_where(batch, worst)}: {batch.engine_n[worst]:.4f} in the engine, "
            f"{batch.start_n[worst]:.4f} in the trainer). {_cache_suspicion(batch, over_n)}The "
            "weights are unchanged. Check that the engine has the newest "
            f"{_what_to_check(distribution, dtype)} raise train.max_mismatch; train.correction "
            "then weighs the difference"
        )

    # `max_mismatch` declares a difference intended.
    max_kl = MAX_KL if config.max_mismatch is None else math.inf
    if config.max_mismatch_kl is not None:
        max_kl = config.max_mismatch_kl
    if mismatch.get("mismatch_kl", 0.0) > max_kl:
        raise SyncError(
            "engine and trainer sample from different policies: KL(engine || trainer) is "
            f"{mismatch['mismatch_kl']:.3g} nats per token, over train.max_mismatch_kl = "
            f"{max_kl:g}, effective sample size {100 * mismatch['importance_ess']:.0f}%. The "
            "weights are unchanged. Check that the engine has the newest "
            f"{_what_to_check(distribution, dtype)} raise train.max_mismatch_kl"
        )
    return most_are_over


def _refuse_impossible(batch: TrainingBatch) -> None:
    """Raise `TurnwrightError` for an id that was sampled, although the trainer gives it no
    probability."""
    assert batch.start_n is not None
    impossible_n = ~(batch.start_n > 0.5 * BANNED_LOGIT)
    if bool(impossible_n.any()):
        raise TurnwrightError(
            "the trainer gives no probability to an id that was sampled in "
            f"{_where(batch, int(impossible_n.nonzero()[0]))}: it is a banned id, or the model's "
            "weights are not finite; check that the engine gets the same banned_ids"
        )


def _what_to_check(distribution: LogitDistribution, dtype: torch.dtype) -> str:
    return (
        f"weights (version and fingerprint), samples at temperature {distribution.temperature:g} "
        f"with top_p {distribution.top_p:g}, top_k {distribution.top_k} and min_p "
        f"{distribution.min_p:g}, bans the same {len(distribution.banned_ids)} ids, and computes "
        f"in {str(dtype).removeprefix('torch.')}; if the difference is intended,"
    )


def _cache_suspicion(batch: TrainingBatch, over_n: Tensor) -> str:
    """Return a sentence if all ids over the bound are of calls whose context came from the engine's
    cache, else nothing."""
    cached_spans = []
    for trajectory in batch.trajectories:
        cached_turns = [turn for turn in trajectory.turns if turn.cached]
        cached_spans.append({span for turn in cached_turns for span in turn.spans})

    from_cache = []
    for index, (span, _) in zip(batch.trajectory_n.tolist(), batch.slots, strict=True):
        from_cache.append(span in cached_spans[index])
    from_cache_n = torch.tensor(from_cache, device=over_n.device)

    if bool((over_n & ~from_cache_n).any()):
        return ""
    if bool((batch.current_n & ~from_cache_n).any()):
        return (
            "All of them, and none of the ids of other calls, are in calls whose context came "
            "from the engine's prefix cache: the prefix cache outlived a weight update. "
        )
    return (
        "Every call had a part of its context from the engine's prefix cache, which may have "
        "outlived a weight update. "
    )


def _where(batch: TrainingBatch, token: int) -> str:
    key = batch.trajectories[int(batch.trajectory_n[token])].key
    return f"task {key.task!r}, sample {key.sample}, step {key.metrics_step}"


def check_finite(loss: float, norm: float, where: str) -> None:
    """Raise `TurnwrightError` when the loss or its gradient is not finite, so that an update would
    destroy the weights."""
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise TurnwrightError(
            f"in {where} the loss is {loss} and its gradient norm {norm}; this update was "
            "not made: lower the learning rate, and check this step's trajectories for extreme "
            "rewards or logprobs"
        )


def check_fingerprints(fingerprint: str, trajectories: Iterable[Trajectory], where: str) -> None:
    """Raise `UsageError` for ids from another template, tokenizer or settings; an empty fingerprint
    accepts any."""
    for trajectory in trajectories:
        if fingerprint and trajectory.template and trajectory.template != fingerprint:
            raise UsageError(
                f"{where} has an episode ({trajectory.key.label}) of another chat template, "
                f"tokenizer or settings (hash {trajectory.template}, here {fingerprint}), whose "
                "ids mean something else to this model: remove it, or train with the settings it "
                "was sampled with"
            )

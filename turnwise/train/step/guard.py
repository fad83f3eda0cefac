"""What stops a training step, and the words in which it is said."""

from __future__ import annotations

import math

import torch

from turnwise.config import TrainConfig
from turnwise.errors import ConfigError, SyncError, TurnwiseError
from turnwise.train.forward.batch import TrainingBatch
from turnwise.train.forward.law import SamplingDistribution
from turnwise.train.loss.terms import BANNED_LOGIT, logprob_mismatch


def mismatch_bound(config: TrainConfig, dtype: torch.dtype) -> float:
    """The largest |logprob of trainer - of engine| that is let pass, in nats.

    By default 1e-3 in float32 (a right engine is within 1e-4) and none below, where rounding alone reaches 0.2; nor with a
    correction, which is asked for where the two differ.
    """
    if config.max_mismatch is not None:
        return config.max_mismatch
    return math.inf if dtype in (torch.bfloat16, torch.float16) or config.correction != "none" else 1e-3


def divergence_bound(config: TrainConfig) -> float:
    """The largest KL(engine || trainer) per token, on average over a batch, that is let pass, in nats.

    By default 0.1, which rounding is far from in any precision and a run that falls apart comes to; none where `max_mismatch`
    was given, which says that they differ on purpose.
    """
    if config.max_mismatch_kl is not None:
        return config.max_mismatch_kl
    return 0.1 if config.max_mismatch is None else math.inf


def check_mismatch(
    batch: TrainingBatch,
    bound: float,
    *,
    law: SamplingDistribution,
    banned: int,
    dtype: torch.dtype,
    divergence: float = math.inf,
) -> None:
    """Compare the trainer's logprobs before the first update with the engine's.

    Raises:
        TurnwiseError: when the trainer gives a sampled id no probability.
        SyncError: when one differs by more than `bound`, or all of them on average by a KL over `divergence`.
    """
    assert batch.start_n is not None
    odd_n = ~(batch.start_n > 0.5 * BANNED_LOGIT)
    if bool(odd_n.any()):
        raise TurnwiseError(
            f"the trainer gives no probability to an id that was sampled in {_where(batch, int(odd_n.nonzero()[0]))}: it is a "
            "banned id, or the model's weights are no longer finite; see that the engine is given the same banned_ids"
        )
    gap_n = (batch.start_n - batch.engine_n).abs().nan_to_num(0.0)
    worst = int(gap_n.argmax())
    figures = logprob_mismatch(batch.start_n, batch.engine_n)
    check = (
        f"weights (version and fingerprint), samples at temperature {law.temperature:g} with top_p {law.top_p:g} and "
        f"top_k {law.top_k}, bans the same "
        f"{banned} ids, and computes in {str(dtype).removeprefix('torch.')}; if it differs on purpose,"
    )
    if gap_n[worst] <= bound and figures.get("mismatch_k3", 0.0) > divergence:
        raise SyncError(
            f"engine and trainer sample from different policies: KL(engine || trainer) is {figures['mismatch_k3']:.3g} nats a "
            f"token, over train.max_mismatch_kl = {divergence:g}, effective sample size {100 * figures['ess']:.0f}%. "
            f"The weights were left as they are. Check that the engine has the newest {check} raise train.max_mismatch_kl or "
            "set train.correction"
        )
    if gap_n[worst] <= bound:
        return
    raise SyncError(
        f"engine and trainer disagree about what was sampled: |logprob of trainer - of engine| is {gap_n[worst]:.3g} at worst, "
        f"{figures['mismatch_mean']:.3g} on average, and over train.max_mismatch = {bound:g} for {int((gap_n > bound).sum())} "
        f"of {batch.size} ids (worst in {_where(batch, worst)}: {batch.engine_n[worst]:.4f} in the engine, "
        f"{batch.start_n[worst]:.4f} in the trainer). The weights were left as they are. Check that the engine has the newest "
        f"{check} raise train.max_mismatch or set train.correction"
    )


def check_logprobs(batch: TrainingBatch, key: str = "train.old_logprobs = 'engine'", other: str = "trainer") -> None:
    """See that the engine gave every logprob, for ratios that are taken against them.

    Args:
        key: what needs them.
        other: the value of that key that does without.

    Raises:
        ConfigError: when one is missing.
    """
    missing = int(torch.isnan(batch.engine_n).sum())
    if missing:
        raise ConfigError(
            f"{key} needs a logprob for every sampled id; {missing} of {batch.size} have none: set it to {other!r}"
        )


def check_finite(loss: float, norm: float, where: str) -> None:
    """See that an update would not destroy the weights.

    Raises:
        TurnwiseError: when the loss or its gradient is not finite.
    """
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise TurnwiseError(
            f"in {where} the loss is {loss} and its gradient's norm {norm}; the weights were left as they are: lower the "
            "learning rate, and look for extreme rewards or logprobs in this step's trajectories"
        )


def _where(batch: TrainingBatch, token: int) -> str:
    key = batch.trajectories[int(batch.trajectory_n[token])].key
    return f"task {key.task!r}, sample {key.sample}, step {key.step}"

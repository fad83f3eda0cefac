"""What stops a training step, and the words in which it is said."""

from __future__ import annotations

import math

import torch

from turnwise.config import TrainConfig
from turnwise.errors import ConfigError, SyncError, TurnwiseError
from turnwise.train.batch import Batch
from turnwise.train.loss import BANNED_LOGIT, mismatch


def mismatch_bound(config: TrainConfig, dtype: torch.dtype) -> float:
    """The largest |logprob of trainer - of engine| that is let pass, in nats.

    By default 1e-3 in float32 (a right engine is within 1e-4) and none below, where rounding alone reaches 0.2.
    """
    if config.max_mismatch is not None:
        return config.max_mismatch
    return math.inf if dtype in (torch.bfloat16, torch.float16) else 1e-3


def check_start(batch: Batch, bound: float, *, temperature: float, banned: int, dtype: torch.dtype) -> None:
    """Compare the trainer's logprobs before the first update with the engine's.

    Raises:
        TurnwiseError: when the trainer gives a sampled id no probability.
        SyncError: when one differs by more than `bound`.
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
    if gap_n[worst] <= bound:
        return
    figures = mismatch(batch.start_n, batch.engine_n)
    raise SyncError(
        f"engine and trainer disagree about what was sampled: |logprob of trainer - of engine| is {gap_n[worst]:.3g} at worst, "
        f"{figures['mismatch_mean']:.3g} on average, and over train.max_mismatch = {bound:g} for {int((gap_n > bound).sum())} "
        f"of {batch.size} ids (worst in {_where(batch, worst)}: {batch.engine_n[worst]:.4f} in the engine, "
        f"{batch.start_n[worst]:.4f} in the trainer). The weights were left as they are. Check that the engine has the newest "
        f"weights (version and fingerprint), samples at temperature {temperature:g} with top_p 1 and top_k 0, bans the same "
        f"{banned} ids, and computes in {str(dtype).removeprefix('torch.')}; if it differs on purpose, raise train.max_mismatch"
    )


def check_logprobs(batch: Batch) -> None:
    """See that the engine gave every logprob, for ratios that are taken against them.

    Raises:
        ConfigError: when one is missing.
    """
    missing = int(torch.isnan(batch.engine_n).sum())
    if missing:
        raise ConfigError(
            f"train.old_logprobs = 'engine' needs a logprob for every sampled id; {missing} of {batch.size} have none: set it "
            "to 'trainer'"
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


def _where(batch: Batch, token: int) -> str:
    key = batch.trajectories[int(batch.trajectory_n[token])].key
    return f"task {key.task!r}, sample {key.sample}, step {key.step}"

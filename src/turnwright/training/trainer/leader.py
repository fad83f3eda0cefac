"""Trainer of rank 0, which broadcasts its calls to the other ranks, and what those do with them.

The calls are made by `ProcessRanks.call_together`; each of `BROADCAST_METHODS` goes through it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from turnwright.errors import TurnwrightError
from turnwright.training.distributed import ProcessRanks
from turnwright.training.forward.forward import LogitDistribution
from turnwright.training.forward.passes import padded
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.training.trainer.trainer import Trainer

BROADCAST_METHODS = (
    "step",
    "step_credits",
    "supervised",
    "logprobs",
    "weights",
    "adapter_weights",
    "reference",
    "reset_optimizer",
    "save_weights",
    "save",
    "load",
    "expected",
)
"""Methods that all ranks run together."""


class RankZeroTrainer(Trainer):
    """Trainer of several ranks: rank 0 broadcasts each call to the others before it makes the call
    itself."""

    ranks: ProcessRanks

    def expected(self, ids: Sequence[int]) -> list[float]:
        """Compute log p(ids[i] | ids[:i]) for i >= 1, at temperature 1 with nothing banned, to
        verify servers."""
        ids = list(ids)
        ones = [1.0] * (len(ids) - 1)
        row = TrainingRow(ids[:-1], list(range(1, len(ids))), ids[1:], ones, ones, 0)
        (micro,) = padded([row], len(ids), self.device)
        with torch.no_grad():
            stats = self._stats(micro, None, LogitDistribution(), entropy=False)
        return [float(logp) for logp in stats.logprobs_m]


def _broadcasting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: RankZeroTrainer, *args: Any, **named: Any) -> Any:
        return self.ranks.call_together(method, self, *args, **named)

    return call


for _name in BROADCAST_METHODS:
    setattr(RankZeroTrainer, _name, _broadcasting(getattr(RankZeroTrainer, _name)))


def follow_rank_zero(ranks: ProcessRanks, begin: Callable[..., Trainer]) -> None:
    """Run the calls that rank 0 broadcasts until it ends the run; `begin` makes this rank's trainer
    of the first message."""
    message = ranks.receive()
    if message is None:
        return

    trainer = begin(*message)
    while (message := ranks.receive()) is not None:
        name, args, named = message
        try:
            result = getattr(trainer, name)(*args, **named)
            if isinstance(result, Iterator):
                # All ranks must gather, even if only one uses the result.
                deque(result, maxlen=0)
        except TurnwrightError:
            continue  # rank 0 raises and reports it

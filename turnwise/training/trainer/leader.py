"""The trainer of rank 0, whose calls the other ranks make too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from turnwise.errors import TurnwiseError
from turnwise.training.distributed import Ranks, drain
from turnwise.training.forward.batch import TrainingRow, padded
from turnwise.training.forward.head import SamplingDistribution
from turnwise.training.trainer.trainer import Trainer

BROADCAST_METHODS = (
    "step",
    "ledger",
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
"""Methods in which all ranks take part."""


class RankZeroTrainer(Trainer):
    """A trainer of several ranks: that of rank 0 tells the others of each call before it makes it itself."""

    def expected(self, ids: Sequence[int]) -> list[float]:
        """log p(ids[i] | ids[:i]) for i from 1 on, at temperature 1 with nothing banned: what servers are held to."""
        known = list(ids)
        ones = [1.0] * (len(known) - 1)
        row = TrainingRow(known[:-1], list(range(1, len(known))), known[1:], ones, ones, 0)
        (micro,) = padded([row], len(known), self.device)
        with torch.no_grad():
            found = self._stats(micro, None, SamplingDistribution(), entropy=False)
        return [float(value) for value in found.logprobs_m]


def _told(name: str) -> Callable[..., Any]:
    method = getattr(RankZeroTrainer if name == "expected" else Trainer, name)

    @wraps(method)
    def call(self: Trainer, *args: Any, **named: Any) -> Any:
        ranks = self.ranks
        if ranks._inside or ranks.rank or ranks.size == 1:  # part of a call that they have been told of
            return method(self, *args, **named)
        ranks.broadcast((name, args, named))
        ranks._inside = True
        try:
            found = method(self, *args, **named)
            # A stream is gathered as it is read, which must be over before the next call.
            found = iter(list(found)) if isinstance(found, Iterator) else found
        except TurnwiseError:  # raised by all ranks alike, or by this one behind what is common
            ranks._inside = False
            raise
        ranks._inside = False
        return found

    return call


for _name in BROADCAST_METHODS:
    setattr(RankZeroTrainer, _name, _told(_name))


def follow_rank_zero(ranks: Ranks, begin: Callable[..., Trainer]) -> None:
    """Do what rank 0 says until it says that the run is over.

    Args:
        begin: makes this rank's trainer of what rank 0 sends first.
    """
    heard = ranks.receive()
    if heard is None:
        return
    trainer = begin(*heard)
    while (heard := ranks.receive()) is not None:
        name, args, named = heard
        try:
            drain(getattr(trainer, name)(*args, **named))
        except TurnwiseError:
            continue  # rank 0 raises it too, and says it

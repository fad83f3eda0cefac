"""The processes that train a model together: what trainer and forward passes ask of them.

`Ranks` is one process, which does nothing for the others. Several, started by torchrun, are
`ProcessRanks` in `turnwright.training.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from turnwright.training.forward.forward import ForwardPass
from turnwright.training.forward.passes import MicroBatch


class Ranks:
    """Processes that train together: here one alone, rank 0 of 1; `ProcessRanks` are several."""

    rank = 0
    size = 1

    def broadcast(self, message: Any) -> None:
        """Send a message to all other ranks, from rank 0."""

    def stop_workers(self) -> None:
        """End the other ranks, from rank 0."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        return tensor

    def any(self, here: bool) -> bool:
        """Return whether `here` is true on any rank."""
        return here

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of all ranks in rank order, those of several ranks on the CPU."""
        return tensors

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor."""
        return tensor

    def full(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; every rank must call it."""
        return tensor

    def shard(
        self, model: nn.Module, forward: ForwardPass
    ) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
        """Shard a model in place; return `stats` and `full_logprobs` of its `ForwardPass`."""
        return forward.stats, forward.full_logprobs

    def as_method(
        self, model: nn.Module, name: str, function: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Return a function that runs inside of a model, whose sharded parts are gathered for it;
        its result must be no view."""
        return function

    def limit(self, micro_tokens: int, positions: int) -> int:
        """Return the maximum positions of a pass of a batch with so many positions."""
        return micro_tokens

    def passes(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's passes, and whether each counts; others only keep step with the other
        ranks."""
        return ((micro, True) for micro in micros)

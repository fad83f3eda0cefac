"""The processes that train one model together, under torchrun.

Rank 0 is the run: it plays every episode, keeps the journal, evaluates and writes checkpoints. The others hold their shards of
the model and do what rank 0 says, one call of its trainer after another. One process writes a run directory and decides what
is trained at which step, so what a kill leaves behind is what it is with a single process; and where generation is the larger
half of the work it is done by engines, which have devices of their own.

Every rank gets every trajectory (ids and numbers, some kilobytes each) and computes the same advantages and denominators; only
the forward passes are shared out, balanced by positions. Sharded layers are gathered and their gradients reduced together, so
all ranks must do equally many passes: who has fewer does further ones whose loss counts 0.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.config.launch import local_rank, world_size
from turnwise.errors import ConfigError, UsageError

_PATIENCE = timedelta(days=30)
"""How long ranks wait for rank 0, which may be playing episodes for hours; they end with it whatever it does."""


class _Pass(Protocol):
    @property
    def ids_bt(self) -> Tensor: ...


AnyPass = TypeVar("AnyPass", bound=_Pass)


class Ranks:
    """One rank's view of all; a process that is alone is rank 0 of 1, and has nothing to send."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._words: Any = None
        """Where rank 0 speaks: apart from what tensors go through, which loses patience sooner."""
        self._inside = False

    @classmethod
    def join(cls) -> Ranks:
        """Meet the processes that torchrun started; alone where it did not.

        Raises:
            ConfigError: when they cannot meet.
        """
        size = world_size()
        if size == 1:
            return cls()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_rank())
        try:
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
            ranks = cls(dist.get_rank(), dist.get_world_size())
            ranks._words = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{size} processes were to train together (WORLD_SIZE), and cannot meet: {' '.join(str(error).split())[:200]}; "
                "start them with torchrun --nproc-per-node N -m turnwise train ..."
            ) from error
        return ranks

    # Words.

    def broadcast(self, message: Any) -> None:
        """Send something to all others, from rank 0.

        Raises:
            UsageError: when it cannot be sent.
        """
        if self.size == 1:
            return
        try:
            pickle.dumps(message)
        except Exception as error:  # whatever an object's own code raises
            raise UsageError(
                f"what is to be trained cannot be sent to {self.size - 1} other ranks ({type(error).__name__}: {error}): keep "
                "tasks and their info to plain values"
            ) from error
        dist.broadcast_object_list([message], src=0, group=self._words)

    def receive(self) -> Any:
        """What rank 0 sends next; None is a dismissal, behind which the ranks part."""
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, src=0, group=self._words)
        if heard[0] is None:
            self.leave()
        return heard[0]

    def stop_workers(self) -> None:
        """Let the others go, from rank 0. In the middle of something they cannot hear it, and end with rank 0."""
        if self.size > 1 and self.rank == 0 and not self._inside:
            with suppress(RuntimeError):
                self.broadcast(None)
                self.leave()

    def leave(self) -> None:
        """All ranks are done: once they know it of each other, the group ends with each of them, before Python does.

        Where it is left to the end of the process, torch's threads are in it still, and on a busy machine they take the process
        with them (`terminate called without an active exception`, seen in most runs of torch 2.13.0 there).
        """
        if self.size > 1:
            with suppress(RuntimeError):
                dist.barrier(group=self._words)
            atexit.register(_end_group)

    # Numbers.

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return here if self.size == 1 else bool(self.sum_(torch.tensor([int(here)])))

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of all ranks, rank by rank, on the CPU; as given where there is one."""
        if self.size == 1:
            return tensors
        found: list[list[Tensor]] = [[] for _ in range(self.size)]
        dist.all_gather_object(found, [tensor.detach().cpu() for tensor in tensors], group=self._words)
        return [tensor for row in found for tensor in row]

    # Work.

    def limit(self, micro_tokens: int, positions: int) -> int:
        """Most positions of a pass, so that every rank gets some two of them where there is enough to do."""
        return micro_tokens if self.size == 1 else max(1, min(micro_tokens, -(-positions // (2 * self.size))))

    def passes(self, micros: Sequence[AnyPass]) -> Iterator[tuple[AnyPass, bool]]:
        """This rank's passes, and whether each is its own; one that is not counts nothing and keeps step with the others."""
        if self.size == 1:
            yield from ((micro, True) for micro in micros)
        elif micros:
            shares = balance_costs([micro.ids_bt.numel() for micro in micros], self.size)
            mine = shares[self.rank]
            least = min(micros, key=lambda micro: micro.ids_bt.numel())
            for number in range(max(map(len, shares))):
                yield (micros[mine[number]], True) if number < len(mine) else (least, False)


def balance_costs(costs: Sequence[int], size: int) -> list[list[int]]:
    """Share work out: the dearest that is left goes to whoever has least (Graham 1969: at most 4/3 of the best).

    Returns:
        For each of `size` ranks the indices of its work, in order.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(size), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]


def drain(stream: Any) -> None:
    """Take what a call gives and keep nothing: gathering is done by all ranks, whoever wants the result."""
    if isinstance(stream, Iterable) and not isinstance(stream, (list, dict, str)):
        for _ in stream:
            pass


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

"""Ranks and FSDP2 sharding.

The processes that train one model together, under torchrun.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turnwise.config.launch import local_rank, world_size
from turnwise.errors import ConfigError, UsageError
from turnwise.training.forward.forward import ForwardPass
from turnwise.training.loss import TokenStats

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


Stats = Callable[..., TokenStats]


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Cut a model into shards, in place: each of its repeated layers by itself, and the rest together.

    Gradients are summed, not averaged: denominators are those of the whole step already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    # Whole again for the backward pass, and never left over from a pass without gradient for an update to make stale.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.12: a rank whose passes show no image
        model.set_reduce_scatter_unused_params(True)


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's repeated layers: the longest list of modules of one class, as the model itself says what not to split."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists: list[nn.ModuleList] = [
        m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(child) for child in m}) == 1
    ]
    named = [m for m in lists if type(m[0]).__name__ in kinds] or lists
    found = max(named, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    return [] if found is None else list(found)


def stats_of(model: nn.Module, forward: ForwardPass) -> Stats:
    """`forward.stats` of a sharded model."""

    def run(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        found = forward.stats(*args, **named)
        return found.logprobs_m.clone(), found.entropy_m  # no view, whose hooks an operation in place would lose

    if forward.head is None:  # it calls the model itself
        return forward.stats
    inside = as_forward(model, "turnwise_stats", run)
    return lambda *args, **named: TokenStats(*inside(*args, **named))


def distribution_of(model: nn.Module, forward: ForwardPass) -> Callable[..., Tensor]:
    """`forward.distribution` of a sharded model."""
    if forward.head is None:
        return forward.distribution
    return as_forward(model, "turnwise_distribution", forward.distribution)


def as_forward(model: nn.Module, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that uses a sharded model's parts, as one of the model's own forward passes, so that its parts are whole."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(model, name, function)
    register_fsdp_forward_method(model, name)
    found: Callable[..., Any] = getattr(model, name)
    return found


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of a whole tensor in the type and in the place of another one: this rank's shard of it where that is sharded."""
    made = tensor.to(other.device, other.dtype)
    if not is_sharded(other):
        return made.clone() if made is tensor else made
    from torch.distributed.tensor import distribute_tensor

    of: Any = other
    return distribute_tensor(made, of.device_mesh, of.placements, src_data_rank=None)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor lies on several ranks."""
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def full_tensor(tensor: Any) -> Tensor:
    """A tensor, gathered where it is sharded: every rank must ask for it."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found

"""Ranks under torchrun and FSDP2 sharding.

Rank 0 is the run: it plays every episode, keeps the journal, evaluates and writes checkpoints. The
other ranks hold their shards of the model and repeat the calls of rank 0's trainer. One process
writes the run directory and orders the steps, so a killed run resumes as with a single process.
Engines on their own devices do the generation.

Every rank gets every trajectory (ids and numbers, some kilobytes each) and computes the same
advantages and denominators. Forward passes are distributed, balanced by positions. Sharded layers
gather weights and reduce gradients collectively, so all ranks must run equally many passes: a rank
with fewer repeats one with weight 0.

`ProcessRanks` is for several processes what `Ranks` is for one: messages from rank 0
(`call_together`), sums, sharding (`shard`), and each rank's passes (`passes`).
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turnwright.config.launch import local_rank, world_size
from turnwright.errors import ConfigError, TurnwrightError, UsageError
from turnwright.training.forward.forward import ForwardPass, TokenStats
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.forward.ranks import Ranks

_TIMEOUT = timedelta(days=30)
"""Time that ranks wait for rank 0, which may play episodes for hours; torchrun ends them with
it."""


class ProcessRanks(Ranks):
    """Ranks that torchrun started, seen from one of them."""

    def __init__(self) -> None:
        """Join them. Raises `ConfigError` when they cannot connect."""
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_rank())
        try:
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self._messages: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            """Group of rank 0's messages, separate from that of tensors, which has a shorter
            timeout."""
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{world_size()} processes must train together (WORLD_SIZE) but cannot connect: "
                f"{reason}; start them with torchrun --nproc-per-node N -m turnwright train ..."
            ) from error
        self._inside = False
        """Whether rank 0 is inside of a call that all ranks make."""

    # Messages.

    def broadcast(self, message: Any) -> None:
        """Send a message to all other ranks, from rank 0.

        Raises `UsageError` when it cannot be pickled.
        """
        try:
            pickle.dumps(message)
        except Exception as error:  # whatever an object's own code raises
            raise UsageError(
                f"the training data cannot be sent to {self.size - 1} other ranks "
                f"({type(error).__name__}: {error}): use only plain values in tasks and their info"
            ) from error
        dist.broadcast_object_list([message], src=0, group=self._messages)

    def receive(self) -> Any:
        """Return rank 0's next message; after None, the ranks leave the group."""
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0, group=self._messages)
        if message[0] is None:
            self.leave()
        return message[0]

    def call_together(
        self, method: Callable[..., Any], trainer: Any, *args: Any, **named: Any
    ) -> Any:
        """Call a method of a trainer on all ranks; rank 0 broadcasts the call first."""
        if self._inside or self.rank:
            return method(trainer, *args, **named)  # a part of a call that was broadcast

        self.broadcast((method.__name__, args, named))
        self._inside = True
        try:
            result = method(trainer, *args, **named)
            # A stream gathers while it is read, which must end before the next call.
            if isinstance(result, Iterator):
                result = iter(list(result))
        except TurnwrightError:
            # Raised by all ranks alike, or by this one after the common part. After any other
            # error the ranks are not at the same place, and no call follows.
            self._inside = False
            raise
        self._inside = False
        return result

    def stop_workers(self) -> None:
        """End the other ranks, from rank 0; during a call they cannot receive it, and end with
        rank 0."""
        if self.rank == 0 and not self._inside:
            with suppress(RuntimeError):
                self.broadcast(None)
                self.leave()

    def leave(self) -> None:
        """Synchronize all ranks, then destroy the group before Python exits.

        Otherwise torch's threads still use the group at process exit and may abort the process on a
        busy machine (`terminate called without an active exception`, in most runs of torch 2.13.0
        there).
        """
        with suppress(RuntimeError):
            dist.barrier(group=self._messages)
        atexit.register(_end_group)

    # Numbers.

    def sum_(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def any(self, here: bool) -> bool:
        return bool(self.sum_(torch.tensor([int(here)])))

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        here = [tensor.detach().cpu() for tensor in tensors]
        by_rank: list[list[Tensor]] = [[] for _ in range(self.size)]
        dist.all_gather_object(by_rank, here, group=self._messages)
        return [tensor for tensors_of_rank in by_rank for tensor in tensors_of_rank]

    def local(self, tensor: Tensor) -> Tensor:
        return local_shard(tensor)

    def full(self, tensor: Tensor) -> Tensor:
        return full_tensor(tensor)

    # Work.

    def shard(
        self, model: nn.Module, forward: ForwardPass
    ) -> tuple[Callable[..., TokenStats], Callable[..., Tensor]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        # Each repeated layer separately, the remainder together.
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.size,))
        for layer in layers(model):
            fully_shard(layer, mesh=mesh)

        # Reshard after the forward pass: a gathered copy from a pass without gradient would be
        # stale after an update.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed, not averaged: denominators are those of the full step
                # already.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if hasattr(model, "set_reduce_scatter_unused_params"):
            # Torch 2.12: for a rank whose passes have no image.
            model.set_reduce_scatter_unused_params(True)

        if forward.head is None:
            # It calls the model itself.
            return forward.stats, forward.full_logprobs

        def run(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
            stats = forward.stats(*args, **named)
            # No view: an in-place operation would lose its hooks.
            return stats.logprobs_m.clone(), stats.entropy_m

        inside = as_forward(model, "turnwright_stats", run)
        full_logprobs = as_forward(model, "turnwright_full_logprobs", forward.full_logprobs)
        return lambda *args, **named: TokenStats(*inside(*args, **named)), full_logprobs

    def as_method(
        self, model: nn.Module, name: str, function: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        return as_forward(model, name, function)

    def limit(self, micro_tokens: int, positions: int) -> int:
        """Return the maximum positions of a pass, so that each rank gets about two passes if there
        are enough positions."""
        return max(1, min(micro_tokens, -(-positions // (2 * self.size))))

    def passes(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the passes of this rank, each with whether it counts: a rank with fewer passes than
        another repeats the smallest."""
        if not micros:
            return

        shares = balance_costs([micro.ids_bt.numel() for micro in micros], self.size)
        own_share = shares[self.rank]
        smallest = min(micros, key=lambda micro: micro.ids_bt.numel())
        for number in range(max(map(len, shares))):
            if number < len(own_share):
                yield micros[own_share[number]], True
            else:
                yield smallest, False


def balance_costs(costs: Sequence[int], size: int) -> list[list[int]]:
    """Return each rank's work, sorted.

    The most expensive goes first, to the least loaded rank (Graham 1969: at most 4/3 of the best).
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    by_cost = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    for index in by_cost:
        rank = min(range(size), key=lambda rank: (loads[rank], len(shares[rank]), rank))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's repeated layers: the largest list of modules of one class, preferably of
    `_no_split_modules`."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())

    lists: list[nn.ModuleList] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            lists.append(module)
    preferred = [modules for modules in lists if type(modules[0]).__name__ in kinds]

    largest = max(
        preferred or lists,
        key=lambda modules: sum(parameter.numel() for parameter in modules.parameters()),
        default=None,
    )
    return [] if largest is None else list(largest)


def as_forward(model: nn.Module, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as a forward method of a sharded model, so that the parts it uses are
    gathered."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(model, name, function)
    register_fsdp_forward_method(model, name)
    registered: Callable[..., Any] = getattr(model, name)
    return registered


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Copy a full tensor to the dtype and device of another; to this rank's shard if the other is
    sharded."""
    copy = tensor.to(other.device, other.dtype)
    if not is_sharded(other):
        return copy.clone() if copy is tensor else copy

    from torch.distributed.tensor import distribute_tensor

    sharded: Any = other
    return distribute_tensor(copy, sharded.device_mesh, sharded.placements, src_data_rank=None)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded over ranks."""
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def full_tensor(tensor: Any) -> Tensor:
    """Gather a sharded tensor; every rank must call it."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full

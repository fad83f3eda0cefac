"""A model in shards, by FSDP2: each rank holds a part of every tensor, and whole layers exist while they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from turnwise.train.forward.forward import ForwardPass
from turnwise.train.loss.terms import TokenStats
from turnwise.train.ranks.ranks import Ranks

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

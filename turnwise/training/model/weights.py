"""The one way by which weights leave the trainer: a stream of named tensors, through stages that change it.

Each stage takes the stream and gives one: adapters are merged into what they adapt, tensors are cast, later they are
quantised. It holds no more than a module at a time, so a model never exists twice because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from turnwise.training.distributed import full_tensor, is_sharded

Weights = Iterator[tuple[str, Tensor]]
Transform = Callable[[Weights], Weights]


def cast(dtype: torch.dtype) -> Transform:
    """A stage for `Trainer.transforms` that casts every floating-point tensor."""

    def stage(weights: Weights) -> Weights:
        return ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in weights)

    return stage


def apply_transforms(weights: Weights, transforms: list[Transform]) -> Weights:
    """A stream behind its stages."""
    for transform in transforms:
        weights = transform(weights)
    return weights


def tied_names(model: nn.Module) -> frozenset[str]:
    """Names in `state_dict()` under which a tensor comes again that has come under another; they are left out of files."""
    seen: set[tuple[int, torch.Size]] = set()
    again = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            again.add(name)
        seen.add(place)
    return frozenset(again)


def clone_tensors(model: nn.Module, leave_out: frozenset[str] = frozenset()) -> Weights:
    """Copies of a model's tensors by name, whole where they are sharded: what leaves must not change under whoever keeps it."""
    for name, tensor in model.state_dict().items():
        if name not in leave_out:
            yield name, full_tensor(tensor.detach()) if is_sharded(tensor) else tensor.detach().clone()

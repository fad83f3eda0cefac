"""Export of the trainer's weights: a stream of named tensors through transforms.

A transform maps one stream to another: it merges adapters or casts tensors. It holds at most one
module at a time, so the model is never duplicated for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from turnwright.training.distributed import full_tensor, is_sharded

Weights = Iterator[tuple[str, Tensor]]
"""Tensors by their names."""
Transform = Callable[[Weights], Weights]


def cast(dtype: torch.dtype) -> Transform:
    """Create a transform for `Trainer.transforms` that casts every floating-point tensor."""

    def stage(weights: Weights) -> Weights:
        for name, tensor in weights:
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    return stage


def tied_names(model: nn.Module) -> frozenset[str]:
    """Return names in `state_dict()` of tensors that already have another name; files omit them."""
    seen: set[tuple[int, torch.Size]] = set()
    tied = set()
    for name, tensor in model.state_dict().items():
        storage = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and storage in seen:
            tied.add(name)
        seen.add(storage)
    return frozenset(tied)


def named_tensors(model: nn.Module, leave_out: frozenset[str], *, copy: bool) -> Weights:
    """Yield a model's tensors by name, gathered if sharded; with `copy`, later updates of the model
    do not change them."""
    for name, tensor in model.state_dict().items():
        if name in leave_out:
            continue
        if is_sharded(tensor):
            yield name, full_tensor(tensor.detach())
        else:
            yield name, tensor.detach().clone() if copy else tensor.detach()


def unique_weights(model: nn.Module, *, copy: bool = False) -> Weights:
    """Yield a model's weights by Hugging Face name, tied ones once.

    Without `copy`, those that are not sharded are the model's own, which its next update changes.
    """
    return named_tensors(model, tied_names(model), copy=copy)

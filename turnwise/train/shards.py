"""Tensors of a model that may lie on several ranks."""

from __future__ import annotations

from torch import Tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor in the type and in the place of another one."""
    return tensor.to(other.device, other.dtype).clone()

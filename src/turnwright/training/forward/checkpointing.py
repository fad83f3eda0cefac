"""Gradient checkpointing of transformers' layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from turnwright.errors import ConfigError


def enable_gradient_checkpointing(model: nn.Module) -> int:
    """Wrap, in place, the layers that support gradient checkpointing; return their number or raise
    `ConfigError` for none.

    transformers' own switch works only in training mode, with dropout. Here the model is in
    evaluation mode, since the trained policy must equal the sampled one.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = type(layer).forward
        if not torch.is_grad_enabled():
            return plain(layer, *args, **kwargs)
        return checkpoint(plain, layer, *args, use_reentrant=False, **kwargs)

    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ConfigError(
            "train.gradient_checkpointing: transformers supports it for no layer of "
            f"{type(model).__name__}; set it to false"
        )
    for layer in layers:
        if "forward" not in vars(layer):
            layer.forward = partial(forward, layer)
    return len(layers)

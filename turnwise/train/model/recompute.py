"""Gradient checkpointing: what a layer computed within itself is computed again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from turnwise.errors import ConfigError


def enable_gradient_checkpointing(model: nn.Module) -> int:
    """Wrap, in place, each layer of a model of transformers that may be checkpointed.

    transformers' own switch works in training mode alone, where dropout is on; here the policy that is trained is the one that
    was sampled, so the model is in evaluation mode.

    Returns:
        How many layers were wrapped.

    Raises:
        ConfigError: for a model with none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        if "forward" not in vars(layer):
            layer.forward = partial(_again, layer)
    if not layers:
        raise ConfigError(
            f"train.gradient_checkpointing: transformers would checkpoint no layer of {type(model).__name__}; turn it off"
        )
    return len(layers)


def _again(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = type(layer).forward
    if not torch.is_grad_enabled():
        return own(layer, *args, **kwargs)
    return checkpoint(own, layer, *args, use_reentrant=False, **kwargs)

"""The trained matrices of a linear layer's adapter, as peft keeps them: found (`low_rank_of`) and
merged (`merge_weight`).

Adding, saving and loading adapters is in `model/lora.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

ADAPTER_NAME = "default"
"""peft's name of a single adapter."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Trained matrices of a layer's adapter, as in ``W + scale * B A``."""

    a: Tensor
    b: Tensor
    scale: float


def low_rank_of(layer: Any) -> LowRank | None:
    """Return the adapter's matrices of a layer; None for a layer without one, or whose adapter is
    switched off."""
    halves = getattr(layer, "lora_A", None)
    if halves is None or layer.disable_adapters:
        return None
    return LowRank(
        halves[ADAPTER_NAME].weight,
        layer.lora_B[ADAPTER_NAME].weight,
        float(layer.scaling[ADAPTER_NAME]),
    )


def has_dropout(model: nn.Module) -> bool:
    """Return whether an adapter of a model drops inputs in training."""
    for module in model.modules():
        if low_rank_of(module) is not None:
            drop = module.lora_dropout[ADAPTER_NAME]
            if isinstance(drop, nn.Dropout) and drop.p > 0:
                return True
    return False


def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute ``W + scale * B A`` in float32, rounded once."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)

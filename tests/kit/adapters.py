"""LoRA adapters for the local engine."""

from __future__ import annotations

from typing import Any

from kit.local_engines import (
    Matrices,
)
from turnwright.config import LoraConfig
from turnwright.engines.local import AdapterEngine, LocalEngine, fingerprint
from turnwright.engines.local.adapters import AdapterShape
from turnwright.training.model.lora import shape_of

SHAPES = ("all", "q_proj v_proj down_proj")
"""Targets of the adapters; the second has fewer."""


def shapes(module: Any) -> list[AdapterShape]:
    return [
        shape_of(module, LoraConfig(rank=4 + n, targets=tuple(some.split())))
        for n, some in enumerate(SHAPES)
    ]


async def send(engine: LocalEngine, given: list[Matrices], version: int = 1) -> list[AdapterEngine]:
    """The engines of the model alone and of each adapter, after an update of each."""
    policies = [engine.adapter(number) for number in range(len(given) + 1)]
    for policy, weights in zip(policies[1:], given, strict=True):
        assert await policy.update(iter(weights), version) == fingerprint(weights)
    return policies

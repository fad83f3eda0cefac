"""Routers of mixture-of-experts models, found by their structure, and the experts that they chose in the engine's steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engine.local.cache import KVCache
from turnwise.types import ExpertRoutes

PROBE = 5
"""Rows of noise on which a router is tried."""


@dataclass(frozen=True, slots=True)
class MoERouter:
    """A module that chooses experts: hidden [N, d] -> logits [N, experts], scores [N, k], indices [N, k]."""

    name: str
    module: nn.Module
    experts: int
    k: int
    layer: int
    """Number of its layer in the decoder, by its name; -1 where the name tells none."""


def find_routers(model: nn.Module) -> list[MoERouter]:
    """The routers of a model, in the order of its layers; none for a dense one.

    A router is a module with a `weight` [experts, d] and a `top_k` that gives logits, scores and indices of that shape when
    it is shown noise.
    """
    return list(_found(model))


def _found(model: nn.Module) -> Iterator[MoERouter]:
    for name, module in model.named_modules():
        weight, k = getattr(module, "weight", None), getattr(module, "top_k", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or type(k) is not int:
            continue
        experts = weight.shape[0]
        given = probe_router(module)
        if given is None or given[0].shape != (PROBE, experts) or given[1].shape != given[2].shape or given[2].dim() != 2:
            continue
        layer = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), -1)
        yield MoERouter(name, module, int(experts), int(given[2].shape[1]), layer)


def probe_router(module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """What a module that may be a router gives for noise; None where that is not logits, scores and indices."""
    # Sharded weights are gathered: on every rank, since all look at the same modules.
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in module.named_parameters()}
    weight = whole["weight"]
    rows = torch.randn(PROBE, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            given = torch.func.functional_call(module, whole, (rows,))
    except Exception:  # whatever it is, it is no router that takes hidden states alone
        return None
    if not isinstance(given, tuple) or len(given) != 3 or not all(isinstance(one, Tensor) for one in given):
        return None
    logits, scores, indices = given
    return (logits, scores, indices) if not indices.is_floating_point() else None


class RouteRecorder:
    """Writes the experts of every row that is fed beside its keys and values.

    Args:
        module: of the engine; its routers get hooks.
        cache: where slots are kept.
    """

    def __init__(self, module: nn.Module, cache: KVCache) -> None:
        self._cache = cache
        self.routers = find_routers(module)
        self.width = 1 if all(router.experts <= 256 for router in self.routers) else 2
        self.rows: tuple[Tensor, Tensor] | None = None
        """Slot and position of each row of the pass that runs."""
        if len({router.k for router in self.routers}) > 1:
            self.routers = []  # no array holds layers of unlike k
        for number, router in enumerate(self.routers):
            router.module.register_forward_hook(partial(self._take, number))

    def __bool__(self) -> bool:
        return bool(self.routers)

    def _take(self, number: int, _module: nn.Module, _given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.rows is None:
            return
        slots, positions = self.rows
        chosen = output[2]
        store = self._cache.routes
        if store is None:
            shape = len(self.routers), chosen.shape[1]
            store = self._cache.take_routes(shape, torch.uint8 if self.width == 1 else torch.int16, chosen.device)
        store[slots, positions, number] = chosen.to(store.dtype)

    def read(self, slot: int, start: int, end: int) -> ExpertRoutes:
        """The experts of a slot's positions from `start` to `end`."""
        store = self._cache.routes
        assert store is not None
        found = store[slot, start:end].contiguous().cpu().numpy()
        return ExpertRoutes(found.tobytes(), store.shape[2], store.shape[3], self.width)

"""The engine's copy of the model; experts its routers choose."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from turnwise.engines.local.attention import ATTENTION_NAME, AttentionPlan, AttentionRun
from turnwise.engines.local.batch import RowMedia
from turnwise.engines.local.fused_decoder import make_fused_decoder
from turnwise.engines.local.kv_cache import KVCache
from turnwise.engines.local.sampling import round_up_rows
from turnwise.engines.local.vision import ImageFeatures, auto_class, split_vlm
from turnwise.errors import EngineError
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


STEP_ROWS = 512
"""Rows of one forward pass, unless more than that decode at once."""
START = 256
"""Positions per slot that are allocated at first; they double when a context needs more."""
CHUNK = 256
"""Keys looked at in one call. Longer calls of the kernel were seen to cut their sums at places that depend on the length."""


class EngineModel:
    """A causal language model in evaluation mode, with the cache that it writes to.

    Args:
        model: a module, which is copied, its config too, or a config, from which one with random weights is made.
        context: most positions of a sequence.
        device, dtype: where and in what the copy computes; None keeps the module's.

    Raises:
        EngineError: when its attention does not go through transformers' attention interface.
    """

    def __init__(self, model: Any, context: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if isinstance(model, PretrainedConfig):
            own = auto_class(model).from_config(deepcopy(model))
        else:
            own = deepcopy(model)
        own = own.to(device=device, dtype=dtype).eval().requires_grad_(False)
        for parameter in own.parameters():
            parameter.grad = None
        self.cache = KVCache(0, 0)
        self.tower, self.blind = split_vlm(own)
        """The halves of a model that sees; where there are none, why."""
        self.fused = make_fused_decoder(own, context, self.cache, self.tower)
        """The forward pass in few calls; None where the model is not one for it."""
        self.recording = RouteRecorder(own, self.cache) if self.fused is None else None
        """Keeps the experts that each position took; empty for a model without routers, which the fused pass is for."""
        # The tower keeps its own attention: images are no rows of slots.
        (own if self.tower is None else self.tower.text).set_attn_implementation(ATTENTION_NAME)
        self.module = own
        self.config = own.config.get_text_config()
        self.vocabulary: int = int(self.config.vocab_size)
        self.context = context
        self.device = next(own.parameters()).device
        self.granule = 256
        """Keys looked at are rounded up to a multiple of this; the fused pass reads just those that there are."""
        self.chunk: int | None = CHUNK if self.on_cpu else None
        """Keys looked at in one call, so that their number does not enter the bits; None where bits are not promised."""
        # One position more than the context, so that the last id of a full context has a place too.
        self._most = context + 1
        _check_rope(self.config, context)

    @property
    def on_cpu(self) -> bool:
        """Whether the promise of equal bits is meant to hold: it is for CPUs."""
        return bool(self.device.type == "cpu")

    def reserve(self, slots: int, positions: int) -> None:
        """Make sure that the cache has this many slots of this many positions; sizes double, so this is rarely work."""
        cache = self.cache
        if slots <= cache.slots and positions <= cache.capacity:
            return
        capacity = max(cache.capacity, min(START, self._most))
        while capacity < positions:
            capacity = min(2 * capacity, max(self._most, positions))
        count = max(cache.slots, 8)
        while count < slots:
            count *= 2
        cache.resize(count, -(-capacity // self.granule) * self.granule)

    def offload(self) -> None:
        """Give back the cache's memory; weights on a GPU go to the host's."""
        self.cache.clear()
        if not self.on_cpu:
            self.module.to("cpu")
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Bring the weights back; the cache grows again as it is used."""
        if not self.on_cpu:
            self.module.to(self.device)

    def rows_per_step(self, decoding: int) -> int:
        """How many rows a pass takes when this many of them decode."""
        return max(STEP_ROWS, decoding + STEP_ROWS // 4)

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        parts: list[AttentionRun],
        keep: list[int],
        seen: RowMedia | None = None,
    ) -> torch.Tensor:
        """One pass over rows of one token each.

        Args:
            tokens, positions, slots: per row its id, its position and the slot that it writes to.
            parts: which rows attend, and to what; a length is rounded up here.
            keep: rows whose logits are wanted.
            seen: what of the rows is seen; None where no call of them has seen anything.

        Returns:
            [padded number of `keep`, vocabulary], which the next pass may overwrite; rows behind the number of `keep` are
            padding.

        Raises:
            EngineError: when some layer did not attend through the engine.
        """
        if self.fused is not None:
            return self.fused.forward(tokens, positions, slots, keep, seen)
        spare = round_up_rows(len(tokens)) - len(tokens)
        batch = torch.tensor(
            [tokens + [0] * spare, positions + [0] * spare, slots + [self.cache.scratch] * spare], device=self.device
        )
        for part in parts:
            part.length = min(-(-part.length // self.granule) * self.granule, self.cache.capacity)
        plan = AttentionPlan(self.cache, batch[1], batch[2], parts, self.chunk)
        if self.recording:
            self.recording.rows = batch[2], batch[1]
        wanted = torch.tensor(keep + [0] * (round_up_rows(len(keep)) - len(keep)), device=self.device)
        logits = self._logits(batch, wanted, plan, seen, spare)
        if plan.touched != self.config.num_hidden_layers:
            raise EngineError(
                f"{type(self.module).__name__}: {plan.touched} of {self.config.num_hidden_layers} layers attend through "
                "transformers' attention interface; the local engine cannot keep a cache for the others: use a server"
            )
        return logits

    def _logits(
        self, batch: torch.Tensor, wanted: torch.Tensor, plan: AttentionPlan, seen: RowMedia | None, spare: int
    ) -> torch.Tensor:
        tower = self.tower
        if tower is None:
            output = self.module(
                input_ids=batch[:1], position_ids=batch[1:2], use_cache=False, logits_to_keep=wanted, turnwise_plan=plan
            )
            logits: torch.Tensor = output.logits[0]
            return logits
        positions, places, features = batch[1:2], None, None
        if seen is not None:
            if tower.turns:
                turns = torch.tensor([row + [0] * spare for row in seen.rotary_positions], device=self.device)
                positions = turns[:, None]
            if seen.feature_rows:
                places, features = torch.tensor(seen.feature_rows, device=self.device), ImageFeatures.join(seen.features)
        hidden = tower.decode(batch[:1], positions, places, features, turnwise_plan=plan)
        chosen: torch.Tensor = tower.head(hidden[0].index_select(0, wanted))
        return chosen


def _check_rope(config: Any, context: int) -> None:
    """Refuse rotary embeddings that change for every row as soon as one row of the batch grows long."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if context > original:
            raise EngineError(
                f"the model's rotary embedding ({rope['rope_type']}) changes behind {original} positions for all rows at once, "
                f"and context is {context}: set context to at most {original}"
            )

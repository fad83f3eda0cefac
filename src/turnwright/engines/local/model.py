"""The engine's copy of the model; experts its routers choose."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from turnwright.engines.local.adapters import AdapterShape, RowAdapters
from turnwright.engines.local.attention import ATTENTION_NAME, AttentionPlan, AttentionRun
from turnwright.engines.local.cuda_graphs import DecodeGraphs
from turnwright.engines.local.fused_decoder import make_fused_decoder
from turnwright.engines.local.kv_cache import KVCache
from turnwright.engines.local.mixed_precision import MixedLinear, pack_layers
from turnwright.engines.local.sampler import ROWS, padded_rows, round_up_rows
from turnwright.engines.local.step_rows import RowMedia
from turnwright.engines.local.vision import ImageFeatures, auto_class, split_vlm
from turnwright.engines.local.weights import Weights, copy_weights
from turnwright.errors import EngineError
from turnwright.types import ExpertRoutes

PROBE_ROWS = 5
"""Random rows for probing a router."""


@dataclass(frozen=True, slots=True)
class MoERouter:
    """Module that chooses experts: hidden [N, d] -> logits [N, experts], scores
    [N, k], indices [N, k]."""

    name: str
    module: nn.Module
    experts: int
    k: int
    layer: int
    """Layer number in the decoder, from its name; -1 without one."""


def find_routers(model: nn.Module) -> list[MoERouter]:
    """Return a model's routers in layer order; none for a dense model.

    A router is a module with a `weight` [experts, d] and a `top_k` that returns logits, scores and
    indices for random rows.
    """
    routers = []
    for name, module in model.named_modules():
        weight, k = getattr(module, "weight", None), getattr(module, "top_k", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or type(k) is not int:
            continue
        experts = weight.shape[0]
        given = probe_router(module)
        if (
            given is None
            or given[0].shape != (PROBE_ROWS, experts)
            or given[1].shape != given[2].shape
            or given[2].dim() != 2
        ):
            continue
        layer = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), -1)
        routers.append(MoERouter(name, module, int(experts), int(given[2].shape[1]), layer))
    return routers


def probe_router(module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a module's output for random rows; None when it is not (logits, scores, indices)."""
    # Sharded weights are gathered on every rank, since all ranks probe the same modules.
    full = {
        name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in module.named_parameters()
    }
    weight = full["weight"]
    rows = torch.randn(PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
        weight.device, weight.dtype
    )
    try:
        with torch.no_grad():
            given = torch.func.functional_call(module, full, (rows,))
    except Exception:  # not a router of hidden states only
        return None
    if (
        not isinstance(given, tuple)
        or len(given) != 3
        or not all(isinstance(one, Tensor) for one in given)
    ):
        return None
    logits, scores, indices = given
    return (logits, scores, indices) if not indices.is_floating_point() else None


class RouteRecorder:
    """Records the experts of every row beside its keys and values, by hooks on
    the module's routers."""

    def __init__(self, module: nn.Module, cache: KVCache) -> None:
        self._cache = cache
        self.routers = find_routers(module)
        self.width = 1 if all(router.experts <= 256 for router in self.routers) else 2
        self.rows: tuple[Tensor, Tensor] | None = None
        """Slot and position of each row of the running pass."""
        if len({router.k for router in self.routers}) > 1:
            self.routers = []  # one array cannot hold layers with different k
        for number, router in enumerate(self.routers):
            router.module.register_forward_hook(partial(self._record, number))

    def __bool__(self) -> bool:
        return bool(self.routers)

    def _record(
        self, number: int, _module: nn.Module, _given: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        if self.rows is None:
            return
        slots, positions = self.rows
        chosen = output[2]
        store = self._cache.routes
        if store is None:
            shape = len(self.routers), chosen.shape[1]
            store = self._cache.take_routes(
                shape, torch.uint8 if self.width == 1 else torch.int16, chosen.device
            )
        store[slots, positions, number] = chosen.to(store.dtype)

    def read(self, slot: int, start: int, end: int) -> ExpertRoutes:
        """Return the experts of a slot's positions from `start` to `end`."""
        store = self._cache.routes
        assert store is not None
        found = store[slot, start:end].contiguous().cpu().numpy()
        return ExpertRoutes(found.tobytes(), store.shape[2], store.shape[3], self.width)


STEP_ROWS = 2048
"""Rows of one forward pass, unless more decode at once."""
INITIAL_POSITIONS = 256
"""Positions initially allocated per slot; doubled when a context needs more."""
LARGE_CACHE = 2**26
"""Bytes of keys and values from which a cache without content gives its memory back."""
CHUNK = 256
"""Keys per attention call. Longer calls were seen to split their sums depending on the length."""
SLOTS_PER_CALL = 16
"""Slots that attend in one call on a CPU, over the keys of the longest."""


class EngineModel:
    """Causal language model in evaluation mode, with its cache: a copy of a module, or random
    weights for a config."""

    def __init__(
        self,
        model: Any,
        context: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        adapters: Sequence[AdapterShape] = (),
    ) -> None:
        if isinstance(model, PretrainedConfig):
            own = auto_class(model).from_config(deepcopy(model))
        else:
            own = deepcopy(model)
        own = own.to(device=device, dtype=dtype).eval().requires_grad_(False)
        for parameter in own.parameters():
            parameter.grad = None
        self.cache = KVCache(0, 0)
        self.tower, self.blind = split_vlm(own)
        """Halves of a vision model; otherwise the reason there are none."""
        self.fused = make_fused_decoder(own, context, self.cache, self.tower)
        """The fused forward pass; None for an unsupported model."""
        decoder = own.base_model if self.tower is None else self.tower.text
        if self.fused is None:
            pack_layers(own)
        self.adapters = RowAdapters(own, decoder, adapters) if adapters else None
        """LoRA adapters of rows; None without any."""
        if self.adapters is not None and self.fused is not None:
            self.fused.set_adapters(self.adapters)
        elif self.adapters is not None:
            self.adapters.hook()
        self.recording = RouteRecorder(own, self.cache) if self.fused is None else None
        """Recorder of experts; empty without routers.

        The fused pass supports only models without routers.
        """
        # The tower keeps its own attention, since images are not rows of slots.
        (own if self.tower is None else self.tower.text).set_attn_implementation(ATTENTION_NAME)
        self.module = own
        self.config = own.config.get_text_config()
        self.vocabulary: int = int(self.config.vocab_size)
        self.context = context
        self.device = next(own.parameters()).device
        recorded = self.device.type == "cuda" and self.tower is None and not self.recording
        self.graphs = DecodeGraphs(self.cache, self.device) if recorded else None
        """Passes as CUDA graphs; None on a CPU, with images and with routers."""
        self.granule = 256
        """Attended key counts are rounded up to a multiple of this; the fused
        pass reads exact counts."""
        self.chunk: int | None = CHUNK if self.on_cpu else None
        """Keys per attention call, which makes bits independent of their count; None where exact
        bits are not claimed."""
        self.slots_per_call = SLOTS_PER_CALL if self.on_cpu else 1 << 30
        """Slots that attend in one call, over the keys of the longest; a GPU attends in one."""
        # One more position than the context, for the last id of a full context.
        self._max_positions = context + 1
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = (
                rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
            )
            if context > original:
                raise EngineError(
                    f"the model's rotary embedding ({rope['rope_type']}) changes for all rows "
                    f"after {original} positions, and context is {context}; set context to at most "
                    f"{original}"
                )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers, packed ones included."""
        tensors = chain(self.module.parameters(), self.module.buffers())
        own = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        packed = [
            layer.packed
            for layer in self.module.modules()
            if isinstance(layer, MixedLinear) and layer.packed
        ]
        in_pass = 0 if self.fused is None else self.fused.packed_bytes
        total: int = sum(own.values()) + sum(matrix.nbytes for matrix in packed) + in_pass
        return total

    @property
    def on_cpu(self) -> bool:
        """Whether batch invariance is claimed: on CPUs only."""
        return bool(self.device.type == "cpu")

    def adapter_of(self, slot: int) -> int:
        """Return the number of the adapter that a slot's content was computed with; 0 for none."""
        return 0 if self.adapters is None else self.adapters.of(slot)

    def reserve(self, slots: int, positions: int) -> None:
        """Ensure that the cache has this many slots and positions; sizes
        double, so growth is rare."""
        if slots > self.cache.slots or positions > self.cache.capacity:
            self.cache.resize(*self._grown(slots, positions))

    def cache_bytes_of(self, slots: int, positions: int) -> int:
        """Return the bytes of the cache once this many slots and positions were reserved."""
        count, capacity = self._grown(slots, positions)
        return (count + 1) * capacity * self.cache.bytes_per_position

    def _grown(self, slots: int, positions: int) -> tuple[int, int]:
        capacity = max(self.cache.capacity, min(INITIAL_POSITIONS, self._max_positions))
        while capacity < positions:
            capacity = min(2 * capacity, max(self._max_positions, positions))
        count = max(self.cache.slots, 8 if self.on_cpu else ROWS)
        while count < slots:
            count *= 2
        return count, -(-capacity // self.granule) * self.granule

    def copy_weights(self, weights: Weights) -> str:
        """Replace the weights by checked ones; return their fingerprint."""
        if self.fused is not None and self.fused.packed_names:
            packing = self.fused.packing()
            digest = copy_weights(self.module, weights, self.fused.packed_names, packing.add)
            self.fused.pack_tied_head()
            return digest
        digest = copy_weights(self.module, weights)
        pack_layers(self.module)
        return digest

    def release_cache(self) -> None:
        """Release the memory of a large cache without content on a CPU; it grows again on use."""
        if self.on_cpu and self.cache.nbytes >= LARGE_CACHE:
            self.cache.clear()

    def offload(self) -> None:
        """Release the cache's memory and move weights from a GPU to host memory."""
        self.cache.clear()
        if not self.on_cpu:
            self.module.to("cpu")
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move the weights back; the cache grows again on use."""
        if not self.on_cpu:
            self.module.to(self.device)

    def rows_per_step(self, decoding: int) -> int:
        """Return the maximum rows of a pass when this many decode."""
        return max(STEP_ROWS, decoding + STEP_ROWS // 4)

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        parts: list[AttentionRun],
        keep: list[int],
        media: RowMedia | None = None,
    ) -> torch.Tensor:
        """Run one pass over rows of one token each, with the target slot of each; lengths of
        `parts` are rounded up here.

        Return the logits of the rows `keep`, [padded number of them, vocabulary], which the
        next pass may overwrite.
        """
        if self.adapters is not None:
            self.adapters.prepare(self.cache.slots + 1, self.device)
        if self.fused is not None:
            return self.fused.forward(tokens, positions, slots, keep, media)
        if (
            self.graphs is not None
            and self.graphs.usable
            and len(parts) == 1
            and parts[0].slot is None
        ):
            logits = self.graphs.forward(
                self._logits, tokens, positions, slots, parts[0].length, keep
            )
            if logits is not None:
                return logits
        batch = padded_rows(
            tokens, positions, slots, round_up_rows(len(tokens)), self.cache.scratch, self.device
        )
        for part in parts:
            part.length = min(-(-part.length // self.granule) * self.granule, self.cache.capacity)
        plan = AttentionPlan(self.cache, batch[1], batch[2], parts, self.chunk)
        if self.recording:
            self.recording.rows = batch[2], batch[1]
        wanted = torch.tensor(
            keep + [0] * (round_up_rows(len(keep)) - len(keep)), device=self.device
        )
        return self._logits(batch, plan, wanted, media)

    def _logits(
        self,
        batch: torch.Tensor,
        plan: AttentionPlan,
        wanted: torch.Tensor,
        media: RowMedia | None = None,
    ) -> torch.Tensor:
        """Return the logits of the rows `wanted` of a batch [3, rows] of
        ids, positions and slots."""
        logits: torch.Tensor
        if self.adapters is not None:
            self.adapters.begin(batch[2])
        if self.tower is None:
            logits = self.module(
                input_ids=batch[:1],
                position_ids=batch[1:2],
                use_cache=False,
                logits_to_keep=wanted,
                turnwright_plan=plan,
            ).logits[0]
        else:
            given, places, features = batch[1:2], None, None
            if media is not None:
                if self.tower.uses_mrope:
                    padding = batch.shape[1] - len(media.rotary_positions[0])
                    rotary = torch.tensor(
                        [row + [0] * padding for row in media.rotary_positions], device=self.device
                    )
                    given = rotary[:, None]
                if media.feature_rows:
                    places, features = (
                        torch.tensor(media.feature_rows, device=self.device),
                        ImageFeatures.join(media.features),
                    )
            hidden = self.tower.decode(batch[:1], given, places, features, turnwright_plan=plan)
            logits = self.tower.head(hidden[0].index_select(0, wanted))
        if plan.touched != self.config.num_hidden_layers:
            raise EngineError(
                f"{type(self.module).__name__}: only {plan.touched} of "
                f"{self.config.num_hidden_layers} layers use transformers' attention interface, so "
                "the local engine cannot cache the others; use a server"
            )
        return logits

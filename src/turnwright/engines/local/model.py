"""The engine's copy of the model; experts its routers choose.

`EngineModel.forward` computes one pass over rows of any calls, one token each. It is the fused
pass of `fused_decoder.py` where a model allows, a CUDA graph of `cuda_graphs.py` for rows that all
decode on a GPU, else transformers' modules with the attention of `attention.py`. Keys and values
are in `KVCache`. Which rows a pass has, `Scheduler._step` decides; what is drawn from the logits,
`Sampler`.
"""

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
from turnwright.engines.local.vision import ImageFeatures, SplitVLM, auto_class, split_vlm
from turnwright.engines.local.weights import Weights, copy_weights
from turnwright.errors import EngineError
from turnwright.types import ExpertRoutes

PROBE_ROWS = 5
"""Random rows for probing a router."""


@dataclass(frozen=True, slots=True)
class MoERouter:
    """Module that chooses experts.

    It computes logits [N, experts], scores [N, k] and indices [N, k] from hidden [N, d].
    """

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
        weight = getattr(module, "weight", None)
        top_k = getattr(module, "top_k", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or type(top_k) is not int:
            continue
        output = probe_router(module)
        if output is None:
            continue

        logits, scores, indices = output
        experts = weight.shape[0]
        if (
            logits.shape != (PROBE_ROWS, experts)
            or scores.shape != indices.shape
            or indices.dim() != 2
        ):
            continue
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        layer = numbers[-1] if numbers else -1
        routers.append(MoERouter(name, module, int(experts), int(indices.shape[1]), layer))
    return routers


def probe_router(module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a module's output for random rows; None when it is not (logits, scores, indices)."""
    # Sharded weights are gathered on every rank, since all ranks probe the same modules.
    parameters: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        gather = getattr(parameter, "full_tensor", None)
        parameters[name] = parameter if gather is None else gather()
    weight = parameters["weight"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBE_ROWS, weight.shape[1], generator=generator)
    rows = rows.to(weight.device, weight.dtype)

    try:
        with torch.no_grad():
            output = torch.func.functional_call(module, parameters, (rows,))
    except Exception:  # not a router of hidden states only
        return None
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in output):
        return None
    logits, scores, indices = output
    if indices.is_floating_point():
        return None
    return logits, scores, indices


class RouteRecorder:
    """Records the experts of every row beside its keys and values, by hooks on the routers."""

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
        self, number: int, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        if self.rows is None:
            return
        slots, positions = self.rows
        _, _, experts = output
        store = self._cache.routes
        if store is None:
            shape = len(self.routers), experts.shape[1]
            dtype = torch.uint8 if self.width == 1 else torch.int16
            store = self._cache.take_routes(shape, dtype, experts.device)
        store[slots, positions, number] = experts.to(store.dtype)

    def read(self, slot: int, start: int, end: int) -> ExpertRoutes:
        """Return the experts of a slot's positions from `start` to `end`."""
        store = self._cache.routes
        assert store is not None
        experts = store[slot, start:end].contiguous().cpu().numpy()
        return ExpertRoutes(experts.tobytes(), store.shape[2], store.shape[3], self.width)


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
    """Causal language model in evaluation mode, with its cache.

    It is a copy of a module, or has random weights for a config.
    """

    def __init__(
        self,
        model: Any,
        context: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        adapters: Sequence[AdapterShape] = (),
    ) -> None:
        module = _own_module(model, device, dtype)
        self.module = module
        self.config = module.config.get_text_config()
        self.vocabulary: int = int(self.config.vocab_size)
        self.context = context
        self.device = next(module.parameters()).device
        self.cache = KVCache(0, 0)

        self.tower, self.blind = split_vlm(module)
        """Halves of a vision model; otherwise the reason there are none."""
        self.fused = make_fused_decoder(module, context, self.cache, self.tower)
        """The fused forward pass; None for an unsupported model."""
        if self.fused is None:
            pack_layers(module)

        decoder = module.base_model if self.tower is None else self.tower.text
        self.adapters = RowAdapters(module, decoder, adapters) if adapters else None
        """LoRA adapters of rows; None without any."""
        if self.adapters is not None and self.fused is not None:
            self.fused.set_adapters(self.adapters)
        elif self.adapters is not None:
            self.adapters.hook()

        self.recording = RouteRecorder(module, self.cache) if self.fused is None else None
        """Recorder of experts; empty without routers.

        The fused pass supports only models without routers.
        """
        # The tower keeps its own attention, since images are not rows of slots.
        text_module = module if self.tower is None else self.tower.text
        text_module.set_attn_implementation(ATTENTION_NAME)
        has_graphs = self.device.type == "cuda" and self.tower is None and not self.recording
        self.graphs = DecodeGraphs(self.cache, self.device) if has_graphs else None
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
        _check_rotary_embedding(self.config, context)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers, packed ones included."""
        # Tied weights share a storage, which counts once.
        storages: dict[int, int] = {}
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

        total = sum(storages.values())
        for layer in self.module.modules():
            if isinstance(layer, MixedLinear) and layer.packed:
                total += layer.packed.nbytes
        if self.fused is not None:
            total += self.fused.packed_bytes
        return total

    @property
    def on_cpu(self) -> bool:
        """Whether batch invariance is claimed: on CPUs only."""
        return bool(self.device.type == "cpu")

    def adapter_of(self, slot: int) -> int:
        """Return the number of the adapter that a slot's content was computed with; 0 for none."""
        return 0 if self.adapters is None else self.adapters.of(slot)

    def reserve(self, slots: int, positions: int) -> None:
        """Ensure that the cache has this many slots and positions; sizes double, so growth is
        rare."""
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
        """Run one pass over rows of one token each, with the target slot of each.

        Lengths of `parts` are rounded up here. Return the logits of the rows `keep`, [padded
        number of them, vocabulary], which the next pass may overwrite.
        """
        if self.adapters is not None:
            self.adapters.prepare(self.cache.slots + 1, self.device)
        if self.fused is not None:
            return self.fused.forward(tokens, positions, slots, keep, media)

        # Rows that all decode, as a recorded graph if there is one for their number.
        all_decode = len(parts) == 1 and parts[0].slot is None
        if self.graphs is not None and self.graphs.usable and all_decode:
            logits = self.graphs.forward(
                self._logits, tokens, positions, slots, parts[0].length, keep
            )
            if logits is not None:
                return logits

        row_count = round_up_rows(len(tokens))
        batch = padded_rows(tokens, positions, slots, row_count, self.cache.scratch, self.device)
        row_positions = batch[1]
        row_slots = batch[2]
        for part in parts:
            part.length = min(-(-part.length // self.granule) * self.granule, self.cache.capacity)
        plan = AttentionPlan(self.cache, row_positions, row_slots, parts, self.chunk)
        if self.recording:
            self.recording.rows = row_slots, row_positions

        padding = [0] * (round_up_rows(len(keep)) - len(keep))
        wanted = torch.tensor(keep + padding, device=self.device)
        return self._logits(batch, plan, wanted, media)

    def _logits(
        self,
        batch: torch.Tensor,
        plan: AttentionPlan,
        wanted: torch.Tensor,
        media: RowMedia | None = None,
    ) -> torch.Tensor:
        """Return the logits of the rows `wanted` of a batch [3, rows] of ids, positions and
        slots."""
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
            hidden = self._decode_images(self.tower, batch, plan, media)
            logits = self.tower.head(hidden[0].index_select(0, wanted))

        if plan.touched != self.config.num_hidden_layers:
            raise EngineError(
                f"{type(self.module).__name__}: only {plan.touched} of "
                f"{self.config.num_hidden_layers} layers use transformers' attention interface, so "
                "the local engine cannot cache the others; use a server"
            )
        return logits

    def _decode_images(
        self, tower: SplitVLM, batch: torch.Tensor, plan: AttentionPlan, media: RowMedia | None
    ) -> torch.Tensor:
        """Return the last hidden state of a batch of a vision model, [1, rows, width]."""
        positions = batch[1:2]
        places = None
        features = None
        if media is not None:
            if tower.uses_mrope:
                padding = [0] * (batch.shape[1] - len(media.rotary_positions[0]))
                axes = [axis + padding for axis in media.rotary_positions]
                positions = torch.tensor(axes, device=self.device)[:, None]
            if media.feature_rows:
                places = torch.tensor(media.feature_rows, device=self.device)
                features = ImageFeatures.join(media.features)
        return tower.decode(batch[:1], positions, places, features, turnwright_plan=plan)


def _own_module(model: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a module, or a module with random weights for a config, for sampling."""
    if isinstance(model, PretrainedConfig):
        module = auto_class(model).from_config(deepcopy(model))
    else:
        module = deepcopy(model)
    module = module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.grad = None
    return module


def _check_rotary_embedding(config: Any, context: int) -> None:
    """Raise `EngineError` if a row's rotary embedding would depend on the length of others."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if context > original:
        raise EngineError(
            f"the model's rotary embedding ({rope['rope_type']}) changes for all rows "
            f"after {original} positions, and context is {context}; set context to at most "
            f"{original}"
        )

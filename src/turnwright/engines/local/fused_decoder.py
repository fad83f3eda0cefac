"""Fused forward pass of a decoder: matrix products by torch, everything between them by
`numba_kernels`.

It supports decoders built like Llama, Qwen2 and Qwen3, also inside vision-language models, on a
CPU, in float32 or with products in bfloat16 (`mixed_precision`). Models are recognized by
structure, not by name, and only after the pass reproduced the module's logits.

`FusedDecoder.forward` is the pass and `FusedDecoder._layer` a layer of it; `make_fused_decoder`
decides whether a model gets one. A model that does not runs in transformers' modules
(`EngineModel.forward`). Training has a pass of its own with the same kernels (`MixedDecoder`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import Linear, Parameter

from turnwright.engines.local.adapters import RowAdapters
from turnwright.engines.local.kv_cache import KVCache
from turnwright.engines.local.mixed_precision import (
    PackedMatrix,
    is_mixed,
    plain_products,
    round_weights,
)
from turnwright.engines.local.quantization import RoundedInputLinear, WeightGrid, input_grid
from turnwright.engines.local.sampler import round_up_rows
from turnwright.engines.local.step_rows import RowMedia
from turnwright.engines.local.vision import ImageFeatures, SplitVLM

_log = logging.getLogger(__name__)

PROBE_LENGTH = 48
"""Number of ids for comparing the pass with the module: more than one block of keys."""
TOLERANCE = 1e-4
"""Maximum difference of a logit, relative to the largest logit if that is above 1."""
ROUNDED_TOLERANCE = 0.25
"""Maximum mean difference of logits with rounded inputs, relative to what rounding changes. In 1 of
150 random models a row exceeded it; a product without rounding has over 0.44."""
ROUNDED_ROWS = 3
"""Number of rows of ids of which one must be within that."""
MIXED_TOLERANCE = 0.25
"""Maximum mean difference of logits with products in bfloat16, relative to their mean size. In 90
random models rounding alone gave 0.005 to 0.039, and matrices in the wrong place 1.0 to 1.5."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a layer, as matrices for torch and as flat arrays for the kernels."""

    qkv: torch.Tensor | PackedMatrix
    bias: np.ndarray
    """Bias of `qkv`; empty without one, as are the head norms."""
    q_norm: np.ndarray
    k_norm: np.ndarray
    output: torch.Tensor | PackedMatrix
    both: torch.Tensor | PackedMatrix
    """Gate and up projections of the MLP."""
    down: torch.Tensor | PackedMatrix
    first: np.ndarray
    """Norm weights before attention; `second` before the MLP."""
    second: np.ndarray
    eps: float
    head_eps: float
    scale: float
    grid: WeightGrid | None
    """Grid to which the inputs of the four products are rounded; None for none."""

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the inputs of a product, rounded where the layer's modules round them."""
        return rows if self.grid is None else self.grid.round_inputs(rows)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the rows of a pass belong, as the kernels read it."""

    numbers: np.ndarray
    """[rows] 0, 1, ..., padding included."""
    angles: np.ndarray
    """Index of each row's rotary angle."""
    positions: np.ndarray
    slots: np.ndarray
    sources: np.ndarray
    """For each slot, the one that holds its shared positions; `shared` is their number."""
    shared: np.ndarray


def multiply(rows: torch.Tensor, matrix: torch.Tensor | PackedMatrix, out: torch.Tensor) -> None:
    """Write the products of rows [N, in] with a matrix [out, in] to `out` [N, out]."""
    if isinstance(matrix, PackedMatrix):
        matrix.product(rows, out)
    else:
        torch.mm(rows, matrix.T, out=out)


Place = tuple[int, str]
"""Number of a layer and name of one of its products."""
HEAD: Place = (-1, "head")


class WeightPacking:
    """Packs weights as they come, those of a product once its last one is there.

    So there is never a second copy of all.
    """

    def __init__(
        self, places: Mapping[Place, tuple[str, ...]], pack: Callable[[Place, PackedMatrix], None]
    ) -> None:
        """`places` are the names of the weights that each product joins."""
        self._places = places
        self._pack = pack
        self._place_of = {name: place for place, names in places.items() for name in names}
        self._waiting: dict[str, torch.Tensor] = {}

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Take the next weight."""
        self._waiting[name] = weight
        place = self._place_of[name]
        names = self._places[place]
        if all(name in self._waiting for name in names):
            # Without a name for the weights, those before this one are freed once rounded.
            rounded = round_weights(*(self._waiting.pop(name) for name in names))
            self._pack(place, PackedMatrix(rounded))


class FusedDecoder:
    """Decoder that shares a module's weights.

    The module's weights become views of the joined ones, so updates apply to both.

    Args:
        module: a causal model for which `is_supported` is true.
        cache: keys and values, which it reads in blocks of `numba_kernels.BLOCK` positions.
        tower: the split model, for a vision-language model.
    """

    def __init__(self, module: Any, cache: KVCache, tower: SplitVLM | None = None) -> None:
        from turnwright.engines.local import numba_kernels

        self.kernels: Any = numba_kernels
        self.cache = cache
        cache.kernels = numba_kernels

        body = module.model if tower is None else tower.text
        attention = body.layers[0].self_attn
        self.uses_mrope = tower is not None and tower.uses_mrope
        self.size: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.size
        self.kv = attention.k_proj.out_features // self.size

        self.table: torch.Tensor = body.embed_tokens.weight
        self.head: torch.Tensor | PackedMatrix = module.lm_head.weight
        self.rotary = body.rotary_emb
        self.last = flat_view(body.norm.weight)
        self.last_eps = float(body.norm.variance_epsilon)
        self.layers = [_layer(layer) for layer in body.layers]
        self.cos = np.zeros(0, dtype=np.float32)
        self.sin = np.zeros(0, dtype=np.float32)
        self._angles = 0
        """Number of positions of `cos` and `sin`; 0 where they are per row."""
        self._buffers: dict[tuple[str, int, bool], dict[int, tuple[torch.Tensor, np.ndarray]]] = {}
        self._adapters: RowAdapters | None = None

        # What `pack` needs.
        self._modules = [projections_of(layer) for layer in body.layers]
        self._names: dict[Any, str] = {}
        for name, linear in module.named_modules():
            if isinstance(linear, Linear):
                self._names[linear] = f"{name}.weight"
        self._tied = module.lm_head.weight is body.embed_tokens.weight
        self._output: Linear = module.lm_head
        self.packed_names: frozenset[str] = frozenset()
        """Weights of which only a packed copy is kept, by name; all of them come with each
        update."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [layer.qkv, layer.output, layer.both, layer.down]
        return sum(matrix.nbytes for matrix in matrices if isinstance(matrix, PackedMatrix))

    def set_adapters(self, adapters: RowAdapters) -> None:
        """Add adapters of the module's layers to the products of each pass."""
        self._adapters = adapters

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        keep: list[int],
        media: RowMedia | None = None,
    ) -> torch.Tensor:
        """Run one pass over rows of one token each; rows of one slot must be in position order.

        Return the logits of the rows `keep`, [padded number of them, vocabulary], which the next
        pass overwrites.
        """
        if not keep:
            keep = [0]

        # Embeddings of the ids, or features of images in their place.
        count = self._rows(len(tokens))
        padding = count - len(tokens)
        hidden = self.table.shape[1]
        stream, flat_stream = self._buffer("stream", count, hidden)
        torch.index_select(self.table, 0, torch.tensor(tokens + [0] * padding), out=stream)
        deep: Sequence[torch.Tensor] = ()
        if media is not None and media.feature_rows:
            media_rows = torch.tensor(media.feature_rows)
            features = ImageFeatures.join(media.features)
            stream.index_copy_(0, media_rows, features.rows)
            deep = features.deep

        if self._adapters is not None:
            self._adapters.begin(torch.tensor(slots + [self.cache.scratch] * padding))
        row_positions = np.array(positions)
        places = RowPlaces(
            np.arange(count),
            self._rotate(row_positions, media),
            row_positions,
            np.array(slots),
            self.cache.sources,
            self.cache.shared,
        )

        # What is added to the output of a product is added in float32.
        half = bool(self.packed_names) and self._adapters is None and not deep
        change = np.zeros(0, dtype=np.int16 if half else np.float32)
        for number, layer in enumerate(self.layers):
            change = self._layer(number, layer, flat_stream, change, places, half)
            if number < len(deep):
                change_rows = torch.from_numpy(change).view(count, hidden)
                change_rows.index_add_(0, media_rows, deep[number])

        # Logits of the rows to keep.
        kept = self._rows(len(keep))
        normed, flat_normed = self._buffer("kept", kept, hidden, half)
        self.kernels.add_and_norm(
            flat_stream, change, np.array(keep), self.last, self.last_eps, flat_normed
        )
        logits, _ = self._buffer("logits", round_up_rows(kept), self.head.shape[0])
        multiply(normed, self.head, logits[:kept])
        return logits

    def _rows(self, count: int) -> int:
        """Return how many rows are computed for so many.

        Those of adapters and of other weights than packed ones are padded.
        """
        packed_only = bool(self.packed_names) and self._adapters is None
        return count if packed_only else round_up_rows(count)

    def _layer(
        self,
        number: int,
        layer: FusedLayer,
        stream: np.ndarray,
        change: np.ndarray,
        places: RowPlaces,
        half: bool,
    ) -> np.ndarray:
        """Add the attention output to the stream; return the MLP output, which the next layer adds.

        With `half`, what only products read or write is in bfloat16; their inputs and outputs are
        rounded to it anyway.
        """
        call = self.kernels
        rows = places.numbers
        count = len(rows)
        hidden = self.table.shape[1]

        # Attention.
        normed, flat_normed = self._buffer("normed", count, hidden, half)
        call.add_and_norm(stream, change, rows, layer.first, layer.eps, flat_normed)
        qkv, flat_qkv = self._buffer("qkv", count, layer.qkv.shape[0])
        multiply(layer.inputs(normed), layer.qkv, qkv)
        self._adapt(number, "qkv", normed, qkv)

        mixed, flat_mixed = self._buffer("mixed", count, self.heads * self.size)
        _, scores = self._buffer("scores", self.heads // self.kv, self.cache.capacity)
        keys, values = self.cache.blocks(number, self.kv, self.size)
        call.attend(
            flat_qkv,
            layer.bias,
            layer.q_norm,
            layer.k_norm,
            layer.head_eps,
            self.cos,
            self.sin,
            places.angles,
            places.positions,
            places.slots,
            places.sources,
            places.shared,
            keys,
            values,
            self.cache.capacity,
            self.heads,
            self.kv,
            self.size,
            layer.scale,
            scores,
            flat_mixed,
        )
        added, flat_added = self._buffer("added", count, hidden, half)
        multiply(layer.inputs(mixed), layer.output, added)
        self._adapt(number, "output", mixed, added)

        # MLP.
        call.add_and_norm(stream, flat_added, rows, layer.second, layer.eps, flat_normed)
        both, flat_both = self._buffer("both", count, layer.both.shape[0], half)
        multiply(layer.inputs(normed), layer.both, both)
        self._adapt(number, "both", normed, both)
        gated, flat_gated = self._buffer("gated", count, layer.down.shape[1], half)
        call.swiglu(flat_both, count, layer.down.shape[1], flat_gated)
        multiply(layer.inputs(gated), layer.down, added)
        self._adapt(number, "down", gated, added)
        return flat_added

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def pack(self) -> None:
        """Multiply in bfloat16 from now on.

        The module then holds the packed weights no more, only their names and shapes.
        """
        packing = self.packing()
        modules: list[Linear] = []
        for projections in self._modules:
            for product_modules in projections.values():
                modules += product_modules
        if not self._tied:
            modules.append(self._output)

        for module in modules:
            packing.add(self._names[module], module.weight)
            placeholder = module.weight.new_zeros(()).expand(module.weight.shape)
            module.weight = Parameter(placeholder, requires_grad=False)
        self.packed_names = frozenset(self._names[module] for module in modules)
        self.pack_tied_head()
        self.cache.half = True

    def packing(self) -> WeightPacking:
        """Return what packs new weights, those of `packed_names`."""
        places: dict[Place, tuple[str, ...]] = {}
        for number, projections in enumerate(self._modules):
            for product, modules in projections.items():
                places[number, product] = tuple(self._names[module] for module in modules)
        if not self._tied:
            places[HEAD] = (self._names[self._output],)
        return WeightPacking(places, self._set_packed)

    def pack_tied_head(self) -> None:
        """Pack the embedding as the output matrix, where it is that."""
        if self._tied:
            self.head = PackedMatrix(round_weights(self.table))

    def _set_packed(self, place: Place, matrix: PackedMatrix) -> None:
        number, product = place
        if place == HEAD:
            self.head = matrix
        else:
            self.layers[number] = replace(self.layers[number], **{product: matrix})

    def _adapt(self, number: int, product: str, inputs: torch.Tensor, output: torch.Tensor) -> None:
        """Add the adapters of a layer to one of its four products, each module's to its columns."""
        if self._adapters is None:
            return
        start = 0
        for module in self._modules[number][product]:
            end = start + module.out_features
            self._adapters.add(module, inputs, output[:, start:end])
            start = end

    def _buffer(
        self, name: str, rows: int, size: int, half: bool = False
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return a reusable buffer for an intermediate result, as a tensor and as a flat array in
        the same memory."""
        views = self._buffers.setdefault((name, size, half), {})
        view = views.get(rows)
        if view is None:
            # Fewer rows than of the largest buffer so far are the first of its.
            largest = max(views, default=0)
            if rows > largest:
                views.clear()
                dtype = torch.bfloat16 if half else torch.float32
                tensor = torch.zeros(rows, size, dtype=dtype)
            else:
                tensor = views[largest][0][:rows]
            view = (tensor, flat_view(tensor))
            views[rows] = view
        return view

    def _rotate(self, positions: np.ndarray, media: RowMedia | None) -> np.ndarray:
        """Compute rotary angles, once for the cache's positions or for rows with media.

        Return each row's index in them.
        """
        count = len(positions)
        if self.uses_mrope and media is not None:
            axes = torch.zeros(3, 1, round_up_rows(count), dtype=torch.long)
            axes[:, 0, :count] = torch.tensor(media.rotary_positions)
            cos, sin = self.rotary(self.table, axes)
            self.cos = flat_view(cos.contiguous())
            self.sin = flat_view(sin.contiguous())
            self._angles = 0
            return np.arange(count)

        if self._angles < self.cache.capacity:
            self._angles = self.cache.capacity
            cos, sin = self.rotary(self.table, torch.arange(self._angles)[None])
            self.cos = flat_view(cos.contiguous())
            self.sin = flat_view(sin.contiguous())
        return positions


def make_fused_decoder(
    module: Any, context: int, cache: KVCache, tower: SplitVLM | None = None
) -> FusedDecoder | None:
    """Return the fused pass for a module that still uses its own attention, or None if unsupported.

    It requires numba, a supported structure, and equal logits on random ids.
    """
    if not is_supported(module, tower):
        return None
    try:
        fused = FusedDecoder(module, cache, tower)
    except ImportError:
        _log.info(
            "local engine: numba is not installed, so the model runs in transformers' modules, "
            "which is slower"
        )
        return None
    except Exception as error:  # an incompatible compiler must not prevent a model from running
        _log.warning(
            "local engine: numba cannot compile here, so the model runs in transformers' modules, "
            "which is slower: %r",
            error,
        )
        return None

    with plain_products(module):  # rounding would hide what differs
        matches = matches_module(module, fused, min(PROBE_LENGTH, context), tower)
    if matches and is_mixed(module):
        matches = _packed_agrees(fused, min(PROBE_LENGTH, context), tower)
    if matches:
        return fused
    cache.kernels = None
    cache.half = False
    return None


def _packed_agrees(fused: FusedDecoder, count: int, tower: SplitVLM | None) -> bool:
    """Let a pass multiply in bfloat16; return whether its logits are those in float32 but for
    rounding."""
    ids, media = _random_ids(fused, count, tower)
    plain = _pass_logits(fused, ids, media)
    fused.pack()
    packed = _pass_logits(fused, ids, media)

    sound = plain.isfinite().all(1) & packed.isfinite().all(1)
    if not sound.any():
        return False
    mean_size = float(plain[sound].abs().mean())
    return _mean_gap(packed, plain) <= MIXED_TOLERANCE * mean_size


def is_supported(module: Any, tower: SplitVLM | None = None) -> bool:
    """Return whether a module consists of the pass's operations, in sizes that the kernels support.

    This does not cover the order of the operations or constant factors; `matches_module` does.
    """
    try:
        body = module.model if tower is None else tower.text
        return (
            _has_only_known_weights(module, body, is_whole=tower is None)
            and all(
                parameter.dtype == torch.float32 and parameter.device.type == "cpu"
                for parameter in module.parameters()
            )
            and _has_supported_sizes(body)
            and all(_has_one_grid(layer) for layer in body.layers)
            and _has_plain_attention(module, body)
        )
    except (AttributeError, IndexError, TypeError):
        return False


def _has_only_known_weights(module: Any, body: Any, *, is_whole: bool) -> bool:
    """Return whether a decoder has the weights that the pass reads, and no others.

    The rest of a vision-language model, which is not whole, belongs to its tower; `SplitVLM` checks
    that decoder and head are all else.
    """
    names = {"embed_tokens.weight", "norm.weight"}
    for number, layer in enumerate(body.layers):
        names |= {f"layers.{number}.{name}" for name in _weights_of_layer(layer)}
    if is_whole:
        whole = {"lm_head.weight", *(f"model.{name}" for name in names)}
        if _weights(module) != whole:
            return False
    return _weights(body) == names and set(module.lm_head.state_dict()) == {"weight"}


def _has_supported_sizes(body: Any) -> bool:
    """Return whether widths fill the kernels' vectors, and all layers have the same heads."""
    first = body.layers[0].self_attn
    sizes = (first.head_dim, first.q_proj.out_features, first.k_proj.out_features)
    for layer in body.layers:
        attention = layer.self_attn
        if sizes != (
            attention.head_dim,
            attention.q_proj.out_features,
            attention.k_proj.out_features,
        ):
            return False

    head_size, queries, keys = sizes
    mlp_widths = [layer.mlp.down_proj.in_features for layer in body.layers]
    widths = [head_size, body.embed_tokens.embedding_dim, *mlp_widths]
    return queries % keys == 0 and not any(width % 16 for width in widths)


def _has_one_grid(layer: Any) -> bool:
    """Return whether a layer rounds the inputs of all its products alike, or of none."""
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    return len({input_grid(linear) for linear in linears}) == 1


def _has_plain_attention(module: Any, body: Any) -> bool:
    """Return whether no setting changes attention in a way that small inputs do not show."""
    config = module.config.get_text_config()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return False
    # Caps have no effect on small logits.
    for part in ("attn", "final"):
        if getattr(config, f"{part}_logit_softcapping", None) is not None:
            return False
    return all(getattr(layer.self_attn, "sliding_window", None) is None for layer in body.layers)


def _weights(module: Any) -> set[str]:
    """Return the names of a module's weights, as they are without adapters."""
    return {
        name.replace(".base_layer.", ".") for name in module.state_dict() if ".lora_" not in name
    }


def _weights_of_layer(layer: Any) -> set[str]:
    names = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    names |= {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
    names |= {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    if layer.self_attn.q_proj.bias is not None:
        names |= {f"self_attn.{letter}_proj.bias" for letter in "qkv"}
    if hasattr(layer.self_attn, "q_norm"):
        names |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    return names


def matches_module(
    module: Any, fused: FusedDecoder, count: int, tower: SplitVLM | None = None
) -> bool:
    """Compare the pass with the module on random ids.

    Where inputs are rounded, another order of additions can cross a rounding boundary and move
    logits far beyond `TOLERANCE`. Such a pass is compared without rounding; with it, its mean
    difference must be a fraction of what rounding changes, for one of a few rows of ids: a product
    without rounding differs by more than `ROUNDED_TOLERANCE` in all of them.
    """
    layers = fused.layers
    if all(layer.grid is None for layer in layers):
        expected, logits = _both_logits(module, fused, count, tower)
        return _agree(expected, logits)

    # Logits of the module and of the pass, for a few rows of ids, with rounding and without.
    seeds = range(ROUNDED_ROWS)
    rounding_modules = [layer for layer in module.modules() if input_grid(layer)]
    rounded = [_both_logits(module, fused, count, tower, seed) for seed in seeds]
    fused.layers = [replace(layer, grid=None) for layer in layers]
    for linear in rounding_modules:
        linear.__class__ = Linear
    try:
        plain = [_both_logits(module, fused, count, tower, seed) for seed in seeds]
    finally:
        fused.layers = layers
        for linear in rounding_modules:
            linear.__class__ = RoundedInputLinear

    for (expected, logits), (expected_plain, _) in zip(rounded, plain, strict=True):
        effect = _mean_gap(expected_plain, expected)
        if _mean_gap(logits, expected) <= ROUNDED_TOLERANCE * effect:
            return all(_agree(expected, logits) for expected, logits in plain)
    return False


def _mean_gap(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the mean difference of rows that have a distribution."""
    sound = expected.isfinite().all(1) & logits.isfinite().all(1)
    return float((logits - expected)[sound].abs().mean())


def _agree(expected: torch.Tensor, logits: torch.Tensor) -> bool:
    """Compare logits; rows without a distribution are skipped, and at least one row must have
    one."""
    sound = expected.isfinite().all(1)
    if not sound.any() or expected.shape != logits.shape:
        return False
    largest = max(1.0, float(expected[sound].abs().max()))
    return bool((logits[sound] - expected[sound]).abs().max() <= TOLERANCE * largest)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _both_logits(
    module: Any, fused: FusedDecoder, count: int, tower: SplitVLM | None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the module and of the pass on random ids.

    A vision-language model also gets random features, at positions that differ in time, height
    and width.
    """
    ids, media = _random_ids(fused, count, tower, seed)
    if tower is None or media is None:
        expected = module(ids[None], use_cache=False).logits[0]
    else:
        if tower.uses_mrope:
            rotary = torch.tensor(media.rotary_positions)[:, None]
        else:
            rotary = torch.arange(count)[None]
        places = torch.tensor(media.feature_rows)
        hidden = tower.decode(ids[None], rotary, places, media.features[0])
        expected = tower.head(hidden)[0]
    return expected, _pass_logits(fused, ids, media)


def _random_ids(
    fused: FusedDecoder, count: int, tower: SplitVLM | None, seed: int = 0
) -> tuple[torch.Tensor, RowMedia | None]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(fused.table.shape[0], (count,), generator=generator)
    return ids, None if tower is None else _random_media(tower, fused, count, generator)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _pass_logits(fused: FusedDecoder, ids: torch.Tensor, media: RowMedia | None) -> torch.Tensor:
    """Return the logits of the pass on ids, fed in pieces of different lengths."""
    count = len(ids)
    fused.cache.resize(2, -(-count // fused.cache.unit) * fused.cache.unit)
    cuts = sorted({0, 2 * count // 3, 2 * count // 3 + 1, count - 1, count})
    logits = []
    for start, end in pairwise(cuts):
        piece_media = None if media is None else _media_between(media, start, end)
        positions = list(range(start, end))
        rows = list(range(end - start))
        slots = [1] * len(rows)
        piece = fused.forward(ids[start:end].tolist(), positions, slots, rows, piece_media)
        logits.append(piece[: len(rows)].clone())
    fused.cache.clear()
    return torch.cat(logits)


def _media_between(media: RowMedia, start: int, end: int) -> RowMedia:
    """Return the media of the rows from `start` to `end`, as those of a pass of its own."""
    time, height, width = (axis[start:end] for axis in media.rotary_positions)
    inside: list[int] = []
    rows: list[int] = []
    for number, row in enumerate(media.feature_rows):
        if start <= row < end:
            inside.append(number)
            rows.append(row - start)
    features = [media.features[0].take(torch.tensor(inside))] if inside else []
    return RowMedia((time, height, width), rows, features)


def _random_media(
    tower: SplitVLM, fused: FusedDecoder, count: int, generator: torch.Generator
) -> RowMedia:
    places = list(range(count // 6, count // 3)) + list(range(count // 2, count // 2 + 2))
    width = fused.table.shape[1]

    def random_rows() -> torch.Tensor:
        return torch.randn(len(places), width, generator=generator) * fused.table.std()

    rotary = torch.randint(0, 3, (3, count), generator=generator).cumsum(1)
    deep_count = min(2, len(fused.layers)) if tower.deep else 0
    deep = tuple(random_rows() for _ in range(deep_count))
    features = ImageFeatures(random_rows(), deep)
    return RowMedia(
        (rotary[0].tolist(), rotary[1].tolist(), rotary[2].tolist()), places, [features]
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parameters, which become views of the result."""
    joined = torch.cat(tuple(parameters))
    parts = joined.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


def projections_of(layer: Any) -> dict[str, tuple[Linear, ...]]:
    """Return the modules of each product of a layer, in the order of their columns."""
    attention = layer.self_attn
    mlp = layer.mlp
    return {
        "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "output": (attention.o_proj,),
        "both": (mlp.gate_proj, mlp.up_proj),
        "down": (mlp.down_proj,),
    }


@torch.no_grad()  # type: ignore[untyped-decorator]
def _layer(layer: Any) -> FusedLayer:
    attention = layer.self_attn
    mlp = layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    nothing = np.zeros(0, dtype=np.float32)

    bias = nothing
    if attention.q_proj.bias is not None:
        bias = flat_view(_join([module.bias for module in projections]))
    q_norm = nothing
    k_norm = nothing
    head_eps = 0.0
    if hasattr(attention, "q_norm"):
        q_norm = flat_view(attention.q_norm.weight)
        k_norm = flat_view(attention.k_norm.weight)
        head_eps = float(attention.q_norm.variance_epsilon)

    return FusedLayer(
        qkv=_join([module.weight for module in projections]),
        bias=bias,
        q_norm=q_norm,
        k_norm=k_norm,
        output=attention.o_proj.weight,
        both=_join([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        first=flat_view(layer.input_layernorm.weight),
        second=flat_view(layer.post_attention_layernorm.weight),
        eps=float(layer.input_layernorm.variance_epsilon),
        head_eps=head_eps,
        scale=float(attention.scaling),
        grid=input_grid(attention.q_proj),
    )


def flat_view(tensor: torch.Tensor) -> np.ndarray:
    """View a tensor as a flat numpy array in the same memory, of int16 for bfloat16."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    array: np.ndarray = flat.numpy()
    return array

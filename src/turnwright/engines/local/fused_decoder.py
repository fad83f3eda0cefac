"""Fused forward pass of a decoder: matrix products by torch, everything between
them by `numba_kernels`.

It supports decoders built like Llama, Qwen2 and Qwen3, also inside vision-language models, on a
CPU, in float32 or with products in bfloat16 (`mixed_precision`). Models are recognized by
structure, not by name, and only after the pass reproduced the module's logits.
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
ROUNDED_TOLERANCE, ROUNDED_ROWS = 0.25, 3
"""Maximum mean difference of logits with rounded inputs, relative to what rounding changes, and
number of rows of ids of which one must be within it. In 1 of 150 random models a row exceeded it; a
product without rounding has over 0.44."""
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
    """Packs weights as they come, those of a product once its last one is there: there is never
    a second copy of all."""

    def __init__(
        self, places: Mapping[Place, tuple[str, ...]], pack: Callable[[Place, PackedMatrix], None]
    ) -> None:
        """`places` are the names of the weights that each product joins."""
        self._places, self._pack = places, pack
        self._place_of = {name: place for place, names in places.items() for name in names}
        self._waiting: dict[str, torch.Tensor] = {}

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Take the next weight."""
        self._waiting[name] = weight
        place = self._place_of[name]
        names = self._places[place]
        if all(one in self._waiting for one in names):
            self._pack(
                place, PackedMatrix(round_weights(*(self._waiting.pop(one) for one in names)))
            )


class FusedDecoder:
    """Decoder that shares a module's weights: the module's weights become views of the joined ones,
    so updates apply to both.

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
        self.last, self.last_eps = flat_view(body.norm.weight), float(body.norm.variance_epsilon)
        self.layers = [_layer(layer) for layer in body.layers]
        self.cos = self.sin = np.zeros(0, dtype=np.float32)
        self._angles = 0
        """Number of positions of `cos` and `sin`; 0 where they are per row."""
        self._buffers: dict[tuple[str, int, bool], dict[int, tuple[torch.Tensor, np.ndarray]]] = {}
        self._adapters: RowAdapters | None = None
        self._modules = [projections_of(layer) for layer in body.layers]
        self._names = {
            layer: f"{name}.weight"
            for name, layer in module.named_modules()
            if isinstance(layer, Linear)
        }
        self._tied = module.lm_head.weight is body.embed_tokens.weight
        self._output: Linear = module.lm_head
        self.packed_names: frozenset[str] = frozenset()
        """Weights of which only a packed copy is kept, by name; all of them
        come with each update."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights."""
        matrices = [
            m for layer in self.layers for m in (layer.qkv, layer.output, layer.both, layer.down)
        ]
        return sum(
            matrix.nbytes for matrix in [*matrices, self.head] if isinstance(matrix, PackedMatrix)
        )

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

        Return the logits of the rows `keep`, [padded number of them, vocabulary], which
        the next pass overwrites.
        """
        if not keep:
            keep = [0]
        count, hidden = self._rows(len(tokens)), self.table.shape[1]
        stream, flat = self._buffer("stream", count, hidden)
        index = torch.tensor(tokens + [0] * (count - len(tokens)))
        torch.index_select(self.table, 0, index, out=stream)
        visible = media if media is not None and media.feature_rows else None
        if visible is not None:
            media_rows, features = (
                torch.tensor(visible.feature_rows),
                ImageFeatures.join(visible.features),
            )
            stream.index_copy_(0, media_rows, features.rows)
        if self._adapters is not None:
            self._adapters.begin(torch.tensor(slots + [self.cache.scratch] * (count - len(slots))))
        position = np.array(positions)
        where = (
            np.arange(count),
            self._rotate(position, media),
            position,
            np.array(slots),
            self.cache.sources,
            self.cache.shared,
        )
        deep = features.deep if visible is not None else ()
        # What is added to the output of a product is added in float32.
        half = bool(self.packed_names) and self._adapters is None and not deep
        change = np.zeros(0, dtype=np.int16 if half else np.float32)
        for number, layer in enumerate(self.layers):
            change = self._layer(number, layer, flat, change, where, half)
            if number < len(deep):
                torch.from_numpy(change).view(count, hidden).index_add_(0, media_rows, deep[number])
        kept = self._rows(len(keep))
        normed, flat_normed = self._buffer("kept", kept, hidden, half)
        self.kernels.add_and_norm(
            flat, change, np.array(keep), self.last, self.last_eps, flat_normed
        )
        logits, _ = self._buffer("logits", round_up_rows(kept), self.head.shape[0])
        multiply(normed, self.head, logits[:kept])
        return logits

    def _rows(self, count: int) -> int:
        """Return how many rows are computed for so many: those of adapters and of other weights
        than packed ones are padded."""
        packed_only = bool(self.packed_names) and self._adapters is None
        return count if packed_only else round_up_rows(count)

    def _layer(
        self,
        number: int,
        layer: FusedLayer,
        stream: np.ndarray,
        change: np.ndarray,
        where: Sequence[np.ndarray],
        half: bool,
    ) -> np.ndarray:
        """Add the attention output to the stream; return the MLP output, which the next layer adds.

        `where` has the number, rotary angle, position and slot of each row, and source and shared
        positions of each slot. With `half`, what only products read or write is in bfloat16; their
        inputs and outputs are rounded to it anyway.
        """
        call, rows = self.kernels, where[0]
        count, hidden = len(rows), self.table.shape[1]

        # Attention.
        normed, flat_normed = self._buffer("normed", count, hidden, half)
        call.add_and_norm(stream, change, rows, layer.first, layer.eps, flat_normed)
        qkv, flat_qkv = self._buffer("qkv", count, layer.qkv.shape[0])
        multiply(layer.inputs(normed), layer.qkv, qkv)
        self._adapt(number, "qkv", normed, qkv)
        mixed, flat_mixed = self._buffer("mixed", count, self.heads * self.size)
        _, scores = self._buffer("scores", self.heads // self.kv, self.cache.capacity)
        norms = layer.bias, layer.q_norm, layer.k_norm, layer.head_eps
        angles = self.cos, self.sin, *where[1:]
        sizes = self.cache.capacity, self.heads, self.kv, self.size
        stores = self.cache.blocks(number, self.kv, self.size)
        call.attend(flat_qkv, *norms, *angles, *stores, *sizes, layer.scale, scores, flat_mixed)
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
        modules = [
            module
            for projections in self._modules
            for product in projections.values()
            for module in product
        ]
        modules += [] if self._tied else [self._output]
        for module in modules:
            packing.add(self._names[module], module.weight)
            module.weight = Parameter(
                module.weight.new_zeros(()).expand(module.weight.shape), requires_grad=False
            )
        self.packed_names = frozenset(self._names[module] for module in modules)
        self.pack_tied_head()
        self.cache.half = True

    def packing(self) -> WeightPacking:
        """Return what packs new weights, those of `packed_names`."""
        places: dict[Place, tuple[str, ...]] = {
            (number, product): tuple(self._names[module] for module in modules)
            for number, projections in enumerate(self._modules)
            for product, modules in projections.items()
        }
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
        if self._adapters is not None:
            end = 0
            for module in self._modules[number][product]:
                start, end = end, end + module.out_features
                self._adapters.add(module, inputs, output[:, start:end])

    def _buffer(
        self, name: str, rows: int, size: int, half: bool = False
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return a reusable buffer for an intermediate result, as a tensor and as a flat
        array in the same memory."""
        views = self._buffers.setdefault((name, size, half), {})
        found = views.get(rows)
        if found is None:
            largest = max(views, default=0)
            if rows > largest:
                views.clear()
            dtype = torch.bfloat16 if half else torch.float32
            tensor = (
                torch.zeros(rows, size, dtype=dtype) if rows > largest else views[largest][0][:rows]
            )
            found = views[rows] = tensor, flat_view(tensor)
        return found

    def _rotate(self, position: np.ndarray, media: RowMedia | None) -> np.ndarray:
        """Compute rotary angles, once for the cache's positions or for rows with media; return
        each row's index in them."""
        if self.uses_mrope and media is not None:
            at = torch.zeros(3, 1, round_up_rows(len(position)), dtype=torch.long)
            at[:, 0, : len(position)] = torch.tensor(media.rotary_positions)
            cos, sin = self.rotary(self.table, at)
            self.cos, self.sin, self._angles = (
                flat_view(cos.contiguous()),
                flat_view(sin.contiguous()),
                0,
            )
            return np.arange(len(position))
        if self._angles < self.cache.capacity:
            self._angles = self.cache.capacity
            cos, sin = self.rotary(self.table, torch.arange(self._angles)[None])
            self.cos, self.sin = flat_view(cos.contiguous()), flat_view(sin.contiguous())
        return position


def make_fused_decoder(
    module: Any, context: int, cache: KVCache, tower: SplitVLM | None = None
) -> FusedDecoder | None:
    """Return the fused pass for a module that still uses its own attention, or None if unsupported.

    It requires numba, a supported structure, and equal logits on random ids.
    """
    if not is_supported(module, tower):
        return None
    try:
        made = FusedDecoder(module, cache, tower)
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
        matches = matches_module(module, made, min(PROBE_LENGTH, context), tower)
    if matches and is_mixed(module):
        matches = _packed_agrees(made, min(PROBE_LENGTH, context), tower)
    if matches:
        return made
    cache.kernels, cache.half = None, False
    return None


def _packed_agrees(made: FusedDecoder, count: int, tower: SplitVLM | None) -> bool:
    """Let a pass multiply in bfloat16; return whether its logits are those of
    before but for rounding."""
    before = _pass_logits(made, *_random_ids(made, count, tower))
    made.pack()
    after = _pass_logits(made, *_random_ids(made, count, tower))
    sound = before.isfinite().all(1) & after.isfinite().all(1)
    return bool(sound.any()) and _mean_gap(after, before) <= MIXED_TOLERANCE * float(
        before[sound].abs().mean()
    )


def is_supported(module: Any, tower: SplitVLM | None = None) -> bool:
    """Return whether a module consists of the pass's operations, in sizes that the kernels support.

    This does not cover the order of the operations or constant factors; `matches_module` does.
    """
    try:
        body = module.model if tower is None else tower.text
        layers, names = body.layers, {"embed_tokens.weight", "norm.weight"}
        for number, layer in enumerate(layers):
            names |= {f"layers.{number}.{name}" for name in _names(layer)}
        # The rest of a vision-language model belongs to its tower; `SplitVLM` checks that decoder
        # and head are all else.
        joined = tower is not None or _weights(module) == {
            "lm_head.weight",
            *(f"model.{name}" for name in names),
        }
        attention = [layer.self_attn for layer in layers]
        size, queries, keys = (
            attention[0].head_dim,
            attention[0].q_proj.out_features,
            attention[0].k_proj.out_features,
        )
        widths = [
            size,
            body.embed_tokens.embedding_dim,
            *(layer.mlp.down_proj.in_features for layer in layers),
        ]
        config = module.config.get_text_config()
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        # No effect on small logits.
        capped = [
            getattr(config, f"{where}_logit_softcapping", None) for where in ("attn", "final")
        ]
        return (
            joined
            and _weights(body) == names
            and set(module.lm_head.state_dict()) == {"weight"}
            and all(
                p.dtype == torch.float32 and p.device.type == "cpu" for p in module.parameters()
            )
            and not any(width % 16 for width in widths)
            and queries % keys == 0
            and all(
                len(
                    {input_grid(module) for module in layer.modules() if isinstance(module, Linear)}
                )
                == 1
                for layer in layers
            )
            and all(
                (a.head_dim, a.q_proj.out_features, a.k_proj.out_features) == (size, queries, keys)
                for a in attention
            )
            and all(getattr(a, "sliding_window", None) is None for a in attention)
            and rope not in ("dynamic", "longrope")
            and capped == [None, None]
        )
    except (AttributeError, IndexError, TypeError):
        return False


def _weights(module: Any) -> set[str]:
    """Return the names of a module's weights, as they are without adapters."""
    return {
        name.replace(".base_layer.", ".") for name in module.state_dict() if ".lora_" not in name
    }


def _names(layer: Any) -> set[str]:
    attention = [f"self_attn.{letter}_proj.weight" for letter in "qkvo"]
    biases = (
        [f"self_attn.{letter}_proj.bias" for letter in "qkv"]
        if layer.self_attn.q_proj.bias is not None
        else []
    )
    norms = (
        ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        if hasattr(layer.self_attn, "q_norm")
        else []
    )
    mlp = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    return {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *attention,
        *biases,
        *norms,
        *mlp,
    }


def matches_module(
    module: Any, made: FusedDecoder, count: int, tower: SplitVLM | None = None
) -> bool:
    """Compare the pass with the module on random ids.

    Where inputs are rounded, another order of additions can cross a rounding boundary and move
    logits far beyond `TOLERANCE`. Such a pass is compared without rounding; with it, its mean
    difference must be a fraction of what rounding changes, for one of a few rows of ids: a product
    without rounding differs by more than `ROUNDED_TOLERANCE` in all of them.
    """
    if all(layer.grid is None for layer in made.layers):
        return _agree(*_both_logits(module, made, count, tower))
    rounded, layers = [layer for layer in module.modules() if input_grid(layer)], made.layers
    with_rounding = [_both_logits(module, made, count, tower, seed) for seed in range(ROUNDED_ROWS)]
    made.layers = [replace(layer, grid=None) for layer in layers]
    for layer in rounded:
        layer.__class__ = Linear
    try:
        plain = [_both_logits(module, made, count, tower, seed) for seed in range(ROUNDED_ROWS)]
    finally:
        made.layers = layers
        for layer in rounded:
            layer.__class__ = RoundedInputLinear
    pairs = zip(with_rounding, plain, strict=True)
    rounds = any(
        _mean_gap(got, one) <= ROUNDED_TOLERANCE * _mean_gap(before, one)
        for (one, got), (before, _) in pairs
    )
    return rounds and all(_agree(*both) for both in plain)


def _mean_gap(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the mean difference of rows that have a distribution."""
    sound = expected.isfinite().all(1) & logits.isfinite().all(1)
    return float((logits - expected)[sound].abs().mean())


def _agree(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Compare logits; rows without a distribution are skipped, and at least
    one row must have one."""
    sound = expected.isfinite().all(1)
    if not sound.any() or expected.shape != got.shape:
        return False
    largest = max(1.0, float(expected[sound].abs().max()))
    return bool((got[sound] - expected[sound]).abs().max() <= TOLERANCE * largest)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _both_logits(
    module: Any, made: FusedDecoder, count: int, tower: SplitVLM | None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the module and of the pass on random ids, fed in
    pieces of different lengths.

    A vision-language model also gets random features, at positions that differ
    in time, height and width.
    """
    ids, media = _random_ids(made, count, tower, seed)
    if tower is None or media is None:
        expected = module(ids[None], use_cache=False).logits[0]
    else:
        rotary = (
            torch.tensor(media.rotary_positions)[:, None]
            if tower.uses_mrope
            else torch.arange(count)[None]
        )
        hidden = tower.decode(
            ids[None], rotary, torch.tensor(media.feature_rows), media.features[0]
        )
        expected = tower.head(hidden)[0]
    return expected, _pass_logits(made, ids, media)


def _random_ids(
    made: FusedDecoder, count: int, tower: SplitVLM | None, seed: int = 0
) -> tuple[torch.Tensor, RowMedia | None]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(made.table.shape[0], (count,), generator=generator)
    return ids, None if tower is None else _random_media(tower, made, count, generator)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _pass_logits(made: FusedDecoder, ids: torch.Tensor, media: RowMedia | None) -> torch.Tensor:
    """Return the logits of the pass on ids, fed in pieces of different lengths."""
    count = len(ids)
    made.cache.resize(2, -(-count // made.cache.unit) * made.cache.unit)
    cuts, logits = sorted({0, 2 * count // 3, 2 * count // 3 + 1, count - 1, count}), []
    for start, end in pairwise(cuts):
        rows = list(range(end - start))
        part = None
        if media is not None:
            inside = [
                number
                for number, position in enumerate(media.feature_rows)
                if start <= position < end
            ]
            features = [media.features[0].take(torch.tensor(inside))] if inside else []
            time, high, wide = (row[start:end] for row in media.rotary_positions)
            part = RowMedia(
                (time, high, wide),
                [media.feature_rows[number] - start for number in inside],
                features,
            )
        piece = made.forward(
            ids[start:end].tolist(), list(range(start, end)), [1] * len(rows), rows, part
        )
        logits.append(piece[: len(rows)].clone())
    made.cache.clear()
    return torch.cat(logits)


def _random_media(
    tower: SplitVLM, made: FusedDecoder, count: int, generator: torch.Generator
) -> RowMedia:
    places = list(range(count // 6, count // 3)) + list(range(count // 2, count // 2 + 2))
    width = made.table.shape[1]

    def rows() -> torch.Tensor:
        return torch.randn(len(places), width, generator=generator) * made.table.std()

    rotary = torch.randint(0, 3, (3, count), generator=generator).cumsum(1)
    deep = tuple(rows() for _ in range(min(2, len(made.layers)))) if tower.deep else ()
    return RowMedia(
        (rotary[0].tolist(), rotary[1].tolist(), rotary[2].tolist()),
        places,
        [ImageFeatures(rows(), deep)],
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parameters, which become views of the result."""
    joined = torch.cat(tuple(parameters))
    for parameter, part in zip(
        parameters, joined.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return joined


def projections_of(layer: Any) -> dict[str, tuple[Linear, ...]]:
    """Return the modules of each product of a layer, in the order of their columns."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    return {
        "qkv": qkv,
        "output": (attention.o_proj,),
        "both": (mlp.gate_proj, mlp.up_proj),
        "down": (mlp.down_proj,),
    }


@torch.no_grad()  # type: ignore[untyped-decorator]
def _layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    nothing = np.zeros(0, dtype=np.float32)
    bias, q_norm, k_norm, head_eps = nothing, nothing, nothing, 0.0
    if attention.q_proj.bias is not None:
        bias = flat_view(_join([module.bias for module in projections]))
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = flat_view(attention.q_norm.weight), flat_view(attention.k_norm.weight)
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
    array: np.ndarray = (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()
    return array

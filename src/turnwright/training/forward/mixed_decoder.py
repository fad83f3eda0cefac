"""A decoder's pass for training in mixed precision, with the arithmetic of the engine's fused pass.

Rounding to bfloat16 makes differences in the last bit of float32 grow: what two implementations
compute differs by as much as the rounding itself, some hundredths of a nat a token. Here norms,
rotary positions, attention and activations are the engine's own kernels, and products go through
the same `PackedMatrix`. So a trained token has the hidden state, to the bit, that it was sampled
from.

`MixedDecoder.stream` runs the layers. A layer is one function of autograd with its backward pass
written out: `_layer_forward` and `_layer_backward` are the two pages to read. It keeps the residual
stream before attention and before the MLP, what products returned, and the rounded weights; the
rest is computed again. Which models are computed so is decided by `mixed_decoder`.

Everything is laid out as T rows: the unique tokens of a prefix tree, or padded rows one after the
other. Gradients of products are products in bfloat16, all other gradients are in float32. A *slope*
is the gradient of the loss by what it is named after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwright.engines.local.fused_decoder import flat_view, is_supported, projections_of
from turnwright.engines.local.mixed_precision import (
    PackedMatrix,
    is_mixed,
    pad_rows,
    round_weights,
    times_weight,
)
from turnwright.engines.local.vision import SplitVLM
from turnwright.training.forward.path_attention import paths_of
from turnwright.training.forward.tree import PrefixTree
from turnwright.training.low_rank import has_dropout, low_rank_of, merge_weight


@dataclass(frozen=True, slots=True)
class TrainedProjection:
    """Linear layers with the same inputs, multiplied as one matrix."""

    layers: tuple[Any, ...]

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tensors that get gradients: each layer's weight, or the two matrices of its
        adapter."""
        for layer in self.layers:
            adapter = low_rank_of(layer)
            if adapter is None:
                yield layer.weight
            else:
                yield adapter.a
                yield adapter.b

    def rounded(self) -> Tensor:
        """Return the joined weights [out, in] in bfloat16, with adapters merged as for engines."""
        weights = []
        for layer in self.layers:
            adapter = low_rank_of(layer)
            if adapter is None:
                weights.append(layer.weight.detach())
            else:
                merged = merge_weight(layer.base_layer.weight, adapter.a, adapter.b, adapter.scale)
                weights.append(merged.detach())
        return round_weights(*weights)

    def slopes(self, slope: Tensor, inputs: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of `parameters()` in float32, from that of the output and the inputs
        in bfloat16.

        `needed` says which parameters get one.
        """
        gradients: list[Tensor | None] = []
        wanted = iter(needed)
        slope = pad_rows(slope)
        inputs = pad_rows(inputs)
        parts = slope.split([layer.weight.shape[0] for layer in self.layers], 1)
        for layer, part in zip(self.layers, parts, strict=True):
            adapter = low_rank_of(layer)
            if adapter is None:
                gradients.append((part.T @ inputs).float() if next(wanted) else None)
                continue

            # Of W + scale * B A the layer has A and B alone.
            needed_a = next(wanted)
            needed_b = next(wanted)
            part = part.float()
            rows = inputs.float()
            inner = part @ adapter.b.float() * adapter.scale
            a_gradient = inner.T @ rows if needed_a else None
            b_gradient = None
            if needed_b:
                b_gradient = part.T @ (rows @ adapter.a.float().T) * adapter.scale
            gradients += [a_gradient, b_gradient]
        return gradients


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """A layer's modules by their part in the pass."""

    first: Tensor
    """Weight of the norm before attention; `second` before the MLP."""
    second: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    biases: tuple[Tensor, ...]
    """Of queries, keys and values; empty without them."""
    qkv: TrainedProjection
    output: TrainedProjection
    both: TrainedProjection
    """Gate and up projections of the MLP."""
    down: TrainedProjection
    eps: float
    head_eps: float
    scale: float

    @classmethod
    def of(cls, layer: Any) -> TrainedLayer:
        """Find the parts of a transformers layer that the fused pass supports."""
        attention = layer.self_attn
        projections = projections_of(layer)
        normed = hasattr(attention, "q_norm")
        biased = attention.q_proj.bias is not None
        return cls(
            first=layer.input_layernorm.weight,
            second=layer.post_attention_layernorm.weight,
            q_norm=attention.q_norm.weight if normed else None,
            k_norm=attention.k_norm.weight if normed else None,
            biases=tuple(module.bias for module in projections["qkv"]) if biased else (),
            **{product: TrainedProjection(modules) for product, modules in projections.items()},
            eps=float(layer.input_layernorm.variance_epsilon),
            head_eps=float(attention.q_norm.variance_epsilon) if normed else 0.0,
            scale=float(attention.scaling),
        )

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of a projection's weights."""
        parts = self.qkv, self.output, self.both, self.down
        return any(low_rank_of(module) is not None for part in parts for module in part.layers)

    def head_parameters(self) -> list[Tensor]:
        """Return what acts on the heads between projection and attention: norms, then biases."""
        norms: list[Tensor] = []
        if self.q_norm is not None and self.k_norm is not None:
            norms = [self.q_norm, self.k_norm]
        return [*norms, *self.biases]

    def parameters(self) -> list[Tensor]:
        """Return all tensors that get gradients, in the order of the function's arguments."""
        matrices: list[Tensor] = []
        for projection in (self.qkv, self.output, self.both, self.down):
            matrices += projection.parameters()
        return [self.first, self.second, *self.head_parameters(), *matrices]


@dataclass(slots=True)
class PassPlan:
    """Where the rows of a pass attend, and what its layers share."""

    cos: Tensor
    """[angles, head size] of the rotary embedding, as `sin`."""
    sin: Tensor
    turns: np.ndarray
    """Index of each row's angles."""
    paths: np.ndarray
    """Rows on the path of each slot, one after the other."""
    starts: np.ndarray
    owners: np.ndarray
    capacity: int
    keys: np.ndarray
    """Storage of one layer's keys; `values` of its values."""
    values: np.ndarray
    checkpoint: bool
    """Whether a layer keeps only its input for the backward pass."""

    def storage(self) -> tuple[Any, ...]:
        """Return where rows attend, and the memory for it, as the kernels take them."""
        return self.paths, self.starts, self.owners, self.keys, self.values, self.capacity


@dataclass(slots=True)
class _Buffers:
    """Storage of keys and values, which grows and is used by one pass after the other."""

    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int16))
    values: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int16))

    def of_size(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        if len(self.keys) < count:
            self.keys, self.values = np.zeros((2, count), dtype=np.int16)
        return self.keys[:count], self.values[:count]


class MixedDecoder:
    """Pass of a decoder that multiplies in bfloat16.

    It has no state: weights are rounded anew in each pass.
    """

    def __init__(self, decoder: Any, kernels: Any) -> None:
        self.kernels = kernels
        self.embed: nn.Module = decoder.embed_tokens
        self.rotary = decoder.rotary_emb
        self.layers = [TrainedLayer.of(layer) for layer in decoder.layers]
        self.norm: Any = decoder.norm
        attention = decoder.layers[0].self_attn
        self.size: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.size
        self.kv = attention.k_proj.out_features // self.size
        self._checkpoint = False
        self._buffers = _Buffers()

    def keep_inputs_only(self) -> None:
        """Keep only the input of each layer for the backward pass, and compute the rest again."""
        self._checkpoint = True

    def stream(
        self,
        embeds_td: Tensor,
        shape: tuple[int, int],
        positions: Tensor,
        tree: PrefixTree | None,
        extras: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the residual stream after the last layer, [T, width].

        Args:
            embeds_td: embeddings of the rows, float32.
            shape: (B, T) of padded rows, (1, T) of a tree.
            positions: (1, T), or (3, B, T) for time, height and width.
            tree: attention structure; None for padded rows.
            extras: [T, width] each, added to the outputs of the first layers.
        """
        plan = self._plan(shape, positions, tree)
        stream = embeds_td.contiguous()
        for number, layer in enumerate(self.layers):
            extra = extras[number] if number < len(extras) else None
            stream = _Layer.apply(self, layer, plan, stream, extra, *layer.parameters())
        return stream

    def last_norm(self, rows_md: Tensor) -> Tensor:
        """Return the last norm of rows of the stream."""
        normed: Tensor = _Norm.apply(
            self.kernels, rows_md, self.norm.weight, float(self.norm.variance_epsilon)
        )
        return normed

    def _plan(self, shape: tuple[int, int], positions: Tensor, tree: PrefixTree | None) -> PassPlan:
        batch, length = shape
        weight = self.layers[0].first
        if positions.dim() == 3:
            # Time, height and width differ from row to row, and so do angles.
            cos, sin = self.rotary(weight, positions)
            turns = np.arange(batch * length)
        else:
            cos, sin = self.rotary(weight, torch.arange(int(positions.max()) + 1)[None])
            turns = np.tile(positions[0].numpy(), batch).astype(np.int64)

        if tree is None:
            paths = list(np.arange(batch * length, dtype=np.int64).reshape(batch, length))
            owners = np.full(batch, length, dtype=np.int64)
        else:
            if "slots" not in tree.cache:
                tree.cache["slots"] = [path.astype(np.int64) for path in paths_of(tree)]
            paths = tree.cache["slots"]
            owners = np.array([end - start for start, end in tree.chains], dtype=np.int64)

        block = self.kernels.BLOCK
        capacity = -(-max(map(len, paths)) // block) * block
        keys, values = self._buffers.of_size(len(paths) * self.kv * capacity * self.size)
        starts = np.cumsum([0, *map(len, paths)], dtype=np.int64)
        return PassPlan(
            cos=cos.reshape(-1, self.size).contiguous(),
            sin=sin.reshape(-1, self.size).contiguous(),
            turns=turns,
            paths=np.concatenate(paths),
            starts=starts,
            owners=owners,
            capacity=capacity,
            keys=keys,
            values=values,
            checkpoint=self._checkpoint,
        )

    # One layer.

    def normed(self, stream: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `change` to the stream in place, if given; return the norm in bfloat16."""
        count = len(stream)
        normed = torch.empty(stream.shape, dtype=torch.bfloat16)
        added = np.zeros(0, dtype=np.int16) if change is None else flat_view(change)
        self.kernels.add_and_norm(
            flat_view(stream), added, np.arange(count), flat_view(weight), eps, flat_view(normed)
        )
        return normed

    def attention(self, layer: TrainedLayer, plan: PassPlan, qkv: Tensor) -> Tensor:
        """Return what the rows attend to, [T, heads * head size], from their projections in
        bfloat16."""
        rotated = self._rotated(layer, plan, qkv)
        mixed = torch.empty(len(qkv), self.heads * self.size)
        (scores,) = self._scratch(plan, 1)
        self.kernels.attend_paths(
            flat_view(rotated),
            *plan.storage(),
            self.heads,
            self.kv,
            self.size,
            layer.scale,
            scores,
            flat_view(mixed),
        )
        return mixed

    def attention_slopes(
        self, layer: TrainedLayer, plan: PassPlan, qkv: Tensor, slope: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the projections, in float32, and of the head parameters, from
        that of `attention`."""
        rotated = self._rotated(layer, plan, qkv)
        qkv_slope = torch.zeros(qkv.shape)
        gathered = np.empty(3 * plan.capacity * self.size, dtype=np.float32)
        self.kernels.attend_paths_slope(
            flat_view(rotated),
            *plan.storage(),
            self.heads,
            self.kv,
            self.size,
            layer.scale,
            *self._scratch(plan, 2),
            gathered,
            flat_view(slope),
            flat_view(qkv_slope),
        )

        # Back through the rotation and the norms of the heads, in place.
        biased = qkv.float()
        if layer.biases:
            biased += torch.cat([bias.detach() for bias in layer.biases])
        norm_slopes = [
            torch.zeros_like(norm) for norm in (layer.q_norm, layer.k_norm) if norm is not None
        ]
        into = [flat_view(norm_slope) for norm_slope in norm_slopes] or [_NOTHING, _NOTHING]
        self.kernels.rotate_slope(
            flat_view(biased), *self._head_settings(layer, plan), flat_view(qkv_slope), *into
        )

        bias_slopes: Sequence[Tensor] = ()
        if layer.biases:
            bias_slopes = qkv_slope.sum(0).split([len(bias) for bias in layer.biases])
        return qkv_slope, [*norm_slopes, *bias_slopes]

    def _rotated(self, layer: TrainedLayer, plan: PassPlan, qkv: Tensor) -> Tensor:
        """Return projections in float32 with their biases, queries and keys normed and rotated."""
        rotated = qkv.float()
        bias = _NOTHING
        if layer.biases:
            bias = flat_view(torch.cat([bias.detach() for bias in layer.biases]))
        self.kernels.rotate(flat_view(rotated), bias, *self._head_settings(layer, plan))
        return rotated

    def _head_settings(self, layer: TrainedLayer, plan: PassPlan) -> tuple[Any, ...]:
        """Return what `rotate` and `rotate_slope` take alike: head norms, angles and sizes."""
        q_norm = _NOTHING if layer.q_norm is None else flat_view(layer.q_norm)
        k_norm = _NOTHING if layer.k_norm is None else flat_view(layer.k_norm)
        angles = flat_view(plan.cos), flat_view(plan.sin), plan.turns
        return q_norm, k_norm, layer.head_eps, *angles, self.heads, self.kv, self.size

    def _scratch(self, plan: PassPlan, count: int) -> np.ndarray:
        """Return buffers for the scores of the query heads of a key head."""
        return np.empty((count, plan.capacity * (self.heads // self.kv)), dtype=np.float32)

    def gated(self, both: Tensor) -> Tensor:
        """Return SwiGLU of gates and values, all bfloat16."""
        rows = len(both)
        size = both.shape[1] // 2
        gated = both.new_empty(rows, size)
        self.kernels.swiglu(flat_view(both), rows, size, flat_view(gated))
        return gated

    def gated_slope(self, both: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient of gates and values from that of `gated`, all bfloat16."""
        both_slope = torch.empty_like(both)
        self.kernels.swiglu_slope(
            flat_view(both),
            len(both),
            both.shape[1] // 2,
            flat_view(slope),
            flat_view(both_slope),
        )
        return both_slope


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A layer's weights in bfloat16, rounded once for both passes."""

    qkv: Tensor
    output: Tensor
    both: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: TrainedLayer) -> _Rounded:
        return cls(
            layer.qkv.rounded(), layer.output.rounded(), layer.both.rounded(), layer.down.rounded()
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.qkv, self.output, self.both, self.down


@dataclass(slots=True)
class _Kept:
    """What a layer's forward pass computed and its backward pass needs."""

    middle: Tensor
    """The stream before the MLP."""
    qkv: Tensor
    mixed: Tensor
    both: Tensor
    weights: _Rounded


def _product(weight: Tensor, inputs: Tensor) -> Tensor:
    """Return the products of rows with a rounded weight, [T, out] bfloat16."""
    return PackedMatrix(weight).product(inputs)


def _layer_forward(
    decoder: MixedDecoder,
    layer: TrainedLayer,
    plan: PassPlan,
    stream: Tensor,
    extra: Tensor | None,
) -> tuple[Tensor, _Kept]:
    """Return the stream after a layer; the same steps as `FusedDecoder._layer`."""
    weights = _Rounded.of(layer)

    # Attention.
    normed = decoder.normed(stream, None, layer.first, layer.eps)
    qkv = _product(weights.qkv, normed)
    mixed = decoder.attention(layer, plan, qkv).bfloat16()

    # MLP. The norm adds what attention returned to the stream.
    middle = stream.clone()
    normed = decoder.normed(middle, _product(weights.output, mixed), layer.second, layer.eps)
    both = _product(weights.both, normed)
    change = _product(weights.down, decoder.gated(both)).float()
    if extra is not None:
        change = change + extra
    return middle + change, _Kept(middle, qkv, mixed, both, weights)


class _Layer(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        decoder: MixedDecoder,
        layer: TrainedLayer,
        plan: PassPlan,
        stream: Tensor,
        extra: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        output, kept = _layer_forward(decoder, layer, plan, stream, extra)
        ctx.decoder = decoder
        ctx.layer = layer
        ctx.plan = plan
        saved: tuple[Tensor, ...] = ()
        weights: tuple[Tensor, ...] = ()
        if not plan.checkpoint:
            saved = (kept.middle, kept.qkv, kept.mixed, kept.both)
            # In a step's first pass, gradients of whole weights will take more memory than these;
            # an adapter's will not.
            if not layer.has_adapters:
                weights = kept.weights.tensors()
        ctx.save_for_backward(stream, *saved, *weights)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        decoder: MixedDecoder = ctx.decoder
        layer: TrainedLayer = ctx.layer
        plan: PassPlan = ctx.plan
        stream, *saved = ctx.saved_tensors
        if plan.checkpoint:
            _, kept = _layer_forward(decoder, layer, plan, stream, None)
        else:
            middle, qkv, mixed, both, *weights = saved
            rounded = _Rounded(*weights) if weights else _Rounded.of(layer)
            kept = _Kept(middle, qkv, mixed, both, rounded)
        return _layer_backward(
            decoder, layer, plan, stream, kept, slopes[0], ctx.needs_input_grad[3:]
        )


def _layer_backward(
    decoder: MixedDecoder,
    layer: TrainedLayer,
    plan: PassPlan,
    stream: Tensor,
    kept: _Kept,
    slope: Tensor,
    needed: Sequence[bool],
) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `_Layer.forward`, from that of its output; last step
    first."""
    _, to_extra, to_first, to_second, *to_parameters = needed
    heads_count = len(layer.head_parameters())
    to_heads = to_parameters[:heads_count]
    to_matrices = iter(to_parameters[heads_count:])
    to_qkv, to_output, to_both, to_down = (
        [next(to_matrices) for _ in projection.parameters()]
        for projection in (layer.qkv, layer.output, layer.both, layer.down)
    )

    # MLP.
    slope = slope.contiguous()
    rounded = slope.bfloat16()
    down = layer.down.slopes(rounded, decoder.gated(kept.both), to_down)
    both_slope = decoder.gated_slope(kept.both, times_weight(rounded, kept.weights.down))
    both = layer.both.slopes(
        both_slope, decoder.normed(kept.middle, None, layer.second, layer.eps), to_both
    )
    middle_slope, second = _norm_slopes(
        decoder.kernels,
        kept.middle,
        layer.second,
        layer.eps,
        times_weight(both_slope, kept.weights.both),
        slope,
    )

    # Attention.
    rounded = middle_slope.bfloat16()
    output = layer.output.slopes(rounded, kept.mixed, to_output)
    qkv_slope, heads = decoder.attention_slopes(
        layer, plan, kept.qkv, times_weight(rounded, kept.weights.output).float()
    )
    rounded = qkv_slope.bfloat16()
    qkv = layer.qkv.slopes(rounded, decoder.normed(stream, None, layer.first, layer.eps), to_qkv)
    stream_slope, first = _norm_slopes(
        decoder.kernels,
        stream,
        layer.first,
        layer.eps,
        times_weight(rounded, kept.weights.qkv),
        middle_slope,
    )

    head_slopes = [head if wanted else None for head, wanted in zip(heads, to_heads, strict=True)]
    return (
        None,
        None,
        None,
        stream_slope,
        slope if to_extra else None,
        first if to_first else None,
        second if to_second else None,
        *head_slopes,
        *qkv,
        *output,
        *both,
        *down,
    )


def _norm_slopes(
    kernels: Any,
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    slope: Tensor,
    beside: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows of a norm and of its weight; `beside` reaches the rows
    around the norm, if not empty."""
    hidden_slope = torch.empty_like(hidden)
    weight_slope = torch.zeros_like(weight)
    kernels.norm_slope(
        flat_view(hidden),
        flat_view(weight),
        eps,
        flat_view(slope),
        flat_view(beside),
        flat_view(hidden_slope),
        flat_view(weight_slope),
    )
    return hidden_slope, weight_slope


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, kernels: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = rows.contiguous()
        normed = torch.empty_like(rows)
        nothing = np.zeros(0, dtype=np.float32)
        kernels.add_and_norm(
            flat_view(rows),
            nothing,
            np.arange(len(rows)),
            flat_view(weight),
            eps,
            flat_view(normed),
        )
        ctx.save_for_backward(rows, weight)
        ctx.kernels = kernels
        ctx.eps = eps
        return normed

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        rows_slope, weight_slope = _norm_slopes(
            ctx.kernels, rows, weight, ctx.eps, slopes[0].contiguous(), torch.zeros(0)
        )
        return None, rows_slope, weight_slope, None


_NOTHING = np.zeros(0, dtype=np.float32)


def mixed_decoder(model: Any, tower: SplitVLM | None) -> MixedDecoder | None:
    """Return the pass of a model's decoder, or None where its modules have to do: it multiplies in
    float32, is of another structure, has adapters with dropout, or numba is not installed."""
    if not is_mixed(model) or not is_supported(model, tower) or has_dropout(model):
        return None
    try:
        from turnwright.engines.local import numba_kernels
    except Exception:
        # Not installed, or with an incompatible compiler; the engine says so.
        return None
    return MixedDecoder(model.model if tower is None else tower.text, numba_kernels)

"""Matrix products in bfloat16 on CPUs; everything between them, and the weights of training, in
float32.

Processors with AMX or AVX512-BF16 multiply bfloat16 several times as fast as float32. In mixed
precision the inputs and the weights of a linear layer are rounded to bfloat16, and so is its
output; sums inside a product are in float32. Norms, rotary positions, attention, activations and
sampling are in float32 as ever. `PackedMatrix.product` is the one place that says how a product is
computed, for the engine and for the trainer alike.

A library adds up a row's products in an order that depends on how many rows are multiplied at once.
So rows go in tiles of `TILE`, the last one padded, or in several tiles at once where a probe found
that this gives the same bits. A row's result then depends on no other row.

Few rows would pay for a whole tile. They go through a kernel that reads the packed weights once and
adds up in the tile's order (`few_rows`), where a probe found that this gives the same bits, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from turnwright.engines.local.few_rows import FewRows, few_rows_at_most, find_order

TILE = 64
"""Rows of a product of the library."""
MOST_ROWS = 256
"""Rows of a product at most, a multiple of `TILE`; larger products gain little more."""
OFF = "TURNWRIGHT_NO_BFLOAT16"
"""Environment variable that makes a processor one without products in bfloat16, for tests and
comparisons."""


@lru_cache(maxsize=1)
def _has_bfloat16_units() -> bool:
    supported: Any = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def multiplies_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 faster than float32, and this torch lets
    it."""
    return not os.environ.get(OFF) and _has_bfloat16_units()


class PackedMatrix:
    """A weight [out, in] rounded to bfloat16, in the order in which the processor reads it.

    It is a copy: after a change of the weights a new one is made.
    """

    def __init__(self, rounded: Tensor) -> None:
        """Pack a matrix of `round_weights`."""
        self.shape = rounded.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(rounded, TILE)
        self.nbytes = 2 * rounded.numel()
        """Bytes of the weights, without padding."""
        threads = torch.get_num_threads()
        order = order_of(*self.shape, threads)
        self._rows = order.rows
        self._few_rows = few_rows_at_most(threads)
        self._few = FewRows(self._packed, self.shape, order.part) if order.part else None

    def product(self, inputs: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the products of rows [N, in] with the matrix, [N, out] bfloat16.

        With `out`, of any type, they are written to it.
        """
        inputs = inputs.bfloat16()
        if len(inputs) <= self._rows:
            if self._few is not None and len(inputs) <= self._few_rows:
                outputs = self._few.product(inputs)
            else:
                outputs = self._multiply(inputs)
            return outputs if out is None else out.copy_(outputs)

        # Parts of one size: a short last part would read all weights for a few rows.
        parts = -(-len(inputs) // self._rows)
        tiles = -(-len(inputs) // TILE)
        rows = -(-tiles // parts) * TILE
        if out is None:
            out = inputs.new_empty(len(inputs), self.shape[0])
        for first in range(0, len(inputs), rows):
            out[first : first + rows] = self._multiply(inputs[first : first + rows])
        return out

    def _multiply(self, inputs: Tensor) -> Tensor:
        """Multiply whole tiles."""
        missing = -len(inputs) % TILE
        if not missing:
            return _linear(inputs, self._packed)
        padded = pad(inputs, (0, 0, 0, missing))
        return _linear(padded, self._packed)[: len(inputs)]


def round_weights(*parts: Tensor) -> Tensor:
    """Round float32 matrices to bfloat16, joined by their rows."""
    if len(parts) == 1:
        return parts[0].detach().bfloat16().contiguous()
    lengths = [len(part) for part in parts]
    rounded = torch.empty(sum(lengths), parts[0].shape[1], dtype=torch.bfloat16)
    for place, part in zip(rounded.split(lengths), parts, strict=True):
        place.copy_(part.detach())
    return rounded


def times_weight(slope: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of inputs [N, in], from that of the outputs [N, out] and the weight
    [out, in], all bfloat16."""
    return (pad_rows(slope) @ weight)[: len(slope)]


def times_inputs(slope: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of a weight [out, in], from those of the outputs [N, out] and the inputs
    [N, in], all bfloat16."""
    return pad_rows(slope).T @ pad_rows(inputs)


def pad_rows(rows: Tensor) -> Tensor:
    """Fill up rows with zeros to one of few numbers of them, at most an eighth more or the end of a
    tile.

    A library keeps code for each size that it multiplied, up to 1,024 of them: for one layer of
    width 576, a product and its transpose took 2.4 MB for each number of rows, up to 1.2 GB.
    """
    step = max(TILE, 1 << max(0, len(rows).bit_length() - 4))
    missing = -len(rows) % step
    return pad(rows, (0, 0, 0, missing)) if missing else rows


def _linear(inputs: Tensor, packed: Tensor) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")
    return outputs


@dataclass(frozen=True, slots=True)
class Order:
    """How products of a shape are computed so that all have the bits of a single tile."""

    rows: int
    """Most rows at once, whole tiles up to `MOST_ROWS`."""
    part: int
    """Inputs that a tile sums up before it adds them to those before, for `FewRows`; 0 where no
    kernel repeats its bits."""


@lru_cache(maxsize=256)
def order_of(out: int, inner: int, threads: int) -> Order:
    """Find the order of additions of a library's products with a matrix [out, inner].

    `threads` is part of the key: a library divides a product among threads. The sums of the probe
    nearly cancel, so another order shows in the rounded result.
    """
    generator = torch.Generator().manual_seed(out * 1_000_003 + inner)
    half = inner // 2
    inputs = torch.randn(MOST_ROWS, inner, generator=generator)
    weight = torch.randn(out, inner, generator=generator)
    inputs[:, half : 2 * half] = inputs[:, :half].flip(1)
    weight[:, half : 2 * half] = -weight[:, :half].flip(1) + 1e-3 * weight[:, half : 2 * half]
    rounded = inputs.bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), TILE)
    in_tiles = torch.cat([_linear(tile, packed) for tile in rounded.split(TILE)])

    # One more tile at a time, while the bits are those of single tiles.
    rows = TILE
    while rows < MOST_ROWS:
        more = rows + TILE
        if not torch.equal(_linear(rounded[:more], packed), in_tiles[:more]):
            break
        rows = more
    return Order(rows, find_order(packed, rounded[:TILE], in_tiles[:TILE]))


class MixedLinear(nn.Linear):  # type: ignore[misc]
    """Linear layer that multiplies in bfloat16; inputs, outputs, weights and gradients are
    float32."""

    packed: PackedMatrix | None = None
    """Copy of the weights that an engine multiplies with, from `pack`; None packs them at each
    use."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        matrix = self.packed or PackedMatrix(round_weights(self.weight))
        outputs: Tensor = _MixedProduct.apply(rows, matrix, self.weight)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.view(*inputs.shape[:-1], -1)

    def pack(self, rounded: Tensor | None = None) -> None:
        """Keep a packed copy of the weights as they are now.

        `rounded` is what `round_weights` returned for them, if the caller has it.
        """
        if rounded is None:
            rounded = round_weights(self.weight)
        self.packed = PackedMatrix(rounded)


class _MixedProduct(torch.autograd.Function):  # type: ignore[misc]
    """Products of rows with a weight. Gradients are products in bfloat16 as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: PackedMatrix, weight: Tensor) -> Tensor:
        inputs = rows.bfloat16()
        ctx.save_for_backward(inputs, weight)
        return matrix.product(inputs).float()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        needs_rows, _, needs_weight = ctx.needs_input_grad
        slope = slopes[0].bfloat16()
        rows_slope = None
        if needs_rows:
            rows_slope = times_weight(slope, round_weights(weight)).float()
        weight_slope = None
        if needs_weight:
            weight_slope = times_inputs(slope, inputs).float()
        return rows_slope, None, weight_slope


def is_mixed(module: nn.Module) -> bool:
    """Return whether a layer of a model multiplies in bfloat16."""
    return any(isinstance(layer, MixedLinear) for layer in module.modules())


def use_mixed_products(decoder: nn.Module, head: nn.Module | None) -> None:
    """Make the linear layers of a decoder and an output head multiply in bfloat16, in place, by a
    change of class."""
    layers = list(decoder.modules())
    if head is not None:
        layers.append(head)
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.__class__ = MixedLinear


@contextmanager
def plain_products(module: nn.Module) -> Iterator[None]:
    """Multiply in float32 in this context."""
    mixed = [layer for layer in module.modules() if isinstance(layer, MixedLinear)]
    try:
        for layer in mixed:
            layer.__class__ = nn.Linear
        yield
    finally:
        for layer in mixed:
            layer.__class__ = MixedLinear


@contextmanager
def packed_once(layer: nn.Module, rounded: Tensor | None = None) -> Iterator[None]:
    """Pack a layer's weights once for all uses in this context, in which they do not change.

    Layers that do not multiply in bfloat16, or are packed already, stay as they are.
    """
    if not isinstance(layer, MixedLinear) or layer.packed is not None:
        yield
        return
    layer.pack(rounded)
    try:
        yield
    finally:
        layer.packed = None


def pack_layers(module: nn.Module) -> None:
    """Keep packed copies of the weights of all layers that multiply in bfloat16."""
    for layer in module.modules():
        if isinstance(layer, MixedLinear):
            layer.pack()

"""Products of few rows in bfloat16, with the bits of a library's products of many.

oneDNN multiplies a tile of rows by the matrix unit of the processor (AMX); for a row or two
that takes as long as for all of the tile. A vector kernel that reads the weights as oneDNN
packed them takes half of the time, and can add up in the same order: 16 pairs of inputs by
fused multiplications, and blocks of them one after the other, in one or several parts. Neither
the packed layout nor the number of parts is documented, so both are found by a probe, and
without a match nothing changes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST = 8
"""Rows up to which the kernel is faster than a tile of 64 on one thread: 30 layers took 69 and 126
ms for one row, 99 and 130 for 8, 102 and 100 for 12. On two threads, among which only the library
divides its work, they took 79 and 98 for 4 rows, 103 and 81 for 6."""


def few_rows_at_most(threads: int) -> int:
    """Return the number of rows up to which the kernel pays."""
    return MOST // threads


class FewRows:
    """A packed matrix whose products with few rows are computed by the kernel.

    Args:
        packed: what oneDNN packed of a weight in bfloat16; it is kept.
        shape: [out, in] of the weight.
        part: number of inputs that are summed up before they are added to those before.
    """

    def __init__(self, packed: Tensor, shape: tuple[int, ...], part: int) -> None:
        from turnwright.engines.local import numba_kernels

        self._kernel: Any = numba_kernels.multiply_few
        self._packed = packed
        self._weights = packed_numbers(packed)
        self._out, self._inner = shape
        self._part = part

    def product(self, inputs: Tensor) -> Tensor:
        """Return the products of rows [N, in] in bfloat16, [N, out] in bfloat16."""
        outputs = inputs.new_empty(len(inputs), self._out)
        rows = inputs.contiguous().view(torch.int16).numpy().reshape(-1)
        flat_outputs = outputs.view(torch.int16).numpy().reshape(-1)
        self._kernel(
            rows, len(inputs), self._inner, self._weights, self._out, self._part, flat_outputs
        )
        return outputs


def packed_numbers(packed: Tensor) -> np.ndarray:
    """View the memory of a packed matrix as bits of bfloat16; it is valid as long as the matrix."""
    address = torch.ops.mkldnn.data_ptr(packed)
    size = torch.ops.mkldnn._nbytes(packed)
    numbers = ctypes.cast(address, ctypes.POINTER(ctypes.c_int16))
    return np.ctypeslib.as_array(numbers, (size // 2,))


def find_order(packed: Tensor, inputs: Tensor, outputs: Tensor) -> int:
    """Return the `part` with which the kernel repeats the library's products to the bit; 0 if none
    does.

    Args:
        packed: a packed matrix.
        inputs: rows [N, in] in bfloat16, whose products show the order of additions.
        outputs: their products by the library, [N, out] in bfloat16.
    """
    inner: int = inputs.shape[1]
    out: int = outputs.shape[1]
    try:
        from turnwright.engines.local.numba_kernels import PANEL
    except Exception:  # not installed, or an incompatible compiler; the engine says so
        return 0
    if inner % PANEL or out % PANEL or not _is_readable(packed, 2 * inner * out):
        return 0

    # Try the sizes of 1, 2, ... equal parts on some of the rows.
    some_rows = slice(None, None, max(1, len(inputs) // MOST))
    blocks = inner // PANEL
    part_sizes = {-(-blocks // parts) * PANEL for parts in range(1, blocks + 1)}
    for part in sorted(part_sizes, reverse=True):
        few = FewRows(packed, (out, inner), part)
        if torch.equal(few.product(inputs[some_rows]), outputs[some_rows]):
            return part
    return 0


def _is_readable(packed: Tensor, size: int) -> bool:
    """Return whether this torch lets a packed matrix be read, and it has no padding."""
    try:
        return bool(torch.ops.mkldnn._nbytes(packed) == size and torch.ops.mkldnn.data_ptr(packed))
    except (AttributeError, RuntimeError):
        return False

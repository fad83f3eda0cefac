"""Dot products of two gradients, in one pass over the memory: for large models, whose numbers fit
into no cache.

`gradient_signal.py` says what they are for; `optimizer.py` computes the same with torch for other
models.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

BLOCK = 4096
"""Numbers whose products are added up in float32; blocks are in float64."""


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "arcp"})  # type: ignore[untyped-decorator]
def dot_products(
    gradient: Any, other: Any, past: Any, without: bool, kept: float, tiny: float
) -> Any:
    """Return g.o, g.g, o.o, and the same three with each coordinate divided by its mean square:
    gs.o, gs.g, os.o [6] float64.

    Args:
        gradient: [N] float32; `other` is taken off it first if `without`.
        other: [N] float32.
        past: mean squares [N] float32 of the steps before, of which `kept` is kept; empty for none,
            then both gradients count.
        kept: Adam's second beta.
        tiny: added to each mean square.
    """
    sums = np.zeros(6, dtype=np.float64)
    has_past = len(past) > 0
    fresh = np.float32(1.0 - kept)
    least = np.float32(tiny)
    for start in range(0, len(gradient), BLOCK):
        dot = square = other_square = scaled_dot = scaled_square = scaled_other = np.float32(0.0)
        for i in range(start, min(start + BLOCK, len(gradient))):
            o = other[i]
            g = gradient[i] - o if without else gradient[i]
            mean = past[i] + fresh * (g * g - past[i]) if has_past else g * g + o * o
            weight = np.float32(1.0) / (mean + least)
            dot += g * o
            square += g * g
            other_square += o * o
            scaled_dot += g * weight * o
            scaled_square += g * weight * g
            scaled_other += o * weight * o
        sums[0] += dot
        sums[1] += square
        sums[2] += other_square
        sums[3] += scaled_dot
        sums[4] += scaled_square
        sums[5] += scaled_other
    return sums

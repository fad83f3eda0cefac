"""Uniform noise by counter: a number depends on (seed, position) and on nothing else."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S40 = (np.uint64(shift) for shift in (30, 27, 31, 40))


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> _S30)) * _FIRST
    value = (value ^ (value >> _S27)) * _SECOND
    mixed: np.ndarray = value ^ (value >> _S31)
    return mixed


def counter_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), one per (seed, position).

    The generator is splitmix64 (Steele, Lea and Flood, 2014): its n-th output is a mix of ``state + n * golden``, so it can be
    asked for any position at once. The seed is mixed first, since callers may count seeds up.

    Args:
        seeds: [n] uint64.
        positions: [n] uint64, position within the reply.

    Returns:
        [n] float32 with 24 random bits each, so never rounded up to 1.
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    drawn: np.ndarray = (mixed >> _S40).astype(np.float32) * np.float32(2.0**-24)
    return drawn

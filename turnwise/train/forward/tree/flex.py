"""The same attention on CUDA: FlexAttention with a mask of blocks that is written down from the tree, not searched for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.train.forward.trie import PrefixTree

BLOCK = 128
"""Queries, and keys, of a block: FlexAttention's own size."""


def block_mask(tree: PrefixTree, device: torch.device | str) -> Any:
    """The BlockMask of a tree, made once for each device.

    Since what descends from a token stands right behind it, a block of keys is seen from a later block of queries in part where
    the furthest end among its keys lies behind the first query, and as a whole where even the nearest end lies behind the last.

    Returns:
        A BlockMask [1, 1, T, T].
    """
    from torch.nn.attention.flex_attention import BlockMask

    name = f"flex {device}"
    if name not in tree.kept:
        some, whole = _blocks(tree)
        ends_t = torch.from_numpy(tree.ends_t).to(device)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends_t[key])

        partial, full = (_listed(table, device) for table in (some & ~whole, whole))
        tree.kept[name] = BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tree.size, tree.size)
        )
    return tree.kept[name]


def _blocks(tree: PrefixTree) -> tuple[Any, Any]:
    """Two tables [blocks of queries, blocks of keys]: whether some query sees some key, and whether each sees each."""
    count = -(-tree.size // BLOCK)
    spare = count * BLOCK - tree.size
    furthest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).max(1)
    nearest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).min(1)
    first = np.arange(count)[:, None] * BLOCK
    earlier = np.tri(count, k=-1, dtype=bool)
    some = (earlier & (furthest[None] > first)) | np.eye(count, dtype=bool)
    return some, earlier & (nearest[None] >= first + BLOCK)


def _listed(table: Any, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which, as BlockMask wants them: those first, the others behind."""
    counts = table.sum(1).astype(np.int32)
    indices = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Passes are of many lengths; without this every one would be compiled for itself until torch gives up.
    return torch.compile(flex_attention, dynamic=True)  # type: ignore[no-any-return]


def flex_attend(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None, run: Callable[..., Tensor] | None = None
) -> Tensor:
    """Attention to ancestors.

    Args:
        query: [1, query heads, T, D]; key and value alike with their own number of heads.
        run: `flex_attention`, compiled unless told otherwise.

    Returns:
        [1, query heads, T, D].
    """
    run = _compiled() if run is None else run
    grouped = query.shape[1] != key.shape[1]
    return run(query, key, value, block_mask=block_mask(tree, query.device), scale=scale, enable_gqa=grouped)

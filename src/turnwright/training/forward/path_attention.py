"""Attention of a prefix tree in few calls, on CPUs: chains of similar size together, each with
copies of the keys it sees.

`plan_paths` decides whether a tree is attended so, and which chains share a call; `attend_paths`
makes the calls. A tree of short replies has hundreds of chains and side branches of a few tokens,
and a call for each costs more than what it computes. Here a chain's queries attend to a copy of its
path, its ancestors and itself; chains are padded to the sizes of the largest in their batch. In
multiplications of a pass, forward and backward, per layer::

    calls = pairs * pair + (chains + side branches) * call
    paths = sum over batches of  n * q * k * pair + n * k * copy + BATCH_CALLS * call

n chains of at most q tokens with at most k keys. Paths are taken where they are estimated to cost
less. Suffixes: `_n` chains, `_q` queries, `_k` keys, `_t` tokens of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from turnwright.training.forward.tree import PrefixTree

BATCH_CALLS = 4.0
"""Cost of a batch relative to one of the tree's attention calls: it gathers, masks and scatters
too. A guess, as `COPY` is."""
COPY = 8.0
"""Cost of copying a number of a key and its value, and of adding up its gradients, in
multiplications."""
MOST_COPIES = 16
"""Maximum keys that are copied, per token of the tree: they are kept for the backward pass."""


class PathBatch(NamedTuple):
    """Chains whose attention is one call."""

    queries_nq: Tensor
    """Index in the layout of each chain's tokens, padded with 0."""
    keys_nk: Tensor
    """Index in the layout of the tokens on each chain's path, padded with 0."""
    sees: Tensor
    """Booleans (n, 1, q, k): whether the key is an ancestor of the query, or itself."""


class PathPlan(NamedTuple):
    """All chains of a tree in batches."""

    batches: tuple[PathBatch, ...]
    places_t: Tensor
    """Index of each token of the layout in the queries of all batches, flattened one after the
    other."""


def plan_paths(tree: PrefixTree, *, pair: float, call: float, width: int) -> PathPlan | None:
    """Return batches of the chains of a tree, or None where calls for each are estimated to cost no
    more.

    Args:
        tree: the tree.
        pair: multiplications of a query with a key in a layer, forward and backward.
        call: cost of an attention call in multiplications.
        width: numbers of a key and its value, all heads.
    """
    separate = tree.pairs * pair + (len(tree.chains) + len(tree.branches)) * call
    if len(tree.chains) * call < tree.pairs * pair / 8:
        return None  # calls are an eighth of the cost at most

    sizes = [end - start for start, end in tree.chains]
    paths = paths_of(tree)
    groups = _group(sizes, [len(path) for path in paths], BATCH_CALLS * call / pair)

    cost = len(groups) * BATCH_CALLS * call
    copies = 0
    for group in groups:
        keys = len(group) * max(len(paths[chain]) for chain in group)
        cost += keys * (max(sizes[chain] for chain in group) * pair + width * COPY)
        copies += keys
    if cost >= separate or copies > MOST_COPIES * tree.size:
        return None
    return batch_paths(tree, paths, groups)


def paths_of(tree: PrefixTree) -> list[Any]:
    """Return the path of each chain: the indices of its ancestors and of its own tokens, int64."""
    return [np.flatnonzero(tree.ends_t[:end] >= end) for _, end in tree.chains]


def batch_paths(
    tree: PrefixTree, paths: Sequence[Any], groups: Sequence[Sequence[int]]
) -> PathPlan:
    """Return one batch for each group of chains; `groups` have each chain once."""
    places_t = np.empty(tree.size, dtype=np.int64)
    batches: list[PathBatch] = []
    first = 0
    for group in groups:
        chains = [tree.chains[chain] for chain in group]
        sizes_n = np.array([end - start for start, end in chains])
        lengths_n = np.array([len(paths[chain]) for chain in group])
        queries_nq = np.zeros((len(group), sizes_n.max()), dtype=np.int64)
        keys_nk = np.zeros((len(group), lengths_n.max()), dtype=np.int64)
        for row, (start, end) in enumerate(chains):
            queries_nq[row, : end - start] = np.arange(start, end)
            keys_nk[row, : lengths_n[row]] = paths[group[row]]
            places_t[start:end] = first + row * queries_nq.shape[1] + np.arange(end - start)
        first += queries_nq.size

        # A chain's tokens are the last ones of its path, each of which sees those up to itself.
        depth_nq = (lengths_n - sizes_n)[:, None] + np.arange(queries_nq.shape[1])
        sees_nqk = np.arange(keys_nk.shape[1]) <= depth_nq[..., None]
        batches.append(
            PathBatch(
                torch.from_numpy(queries_nq),
                torch.from_numpy(keys_nk),
                torch.from_numpy(sees_nqk[:, None]),
            )
        )
    return PathPlan(tuple(batches), torch.from_numpy(places_t))


def _group(sizes: Sequence[int], lengths: Sequence[int], most_padding: float) -> list[list[int]]:
    """Group chains by size, so that the padding of each group is at most so many pairs."""
    groups: list[list[int]] = []
    queries = keys = pairs = 0
    largest_first = sorted(range(len(sizes)), key=lambda chain: (-sizes[chain], -lengths[chain]))
    for chain in largest_first:
        own_pairs = sizes[chain] * lengths[chain]
        padded_keys = max(keys, lengths[chain])
        # The first chain of a group has the most queries.
        if groups:
            padded_pairs = (len(groups[-1]) + 1) * queries * padded_keys
            if padded_pairs - pairs - own_pairs <= most_padding:
                groups[-1].append(chain)
                keys = padded_keys
                pairs += own_pairs
                continue

        groups.append([chain])
        queries = sizes[chain]
        keys = lengths[chain]
        pairs = own_pairs
    return groups


def attend_paths(
    query: Tensor, key: Tensor, value: Tensor, plan: PathPlan, scale: float | None
) -> Tensor:
    """Attend from [1, query heads, T, D] to keys and values [1, their heads, T, D]; return
    [1, T, query heads, D].

    Gradients of copies are summed in float32 or better.
    """
    heads = query.shape[1]
    key_heads = key.shape[1]
    width = key.shape[3]
    wide = torch.promote_types(query.dtype, torch.float32)
    queries_th = query[0].transpose(0, 1).flatten(1)
    both_th = torch.cat([key[0], value[0]], -1).transpose(0, 1).flatten(1).to(wide)

    attended: list[Tensor] = []
    for batch in plan.batches:
        # [chains, heads, queries or keys, width]
        queries = functional.embedding(batch.queries_nq, queries_th)
        queries = queries.unflatten(-1, (heads, -1)).transpose(1, 2)
        both = functional.embedding(batch.keys_nk, both_th).to(query.dtype)
        both = both.unflatten(-1, (key_heads, -1)).transpose(1, 2)
        keys, values = both.split(width, -1)
        out = functional.scaled_dot_product_attention(
            queries, keys, values, batch.sees, scale=scale, enable_gqa=heads != key_heads
        )
        attended.append(out.transpose(1, 2).flatten(0, 1).flatten(1))

    in_layout = functional.embedding(plan.places_t, torch.cat(attended))
    return in_layout.unflatten(-1, (heads, -1))[None]

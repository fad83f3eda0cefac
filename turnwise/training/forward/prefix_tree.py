"""Prefix trees over rows of ids, and the layout of their tokens. No tensors here.

Rows are sorted by their keys, so their lengths and the common prefix of neighbors define a trie. Its tokens are laid out depth
first, the longest branch of a node first. Then

- the descendants of a token follow it directly, so "k is an ancestor of q, or q itself" is ``k <= q < ends[k]``;
- a node, its first child, that one's first child and so on are contiguous, a *chain*, and attend to each other as in a row;
- all other branches of a node are contiguous too and attend to the chain's tokens up to that node: a *side branch*, one
  rectangle of attention without a mask.

So attention over a trie is one causal call per chain and one plain call per branching node, at any depth, and no key is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class PrefixNode(NamedTuple):
    """Node of the trie: a run of consecutive tokens."""

    row: int
    """Index of the first of its rows."""
    begin: int
    """Path position of its first token."""
    end: int
    start: int
    """Index of its first token in the layout."""


class BranchAttention(NamedTuple):
    """Queries of a node's side branches and the keys of the chain they attend to, as half-open ranges."""

    first: int
    last: int
    """End of the queries."""
    key: int
    """First token of the chain."""
    keys: int
    """End of the node."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Attention structure of the T tokens of one forward pass."""

    size: int
    """T."""
    ends_t: Any
    """int64, T: end of each token's descendants."""
    chains: tuple[tuple[int, int], ...]
    """(start, end) of each chain; together they cover every token once."""
    branches: tuple[BranchAttention, ...]
    cache: dict[str, Any] = field(default_factory=dict, compare=False)
    """Back-end data derived from the tree."""

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs, a token with itself included."""
        return sum((e - s) * (e - s + 1) // 2 for s, e in self.chains) + sum(
            (branch.last - branch.first) * (branch.keys - branch.key) for branch in self.branches
        )


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of their keys."""

    order: tuple[int, ...]
    """Row indices, sorted."""
    lengths: tuple[int, ...]
    """Row lengths in that order."""
    common: tuple[int, ...]
    """Number of leading keys each row shares with the one before it; 0 for the first."""

    @classmethod
    def of(cls, keys: Sequence[Sequence[int]]) -> SortedRows:
        """Sort rows by their keys; equal rows keep their order."""
        arrays = [np.asarray(row, dtype=np.int64) for row in keys]
        # Big-endian bytes sort like the (unsigned) numbers; any order that groups prefixes would do.
        encoded = [array.astype(">i8").tobytes() for array in arrays]
        order = sorted(range(len(keys)), key=lambda i: (encoded[i], i))
        common = [0, *(_common(arrays[a], arrays[b]) for a, b in pairwise(order))][: len(keys)]
        return cls(tuple(order), tuple(len(keys[i]) for i in order), tuple(common))

    def unique(self, lo: int, hi: int) -> int:
        """Count the tokens of the trie over sorted rows `lo` to `hi`."""
        return self.lengths[lo] + sum(self.lengths[i] - self.common[i] for i in range(lo + 1, hi))


def _common(a: Any, b: Any) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


@dataclass(frozen=True, slots=True)
class PackedPrefixTree:
    """Prefix tree over some rows, laid out."""

    tree: PrefixTree
    nodes: tuple[PrefixNode, ...]
    """In layout order."""
    places: dict[int, Any]
    """Row index -> int64 array: layout index of the token at each path position."""


def build_prefix_tree(shared: SortedRows, lo: int, hi: int) -> PackedPrefixTree:
    """Build the trie over the sorted rows from `lo` to `hi`."""
    nodes, levels, opens = _nodes(shared, lo, hi)
    places = {shared.order[i]: np.empty(shared.lengths[i], dtype=np.int64) for i in range(lo, hi)}
    at = {row: i for i, row in enumerate(shared.order[lo:hi], lo)}
    size = 0
    for node, last in nodes:
        length = node.end - node.begin
        for i in range(at[node.row], last):
            places[shared.order[i]][node.begin : node.end] = np.arange(node.start, node.start + length)
        size += length
    return PackedPrefixTree(_tree([node for node, _ in nodes], levels, opens, size), tuple(node for node, _ in nodes), places)


def _nodes(shared: SortedRows, lo: int, hi: int) -> tuple[list[tuple[PrefixNode, int]], list[int], list[bool]]:
    """Return the nodes in layout order, each with the end of its rows; their depths; whether each starts a chain."""
    common, lengths = np.asarray(shared.common), np.asarray(shared.lengths)
    nodes: list[tuple[PrefixNode, int]] = []
    levels: list[int] = []
    opens: list[bool] = []
    size = 0
    # Rows `first` to `last` agree up to `depth` and belong to one node, which extends to where the first of them differs or
    # ends. The root has no tokens; its children share nothing.
    todo = [(lo, hi, 0, 0, True)]
    while todo:
        first, last, depth, level, opening = todo.pop()
        end = int(common[first + 1 : last].min(initial=lengths[first])) if level else 0
        if level:
            nodes.append((PrefixNode(shared.order[first], depth, end, size), last))
            levels.append(level)
            opens.append(opening)
            size += end - depth
        cuts = [first, *(first + 1 + np.flatnonzero(common[first + 1 : last] == end)).tolist(), last]
        below = [(a, b) for a, b in pairwise(cuts) if lengths[b - 1] > end]
        below.sort(key=lambda rows: -int(lengths[rows[0] : rows[1]].max()))
        children = [(a, b, end, level + 1, not level or number > 0) for number, (a, b) in enumerate(below)]
        todo += reversed(children)
    return nodes, levels, opens


def _tree(nodes: Sequence[PrefixNode], levels: Sequence[int], opens: Sequence[bool], size: int) -> PrefixTree:
    ends_t = np.empty(size, dtype=np.int64)
    chains: list[tuple[int, int]] = []
    branches: list[BranchAttention] = []
    ends = [0] * len(nodes)  # end of each node's descendants
    open_at: list[int] = []
    for number in range(len(nodes)):
        while open_at and levels[open_at[-1]] >= levels[number]:
            ends[open_at.pop()] = nodes[number].start
        open_at.append(number)
    for number in open_at:
        ends[number] = size
    chain = 0
    for number, node in enumerate(nodes):
        end = node.start + node.end - node.begin
        ends_t[node.start : end] = ends[number]
        if opens[number]:
            chain = node.start
            chains.append((chain, end))
        else:
            chains[-1] = (chain, end)
        if end < ends[number] > ends[number + 1]:
            branches.append(BranchAttention(ends[number + 1], ends[number], chain, end))
    return PrefixTree(size, ends_t, tuple(chains), tuple(branches))

"""Rows of ids as a trie: what they share, and the order in which its tokens are laid out. No tensors here.

Rows are sorted by their keys, so a trie over neighbouring rows is told by their lengths and by how long each one's beginning
agrees with that of the row before it. Its tokens are laid out depth first, the longest branch of a node first. Then

- what descends from a token stands right behind it, so "k is an ancestor of q, or q itself" is ``k <= q < ends[k]``;
- a node, its first child, that one's first child and so on are neighbours, a *chain*, and attend to one another as a row does;
- all other branches of a node are neighbours too, and all of them see the chain's tokens up to that node: a *hang*, which is
  one rectangle of attention without a mask.

So attention over a trie is one causal call per chain and one plain call per node that branches, whatever its depth, and no key
is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class PrefixNode(NamedTuple):
    """A run of tokens that stand in a row: a node of the trie."""

    row: int
    """Index of the first of the rows that have it."""
    begin: int
    """Path position of its first token."""
    end: int
    start: int
    """Where its first token stands in the layout."""


class BranchAttention(NamedTuple):
    """The queries of a node's further branches, and the keys of the chain that they hang on."""

    first: int
    last: int
    """Behind the last query."""
    key: int
    """The chain's first token."""
    keys: int
    """Behind the node's last token."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Who attends to whom among the T tokens of one forward pass."""

    size: int
    """T."""
    ends_t: Any
    """int64, T: behind the last token that descends from each."""
    chains: tuple[tuple[int, int], ...]
    """First token, and behind the last; together they are all tokens, each once."""
    hangs: tuple[BranchAttention, ...]
    kept: dict[str, Any] = field(default_factory=dict, compare=False)
    """What a back end made of it."""

    @property
    def pairs(self) -> int:
        """How many pairs of query and key there are, a token with itself included."""
        return sum((e - s) * (e - s + 1) // 2 for s, e in self.chains) + sum(
            (hang.last - hang.first) * (hang.keys - hang.key) for hang in self.hangs
        )


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of their keys."""

    order: tuple[int, ...]
    """Indices of the rows."""
    lengths: tuple[int, ...]
    """Of the rows in that order."""
    common: tuple[int, ...]
    """How many of its first keys each one shares with the one before it; 0 for the first."""

    @classmethod
    def of(cls, keys: Sequence[Sequence[int]]) -> SortedRows:
        """Sort rows by their keys; equal rows keep their order."""
        arrays = [np.asarray(row, dtype=np.int64) for row in keys]
        # Big-endian bytes, whose order is that of the (unsigned) numbers; any order would do that puts beginnings together.
        told = [array.astype(">i8").tobytes() for array in arrays]
        order = sorted(range(len(keys)), key=lambda i: (told[i], i))
        common = [0] * len(keys)
        for place in range(1, len(keys)):
            common[place] = _common(arrays[order[place - 1]], arrays[order[place]])
        return cls(tuple(order), tuple(len(keys[i]) for i in order), tuple(common))

    def unique(self, lo: int, hi: int) -> int:
        """Tokens of the trie over some of the sorted rows."""
        return self.lengths[lo] + sum(self.lengths[i] - self.common[i] for i in range(lo + 1, hi))


def _common(a: Any, b: Any) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


@dataclass(frozen=True, slots=True)
class PackedPrefixTree:
    """A trie over some rows, laid out."""

    tree: PrefixTree
    pieces: tuple[PrefixNode, ...]
    """In the order of the layout."""
    places: dict[int, Any]
    """Row index -> int64 array: where in the layout the token at each path position stands."""


def build_prefix_tree(shared: SortedRows, lo: int, hi: int) -> PackedPrefixTree:
    """The trie over the sorted rows from `lo` to `hi`."""
    pieces, levels, opens = _pieces(shared, lo, hi)
    places = {shared.order[i]: np.empty(shared.lengths[i], dtype=np.int64) for i in range(lo, hi)}
    at = {row: i for i, row in enumerate(shared.order[lo:hi], lo)}
    size = 0
    for piece, last in pieces:
        length = piece.end - piece.begin
        for i in range(at[piece.row], last):
            places[shared.order[i]][piece.begin : piece.end] = np.arange(piece.start, piece.start + length)
        size += length
    return PackedPrefixTree(
        _tree([piece for piece, _ in pieces], levels, opens, size), tuple(piece for piece, _ in pieces), places
    )


def _pieces(shared: SortedRows, lo: int, hi: int) -> tuple[list[tuple[PrefixNode, int]], list[int], list[bool]]:
    """The nodes in the order of the layout, each with where its rows end; how deep each is; whether it begins a chain."""
    common, lengths = np.asarray(shared.common), np.asarray(shared.lengths)
    pieces: list[tuple[PrefixNode, int]] = []
    levels: list[int] = []
    opens: list[bool] = []
    size = 0
    # Rows from `first` to `last` agree up to `depth` and belong to one node, which goes on to where the first of them differ or
    # end. The root has no tokens; what begins at it shares nothing.
    todo = [(lo, hi, 0, 0, True)]
    while todo:
        first, last, depth, level, opening = todo.pop()
        end = int(common[first + 1 : last].min(initial=lengths[first])) if level else 0
        if level:
            pieces.append((PrefixNode(shared.order[first], depth, end, size), last))
            levels.append(level)
            opens.append(opening)
            size += end - depth
        cuts = [first, *(first + 1 + np.flatnonzero(common[first + 1 : last] == end)).tolist(), last]
        below = [(a, b) for a, b in pairwise(cuts) if lengths[b - 1] > end]
        below.sort(key=lambda rows: -int(lengths[rows[0] : rows[1]].max()))
        children = [(a, b, end, level + 1, not level or number > 0) for number, (a, b) in enumerate(below)]
        todo += reversed(children)
    return pieces, levels, opens


def _tree(pieces: Sequence[PrefixNode], levels: Sequence[int], opens: Sequence[bool], size: int) -> PrefixTree:
    ends_t = np.empty(size, dtype=np.int64)
    chains: list[tuple[int, int]] = []
    hangs: list[BranchAttention] = []
    behind = [0] * len(pieces)  # behind the last token that descends from a piece
    open_at: list[int] = []
    for number in range(len(pieces)):
        while open_at and levels[open_at[-1]] >= levels[number]:
            behind[open_at.pop()] = pieces[number].start
        open_at.append(number)
    for number in open_at:
        behind[number] = size
    chain = 0
    for number, piece in enumerate(pieces):
        end = piece.start + piece.end - piece.begin
        ends_t[piece.start : end] = behind[number]
        if opens[number]:
            chain = piece.start
            chains.append((chain, end))
        else:
            chains[-1] = (chain, end)
        if end < behind[number] > behind[number + 1]:
            hangs.append(BranchAttention(behind[number + 1], behind[number], chain, end))
    return PrefixTree(size, ends_t, tuple(chains), tuple(hangs))

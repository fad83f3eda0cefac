"""The attention structure of a tree of rows with shared prefixes, as `prefix_tree.py` lays it
out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BranchAttention(NamedTuple):
    """Queries of a node's side branches and the keys of the chain they attend to, as half-open
    ranges."""

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
        in_chains = sum((end - start) * (end - start + 1) // 2 for start, end in self.chains)
        to_chains = sum(
            (branch.last - branch.first) * (branch.keys - branch.key) for branch in self.branches
        )
        return in_chains + to_chains

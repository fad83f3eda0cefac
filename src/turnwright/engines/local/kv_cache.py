"""Key-value cache: per-layer tensors of all slots, which never move while rows come and go."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

Move = tuple[int, int, int, int]
"""A copy between slots: source, target, first position, end."""


@dataclass(slots=True)
class KVCache:
    """Static key-value storage: per layer two tensors [slots + 1, heads, capacity /
    unit, head size * unit].

    The last slot is scratch: padding rows write there, and nothing reads it. A layer is allocated
    at its first write, with the shape written. Content after the valid positions of a slot is
    finite and always masked.
    """

    slots: int
    capacity: int
    """Positions per slot."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    kernels: Any = None
    """Kernels of the fused pass, if that reads the cache: `numba_kernels.BLOCK` positions are then
    stored together, in an order known to it, and copied together."""
    half: bool = False
    """Whether the fused pass keeps keys and values in bfloat16."""
    routes: torch.Tensor | None = None
    """[slots + 1, capacity, expert layers, k] experts of each position; None for a
    model without routers."""
    storage: int = 0
    """Number of times that the tensors were replaced."""
    sources: np.ndarray = field(init=False)
    """[slots + 1] slot from which a reader in units takes a slot's first `shared` positions: they
    have equal bits in both, and slots that share a source find them in the processor's cache."""
    shared: np.ndarray = field(init=False)
    """[slots + 1] number of those positions, a multiple of `unit`."""
    _stores: list[Any] = field(default_factory=list)
    """The tensors of `layers`; on a CPU their bytes as arrays of numpy, which copies a slot
    at a fifth of the cost."""

    def __post_init__(self) -> None:
        self.sources, self.shared = np.zeros((2, self.slots + 1), dtype=np.int64)

    @property
    def unit(self) -> int:
        """Positions stored together."""
        return 1 if self.kernels is None else int(self.kernels.BLOCK)

    @property
    def scratch(self) -> int:
        """Index of the scratch slot."""
        return self.slots

    @property
    def bytes_per_position(self) -> int:
        """Bytes per position of a slot, in all layers allocated so far."""
        each: int = sum(
            2 * keys.shape[1] * keys.shape[3] * keys.element_size() // self.unit
            for keys, _ in self.layers.values()
        )
        return each if self.routes is None else each + int(self.routes[0, :1].nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all slots."""
        total: int = sum(store.nbytes for store in self._stores)
        return total if self.routes is None else total + int(self.routes.nbytes)

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the storage of a layer, allocating it like `key` and `value` [1,
        heads, n, head size] if new."""
        found = self.layers.get(index)
        if found is None:
            found = self.layers[index] = (self._empty(key), self._empty(value))
            self._stores += map(_bytes, found)
        return found

    def blocks(self, index: int, heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the storage of a CPU layer in units, as flat arrays of
        float32, or of int16 for bfloat16.

        Layers are first asked for in their order.
        """
        if index not in self.layers:
            dtype = torch.bfloat16 if self.half else torch.float32
            self.layer(index, *[torch.empty(1, heads, 0, size * self.unit, dtype=dtype)] * 2)
        kind = np.int16 if self.half else np.float32
        keys, values = (
            store.view(kind).reshape(-1) for store in self._stores[2 * index : 2 * index + 2]
        )
        return keys, values

    def take_routes(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate storage for the experts of every position, `shape` values each."""
        self.routes = _zeros((self.slots + 1, self.capacity, *shape), dtype, device)
        return self.routes

    def clear(self) -> None:
        """Drop all slots and layers."""
        self.storage += 1
        self.layers.clear()
        self._stores.clear()
        self.routes = None
        self.slots = self.capacity = 0
        self.sources, self.shared = np.zeros((2, 1), dtype=np.int64)

    def resize(self, slots: int, capacity: int) -> None:
        """Grow to more slots or positions; content stays."""
        old_slots = self.slots
        self.storage += 1
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        sources, shared = np.zeros((2, self.slots + 1), dtype=np.int64)
        sources[:old_slots], shared[:old_slots] = self.sources[:old_slots], self.shared[:old_slots]
        self.sources, self.shared = sources, shared
        for index, (keys, values) in self.layers.items():
            grown = (self._empty(keys), self._empty(values))
            for new, old in zip(grown, (keys, values), strict=True):
                new[:old_slots, :, : old.shape[2]] = old[:old_slots]
            self.layers[index] = grown
        self._stores = [_bytes(store) for pair in self.layers.values() for store in pair]
        if (routes := self.routes) is not None:
            shape = (self.slots + 1, self.capacity, *routes.shape[2:])
            self.routes = _zeros(shape, routes.dtype, routes.device)
            self.routes[:old_slots, : routes.shape[1]] = routes[:old_slots]

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy positions from slot to slot, in order, and those before in the unit of a start."""
        if not moves:
            return
        if self.kernels is not None:
            flat = np.array(moves, dtype=np.int64).reshape(-1)
            for store in self._stores:
                _, heads, blocks, width = store.shape
                self.kernels.copy_blocks(
                    store.view(np.float32).reshape(-1), flat, heads, blocks, width // 4
                )
            self.kernels.share_blocks(flat, self.sources, self.shared)
        elif self._stores and isinstance(self._stores[0], np.ndarray):
            for source, target, start, end in moves:
                if self.routes is not None:
                    self.routes[target, start:end] = self.routes[source, start:end]
                for store in self._stores:
                    store[target, :, start:end] = store[source, :, start:end]
        else:
            for together in batch_moves(moves):
                self._copy_together(together)

    def rewind(self, rewound: Sequence[tuple[int, int]]) -> None:
        """End the sharing of positions of slots, those of each from a position on, before
        they are overwritten."""
        if rewound and self.kernels is not None:
            self.kernels.end_sharing(
                np.array(rewound, dtype=np.int64).reshape(-1), self.sources, self.shared
            )

    def _copy_together(self, moves: Sequence[Move]) -> None:
        """Make copies of which none reads or writes what an earlier one writes: a GPU takes as
        long for many as for one.

        All are read before one is written. Positions before a start are copied with them; the slots
        have the same ids there.
        """
        sources, targets = (self._slots([move[part] for move in moves]) for part in (0, 1))
        start, end = min(move[2] for move in moves), max(move[3] for move in moves)
        if self.routes is not None:
            self.routes[targets, start:end] = self.routes[sources, start:end]
        units = slice(start // self.unit, -(-end // self.unit))
        for store in self._stores:
            store[targets, :, units] = store[sources, :, units]

    def swap(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Exchange the first `length` positions of two slots, for several
        pairs of different slots."""
        ones, others = zip(*pairs, strict=True)
        there, back = self._slots([*ones, *others]), self._slots([*others, *ones])
        if self.routes is not None:
            self.routes[there, :length] = self.routes[back, :length]
        self.rewind([(slot, 0) for slot in chain(*pairs)])
        length = -(-length // self.unit)
        for store in self._stores:
            store[there, :, :length] = store[back, :, :length]

    def _slots(self, numbers: list[int]) -> Any:
        """Return slots as an index that needs no transfer to the device at each use."""
        store = self._stores[0] if self._stores else None
        return (
            torch.tensor(numbers, device=store.device)
            if isinstance(store, torch.Tensor)
            else numbers
        )

    def zero(self, slot: int | None = None) -> None:
        """Zero a slot, or all of them: non-finite values would pass through a mask."""
        self.rewind([(one, 0) for one in (range(len(self.shared)) if slot is None else [slot])])
        for store in self._stores if self.routes is None else [self.routes, *self._stores]:
            store[slice(None) if slot is None else slot] = 0

    def zero_from(self, slot: int, start: int) -> None:
        """Zero a slot from a position on; not in units, whose reader never
        passes the last position."""
        if self.unit == 1:
            for store in self._stores:
                store[slot, :, start:] = 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.slots + 1, like.shape[1], self.capacity // self.unit, like.shape[3])
        return _zeros(shape, like.dtype, like.device)


def batch_moves(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Split copies, in order, into lists of which none reads or writes what an earlier one writes,
    and of which at most half is more than was asked for."""
    together: list[Move] = []
    written: set[int] = set()
    first = last = asked = 0
    for source, target, start, end in moves:
        widened = (len(together) + 1) * (max(last, end) - min(first, start))
        if together and (
            source in written or target in written or widened > 2 * (asked + end - start)
        ):
            yield together
            together, written = [], set()
        first, last, asked = (
            (min(first, start), max(last, end), asked + end - start)
            if together
            else (start, end, end - start)
        )
        together.append((source, target, start, end))
        written.add(target)
    if together:
        yield together


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Memory zeroed by numpy is mapped on first use and in large pages.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _bytes(store: torch.Tensor) -> Any:
    return store.view(torch.uint8).numpy() if store.device.type == "cpu" else store

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
    """Static key-value storage of all layers, with a slot for each sequence.

    Each layer has two tensors [slots + 1, heads, capacity / unit, head size * unit]. The last slot
    is scratch: padding rows write there, and nothing reads it. A layer is allocated at its first
    write, with the shape written. Content after the valid positions of a slot is finite and always
    masked.
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
    """[slots + 1, capacity, expert layers, k] experts of each position; None for a model without
    routers."""
    storage: int = 0
    """Number of times that the tensors were replaced."""
    sources: np.ndarray = field(init=False)
    """[slots + 1] slot from which a reader in units takes a slot's first `shared` positions: they
    have equal bits in both, and slots that share a source find them in the processor's cache."""
    shared: np.ndarray = field(init=False)
    """[slots + 1] number of those positions, a multiple of `unit`."""
    _stores: list[Any] = field(default_factory=list)
    """The tensors of `layers`; on a CPU their bytes as arrays of numpy, which copies a slot at a
    fifth of the cost."""

    def __post_init__(self) -> None:
        self.sources = np.zeros(self.slots + 1, dtype=np.int64)
        self.shared = np.zeros(self.slots + 1, dtype=np.int64)

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
        total = 0
        for keys, _ in self.layers.values():
            total += 2 * keys.shape[1] * keys.shape[3] * keys.element_size() // self.unit
        if self.routes is not None:
            total += int(self.routes[0, :1].nbytes)
        return total

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all slots."""
        total: int = sum(store.nbytes for store in self._stores)
        return total if self.routes is None else total + int(self.routes.nbytes)

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the storage of a layer.

        A new one is allocated like `key` and `value` [1, heads, n, head size].
        """
        storage = self.layers.get(index)
        if storage is None:
            storage = (self._empty(key), self._empty(value))
            self.layers[index] = storage
            self._stores += map(_bytes, storage)
        return storage

    def blocks(self, index: int, heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the storage of a CPU layer in units.

        The arrays are flat, of float32, or of int16 for bfloat16. Layers are first asked for in
        their order.
        """
        if index not in self.layers:
            dtype = torch.bfloat16 if self.half else torch.float32
            like = torch.empty(1, heads, 0, size * self.unit, dtype=dtype)
            self.layer(index, like, like)
        dtype_np = np.int16 if self.half else np.float32
        keys, values = self._stores[2 * index : 2 * index + 2]
        return keys.view(dtype_np).reshape(-1), values.view(dtype_np).reshape(-1)

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
        self.slots = 0
        self.capacity = 0
        self.sources = np.zeros(1, dtype=np.int64)
        self.shared = np.zeros(1, dtype=np.int64)

    def resize(self, slots: int, capacity: int) -> None:
        """Grow to more slots or positions; content stays."""
        old_slots = self.slots
        self.storage += 1
        self.slots = max(slots, self.slots)
        self.capacity = max(capacity, self.capacity)

        # The new scratch slot shares nothing.
        sources = np.zeros(self.slots + 1, dtype=np.int64)
        sources[:old_slots] = self.sources[:old_slots]
        self.sources = sources
        shared = np.zeros(self.slots + 1, dtype=np.int64)
        shared[:old_slots] = self.shared[:old_slots]
        self.shared = shared

        for index, (keys, values) in self.layers.items():
            grown = (self._empty(keys), self._empty(values))
            for new, old in zip(grown, (keys, values), strict=True):
                new[:old_slots, :, : old.shape[2]] = old[:old_slots]
            self.layers[index] = grown
        self._stores = [_bytes(store) for pair in self.layers.values() for store in pair]

        routes = self.routes
        if routes is not None:
            shape = (self.slots + 1, self.capacity, *routes.shape[2:])
            self.routes = _zeros(shape, routes.dtype, routes.device)
            self.routes[:old_slots, : routes.shape[1]] = routes[:old_slots]

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy positions from slot to slot, in order, and those before in the unit of a start."""
        if not moves:
            return

        if self.kernels is not None:
            flat_moves = np.array(moves, dtype=np.int64).reshape(-1)
            for store in self._stores:
                _, heads, blocks, width = store.shape
                flat_store = store.view(np.float32).reshape(-1)
                # The width is in bytes, four of them a float32.
                self.kernels.copy_blocks(flat_store, flat_moves, heads, blocks, width // 4)
            self.kernels.share_blocks(flat_moves, self.sources, self.shared)

        elif self._stores and isinstance(self._stores[0], np.ndarray):
            for source, target, start, end in moves:
                if self.routes is not None:
                    self.routes[target, start:end] = self.routes[source, start:end]
                for store in self._stores:
                    store[target, :, start:end] = store[source, :, start:end]

        else:
            for batch in batch_moves(moves):
                self._copy_together(batch)

    def rewind(self, rewound: Sequence[tuple[int, int]]) -> None:
        """End the sharing of positions that are to be overwritten.

        `rewound` has slots, each with the first of these positions.
        """
        if rewound and self.kernels is not None:
            flat = np.array(rewound, dtype=np.int64).reshape(-1)
            self.kernels.end_sharing(flat, self.sources, self.shared)

    def _copy_together(self, moves: Sequence[Move]) -> None:
        """Make copies of which none reads or writes what an earlier one writes.

        A GPU takes as long for many as for one. All are read before one is written. Positions
        before a start are copied with them; the slots have the same ids there.
        """
        sources = self._slots([source for source, _, _, _ in moves])
        targets = self._slots([target for _, target, _, _ in moves])
        start = min(start for _, _, start, _ in moves)
        end = max(end for _, _, _, end in moves)
        if self.routes is not None:
            self.routes[targets, start:end] = self.routes[sources, start:end]
        units = slice(start // self.unit, -(-end // self.unit))
        for store in self._stores:
            store[targets, :, units] = store[sources, :, units]

    def swap(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Exchange the first `length` positions of two slots, for several pairs of different
        slots."""
        firsts, seconds = zip(*pairs, strict=True)
        targets = self._slots([*firsts, *seconds])
        sources = self._slots([*seconds, *firsts])
        if self.routes is not None:
            self.routes[targets, :length] = self.routes[sources, :length]
        self.rewind([(slot, 0) for slot in chain(*pairs)])
        units = -(-length // self.unit)
        for store in self._stores:
            store[targets, :, :units] = store[sources, :, :units]

    def _slots(self, numbers: list[int]) -> Any:
        """Return slots as an index that needs no transfer to the device at each use."""
        store = self._stores[0] if self._stores else None
        if isinstance(store, torch.Tensor):
            return torch.tensor(numbers, device=store.device)
        return numbers

    def zero(self, slot: int | None = None) -> None:
        """Zero a slot, or all of them: non-finite values would pass through a mask."""
        zeroed = range(len(self.shared)) if slot is None else [slot]
        self.rewind([(index, 0) for index in zeroed])
        place = slice(None) if slot is None else slot
        if self.routes is not None:
            self.routes[place] = 0
        for store in self._stores:
            store[place] = 0

    def zero_from(self, slot: int, start: int) -> None:
        """Zero a slot from a position on.

        In units this does nothing: their reader never passes the last position.
        """
        if self.unit == 1:
            for store in self._stores:
                store[slot, :, start:] = 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.slots + 1, like.shape[1], self.capacity // self.unit, like.shape[3])
        return _zeros(shape, like.dtype, like.device)


def batch_moves(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Split copies, in order, into batches that can be made at once.

    No copy of a batch reads or writes what an earlier one of it writes. Those of a batch all copy
    the same positions, from the first start to the last end; at most half of what they copy is
    more than was asked for.
    """
    batch: list[Move] = []
    written: set[int] = set()
    first = last = asked = 0
    for source, target, start, end in moves:
        is_dependent = source in written or target in written
        copied = (len(batch) + 1) * (max(last, end) - min(first, start))
        if batch and (is_dependent or copied > 2 * (asked + end - start)):
            yield batch
            batch = []
            written = set()

        if batch:
            first = min(first, start)
            last = max(last, end)
            asked += end - start
        else:
            first = start
            last = end
            asked = end - start
        batch.append((source, target, start, end))
        written.add(target)
    if batch:
        yield batch


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Memory zeroed by numpy is mapped on first use and in large pages.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _bytes(store: torch.Tensor) -> Any:
    return store.view(torch.uint8).numpy() if store.device.type == "cpu" else store

"""Keys and values of every slot, layer by layer, in tensors that never move while rows come and go."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(slots=True)
class KVCache:
    """Static key-value storage: per layer two tensors [slots + 1, heads, capacity / unit, head size * unit].

    The last slot is scratch: rows that only fill up a batch write there, and nothing reads it. Layers are allocated when they
    first write, with the shape that they write, so that nothing need be known of the model. What lies behind the valid
    positions of a slot is finite and always masked.
    """

    slots: int
    capacity: int
    """Positions per slot."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    unit: int = 1
    """Positions that lie together, in an order that is known to who reads them. They are copied together."""
    routes: torch.Tensor | None = None
    """[slots + 1, capacity, layers of experts, k] the experts that each position took; None for a model without routers."""

    @property
    def scratch(self) -> int:
        """Index of the slot that nothing reads."""
        return self.slots

    @property
    def bytes_per_position(self) -> int:
        """Bytes that one position of one slot takes in all layers that have written so far."""
        each: int = sum(
            2 * keys.shape[1] * keys.shape[3] * keys.element_size() // self.unit for keys, _ in self.layers.values()
        )
        return each if self.routes is None else each + int(self.routes[0, :1].nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that are set aside for all slots."""
        held: int = sum(store.nbytes for pair in self.layers.values() for store in pair)
        return held if self.routes is None else held + int(self.routes.nbytes)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of a layer, allocated like `key` and `value` [1, heads, n, head size] if it is new."""
        found = self.layers.get(index)
        if found is None:
            found = self.layers[index] = (self._empty(key), self._empty(value))
        return found

    def blocks(self, index: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of a layer whose keys and values are numbers of fp32 on the CPU, in units."""
        found = self.layers.get(index)
        return found if found is not None else self.layer(index, *[torch.empty(1, heads, 0, size * self.unit)] * 2)

    def take_routes(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Storage for the experts of every position, `shape` numbers each."""
        self.routes = _zeros((self.slots + 1, self.capacity, *shape), dtype, device)
        return self.routes

    def clear(self) -> None:
        """Have no slots and no layers."""
        self.layers.clear()
        self.routes = None
        self.slots = self.capacity = 0

    def resize(self, slots: int, capacity: int) -> None:
        """Make room for more slots or positions; what is stored stays."""
        old_slots = self.slots
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        for index, (keys, values) in self.layers.items():
            grown = (self._empty(keys), self._empty(values))
            for new, old in zip(grown, (keys, values), strict=True):
                new[:old_slots, :, : old.shape[2]] = old[:old_slots]
            self.layers[index] = grown
        if (told := self.routes) is not None:
            shape = (self.slots + 1, self.capacity, *told.shape[2:])
            self.routes = _zeros(shape, told.dtype, told.device)
            self.routes[:old_slots, : told.shape[1]] = told[:old_slots]

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of a slot to others."""
        if self.routes is not None:
            self.routes[targets, :length] = self.routes[source, :length]
        length = -(-length // self.unit)
        for pair in self.layers.values():
            for store in pair:
                for target in targets:
                    store[target, :, :length] = store[source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        if self.routes is not None:
            self.routes[[one, other], :length] = self.routes[[other, one], :length]
        length = -(-length // self.unit)
        for pair in self.layers.values():
            for store in pair:
                kept = store[one, :, :length].clone()
                store[one, :, :length] = store[other, :, :length]
                store[other, :, :length] = kept

    def zero(self, slot: int | None = None) -> None:
        """Set a slot, or all of them, to zero: numbers that are not finite would pass through a mask."""
        if self.routes is not None:
            (self.routes if slot is None else self.routes[slot]).zero_()
        for pair in self.layers.values():
            for store in pair:
                (store if slot is None else store[slot]).zero_()

    def zero_from(self, slot: int, start: int) -> None:
        """Set a slot to zero from a position on; not in units, whose reader looks at no position behind the last."""
        if self.unit == 1:
            for pair in self.layers.values():
                for store in pair:
                    store[slot, :, start:].zero_()

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.slots + 1, like.shape[1], self.capacity // self.unit, like.shape[3])
        return _zeros(shape, like.dtype, like.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Memory that numpy zeroes is only taken from the system where it is used, and comes in large pages.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)

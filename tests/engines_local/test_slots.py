"""Slots of the cache: whatever comes and goes, a call's cached positions hold its own ids."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwright.engines.local import numba_kernels
from turnwright.engines.local.kv_cache import KVCache, batch_moves
from turnwright.engines.local.slots import SlotTable, common_prefix

SLOTS, CAPACITY = 5, 5 * numba_kernels.BLOCK
operation = st.tuples(
    st.sampled_from(["call", "call", "call", "end", "end", "release", "swap"]),
    st.integers(0, 7),
    st.integers(0, CAPACITY - 1),
    st.integers(0, 2),
)


class Cached:
    """A slot table with a real cache, whose keys and values are the ids that
    they were computed from."""

    def __init__(self, kernels: Any) -> None:
        self.table = SlotTable(SLOTS)
        self.cache = KVCache(SLOTS, CAPACITY, kernels=kernels)
        self.cache.layer(0, *[torch.zeros(1, 1, 0, self.cache.unit)] * 2)
        self.contexts: dict[int, list[int]] = {}

    def ids(self, slot: int) -> list[list[int]]:
        return [store[slot].flatten().int().tolist() for store in self.cache.layers[0]]

    def call(self, session: int, length: int, branch: int) -> None:
        # Its own, or its sibling's.
        before = self.contexts.get(session ^ (branch == 0), [])[:length]
        ids = self.contexts[session] = [*before, *range(1 + branch, 2 + branch + length % 7 * 5)][
            :CAPACITY
        ]
        placed = self.table.place(ids, f"s{session}", f"g{session // 2}")
        if placed is None:
            return
        slot = placed.slot
        assert slot.call is None
        if placed.donor is not None:
            self.cache.copy([(placed.donor.index, slot.index, placed.start, placed.keep)])
        self.cache.rewind([(slot.index, placed.keep)])
        for found in self.ids(slot.index):
            assert found[: placed.keep] == ids[: placed.keep]
        for store in self.cache.layers[0]:
            store[slot.index].view(-1)[placed.keep : len(ids)] = torch.tensor(
                ids[placed.keep :]
            ).float()
        slot.call, slot.valid = object(), len(ids)

    def end(self, number: int) -> None:
        busy = [slot for slot in self.table.slots if slot.call is not None]
        if busy:
            self.table.finish(busy[number % len(busy)])

    def swap(self, number: int, other: int) -> None:
        first, second = self.table.slots[number % SLOTS], self.table.slots[other % SLOTS]
        if first is not second:
            self.cache.swap([(first.index, second.index)], max(first.valid, second.valid))
            self.table.swap(first, second)

    def check(self) -> None:
        for index, slot in enumerate(self.table.slots):
            assert slot.index == index
            assert all(found[: slot.valid] == slot.seq[: slot.valid] for found in self.ids(index))
            source, shared = self.cache.sources[index], self.cache.shared[index]
            assert self.ids(index)[0][:shared] == self.ids(source)[0][:shared]
            assert shared % self.cache.unit == 0
        free = [
            slot.index for slot in self.table.slots if slot.call is None and slot.session is None
        ]
        assert [index for index in range(SLOTS) if self.table._free >> index & 1] == free


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([None, numba_kernels]), st.lists(operation, min_size=30, max_size=60))
def test_a_call_finds_its_own_ids_in_its_slot(kernels, operations):
    cached = Cached(kernels)
    for kind, session, length, branch in operations:
        if kind == "call":
            cached.call(session, length, branch)
        elif kind == "end":
            cached.end(session)
        elif kind == "release":
            cached.table.release(f"s{session}")
        else:
            cached.swap(session, length)
        cached.check()


def test_what_a_copy_overwrites_is_no_longer_read_there():
    cache, block = KVCache(SLOTS, CAPACITY, kernels=numba_kernels), numba_kernels.BLOCK
    cache.copy([(0, 1, 0, 2 * block + 3)])
    assert (cache.sources[1], cache.shared[1]) == (0, 2 * block)
    cache.copy([(2, 0, block + 1, 2 * block)])
    assert (cache.sources[1], cache.shared[1]) == (0, block)
    assert (cache.sources[0], cache.shared[0]) == (2, 2 * block)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, SLOTS - 1), st.integers(1, SLOTS - 1), st.integers(1, CAPACITY)),
        max_size=12,
    )
)
def test_copies_that_are_made_together_are_those_made_one_by_one(moves):
    """As on a GPU, where positions after the end of a copy are undefined."""
    cache = KVCache(SLOTS, CAPACITY)
    (keys, _) = cache.layer(0, *[torch.zeros(1, 1, 0, 1)] * 2)
    expected = [[slot * CAPACITY + at for at in range(CAPACITY)] for slot in range(SLOTS)]
    keys[:SLOTS] = torch.tensor(expected).float()[:, None, :, None]
    asked = []
    for source, distance, end in moves:
        target = (source + distance) % SLOTS
        copied = expected[source][:end]
        # What the slots share is not asked for.
        start = common_prefix(copied, expected[target], len(copied))
        if start < len(copied):
            expected[target] = copied
            asked.append((source, target, start, len(copied)))
    for together in batch_moves(asked):
        # A GPU writes in any order.
        assert len({target for _, target, _, _ in together}) == len(together)
        cache._copy_together(together)
    for slot, ids in enumerate(expected):
        assert keys[slot].flatten().int().tolist()[: len(ids)] == ids

"""Assignment of sessions to cache slots: prefix matching, sharing and eviction.

`SlotTable.place` decides which slot a call gets and what of its context need not be computed.
Plain Python, no tensors: keys and values are in `KVCache`, and `Scheduler._admit` copies them as a
`Placement` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WORTH_WAITING = 16
"""Positions shared with a sibling from which a prompt waits for the sibling's instead of
computing them twice."""
GRACE = 16
"""Steps for which an idle slot is reserved for its session while others run: most
environments respond within them."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of the cache. `index` changes when the engine moves its content."""

    index: int
    seq: list[int] = field(default_factory=list)
    """Ids; keys and values of the first `valid` are cached."""
    valid: int = 0
    session: str | None = None
    group: str = ""
    call: Any = None
    """The call using it; None when idle."""
    idle_since: int = -GRACE
    """Step at which its last call ended."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Slot for a call, the number of cached positions it keeps, and an optional donor."""

    slot: Slot
    keep: int
    donor: Slot | None = None
    """Slot to copy positions up to `keep` from; None when they are in place."""
    start: int = 0
    """First position to copy."""


def common_prefix(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two id sequences, at most `limit`."""
    limit = min(limit, len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit

    # Bisection by comparison of slices, which runs in C.
    low, high = 0, limit  # equal below low, not equal at high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SlotTable:
    """Slots by session and group. Matches compare ids; names only select candidates."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self._free = (1 << count) - 1
        """Bit `index` is set for a slot without a call and a session: the lowest one is found at
        once."""
        self._sessions: dict[str, list[Slot]] = {}
        self._groups: dict[str, set[Slot]] = {}
        self.step = 0
        """Step counter, advanced by the scheduler."""

    def place(self, ids: list[int], session: str, group: str) -> Placement | None:
        """Find and take a slot for a call.

        Return None when no slot is free or idle, or a sibling is computing the same prompt.
        """
        limit = len(ids) - 1  # the last id is always computed, for its logits

        # The session's idle slot with the longest prefix of this context.
        session_slots = self._sessions.get(session, ())
        own_slot = None
        own_prefix = -1
        for slot in session_slots:
            if slot.call is None:
                prefix = common_prefix(slot.seq, ids, min(slot.valid, limit))
                if prefix > own_prefix:
                    own_slot = slot
                    own_prefix = prefix

        # Mostly the context extends this slot. Then only siblings that go on as this call does
        # are of use, and a few ids show which.
        siblings = list(self._groups.get(group, ()))
        if own_slot is not None and own_prefix > 0 and own_prefix in (own_slot.valid, limit):
            end = own_prefix + WORTH_WAITING
            if end > limit:
                siblings = []
            else:
                next_ids = ids[own_prefix:end]
                siblings = [slot for slot in siblings if slot.seq[own_prefix:end] == next_ids]
            if not siblings:
                return self._take(Placement(own_slot, own_prefix), ids, session, group)

        # Another slot may have a longer prefix, or be computing one that is worth waiting for.
        donor, donated, promised = self._donor(ids, limit, [*session_slots, *siblings])
        if promised >= max(donated, own_prefix) + WORTH_WAITING:
            return None
        target = self._target(own_slot, own_prefix)
        if target is None:
            return None

        in_place = max(own_prefix, 0) if target is own_slot else 0
        if donor is not None and donated > 0 and (target is not own_slot or donated > own_prefix):
            source = None if donor is target else donor
            placement = Placement(target, donated, source, in_place)
        else:
            placement = Placement(target, in_place)
        return self._take(placement, ids, session, group)

    def finish(self, slot: Slot) -> None:
        """End the call in a slot; its cache stays for the session's next call."""
        slot.call = None
        slot.idle_since = self.step
        del slot.seq[slot.valid :]
        if slot.session is None:
            self._free |= 1 << slot.index

    def release(self, session: str) -> None:
        """End a session and free its idle slots; their content may serve siblings until reuse."""
        for slot in self._sessions.pop(session, ()):
            slot.session = None
            if slot.call is None:
                self._free |= 1 << slot.index

    def vacate(self, slot: Slot) -> None:
        """Clear an idle slot and its session."""
        if slot.session is not None:
            self._sessions[slot.session].remove(slot)
            if not self._sessions[slot.session]:
                del self._sessions[slot.session]
        if slot.group in self._groups:
            self._groups[slot.group].discard(slot)
            if not self._groups[slot.group]:
                del self._groups[slot.group]
        slot.seq = []
        slot.valid = 0
        slot.session = None
        slot.group = ""
        self._free |= 1 << slot.index

    def swap(self, first: Slot, second: Slot) -> None:
        """Exchange the positions of two slots."""
        first_bit = 1 << first.index
        second_bit = 1 << second.index
        if bool(self._free & first_bit) != bool(self._free & second_bit):
            self._free ^= first_bit | second_bit
        first.index, second.index = second.index, first.index
        self.slots[first.index] = first
        self.slots[second.index] = second

    def _donor(self, ids: list[int], limit: int, slots: list[Slot]) -> tuple[Slot | None, int, int]:
        """Return the slot with the longest cached prefix, its length, and the longest prefix that
        is being computed."""
        donor = None
        donated = 0
        promised = 0
        for slot in slots:
            prefix = common_prefix(slot.seq, ids, limit)
            cached = min(prefix, slot.valid)
            if cached > donated:
                donor = slot
                donated = cached
            if slot.call is not None and slot.valid < prefix:
                promised = max(promised, prefix)
        return donor, donated, promised

    def _target(self, own_slot: Slot | None, own_prefix: int) -> Slot | None:
        """Return the slot that a call gets; None when every idle one waits for its session."""
        # A session whose context was rewritten keeps the old one while there are free slots.
        if own_slot is not None and (2 * own_prefix >= own_slot.valid or not self._free):
            return own_slot
        if self._free:
            lowest = (self._free & -self._free).bit_length() - 1
            return self.slots[lowest]

        idle = [slot for slot in self.slots if slot.call is None]
        if not idle:
            return None
        longest_idle = min(idle, key=lambda slot: slot.idle_since)
        if self.step - longest_idle.idle_since < GRACE and len(idle) < len(self.slots):
            return None
        return longest_idle

    def _take(self, placement: Placement, ids: list[int], session: str, group: str) -> Placement:
        slot = placement.slot
        if slot.session != session or slot.group != group:
            self.vacate(slot)
            slot.session = session
            slot.group = group
            self._sessions.setdefault(session, []).append(slot)
            if group:
                self._groups.setdefault(group, set()).add(slot)
        self._free &= ~(1 << slot.index)

        # Donated positions are copied before anything reads the slot.
        slot.seq = list(ids)
        slot.valid = placement.keep
        return placement

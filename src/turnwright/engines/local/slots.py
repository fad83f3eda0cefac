"""Assignment of sessions to cache slots: prefix matching, sharing and eviction.

Plain Python, no tensors.
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


def common_prefix(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two id sequences, at most `limit`."""
    limit = min(limit, len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit  # equal below low, not equal at high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SlotTable:
    """Slots by session and group. Matches compare ids; names only select candidates."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self._free = (1 << count) - 1
        """Bit `index` is set for a slot without a call and a session: the lowest
        one is found at once."""
        self._sessions: dict[str, list[Slot]] = {}
        self._groups: dict[str, set[Slot]] = {}
        self.step = 0
        """Step counter, advanced by the scheduler."""

    def place(self, ids: list[int], session: str, group: str) -> Placement | None:
        """Find and take a slot for a call; None when no slot is free or idle, or a sibling is
        computing the same prompt."""
        limit = len(ids) - 1  # the last id is always computed, for its logits
        mine = self._sessions.get(session, ())
        own, kept = None, -1
        for slot in mine:
            if slot.call is None:
                same = common_prefix(slot.seq, ids, min(slot.valid, limit))
                if same > kept:
                    own, kept = slot, same
        siblings = list(self._groups.get(group, ()))
        if own is not None and kept > 0 and (kept == own.valid or kept == limit):
            # Of use are only siblings that go on as this call does, and a few ids show which.
            end = kept + WORTH_WAITING
            siblings = (
                [slot for slot in siblings if slot.seq[kept:end] == ids[kept:end]]
                if end <= limit
                else []
            )
            if not siblings:
                return self._take(Placement(own, kept), ids, session, group)
        donor, given, soon = self._donor(ids, limit, [*mine, *siblings])
        if soon >= max(given, kept) + WORTH_WAITING:
            return None
        if own is not None and (2 * kept >= own.valid or not self._free):
            target = own
        elif self._free:
            target = self.slots[(self._free & -self._free).bit_length() - 1]
        else:
            idle = [slot for slot in self.slots if slot.call is None]
            if not idle:
                return None
            target = min(idle, key=lambda slot: slot.idle_since)
            if self.step - target.idle_since < GRACE and len(idle) < len(self.slots):
                return None
        if donor is not None and given > 0 and (target is not own or given > kept):
            in_place = max(kept, 0) if target is own else 0
            return self._take(
                Placement(target, given, None if donor is target else donor, in_place),
                ids,
                session,
                group,
            )
        return self._take(
            Placement(target, max(kept, 0) if target is own else 0), ids, session, group
        )

    def finish(self, slot: Slot) -> None:
        """End the call in a slot; its cache stays for the session's next call."""
        slot.call, slot.idle_since = None, self.step
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
        slot.seq, slot.valid, slot.session, slot.group = [], 0, None, ""
        self._free |= 1 << slot.index

    def swap(self, one: Slot, other: Slot) -> None:
        """Exchange the positions of two slots."""
        one_bit, other_bit = 1 << one.index, 1 << other.index
        if bool(self._free & one_bit) != bool(self._free & other_bit):
            self._free ^= one_bit | other_bit
        one.index, other.index = other.index, one.index
        self.slots[one.index], self.slots[other.index] = one, other

    def _donor(
        self, ids: list[int], limit: int, others: list[Slot]
    ) -> tuple[Slot | None, int, int]:
        """Return the slot with the longest cached prefix, its length, and the longest
        prefix being computed."""
        best, given, soon = None, 0, 0
        for slot in others:
            promised = common_prefix(slot.seq, ids, limit)
            now = min(promised, slot.valid)
            if now > given:
                best, given = slot, now
            if slot.call is not None and slot.valid < promised:
                soon = max(soon, promised)
        return best, given, soon

    def _take(self, placement: Placement, ids: list[int], session: str, group: str) -> Placement:
        slot = placement.slot
        if slot.session != session or slot.group != group:
            self.vacate(slot)
            slot.session, slot.group = session, group
            self._sessions.setdefault(session, []).append(slot)
            if group:
                self._groups.setdefault(group, set()).add(slot)
        self._free &= ~(1 << slot.index)
        # Donated positions are copied before anything reads the slot.
        slot.seq, slot.valid = list(ids), placement.keep
        return placement

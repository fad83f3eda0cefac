"""One engine step as rows of tokens; speculative drafts.

Speculative decoding by look-up: what followed the last ids of a context before is drafted to follow them again.

A pass feeds the drafted ids behind the last one, as rows of a prompt are fed, and so has the distribution behind each. Every
position is then drawn from its own distribution with its own noise, (seed, position), as without drafts; a row counts while
the ids before it are the drafted ones. So nothing is accepted or rejected by chance of its own: what is drawn is what would
have been drawn, and a draft decides only how many ids one pass draws. The look-up is that of Saxena's prompt look-up decoding
(2023); the check of a draft in one pass is Leviathan et al. (2023), for a draft without a distribution of its own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.engines.base import Generation, Request
from turnwise.engines.local.attention import AttentionRun
from turnwise.engines.local.sampling import RowDraw
from turnwise.engines.local.slots import Slot
from turnwise.engines.local.vision import ContextMedia, ImageFeatures
from turnwise.errors import EngineError


@dataclass(slots=True)
class RowMedia:
    """What the rows of a pass see."""

    rotary_positions: tuple[list[int], list[int], list[int]]
    """Rotary positions of the rows in time, height and width."""
    feature_rows: list[int] = field(default_factory=list)
    """Rows at which features stand, rising."""
    features: list[ImageFeatures] = field(default_factory=list)
    """These, one after another."""


LENGTHS = (3, 2)
"""How many last ids are looked for; longer ones first, since what followed them is the better guess."""


class Drafter:
    """Drafts for one reply.

    Args:
        prompt: the ids before the reply.
        most: most ids of one draft; at least 1.
    """

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self._ids = list(prompt)
        self._prompt = len(self._ids)
        self._most = most
        self._reach = most
        self._known = min(LENGTHS)
        """Positions before this one are in `_behind`."""
        self._behind: dict[tuple[int, ...], int] = {}
        """Some ids in a row -> the position behind the last place where they stand, itself not the end."""
        self.open: list[int] = []
        """What was drafted and is not told yet."""
        self.drafted = 0
        """Ids drafted so far; `accepted` of them were drawn."""
        self.accepted = 0

    def propose(self, reply: Sequence[int], room: int, barred: Sequence[Container[int]] = ()) -> list[int]:
        """What may follow a reply, kept as `open` until `told`.

        Args:
            reply: its ids so far; a longer one each time.
            room: most ids.
            barred: a draft ends before an id that is in one of these.
        """
        self._ids += reply[len(self._ids) - self._prompt :]
        self._learn()
        draft: list[int] = []
        at, ids = self._place(), self._ids
        if at is not None:
            for step in range(min(room, self._reach)):
                # Behind the end the draft goes on with itself: what repeats every few ids is drafted for many.
                found = ids[at + step] if at + step < len(ids) else draft[at + step - len(ids)]
                if any(found in some for some in barred):
                    break
                draft.append(found)
        self.open = draft
        return draft

    def record_accepted(self, accepted: int) -> None:
        """How many of the last draft were drawn. Drafts get shorter where they are wrong and longer where they are right."""
        count, self.open = len(self.open), []
        if not count:
            return
        self.drafted += count
        self.accepted += accepted
        if accepted == count:
            self._reach = min(self._most, 2 * self._reach)
        elif 2 * accepted < count:
            self._reach = max(1, self._reach // 2)

    def stop(self) -> None:
        """Draft no more."""
        self._most = self._reach = 0

    def _learn(self) -> None:
        """Take up the places of what stands in the context, its end left out."""
        ids, behind = self._ids, self._behind
        for at in range(self._known, len(ids)):
            for length in LENGTHS:
                if at >= length:
                    behind[tuple(ids[at - length : at])] = at
        self._known = max(self._known, len(ids))

    def _place(self) -> int | None:
        """Behind which position the last ids stood before."""
        for length in LENGTHS:
            found = self._behind.get(tuple(self._ids[-length:]))
            if found is not None:
                return found
        return None


def excluded_from_drafts(request: Request) -> tuple[Container[int], ...]:
    """Ids that no draft of a reply holds: those never drawn, and those behind which nothing is."""
    return request.banned_ids, request.stop_ids


@dataclass(slots=True, eq=False)
class ActiveCall:
    """One call on its way through the engine."""

    request: Request
    prompt: list[int]
    limit: int
    """At most this many new ids."""
    future: Any
    """Told the result by whoever runs the scheduler."""
    keys: list[int]
    """What tells prompts apart: its ids, but where it shows something, what is shown."""
    view: ContextMedia | None = None
    """What it shows."""
    slot: Slot | None = None
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alone: bool = False
    """Whether it was in a step that failed: it begins anew with none beside it, so that its fault shows to be its own."""
    drafter: Drafter | None = None
    """Drafts its next ids, where the engine speculates and the reply has begun."""

    def begin_anew(self) -> None:
        """Forget what was sampled: drawn again, it is the same."""
        self.slot, self.cached, self.ids, self.logprobs, self.drafter, self.alone = None, 0, [], [], None, True

    @property
    def position(self) -> int:
        """Position within the reply of the next id."""
        return len(self.ids)

    @property
    def draft(self) -> list[int]:
        """What the step that runs feeds behind its last id."""
        return self.drafter.open if self.drafter is not None else []


Outcome = tuple[ActiveCall, Generation | EngineError]


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """A position behind drafted ids, as the sampler asks for it."""

    request: Request
    position: int


@dataclass(slots=True)
class EngineBatch:
    """What one step computes: rows of one token each, first those that decode."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    parts: list[AttentionRun] = field(default_factory=list)
    drawing: list[ActiveCall] = field(default_factory=list)
    """Calls that get an id in this step; one with a draft stands here once more for each id of it."""
    keep: list[int] = field(default_factory=list)
    """Their rows, whose logits are wanted."""
    drafted: bool = False
    """Whether some call has a draft."""
    look: RowMedia | None = None
    """What the rows see, where the model sees."""
    broken: list[Outcome] = field(default_factory=list)
    """Calls whose images cannot be had."""

    def decode(self, call: ActiveCall) -> None:
        """Append the row of a reply's last id, and those of its draft."""
        slot = call.slot
        assert slot is not None
        fed = [slot.seq[slot.valid], *call.draft]
        rows = range(len(self.tokens), len(self.tokens) + len(fed))
        self.tokens += fed
        self.positions += range(slot.valid, slot.valid + len(fed))
        self.slots += [slot.index] * len(fed)
        self.drawing += [call] * len(fed)
        self.keep += rows
        self.drafted |= len(fed) > 1
        slot.valid += 1  # of drafted ids only those that are drawn become valid

    def rotary_positions(self) -> RowMedia:
        """Where the rows of replies stand for the rotary embedding: as far behind as the images before them say."""
        turns = list(self.positions)
        for row, call in zip(self.keep, self.drawing, strict=True):
            if call.view is not None:
                turns[row] += call.view.shift
        return RowMedia((turns, list(turns), list(turns)))

    def draws(self) -> Sequence[RowDraw]:
        """Whose id is drawn from each kept row, and at which position of its reply."""
        if not self.drafted:
            return self.drawing
        ahead: list[RowDraw] = []
        last = None
        for call in self.drawing:
            behind = ahead[-1].position + 1 if call is last else call.position
            ahead.append(DraftPosition(call.request, behind))
            last = call
        return ahead

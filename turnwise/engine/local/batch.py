"""What one step of the engine computes: rows of one token each, and the calls that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.engine.base import Generation, Request
from turnwise.engine.local.attention import AttentionRun
from turnwise.engine.local.look import RowMedia
from turnwise.engine.local.sampling import RowDraw
from turnwise.engine.local.sight import ContextMedia
from turnwise.engine.local.slots import Slot
from turnwise.engine.local.speculate import Drafter
from turnwise.errors import EngineError


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

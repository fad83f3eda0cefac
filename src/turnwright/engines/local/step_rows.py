"""One engine step as rows of tokens; speculative drafts.

`ActiveCall` is a call while the engine computes it, `EngineBatch` the rows of one step, `Drafter`
the source of drafts of one reply. `Scheduler._step` fills a batch and gives it to the model.

Speculative decoding by prompt lookup: the ids that followed the last ids earlier in the context
are drafted (Saxena, 2023).

A pass feeds drafted ids like prompt rows and so computes the distribution after each. Every
position is sampled from its own distribution with its own random number (seed, position), as
without drafts; a row counts while the ids before it match the draft. Nothing is accepted or
rejected at random: a draft changes only how many ids one pass samples. Verification in one pass
follows Leviathan et al. (2023), for a deterministic draft.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwright.engines.local.attention import AttentionRun
from turnwright.engines.local.slots import Slot
from turnwright.engines.local.vision import ContextMedia, ImageFeatures
from turnwright.engines.protocols import Generation, Request
from turnwright.errors import EngineError
from turnwright.types import Alternatives


@dataclass(slots=True)
class RowMedia:
    """Media of the rows of a pass."""

    rotary_positions: tuple[list[int], list[int], list[int]]
    """Rotary positions of the rows in time, height and width."""
    feature_rows: list[int] = field(default_factory=list)
    """Rows with image features, ascending."""
    features: list[ImageFeatures] = field(default_factory=list)
    """Features of those rows, in order."""


LENGTHS = (3, 2)
"""Numbers of last ids to look up; longer matches first, as better predictors."""


class Drafter:
    """Drafts ids for one reply, at most `max_draft` (1 or more) at a time."""

    def __init__(self, prompt: Sequence[int], max_draft: int) -> None:
        self._ids = list(prompt)
        self._prompt = len(self._ids)
        self._max_draft = max_draft
        self._draft_length = max_draft
        self._indexed = min(LENGTHS)
        """Positions before this one are in `_followers`."""
        self._followers: dict[tuple[int, ...], int] = {}
        """n-gram -> position after its last occurrence, excluding the end."""
        self.open: list[int] = []
        """Current draft, until `record_accepted`."""
        self.drafted = 0
        """Number of drafted ids; `accepted` of them were sampled."""
        self.accepted = 0

    def propose(
        self, reply: Sequence[int], limit: int, excluded: Sequence[Container[int]] = ()
    ) -> list[int]:
        """Draft at most `limit` ids after a reply, up to an excluded one.

        They are kept as `open` until `record_accepted`.
        """
        # Index what the reply has gained.
        self._ids += reply[len(self._ids) - self._prompt :]
        ids = self._ids
        followers = self._followers
        for end in range(self._indexed, len(ids)):
            for length in LENGTHS:
                if end >= length:
                    followers[tuple(ids[end - length : end])] = end
        self._indexed = max(self._indexed, len(ids))

        # Look up where the last ids occurred earlier.
        start = None
        for length in LENGTHS:
            start = followers.get(tuple(ids[-length:]))
            if start is not None:
                break

        # Draft what followed there. Past the end of the context the draft continues from itself,
        # so short cycles are drafted repeatedly.
        draft: list[int] = []
        if start is not None:
            for position in range(start, start + min(limit, self._draft_length)):
                id_ = ids[position] if position < len(ids) else draft[position - len(ids)]
                if any(id_ in container for container in excluded):
                    break
                draft.append(id_)
        self.open = draft
        return draft

    def record_accepted(self, accepted: int) -> None:
        """Record how many ids of the last draft were sampled.

        Drafts get shorter after a wrong one and longer after a correct one.
        """
        count = len(self.open)
        self.open = []
        if not count:
            return

        self.drafted += count
        self.accepted += accepted
        if accepted == count:
            self._draft_length = min(self._max_draft, 2 * self._draft_length)
        elif 2 * accepted < count:
            self._draft_length = max(1, self._draft_length // 2)

    def stop(self) -> None:
        """Stop drafting."""
        self._max_draft = 0
        self._draft_length = 0


@dataclass(slots=True, eq=False)
class ActiveCall:
    """A call while the engine computes it, with the part of its reply sampled so far."""

    request: Request
    prompt: list[int]
    limit: int
    """Maximum number of new ids."""
    future: Any
    keys: list[int]
    """Ids for prefix matching, with media positions replaced by media keys."""
    view: ContextMedia | None = None
    adapter: int = 0
    """Number of the LoRA adapter that it is sampled with; 0 for none."""
    slot: Slot | None = None
    """Its slot of the cache, once it is placed."""
    cached: int = 0
    """Number of ids of the prompt that the slot had."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    """Of each id, where the request asks for them; after them those of positions of a draft that
    was not sampled."""
    alone: bool = False
    """Whether it was in a failed step: it is restarted alone, to attribute the failure."""
    drafter: Drafter | None = None
    """Drafts the next ids, once the reply has started with speculation on."""

    def restart(self) -> None:
        """Discard the sampled ids; sampling again gives the same ones."""
        self.slot = None
        self.cached = 0
        self.ids = []
        self.logprobs = []
        self.alternatives = []
        self.drafter = None
        self.alone = True

    @property
    def position(self) -> int:
        """Position of the next id within the reply, including what earlier calls sampled of it."""
        return self.request.reply_position + len(self.ids)

    @property
    def draft(self) -> list[int]:
        """Ids fed after the last one in the current step."""
        return self.drafter.open if self.drafter is not None else []


Outcome = tuple[ActiveCall, Generation | EngineError]


def caused_error(text: str, cause: BaseException) -> EngineError:
    """Return an error with its cause, as `raise ... from` would raise it."""
    error = EngineError(text)
    error.__cause__ = cause
    return error


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """Position after drafted ids, for the sampler."""

    request: Request
    position: int


RowDraw = ActiveCall | DraftPosition
"""A row to sample: request, and position within the reply."""


@dataclass(slots=True)
class EngineBatch:
    """Rows of one step, one token each, decoding rows first."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    runs: list[AttentionRun] = field(default_factory=list)
    drawing: list[ActiveCall] = field(default_factory=list)
    """Calls that sample in this step, repeated for each id of a draft."""
    keep: list[int] = field(default_factory=list)
    """Rows whose logits are needed."""
    drafted: bool = False
    """Whether any call has a draft."""
    media: RowMedia | None = None
    broken: list[Outcome] = field(default_factory=list)
    """Calls whose images are unavailable."""

    def decode(self, calls: Iterable[ActiveCall]) -> None:
        """Append the rows of the replies' last ids and drafts.

        Calls whose prompts are not computed yet have none.
        """
        # Local names: this loop runs for every sampled id.
        tokens = self.tokens
        positions = self.positions
        slots = self.slots
        drawing = self.drawing
        first_row = len(tokens)
        for call in calls:
            slot = call.slot
            if slot is None or not call.ids:
                continue
            position = slot.valid
            tokens.append(slot.seq[position])
            positions.append(position)
            slots.append(slot.index)
            drawing.append(call)
            slot.valid = position + 1  # drafted ids become valid only when sampled

            if call.drafter is not None:
                draft = call.drafter.open
                if draft:
                    tokens += draft
                    positions += range(position + 1, position + 1 + len(draft))
                    slots += [slot.index] * len(draft)
                    drawing += [call] * len(draft)
                    self.drafted = True
        self.keep += range(first_row, len(tokens))

    def rotary_positions(self) -> RowMedia:
        """Return the rotary positions of decoding rows, shifted by the images before them."""
        rotary = list(self.positions)
        for row, call in zip(self.keep, self.drawing, strict=True):
            if call.view is not None:
                rotary[row] += call.view.shift
        return RowMedia((rotary, list(rotary), list(rotary)))

    def draws(self) -> Sequence[RowDraw]:
        """Return request and reply position for each kept row."""
        if not self.drafted:
            return self.drawing

        # A call is repeated for each id of its draft, which are drawn at consecutive positions.
        draws: list[RowDraw] = []
        previous_call = None
        for call in self.drawing:
            if call is previous_call:
                position = draws[-1].position + 1
            else:
                position = call.position
            draws.append(DraftPosition(call.request, position))
            previous_call = call
        return draws

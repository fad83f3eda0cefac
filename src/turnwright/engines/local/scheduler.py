"""Continuous batching: each step computes one token of every running reply and all new prompts, in
one pass.

A step reads from top to bottom in `Scheduler._step`: waiting calls get a slot of the cache
(`slots.py`), running replies contribute their last id each (and a draft of the next ones), prompts
what of them is not cached; the model computes all these rows (`model.py`), the sampler draws
(`sampler.py`), and `_collect` appends what was drawn to the replies. The engine around it
(`engine.py`) has the event loop, the thread, and the weights.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch

from turnwright.engines.local import torch_settings
from turnwright.engines.local.attention import AttentionRun
from turnwright.engines.local.kv_cache import Move
from turnwright.engines.local.model import EngineModel
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.slots import GRACE, Slot, SlotTable
from turnwright.engines.local.step_rows import (
    ActiveCall,
    Drafter,
    EngineBatch,
    Outcome,
    RowDraw,
    caused_error,
)
from turnwright.engines.local.vision import ImageFeatureCache
from turnwright.engines.protocols import Finish, Generation
from turnwright.errors import EngineError, TurnwrightError
from turnwright.types import ROUTES, Media

_log = logging.getLogger(__name__)
SORT_THRESHOLD = 64
"""Rows are swapped when a longer one precedes a shorter one by this many keys, so that short rows
do not pay for long ones."""


class Scheduler:
    """Schedules calls over slots and steps; single-threaded, without event loops.

    Scheduling never changes a reply: a row's results do not depend on its slot, its step or other
    rows.
    """

    def __init__(
        self, model: EngineModel, sampler: Sampler, slots: int, speculate: int = 0, version: int = 0
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.speculate = speculate
        """Maximum number of ids drafted after one."""
        self.drafted = 0
        """Number of drafted ids."""
        self.accepted = 0
        """Number of those that were sampled."""
        self.failed_steps = 0
        """Number of consecutive failed steps."""
        policies = 1 + (model.adapters.count if model.adapters else 0)
        self.versions = [version] * policies
        """Policy version of the model, and of each adapter."""
        self.table = SlotTable(slots)
        self.waiting: deque[ActiveCall] = deque()
        self.running: list[ActiveCall] = []
        self.seen = ImageFeatureCache(model.tower) if model.tower is not None else None
        """Cache of image features, for a vision model."""
        self._changed = False
        """Whether a waiting call may fit now."""
        self._finds_alternatives = False
        """Whether a call has ever asked for alternatives; else no row is looked at for them."""

    @property
    def busy(self) -> bool:
        """Whether there is work for a step."""
        return bool(self.running or self.waiting)

    def submit(self, call: ActiveCall) -> None:
        """Queue a call; it starts in the next step with space for it."""
        self.waiting.append(call)
        self._changed = True
        if call.request.alternatives:
            self._finds_alternatives = True

    def cancel(self, call: ActiveCall) -> None:
        """Drop a call without a caller; its session's cache stays."""
        if call in self.running:  # otherwise it has ended
            self.running.remove(call)
            self._free_slot(call)
        elif call in self.waiting:
            self.waiting.remove(call)

    def release(self, session: str, adapter: int = 0) -> None:
        """End a session of an adapter; its slots may be reused."""
        self.table.release(_own(session, adapter))
        self._changed = True

    def abort(self, adapter: int | None = None) -> list[Outcome]:
        """End every call, or those of an adapter, with what they have sampled."""

        def is_ended(call: ActiveCall) -> bool:
            return adapter is None or call.adapter == adapter

        ended = [call for call in (*self.running, *self.waiting) if is_ended(call)]
        self.running = [call for call in self.running if not is_ended(call)]
        self.waiting = deque(call for call in self.waiting if not is_ended(call))
        for call in ended:
            if call.slot is not None:
                self._free_slot(call)
        return [(call, self._generation(call, "abort")) for call in ended]

    def clear_cache(self, adapter: int | None = None) -> None:
        """Drop everything computed from replaced weights, or by an adapter, of which no call may be
        running.

        Adapters change no image features.
        """
        for slot in self.table.slots:
            if adapter in (None, self.model.adapter_of(slot.index)):
                self.table.vacate(slot)
        if self.seen is not None and adapter is None:
            self.seen.clear()

    def step(self) -> list[Outcome]:
        """Compute one step and return the calls that ended.

        A failing step ends only the call that causes the failure.
        """
        torch_settings.keep()
        with torch.inference_mode():
            try:
                ended = self._step()
            except Exception as error:
                _log.exception("a step of the local engine failed")
                self.failed_steps += 1
                return self._failed(error)
        self.failed_steps = 0
        return ended

    def _failed(self, error: Exception) -> list[Outcome]:
        """Restart the calls of a failed step one at a time; the call that fails alone ends with the
        error.

        Draws depend on neither other calls nor the cache, so the remaining calls get the same
        replies.
        """
        suspects = self.running
        self.running = []
        for call in suspects:
            if call.slot is not None:
                self.model.cache.zero(call.slot.index)
                self.table.finish(call.slot)
        self.clear_cache()
        self.waiting = deque(call for call in self.waiting if call not in suspects)

        if not suspects and (self.waiting[0].alone or len(self.waiting) == 1):
            suspects = [self.waiting.popleft()]  # its placement failed
        if len(suspects) == 1:
            return [(suspects[0], caused_error(_step_fault(suspects[0], error), error))]

        for call in suspects or self.waiting:
            call.restart()
        self.waiting.extendleft(reversed(suspects))
        self._changed = True
        return []

    def _step(self) -> list[Outcome]:
        self.table.step += 1
        if self._changed or self.table.step % GRACE == 0:
            self._admit()
        if not self.running:
            return []

        # Running replies: a row for the last id of each, and for those of its draft.
        if self.speculate:
            self._draft()
        if self.model.fused is not None:
            batch = EngineBatch()
            batch.decode(self.running)
        else:
            batch = self._decode_rows_in_place()

        # Prompts: rows for what is not cached, as far as the pass has room.
        if self.seen is not None:
            batch.media = batch.rotary_positions()
            decoding = len(batch.tokens)
            self._encode_images(self.seen, self.model.rows_per_step(decoding) - decoding)
        self._feed(batch)
        self._end(batch.broken)
        if not batch.tokens:
            return batch.broken

        logits = self.model.forward(
            batch.tokens, batch.positions, batch.slots, batch.runs, batch.keep, batch.media
        )
        if not batch.drawing:
            return batch.broken
        draws = batch.draws()
        ids, logprobs = self.sampler(logits, draws)
        if self._finds_alternatives:
            self._find_alternatives(logits, draws, batch.drawing)
        return [*batch.broken, *self._collect(batch, ids, logprobs)]

    def _draft(self) -> None:
        """Draft for the running replies, within the rows of one pass."""
        space = self.model.rows_per_step(0) - len(self.running)
        for call in self.running:
            if not call.ids:
                continue
            if call.drafter is None:
                call.drafter = Drafter(call.prompt, self.speculate)
            # The last id of a reply is sampled but not fed, so a draft is one shorter than the
            # remaining ids.
            max_draft = min(space, call.limit - len(call.ids) - 1)
            excluded = (call.request.banned_ids, call.request.stop_ids)
            space -= len(call.drafter.propose(call.ids, max_draft, excluded))

    def _decode_rows_in_place(self) -> EngineBatch:
        """Batch with each reply's row at the index of its slot, so that keys and values need not be
        gathered; replies with a draft follow and attend like prompts."""
        decoding = [call for call in self.running if call.ids and not call.draft]
        self._compact(decoding)
        places = [(call.slot, call) for call in decoding if call.slot]
        places.sort(key=lambda place: place[0].index)
        block = self.model.slots_per_call
        if len(places) > block:
            self._sort([slot for slot, _ in places])
            places.sort(key=lambda place: place[0].index)

        rows = places[-1][0].index + 1 if places else 0
        batch = EngineBatch([0] * rows, [0] * rows, [self.model.cache.scratch] * rows)
        runs = batch.runs
        for slot, call in places:
            index = slot.index
            valid = slot.valid
            batch.tokens[index] = slot.seq[valid]
            batch.positions[index] = valid
            batch.slots[index] = index
            batch.drawing.append(call)
            batch.keep.append(index)
            slot.valid = valid + 1

            # Rows of one block share a call of attention.
            if runs and index < runs[-1].first // block * block + block:
                runs[-1].count = index + 1 - runs[-1].first
                runs[-1].length = max(runs[-1].length, valid + 1)
            else:
                runs.append(AttentionRun(index, 1, valid + 1))

        for call in self.running:
            if call.draft:
                first = len(batch.tokens)
                batch.decode((call,))
                count = len(batch.tokens) - first
                length = batch.positions[-1] + 1
                runs.append(AttentionRun(first, count, length, batch.slots[-1]))
        return batch

    def _admit(self) -> None:
        """Place waiting calls in order of arrival; a call that cannot be placed does not block
        later ones."""
        self._changed = False
        if not self.waiting:
            return
        at_once = min(len(self.table.slots), len(self.running) + len(self.waiting))
        self.model.reserve(at_once, max(len(call.prompt) + call.limit for call in self.waiting))

        still_waiting: deque[ActiveCall] = deque()
        copies: list[Move] = []
        kept: list[tuple[int, int]] = []
        for call in self.waiting:
            if self.running and (call.alone or self.running[0].alone):
                still_waiting.append(call)
                continue
            session = _own(call.request.session, call.adapter)
            group = call.request.group and _own(call.request.group, call.adapter)
            placement = self.table.place(call.keys, session, group)
            if placement is None:
                still_waiting.append(call)
                continue

            # What of the prompt the slot has, or another slot that has more, is not computed.
            slot = placement.slot
            self.model.reserve(slot.index + 1, len(call.prompt) + call.limit)
            if placement.donor is not None:
                copies.append((placement.donor.index, slot.index, placement.start, placement.keep))
            kept.append((slot.index, placement.keep))

            slot.call = call
            call.slot = slot
            call.cached = placement.keep
            if self.model.adapters is not None:
                self.model.adapters.assign(slot.index, call.adapter)
            self.running.append(call)

        self.waiting = still_waiting
        self.model.cache.copy(copies)
        self.model.cache.rewind(kept)

    def _compact(self, decoding: list[ActiveCall]) -> None:
        """Move the highest rows into gaps when too many rows in between are idle."""
        allowed = len(self.running) + max(8, len(self.running) // 4)
        highest = [call.slot for call in decoding if call.slot]
        highest.sort(key=lambda slot: -slot.index)
        if not highest or highest[0].index < allowed:
            return
        gaps = [slot for slot in self.table.slots[: highest[0].index] if slot.call is None]
        pairs = zip(highest, gaps, strict=False)
        self._swap([(slot, gap) for slot, gap in pairs if slot.index > gap.index])

    def _sort(self, rows: list[Slot]) -> None:
        """Swap the two rows that are furthest from the order of their lengths."""
        longest = rows[0]
        worst = SORT_THRESHOLD
        pair = None
        for slot in rows:
            if slot.valid >= longest.valid:
                longest = slot
            elif longest.valid - slot.valid > worst:
                worst = longest.valid - slot.valid
                pair = (longest, slot)
        if pair is not None:
            self._swap([pair])

    def _swap(self, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Exchange pairs of different slots; at least one."""
        indices = [(first.index, second.index) for first, second in pairs]
        longest = max(slot.valid for slot in chain(*pairs))
        self.model.cache.swap(indices, longest)
        for first, second in pairs:
            if self.model.adapters is not None:
                self.model.adapters.swap(first.index, second.index)
            self.table.swap(first, second)

    def _feed(self, batch: EngineBatch) -> None:
        """Append new prompt positions after the decoding rows, as far as one pass allows."""
        space = self.model.rows_per_step(len(batch.tokens)) - len(batch.tokens)
        for call in self.running:
            slot = call.slot
            if call.ids or slot is None:
                continue
            if space <= 0:
                break

            start = slot.valid
            count = min(len(call.prompt) - start, space)
            end = start + count
            if batch.media is not None:
                try:
                    self._add_media(call, batch, start, end)
                except (TurnwrightError, OSError) as error:
                    fault = (
                        f"session {call.request.session!r}: an image of its context is "
                        f"unavailable: {error}"
                    )
                    batch.broken.append((call, caused_error(fault, error)))
                    continue

            batch.runs.append(AttentionRun(len(batch.tokens), count, end, slot.index))
            batch.tokens += call.prompt[start:end]
            batch.positions += range(start, end)
            batch.slots += [slot.index] * count
            slot.valid = end
            space -= count
            if end == len(call.prompt):
                # The last id of the prompt predicts the first of the reply.
                batch.drawing.append(call)
                batch.keep.append(len(batch.tokens) - 1)
            self._changed = True  # a sibling may wait for this

    def _encode_images(self, seen: ImageFeatureCache, space: int) -> None:
        """Encode the images of this step together."""
        images: list[tuple[Media, int]] = []
        for call in self.running:
            if call.ids or call.slot is None or space <= 0:
                continue
            start = call.slot.valid
            end = min(len(call.prompt), start + space)
            space -= end - start
            if call.view is not None:
                for media, size, _, _ in call.view.features_between(start, end):
                    images.append((media, size))
        seen.prepare(images)

    def _add_media(self, call: ActiveCall, batch: EngineBatch, start: int, end: int) -> None:
        """Append the rotary positions and image features of the next rows of a context."""
        assert batch.media is not None
        assert self.seen is not None
        first_row = len(batch.tokens)
        if call.view is None:
            for axis in batch.media.rotary_positions:
                axis += range(start, end)
            return

        # All features are taken before any is appended: an image may be unavailable.
        parts = call.view.features_between(start, end)
        features = [self.seen.features(media, size).take(part) for media, size, _, part in parts]
        for (_, _, places, _), rows in zip(parts, features, strict=True):
            batch.media.feature_rows += [first_row + place - start for place in places]
            batch.media.features.append(rows)
        rotary = call.view.rotary_positions(start, end)
        for number, axis in enumerate(batch.media.rotary_positions):
            axis += range(start, end) if rotary is None else rotary[number].tolist()

    def _find_alternatives(
        self, logits: torch.Tensor, draws: Sequence[RowDraw], calls: Sequence[ActiveCall]
    ) -> None:
        """Add the alternatives of each row to its call, if the call asks for them.

        The rows of a draft are those of the next positions, whether or not they are sampled now.
        """
        for call in calls:
            del call.alternatives[len(call.ids) :]
        for row, alternatives in self.sampler.alternatives(logits, draws).items():
            calls[row].alternatives.append(alternatives)

    def _collect(self, batch: EngineBatch, ids: list[int], logprobs: list[float]) -> list[Outcome]:
        """Append the sampled ids of a step to their replies; return the calls that end."""
        drawing = batch.drawing
        ended: list[Outcome] = []
        row = 0
        while row < len(drawing):
            call = drawing[row]
            if batch.drafted and call.draft:
                end = row + 1 + len(call.draft)
                result = self._append_draft(call, ids[row:end], logprobs[row:end])
            else:
                end = row + 1
                result = self._append(call, ids[row], logprobs[row])

            if isinstance(result, str):
                ended.append((call, self._generation(call, result)))
            elif result is not None:
                ended.append((call, result))
            row = end
        self._end(ended)
        return ended

    def _append(self, call: ActiveCall, id_: int, logprob: float) -> Finish | EngineError | None:
        """Append a sampled id to its reply; return why the call ends, None if it continues."""
        if not math.isfinite(logprob):
            return self._no_distribution(call, logprob)
        slot = call.slot
        assert slot is not None
        ids = call.ids
        ids.append(id_)
        call.logprobs.append(logprob)

        if id_ in call.request.stop_ids:
            return "stop"
        stop_text = call.request.stop_text
        if stop_text is not None:
            try:
                if stop_text.completes(ids):
                    return "stop"
            except Exception as error:  # from the request's own decoder
                return caused_error(_step_fault(call, error), error)
        if len(ids) >= call.limit:
            return "length"
        slot.seq.append(id_)
        return None

    def _append_draft(
        self, call: ActiveCall, ids: list[int], logprobs: list[float]
    ) -> Finish | EngineError | None:
        """Append sampled ids as far as the draft was correct; return why the call ends, None if it
        continues."""
        slot = call.slot
        drafter = call.drafter
        assert slot is not None
        assert drafter is not None

        draft = call.draft
        ended = None
        accepted = 0
        for number, (id_, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if not math.isfinite(logprob):
                # The draft may lack a distribution and leak through the mask: retry without it.
                slot.valid -= 1
                break
            is_drafted = number < len(draft) and draft[number] == id_
            accepted += is_drafted
            ended = self._append(call, id_, logprob)
            if ended is not None or not is_drafted:
                break
            slot.valid += 1

        drafter.record_accepted(accepted)
        self.drafted += len(draft)
        self.accepted += accepted
        if not all(map(math.isfinite, logprobs)):
            drafter.stop()
            self.model.cache.zero_from(slot.index, slot.valid)
        return ended

    def _end(self, ended: list[Outcome]) -> None:
        """Stop running these calls."""
        if not ended:
            return
        calls = {call for call, _ in ended}
        self.running = [call for call in self.running if call not in calls]
        for call in calls:
            self._free_slot(call)

    def _no_distribution(self, call: ActiveCall, logprob: float) -> EngineError:
        """Return the error for a row without a distribution; zero its slot, since non-finite values
        pass through masks."""
        slot = call.slot
        assert slot is not None
        self.model.cache.zero(slot.index)
        slot.valid = 0
        return EngineError(
            f"session {call.request.session!r}: logprob {logprob} at position {call.position} of "
            f"the reply; the weights of version {self.versions[call.adapter]} overflow, or every "
            "id is banned: check the last training updates"
        )

    def _free_slot(self, call: ActiveCall) -> None:
        slot = call.slot
        assert slot is not None
        if not call.ids and slot.valid:
            # Nothing was sampled from these positions, so they are not known to be finite.
            with torch.inference_mode():
                self.model.cache.zero(slot.index)
            slot.valid = 0
        self.table.finish(slot)
        self._changed = True

    def _generation(self, call: ActiveCall, finish: Finish) -> Generation:
        generation = Generation(
            call.ids, call.logprobs, finish, self.versions[call.adapter], call.cached
        )
        generation.alternatives = call.alternatives[: len(call.ids)]
        if call.drafter is not None:
            generation.drafted = call.drafter.drafted
            generation.accepted = call.drafter.accepted

        # The experts of the ids that the caller does not have yet.
        recording = self.model.recording
        slot = call.slot
        if recording and slot is not None and ROUTES in call.request.extras:
            start = call.request.routes_from
            if slot.valid > start:
                routes = recording.read(slot.index, start, slot.valid)
                generation.extras = {ROUTES: (start, routes)}
        return generation


def _own(name: str, adapter: int) -> str:
    """Return the name of a session or group among those of all adapters, whose caches must not be
    shared."""
    return f"{adapter}\0{name}" if adapter else name


def _step_fault(call: ActiveCall, error: Exception) -> str:
    return f"session {call.request.session!r}: the local engine failed in a step: {error!r:.500}"

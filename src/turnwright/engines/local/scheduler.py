"""Continuous batching: each step computes one token of every running reply and all new
prompts, in one pass."""

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

    Scheduling never changes a reply: a row's results do not depend on its
    slot, its step or other rows.
    """

    def __init__(
        self, model: EngineModel, sampler: Sampler, slots: int, speculate: int = 0, version: int = 0
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.speculate = speculate
        """Maximum number of ids drafted after one."""
        self.drafted = self.accepted = 0
        """Number of drafted ids, and of those that were sampled."""
        self.failed_steps = 0
        """Number of consecutive failed steps."""
        self.versions = [version] * (1 + (model.adapters.count if model.adapters else 0))
        """Policy version of the model, and of each adapter."""
        self.table = SlotTable(slots)
        self.waiting: deque[ActiveCall] = deque()
        self.running: list[ActiveCall] = []
        self.seen = ImageFeatureCache(model.tower) if model.tower is not None else None
        """Cache of image features, for a vision model."""
        self._changed = False
        """Whether a waiting call may fit now."""

    @property
    def busy(self) -> bool:
        """Whether there is work for a step."""
        return bool(self.running or self.waiting)

    def submit(self, call: ActiveCall) -> None:
        """Queue a call; it starts in the next step with space for it."""
        self.waiting.append(call)
        self._changed = True

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
        ended = [call for call in (*self.running, *self.waiting) if adapter in (None, call.adapter)]
        self.running = [call for call in self.running if adapter not in (None, call.adapter)]
        self.waiting = deque(call for call in self.waiting if adapter not in (None, call.adapter))
        for call in ended:
            if call.slot is not None:
                self._free_slot(call)
        return [(call, self._generation(call, "abort")) for call in ended]

    def clear_cache(self, adapter: int | None = None) -> None:
        """Drop everything computed from replaced weights, or by an adapter, of which no call may be
        running. Adapters change no image features."""
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
        """Restart the calls of a failed step one at a time; the call that fails
        alone ends with the error.

        Draws depend on neither other calls nor the cache, so the remaining
        calls get the same replies.
        """
        suspects, self.running = self.running, []
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
        if self.speculate:
            self._draft()
        if self.model.fused is not None:
            batch = EngineBatch()
            batch.decode(self.running)
        else:
            batch = self._decode_rows_in_place()
        if self.seen is not None:
            batch.media = batch.rotary_positions()
            self._encode_images(
                self.seen, self.model.rows_per_step(len(batch.tokens)) - len(batch.tokens)
            )
        self._feed(batch)
        self._end(batch.broken)
        if not batch.tokens:
            return batch.broken
        logits = self.model.forward(
            batch.tokens, batch.positions, batch.slots, batch.runs, batch.keep, batch.media
        )
        if not batch.drawing:
            return batch.broken
        ids, logprobs = self.sampler(logits, batch.draws())
        return [*batch.broken, *self._collect(batch, ids, logprobs)]

    def _draft(self) -> None:
        """Draft for the running replies, within the rows of one pass."""
        space = self.model.rows_per_step(0) - len(self.running)
        for call in self.running:
            if call.ids:
                if call.drafter is None:
                    call.drafter = Drafter(call.prompt, self.speculate)
                # The last id of a reply is sampled but not fed, so a draft is one shorter
                # than the remaining ids.
                max_draft = min(space, call.limit - len(call.ids) - 1)
                excluded = (call.request.banned_ids, call.request.stop_ids)
                space -= len(call.drafter.propose(call.ids, max_draft, excluded))

    def _decode_rows_in_place(self) -> EngineBatch:
        """Batch with each reply's row at the index of its slot; replies with a draft follow
        and attend like prompts."""
        decoding = [call for call in self.running if call.ids and not call.draft]
        self._compact(decoding)
        places = sorted(
            ((call.slot, call) for call in decoding if call.slot), key=lambda pair: pair[0].index
        )
        block = self.model.slots_per_call
        if len(places) > block:
            self._sort([slot for slot, _ in places])
            places.sort(key=lambda pair: pair[0].index)
        rows = places[-1][0].index + 1 if places else 0
        batch = EngineBatch([0] * rows, [0] * rows, [self.model.cache.scratch] * rows)
        runs = batch.runs
        for slot, call in places:
            index, valid = slot.index, slot.valid
            batch.tokens[index], batch.positions[index], batch.slots[index] = (
                slot.seq[valid],
                valid,
                index,
            )
            batch.drawing.append(call)
            batch.keep.append(index)
            slot.valid = valid + 1
            if runs and index < runs[-1].first // block * block + block:
                runs[-1].count = index + 1 - runs[-1].first
                runs[-1].length = max(runs[-1].length, valid + 1)
            else:
                runs.append(AttentionRun(index, 1, valid + 1))
        for call in self.running:
            if call.draft:
                first = len(batch.tokens)
                batch.decode((call,))
                runs.append(
                    AttentionRun(
                        first, len(batch.tokens) - first, batch.positions[-1] + 1, batch.slots[-1]
                    )
                )
        return batch

    def _admit(self) -> None:
        """Place waiting calls in order of arrival; a call that cannot be placed does
        not block later ones."""
        self._changed = False
        if not self.waiting:
            return
        at_once = min(len(self.table.slots), len(self.running) + len(self.waiting))
        self.model.reserve(at_once, max(len(call.prompt) + call.limit for call in self.waiting))
        left: deque[ActiveCall] = deque()
        copies: list[Move] = []
        kept: list[tuple[int, int]] = []
        for call in self.waiting:
            if self.running and (call.alone or self.running[0].alone):
                left.append(call)
                continue
            request = call.request
            names = (
                _own(request.session, call.adapter),
                request.group and _own(request.group, call.adapter),
            )
            placement = self.table.place(call.keys, *names)
            if placement is None:
                left.append(call)
                continue
            slot = placement.slot
            self.model.reserve(slot.index + 1, len(call.prompt) + call.limit)
            if placement.donor is not None:
                copies.append((placement.donor.index, slot.index, placement.start, placement.keep))
            kept.append((slot.index, placement.keep))
            slot.call, call.slot, call.cached = call, slot, placement.keep
            if self.model.adapters is not None:
                self.model.adapters.assign(slot.index, call.adapter)
            self.running.append(call)
        self.waiting = left
        self.model.cache.copy(copies)
        self.model.cache.rewind(kept)

    def _compact(self, decoding: list[ActiveCall]) -> None:
        """Move the highest rows into gaps when too many rows in between are idle."""
        allowed = len(self.running) + max(8, len(self.running) // 4)
        high = sorted((call.slot for call in decoding if call.slot), key=lambda slot: -slot.index)
        if not high or high[0].index < allowed:
            return
        gaps = [slot for slot in self.table.slots[: high[0].index] if slot.call is None]
        self._swap(
            [(slot, gap) for gap, slot in zip(gaps, high, strict=False) if slot.index > gap.index]
        )

    def _sort(self, rows: list[Slot]) -> None:
        """Swap the two rows that are furthest from the order of their lengths."""
        highest, worst, pair = rows[0], SORT_THRESHOLD, None
        for slot in rows:
            if slot.valid >= highest.valid:
                highest = slot
            elif highest.valid - slot.valid > worst:
                worst, pair = highest.valid - slot.valid, (highest, slot)
        if pair is not None:
            self._swap([pair])

    def _swap(self, pairs: Sequence[tuple[Slot, Slot]]) -> None:
        """Exchange pairs of different slots."""
        self.model.cache.swap(
            [(one.index, other.index) for one, other in pairs],
            max(slot.valid for slot in chain(*pairs)),
        )
        for one, other in pairs:
            if self.model.adapters is not None:
                self.model.adapters.swap(one.index, other.index)
            self.table.swap(one, other)

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
            if batch.media is not None:
                try:
                    self._add_media(call, batch, start, start + count)
                except (TurnwrightError, OSError) as error:
                    fault = (
                        f"session {call.request.session!r}: an image of its context is "
                        f"unavailable: {error}"
                    )
                    batch.broken.append((call, caused_error(fault, error)))
                    continue
            batch.runs.append(AttentionRun(len(batch.tokens), count, start + count, slot.index))
            batch.tokens += call.prompt[start : start + count]
            batch.positions += range(start, start + count)
            batch.slots += [slot.index] * count
            slot.valid = start + count
            space -= count
            if slot.valid == len(call.prompt):
                batch.drawing.append(call)
                batch.keep.append(len(batch.tokens) - 1)
            self._changed = True  # a sibling may wait for this

    def _encode_images(self, seen: ImageFeatureCache, space: int) -> None:
        """Encode the images of this step together."""
        wanted: list[tuple[Media, int]] = []
        for call in self.running:
            if call.ids or call.slot is None or space <= 0:
                continue
            start = call.slot.valid
            end = min(len(call.prompt), start + space)
            space -= end - start
            if call.view is not None:
                wanted += [
                    (media, size) for media, size, _, _ in call.view.features_between(start, end)
                ]
        seen.prepare(wanted)

    def _add_media(self, call: ActiveCall, batch: EngineBatch, start: int, end: int) -> None:
        """Append the rotary positions and image features of the next rows of a context."""
        media, view, first = batch.media, call.view, len(batch.tokens)
        assert media is not None
        assert self.seen is not None
        rotary = None
        if view is not None:
            found = view.features_between(start, end)
            features = [
                self.seen.features(media, size).take(part) for media, size, _, part in found
            ]
            for (_, _, pads, _), rows in zip(found, features, strict=True):
                media.feature_rows += [first + at - start for at in pads]
                media.features.append(rows)
            rotary = view.rotary_positions(start, end)
        for number, row in enumerate(media.rotary_positions):
            row += range(start, end) if rotary is None else rotary[number].tolist()

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
            if result is not None:
                ended.append(
                    (call, self._generation(call, result) if isinstance(result, str) else result)
                )
            row = end
        self._end(ended)
        return ended

    def _append(self, call: ActiveCall, id_: int, logprob: float) -> Finish | EngineError | None:
        """Append a sampled id to its reply; return why the call ends, None if it continues."""
        if not math.isfinite(logprob):
            return self._no_distribution(call, logprob)
        slot, request, ids = call.slot, call.request, call.ids
        assert slot is not None
        ids.append(id_)
        call.logprobs.append(logprob)
        try:
            if id_ in request.stop_ids or (
                request.stop_text is not None and request.stop_text.completes(ids)
            ):
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
        """Append sampled ids as far as the draft was correct; return why the call ends,
        None if it continues."""
        slot, drafter, draft, ended, taken = call.slot, call.drafter, call.draft, None, 0
        assert slot is not None
        assert drafter is not None
        for number, (id_, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            if not math.isfinite(logprob):
                # The draft may lack a distribution and leak through the mask: retry without it.
                slot.valid -= 1
                break
            drawn = number < len(draft) and draft[number] == id_
            taken += drawn
            ended = self._append(call, id_, logprob)
            if ended is not None or not drawn:
                break
            slot.valid += 1
        drafter.record_accepted(taken)
        self.drafted += len(draft)
        self.accepted += taken
        if not all(map(math.isfinite, logprobs)):
            drafter.stop()
            self.model.cache.zero_from(slot.index, slot.valid)
        return ended

    def _end(self, ended: list[Outcome]) -> None:
        if ended:
            over = {call for call, _ in ended}
            self.running = [call for call in self.running if call not in over]
            for call in over:
                self._free_slot(call)

    def _no_distribution(self, call: ActiveCall, logprob: float) -> EngineError:
        """Return the error for a row without a distribution; zero its slot, since non-finite
        values pass through masks."""
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
        made = Generation(call.ids, call.logprobs, finish, self.versions[call.adapter], call.cached)
        if call.drafter is not None:
            made.drafted, made.accepted = call.drafter.drafted, call.drafter.accepted
        recording, slot, start = self.model.recording, call.slot, call.request.routes_from
        if recording and slot is not None and ROUTES in call.request.extras and slot.valid > start:
            made.extras = {ROUTES: (start, recording.read(slot.index, start, slot.valid))}
        return made


def _own(name: str, adapter: int) -> str:
    """Return the name of a session or group among those of all adapters, whose
    caches must not be shared."""
    return f"{adapter}\0{name}" if adapter else name


def _step_fault(call: ActiveCall, error: Exception) -> str:
    return f"session {call.request.session!r}: the local engine failed in a step: {error!r:.500}"

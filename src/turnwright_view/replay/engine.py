"""Recorded engine: answers recorded prompts with recorded replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwright.config.recorded import rules_of
from turnwright.engines import Generation, Request
from turnwright.engines.protocols import check_generation
from turnwright.envs.user_code import RemoteException
from turnwright.errors import BackendContractError, EngineError
from turnwright.records.journal import RecordedAttempt, RecordedEpisode, RecordedTurn
from turnwright.records.serialization import NO_LOGPROB
from turnwright.types import (
    ROUTES,
    EpisodeKey,
    ExpertRoutes,
    Failure,
    MediaPlacement,
    StopReason,
    ids_with_media_keys,
    placements_between,
)
from turnwright_view.replay.compare import EpisodeDifference

MAX_IDS = 8
"""Ids listed in a difference."""
MAX_DELAY_S, DELAY_CHECKS = 1.0, 20
"""Seconds that an answer waits for calls recorded before it, and the number of checks in that time.
Checks are counted rather than seconds, so that a suspended or busy machine matters little."""


class ReplayDiverged(BackendContractError):
    """A request that the record does not have; the episode ends."""


class RecordedEngineError(RemoteException, EngineError):
    """A recorded engine failure."""


class RecordedTimeout(RecordedEngineError):
    """A recorded engine failure at the deadline of the episode."""

    over = True


class RecordedFatalError(RemoteException, BackendContractError):
    """A recorded engine failure that is never retried."""


@dataclass(slots=True)
class _Call:
    """One recorded answer of the engine: a span of a reply."""

    span: int
    turn: RecordedTurn | None
    """None for a reply during which the engine failed for good."""
    first: bool
    last: bool
    number: int
    """Index of its turn within the attempt."""
    agent: str
    failed: int = 0
    """Number of failures before the answer so far."""
    asked: bool = False
    answered: bool = False


class _Session:
    """Calls of one recorded attempt."""

    def __init__(
        self, episode: RecordedEpisode, attempt: RecordedAttempt, failures: list[Failure]
    ) -> None:
        self.episode, self.failures = episode, failures
        self.last_attempt = attempt is episode.attempts[-1]
        calls = [
            _Call(
                span,
                one,
                span == one.turn.spans[0],
                span == one.turn.spans[-1],
                one.number,
                one.turn.agent,
            )
            for one in attempt.turns
            for span in one.turn.spans
        ]
        self.calls = sorted(
            [*calls, *self._incomplete_replies(attempt)], key=lambda call: call.span
        )
        self.by_call = sorted(
            self.calls, key=lambda call: call.turn.call if call.turn is not None else call.span
        )
        self.owners: dict[int, _Call] = {}
        """The call that added a prompt span to the record: the first whose path has it."""
        for call in self.by_call:
            for index, _ in episode.trajectory.chain(episode.trajectory.spans[call.span].parent):
                if not episode.trajectory.spans[index].sampled:
                    self.owners.setdefault(index, call)
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.row = 0
        """Consecutive failures."""

    def _incomplete_replies(self, attempt: RecordedAttempt) -> Iterator[_Call]:
        """Yield calls of replies that never became turns."""
        spans, number = (
            self.episode.trajectory.spans,
            next(n for n, one in enumerate(self.episode.attempts) if one is attempt),
        )
        ends = [one.first_span for one in self.episode.attempts[number + 1 :]] or [len(spans)]
        complete = {span for one in attempt.turns for span in one.turn.spans}
        for index in range(attempt.first_span, ends[0]):
            if spans[index].sampled and index not in complete:
                yield _Call(index, None, False, False, len(attempt.turns), spans[index].agent)

    def answers_empty(self, left: int) -> bool:
        """Return whether the remaining failures belong to a later call: no call fails more
        often than the rules allow.

        The record does not have which calls of a reply failed. An empty, interrupted answer makes
        the loop call once more.
        """
        max_retries = max(1, rules_of(self.episode.settings.get("rules", {})).retries.engine)
        empty, self.row = self.row > 0 and left > 0 and left % max_retries == 0, self.row + 1
        if empty or not left:
            self.row = 0
        return empty

    def context(self, call: _Call) -> tuple[list[int], Sequence[MediaPlacement]]:
        """Return the prompt ids of a call, and their media."""
        span = self.episode.trajectory.spans[call.span]
        placed = placements_between(
            self.episode.trajectory.media_placements(span.parent), 0, span.start
        )
        return self.episode.trajectory.path(span.parent)[: span.start], placed

    def keyed_context(self, call: _Call) -> list[int]:
        """Return the prompt ids of a call, with media keys."""
        return ids_with_media_keys(*self.context(call))

    def is_next(self, call: _Call) -> bool:
        """Return whether everything recorded before an answer has happened."""
        before = all(other.answered for other in self.calls if other.span < call.span)
        return before and all(
            other.asked for span, other in self.owners.items() if span < call.span
        )

    def notify(self) -> None:
        """Wake calls that are next."""
        for call in self.calls:
            if call.span in self.waiting and self.is_next(call):
                _wake(self.waiting[call.span])


class RecordedEngine:
    """Engine that repeats a record: the same ids, logprobs, versions and failures for the
    same prompts of an episode.

    A prompt that is not in the record raises `ReplayDiverged`, which ends the episode;
    `differences` has the first difference. Concurrent calls are answered in the recorded order.
    """

    version = 0

    def __init__(
        self,
        episodes: Iterable[RecordedEpisode],
        pieces: Callable[[Sequence[int]], list[str]],
        context: int | None = None,
    ):
        """`pieces` returns the text of each id, for differences; `context` is the limit
        of the recorded engine."""
        self.context = context
        self.differences: dict[EpisodeKey, EpisodeDifference] = {}
        self._pieces = pieces
        self._sessions: dict[str, _Session] = {}
        for episode in episodes:
            failures = [
                failure for failure in episode.trajectory.failures if failure.phase == "generate"
            ]
            key = episode.key
            for number, attempt in enumerate(episode.attempts):
                session = replace(key, attempt=key.attempt + number).session
                self._sessions[session] = _Session(episode, attempt, failures)

    async def generate(self, request: Request) -> Generation:
        """Return the recorded answer; raise `ReplayDiverged` if there is none, `EngineError` if the
        record has a failure."""
        session = self._sessions.get(request.session)
        if session is None:
            raise ReplayDiverged(f"the record has no episode {request.session}")
        call = self._find(session, request)
        if self._fails(session, call) if call is not None else self._ends(session, request):
            return Generation([], [], "abort", self.version)
        if call is None:
            if session.episode.settings.get("play"):
                # The call may have been running when the function returned.
                await asyncio.sleep(MAX_DELAY_S)
            raise self._no_recorded_call(session, request)
        call.asked, session.row = True, 0
        session.notify()
        await self._wait_for_turn(session, call)
        generation = _generation(session, call, request)
        try:
            _check_length(generation, request)
            check_generation(generation, request, "the record")
        except BackendContractError as fault:
            turn = call.number
            where, size = f"turn {turn + 1}", f"{len(generation.ids)} ids"
            difference = EpisodeDifference(
                session.episode.key, "reply", where, size, str(fault), turn
            )
            raise self._diverged(session, difference) from None
        call.answered = True
        session.notify()
        return generation

    def release(self, session: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def _find(self, session: _Session, request: Request) -> _Call | None:
        """Return the first recorded call with this prompt that was not requested yet."""
        ids = ids_with_media_keys(request.ids, request.media)
        calls = (call for call in session.by_call if not call.asked and call.agent == request.agent)
        return next((call for call in calls if session.keyed_context(call) == ids), None)

    def _fails(self, session: _Session, call: _Call) -> bool:
        """Raise the next failure recorded before a reply; return whether an
        empty answer precedes it."""
        if (
            not call.first
            or call.turn is None
            or call.failed >= call.turn.tries
            or not session.failures
        ):
            return False
        if session.answers_empty(call.turn.tries - call.failed):
            return True
        call.failed += 1
        raise _as_error(session.failures.pop(0))

    async def _wait_for_turn(self, session: _Session, call: _Call) -> None:
        """Wait for calls recorded before this one.

        The wait is bounded, since changed code may not make them.
        """
        if session.is_next(call) or session.episode.key in self.differences:
            return
        turn = session.waiting[call.span] = asyncio.get_running_loop().create_future()
        try:
            for _ in range(DELAY_CHECKS):
                await asyncio.wait((turn,), timeout=MAX_DELAY_S / DELAY_CHECKS)
                if turn.done():
                    break
        finally:
            del session.waiting[call.span]

    def _ends(self, session: _Session, request: Request) -> bool:
        """Raise the failure that ended the episode, if one did; return whether an
        empty answer precedes it."""
        error, stop = session.episode.trajectory.error, session.episode.trajectory.stop
        asked = all(call.asked or call.agent != request.agent for call in session.calls)
        if not asked or not session.last_attempt or error is None or error.phase != "generate":
            return False
        if session.answers_empty(len(session.failures)):
            return True
        raise (
            _as_error(session.failures.pop(0))
            if session.failures
            else _as_error(error, stop is StopReason.WALL_CLOCK)
        )

    def _no_recorded_call(self, session: _Session, request: Request) -> EngineError:
        """Return the error for a request that matches no recorded call."""
        open_calls = [c for c in session.calls if not c.asked and c.agent == request.agent]
        if not open_calls:
            turns, stop = len(session.episode.attempts[-1].turns), session.episode.trajectory.stop
            recorded = f"{turns} turns, {stop}"
            difference = EpisodeDifference(
                session.episode.key, "turns", "", recorded, "one more turn", turns
            )
            return self._diverged(session, difference)
        ids = ids_with_media_keys(request.ids, request.media)
        nearest, at = open_calls[0], -1
        for call in open_calls:
            known = session.keyed_context(call)
            same = next(
                (n for n, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b),
                min(len(known), len(ids)),
            )
            if same > at:
                nearest, at = call, same
        return self._diverged(session, self._prompt_difference(session, request, at, nearest))

    def _prompt_difference(
        self, session: _Session, request: Request, at: int, call: _Call
    ) -> EpisodeDifference:
        """Return the difference between a prompt and the nearest recorded one, from id `at` on."""
        known, placed = session.context(call)
        old, new = tuple(known[at : at + MAX_IDS]), tuple(request.ids[at : at + MAX_IDS])
        texts = format_ids(old, self._pieces), format_ids(new, self._pieces)
        if old == new:  # equal ids with different media
            texts = _image(placed, at), _image(request.media, at)
        trajectory, turn = session.episode.trajectory, call.number
        links = [
            trajectory.spans[index]
            for index, used in trajectory.chain(trajectory.spans[call.span].parent)
        ]
        origin = next((str(span.origin) for span in reversed(links) if span.start <= at), "")
        where = f"turn {turn + 1}, id {at}" + (f" ({origin})" if origin and at < len(known) else "")
        return EpisodeDifference(
            session.episode.key, "prompt", where, *texts, turn, at, old, new, origin
        )

    def _diverged(self, session: _Session, difference: EpisodeDifference) -> ReplayDiverged:
        self.differences.setdefault(session.episode.key, difference)
        for turn in session.waiting.values():
            _wake(turn)
        return ReplayDiverged(
            f"{difference.what} {difference.where}: {difference.recorded} was recorded, now "
            f"{difference.now}"
        )


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def format_ids(ids: Sequence[int], pieces: Callable[[Sequence[int]], list[str]]) -> str:
    """Format ids and their text for a table."""
    if not ids:
        return "nothing more"
    try:
        text = "".join(pieces(ids))
    except Exception:  # ids of another tokenizer
        text = "?"
    return f"{text!r} {list(ids)}"


def _image(placed: Sequence[MediaPlacement], at: int) -> str:
    block = next((block for block in placed if block.start <= at < block.end), None)
    return (
        f"an image {block.media.key[:12]} of grid {block.grid}" if block is not None else "no image"
    )


def _as_error(failure: Failure, timed_out: bool = False) -> EngineError:
    if failure.type in ("BackendContractError", "StaleWeights"):
        return RecordedFatalError(failure)
    return RecordedTimeout(failure) if timed_out else RecordedEngineError(failure)


def _generation(session: _Session, call: _Call, request: Request) -> Generation:
    """Return the recorded answer to a call."""
    trajectory, turn = session.episode.trajectory, call.turn.turn if call.turn is not None else None
    span = trajectory.spans[call.span]
    ids, logprobs = list(span.ids), list(span.logprobs or ())
    ends = turn is not None and call.last
    finish: Any = turn.finish if turn is not None and ends else "abort"
    generation = Generation(
        ids, logprobs, finish, span.version or 0, turn.cached if turn is not None and ends else 0
    )
    if None in logprobs:
        masked = "logprobs_masked" in trajectory.metrics or span.untrained == NO_LOGPROB
        generation.missing_logprobs = "mask" if masked else "recompute"
    if call.first and call is session.calls[0] and session.last_attempt:
        drafted, accepted = (
            int(trajectory.metrics.get(name, 0)) for name in ("draft_ids", "draft_ids_accepted")
        )
        generation.drafted, generation.accepted = drafted, accepted
    if turn is not None and ROUTES in request.extras and ROUTES in turn.extras:
        start, routes = turn.extras[ROUTES]
        end = (
            start + len(routes)
            if call.last
            else min(start + len(routes), len(request.ids) + len(ids) - 1)
        )
        if start <= request.routes_from < end:
            known: ExpertRoutes = routes.slice(request.routes_from - start, end - start)
            generation.extras = {ROUTES: (request.routes_from, known)}
    return generation


def _check_length(generation: Generation, request: Request) -> None:
    """Raise `BackendContractError` if an engine with this token limit would have
    sampled more or fewer ids."""
    size, max_tokens = len(generation.ids), request.max_tokens
    if generation.finish == "length" and size != max_tokens:
        raise BackendContractError(f"a limit of {max_tokens}, where the reply was truncated")
    if size > max_tokens:
        raise BackendContractError(f"a limit of {max_tokens}, under the length of the reply")

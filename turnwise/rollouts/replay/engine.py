"""A recorded engine: what it sampled in a run, given again to whoever asks the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.engines import Generation, Request
from turnwise.engines.base import check_generation
from turnwise.envs.user_code import RemoteException
from turnwise.errors import BackendContractError, EngineError
from turnwise.records.journal import RecordedAttempt, RecordedEpisode, RecordedTurn
from turnwise.records.serialization import NO_LOGPROB
from turnwise.rollouts.replay.compare import EpisodeDifference
from turnwise.types import (
    ROUTES,
    EpisodeKey,
    ExpertRoutes,
    Failure,
    MediaPlacement,
    StopReason,
    ids_with_media_keys,
    placements_between,
)

SHOWN = 8
"""Ids that are shown of a difference."""
PATIENCE_S, LOOKS = 1.0, 20
"""How long an answer is held back until calls were made that came before it in the record, and in how many looks: one look is
one however late it comes, so that what a stopped or busy machine takes away counts for little."""


class ReplayDiverged(BackendContractError):
    """The loop asks a recorded engine for something that the record does not hold; the episode ends."""


class RecordedEngineError(RemoteException, EngineError):
    """A failure of an engine that stands in the record."""


class RecordedTimeout(RecordedEngineError):
    """The same where the time of the whole episode was over."""

    over = True


class RecordedFatalError(RemoteException, BackendContractError):
    """The same of one that is never asked about again."""


@dataclass(slots=True)
class _Call:
    """One answer of the engine: a span of a reply."""

    span: int
    told: RecordedTurn | None
    """None for what was sampled before the engine failed for good in the middle of a reply."""
    first: bool
    last: bool
    number: int
    """The turn that it is of, within the attempt."""
    agent: str
    failed: int = 0
    """How often it was answered by a failure."""
    asked: bool = False
    answered: bool = False


class _Session:
    """The calls of one attempt."""

    def __init__(self, told: RecordedEpisode, attempt: RecordedAttempt, failures: list[Failure]) -> None:
        self.told, self.failures = told, failures
        self.last_attempt = attempt is told.attempts[-1]
        calls = [
            _Call(span, one, span == one.turn.spans[0], span == one.turn.spans[-1], one.number, one.turn.agent)
            for one in attempt.turns
            for span in one.turn.spans
        ]
        self.calls = sorted([*calls, *self._torn(attempt)], key=lambda call: call.span)
        self.by_call = sorted(self.calls, key=lambda call: call.told.call if call.told is not None else call.span)
        self.owners: dict[int, _Call] = {}
        """Whose question brought a span of a prompt into the record: of the first call on whose path it is."""
        for call in self.by_call:
            for index, _ in told.trajectory.chain(told.trajectory.spans[call.span].parent):
                if not told.trajectory.spans[index].sampled:
                    self.owners.setdefault(index, call)
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.row = 0
        """Failures in a row."""

    def _torn(self, attempt: RecordedAttempt) -> Iterator[_Call]:
        """What was sampled of replies that never became turns."""
        spans, number = self.told.trajectory.spans, next(n for n, one in enumerate(self.told.attempts) if one is attempt)
        ends = [one.first_span for one in self.told.attempts[number + 1 :]] or [len(spans)]
        whole = {span for one in attempt.turns for span in one.turn.spans}
        for index in range(attempt.first_span, ends[0]):
            if spans[index].sampled and index not in whole:
                yield _Call(index, None, False, False, len(attempt.turns), spans[index].agent)

    def pauses(self, left: int) -> bool:
        """Whether the failures that are left are of a later call: none failed more often than the rules let it be made again.

        Which calls of a reply failed is not recorded; an empty answer that was interrupted makes the loop call once more.
        """
        most = max(1, self.told.settings.get("rules", {}).get("max_engine_retries_per_turn", 1))
        pause, self.row = self.row > 0 and left > 0 and left % most == 0, self.row + 1
        if pause or not left:
            self.row = 0
        return pause

    def context(self, call: _Call) -> tuple[list[int], list[MediaPlacement]]:
        """What the engine received for a call."""
        span = self.told.trajectory.spans[call.span]
        placed = placements_between(self.told.trajectory.media_placements(span.parent), 0, span.start)
        return self.told.trajectory.path(span.parent)[: span.start], list(placed)

    def is_next(self, call: _Call) -> bool:
        """Whether all that came before an answer has happened."""
        before = all(other.answered for other in self.calls if other.span < call.span)
        return before and all(other.asked for span, other in self.owners.items() if span < call.span)

    def notify(self) -> None:
        """Wake who waited until it is their turn."""
        for call in self.calls:
            if call.span in self.waiting and self.is_next(call):
                _wake(self.waiting[call.span])


class RecordedEngine:
    """Answers as it is recorded: the same ids, logprobs, versions and failures to the same prompts of the same episode.

    A prompt that is not in the record is a `ReplayDiverged`, which ends the episode; `differences` has where it differs first.
    Calls that ran at the same time are answered in the recorded order.
    """

    version = 0

    def __init__(
        self, episodes: Iterable[RecordedEpisode], pieces: Callable[[Sequence[int]], list[str]], context: int | None = None
    ):
        """
        Args:
            episodes: as `told_steps` gives them.
            pieces: the text of each id, for telling of differences.
            context: most ids of a prompt and its reply, of the engine that was recorded.
        """
        self.context = context
        self.differences: dict[EpisodeKey, EpisodeDifference] = {}
        self._pieces = pieces
        self._sessions: dict[str, _Session] = {}
        for told in episodes:
            failures = [failure for failure in told.trajectory.failures if failure.phase == "generate"]
            key = told.key
            for number, attempt in enumerate(told.attempts):
                name = f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt + number}"
                self._sessions[name] = _Session(told, attempt, failures)

    async def generate(self, request: Request) -> Generation:
        """The recorded answer.

        Raises:
            Diverged: when there is none to this request.
            EngineError: when that is what the record says.
        """
        session = self._sessions.get(request.session)
        if session is None:
            raise ReplayDiverged(f"the record has no episode {request.session}")
        call = self._find(session, request)
        if self._fails(session, call) if call is not None else self._ends(session, request):
            return Generation([], [], "abort", self.version)
        if call is None:
            if session.told.settings.get("play"):  # maybe it was under way when the function returned, and is cut off again
                await asyncio.sleep(PATIENCE_S)
            raise self._unknown(session, request)
        call.asked, session.row = True, 0
        session.notify()
        await self._turn_of(session, call)
        generation = _generation(session, call, request)
        try:
            _check_length(generation, request)
            check_generation(generation, request, "the record")
        except BackendContractError as fault:
            turn = call.number
            difference = EpisodeDifference(
                session.told.key, "reply", f"turn {turn + 1}", f"{len(generation.ids)} ids", str(fault), turn
            )
            raise self._diverged(session, difference) from None
        call.answered = True
        session.notify()
        return generation

    def release(self, session: str) -> None:
        """Nothing is kept that was not there before."""

    async def close(self) -> None:
        """Nothing runs."""

    def _find(self, session: _Session, request: Request) -> _Call | None:
        """The call with this prompt that was made first, of those that nobody made yet."""
        ids = ids_with_media_keys(request.ids, request.media) if request.media else list(request.ids)
        for call in session.by_call:
            if call.asked or call.agent != request.agent:
                continue
            known, placed = session.context(call)
            if (ids_with_media_keys(known, placed) if placed else known) == ids:
                return call
        return None

    def _fails(self, session: _Session, call: _Call) -> bool:
        """Fail as often as the record says before a reply; whether an empty answer comes in between."""
        if not call.first or call.told is None or call.failed >= call.told.tries or not session.failures:
            return False
        if session.pauses(call.told.tries - call.failed):
            return True
        call.failed += 1
        raise _again(session.failures.pop(0))

    async def _turn_of(self, session: _Session, call: _Call) -> None:
        """Wait until it is this call's turn; not for ever, since the code that makes the others may be another by now."""
        if session.is_next(call) or session.told.key in self.differences:
            return
        turn = session.waiting[call.span] = asyncio.get_running_loop().create_future()
        try:
            for _ in range(LOOKS):
                await asyncio.wait((turn,), timeout=PATIENCE_S / LOOKS)
                if turn.done():
                    break
        finally:
            del session.waiting[call.span]

    def _ends(self, session: _Session, request: Request) -> bool:
        """Fail for good, where that is what the record says; whether an empty answer comes in between."""
        error, stop = session.told.trajectory.error, session.told.trajectory.stop
        asked = all(call.asked or call.agent != request.agent for call in session.calls)
        if not asked or not session.last_attempt or error is None or error.phase != "generate":
            return False
        if session.pauses(len(session.failures)):
            return True
        raise _again(session.failures.pop(0)) if session.failures else _again(error, over=stop is StopReason.WALL_CLOCK)

    def _unknown(self, session: _Session, request: Request) -> EngineError:
        """What becomes of a request that no turn of the record answers."""
        open_calls = [c for c in session.calls if not c.asked and c.agent == request.agent]
        if not open_calls:
            turns, stop = len(session.told.attempts[-1].turns), session.told.trajectory.stop
            said = "one more turn"
            return self._diverged(
                session, EpisodeDifference(session.told.key, "turns", "", f"{turns} turns, {stop}", said, turns)
            )
        ids = ids_with_media_keys(request.ids, request.media) if request.media else list(request.ids)
        best: tuple[int, _Call, list[int], list[int]] | None = None
        for call in open_calls:
            known, placed = session.context(call)
            seen = ids_with_media_keys(known, placed) if placed else known
            same = next((n for n, (a, b) in enumerate(zip(seen, ids, strict=False)) if a != b), min(len(seen), len(ids)))
            if best is None or same > best[0]:
                best = same, call, known, seen
        assert best is not None
        return self._diverged(session, self._prompt(session, request, best[0], best[1], best[2]))

    def _prompt(self, session: _Session, request: Request, at: int, call: _Call, known: list[int]) -> EpisodeDifference:
        """Where a prompt leaves the one that is nearest to it in the record."""
        old, new = tuple(known[at : at + SHOWN]), tuple(request.ids[at : at + SHOWN])
        shown = format_ids(old, self._pieces), format_ids(new, self._pieces)
        if old == new:  # the ids are alike, so it is what they show
            shown = _image(session.context(call)[1], at), _image(request.media, at)
        trajectory, turn = session.told.trajectory, call.number
        links = [trajectory.spans[index] for index, used in trajectory.chain(trajectory.spans[call.span].parent)]
        origin = next((str(span.origin) for span in reversed(links) if span.start <= at), "")
        where = f"turn {turn + 1}, id {at}" + (f" ({origin})" if origin and at < len(known) else "")
        return EpisodeDifference(session.told.key, "prompt", where, *shown, turn, at, old, new, origin)

    def _diverged(self, session: _Session, difference: EpisodeDifference) -> ReplayDiverged:
        self.differences.setdefault(session.told.key, difference)
        for turn in session.waiting.values():
            _wake(turn)
        return ReplayDiverged(f"{difference.what} {difference.where}: {difference.recorded} was recorded, now {difference.now}")


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def format_ids(ids: Sequence[int], pieces: Callable[[Sequence[int]], list[str]]) -> str:
    """Ids and what they say, for a table."""
    if not ids:
        return "nothing more"
    try:
        said = "".join(pieces(ids))
    except Exception:  # ids of another tokenizer
        said = "?"
    return f"{said!r} {list(ids)}"


def _image(placed: Sequence[MediaPlacement], at: int) -> str:
    block = next((block for block in placed if block.start <= at < block.end), None)
    return f"an image {block.media.key[:12]} of grid {block.grid}" if block is not None else "no image"


def _again(failure: Failure, over: bool = False) -> EngineError:
    if failure.type in ("BackendContractError", "StaleWeights"):
        return RecordedFatalError(failure)
    return RecordedTimeout(failure) if over else RecordedEngineError(failure)


def _generation(session: _Session, call: _Call, request: Request) -> Generation:
    """What the record has of a call's answer."""
    trajectory, turn = session.told.trajectory, call.told.turn if call.told is not None else None
    span = trajectory.spans[call.span]
    ids, logprobs = list(span.ids), list(span.logprobs or ())
    whole = turn is not None and call.last
    finish: Any = turn.finish if turn is not None and whole else "abort"
    generation = Generation(ids, logprobs, finish, span.version or 0, turn.cached if turn is not None and whole else 0)
    if None in logprobs:
        masked = "logprobs_masked" in trajectory.metrics or span.untrained == NO_LOGPROB
        generation.missing_logprobs = "mask" if masked else "recompute"
    if call.first and call is session.calls[0] and session.last_attempt:
        drafted, accepted = (int(trajectory.metrics.get(name, 0)) for name in ("draft_ids", "draft_ids_accepted"))
        generation.drafted, generation.accepted = drafted, accepted
    if turn is not None and ROUTES in request.extras and ROUTES in turn.extras:
        start, routes = turn.extras[ROUTES]
        end = start + len(routes) if call.last else min(start + len(routes), len(request.ids) + len(ids) - 1)
        if start <= request.routes_from < end:
            told: ExpertRoutes = routes.slice(request.routes_from - start, end - start)
            generation.extras = {ROUTES: (request.routes_from, told)}
    return generation


def _check_length(generation: Generation, request: Request) -> None:
    """Hold the limit of a request to that under which the answer was cut off.

    Raises:
        BackendContractError: when the engine would have sampled more, or less.
    """
    had, most = len(generation.ids), request.max_tokens
    if generation.finish == "length" and had != most:
        raise BackendContractError(f"a limit of {most}, where the reply was cut off")
    if had > most:
        raise BackendContractError(f"a limit of {most}, under the length of the reply")

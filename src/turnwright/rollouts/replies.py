"""Replies: sampled, taken from a record, read as messages, and split into spans.

`ReplySampler.sample` is the way of one reply: request, call, spans onto the path, and another call
where the engine aborted. `read_reply` parses its ids, `reply_spans` splits them where the policy
version changes or a logprob is missing.

What the turn becomes is in `Recorder.generate`; which calls are made again is in `Retries.engine`,
and what an engine returns besides ids and logprobs in `EngineExtras`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from turnwright.engines import Engine, Generation, Request, Sampling, StopText
from turnwright.engines.protocols import check_generation
from turnwright.errors import EngineError, class_name, words
from turnwright.records.journal import RecordedTurn
from turnwright.records.serialization import NO_LOGPROB
from turnwright.renderers import Renderer
from turnwright.renderers.renderer import Decode
from turnwright.rollouts.budget import Budget
from turnwright.rollouts.conversation import ConversationPath
from turnwright.rollouts.counts import add_counts
from turnwright.rollouts.engine_extras import EngineExtras
from turnwright.rollouts.episode_settings import EpisodeSettings
from turnwright.rollouts.resume import recorded_generation
from turnwright.rollouts.retries import Retries
from turnwright.rollouts.timeouts import Deadline, EpisodePlace
from turnwright.types import (
    Alternatives,
    ContentPart,
    Message,
    Origin,
    SamplingDistribution,
    Span,
    Trajectory,
    Turn,
)

_MAX_ABORTS = 100
"""Consecutive aborted calls without a new id, after which the engine counts as broken."""


@lru_cache(maxsize=64)
def distribution_of(sampling: Sampling, banned_ids: frozenset[int]) -> SamplingDistribution:
    """Return one shared object for all replies with equal sampling parameters."""
    return SamplingDistribution(**sampling.settings(), banned_ids=banned_ids)


class ReplyOrder(NamedTuple):
    """What a reply is sampled with."""

    budget: int
    """Maximum ids."""
    sampling: Sampling
    distribution: SamplingDistribution
    """That of `sampling`, without the renderer's banned ids."""
    stop: StopText | None
    stop_ids: frozenset[int]
    seed: int
    deadline: Deadline


class PathReply(NamedTuple):
    """A reply whose ids are on its path."""

    message: Message
    ids: Sequence[int]
    spans: tuple[int, ...]
    """Spans that hold the ids, by index."""
    generation: Generation
    """The last call's, with the extras and the draft counts of all calls."""
    failed_calls: int
    """Calls that failed and were made again."""


class _CallResult(NamedTuple):
    """What one call added to a reply."""

    generation: Generation
    ids: Sequence[int]
    """All ids of the reply so far, those of earlier calls included."""
    message: Message | Exception
    """What the ids say; an exception where a parser failed on them."""


class ReplySampler:
    """Samples the replies of one attempt after another of an episode.

    An engine may abort a call, to update its weights for instance. The reply goes on in another
    call, after the ids that it has, so one reply may have ids of several policy versions.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        engine: Engine,
        renderer: Renderer,
        settings: EpisodeSettings,
        budget: Budget,
        retries: Retries,
        place: EpisodePlace | None = None,
    ) -> None:
        """Calls wait for a `place`, if given."""
        key = trajectory.key
        self._trajectory = trajectory
        self._engine = engine
        self._renderer = renderer
        self._settings = settings
        self._budget = budget
        self._retries = retries
        self._place = place
        self._group = f"{key.phase}/{key.step}/{key.task}"
        self.extras = EngineExtras(settings.want, trajectory)
        self.session = key.session
        """Session of the attempt in the engine."""
        self.calls = 0
        """Calls of the episode so far, recorded ones included."""

    def begin_attempt(self, session: str) -> None:
        """Sample in another session of the engine from now on."""
        self.session = session

    @property
    def waits(self) -> bool:
        """Whether a call waits for a place."""
        return self._place is not None and self._place.waiting > 0

    async def sample(self, path: ConversationPath, order: ReplyOrder) -> PathReply:
        """Sample one reply onto a path, continuing aborted calls.

        Raises `EngineError` where the engine goes on aborting without a new id, and what a parser
        raised, once everything sampled is on the path.
        """
        spans: list[int] = []
        ids: Sequence[int] = ()
        extras: dict[str, tuple[int, Any]] = {}
        aborts = 0
        failed_calls = 0
        drafted = 0
        accepted = 0
        turn = len(self._trajectory.turns)  # now: other agents may add turns while this one waits
        path.calls += 1

        while True:
            # Call the engine, again where it fails and the rules allow it.
            extras_from = self.extras.first_unknown(path, extras)
            request = self._request(path, order, ids, extras_from)
            self.calls += 1
            call = partial(self._call, request, ids, path, order)
            try:
                result = await call()
            except (EngineError, TimeoutError) as error:
                result, tries = await self._retries.engine(error, call, order.deadline.wait, turn)
                failed_calls += tries
            generation = result.generation
            ids = result.ids

            # Record what it sampled.
            self.extras.add(extras, generation, extras_from)
            drafted += generation.drafted
            accepted += generation.accepted
            if generation.ids:
                sampled_spans = reply_spans(
                    generation, self._trajectory, len(path.ids), path.agent, order.distribution
                )
                spans += [path.add(span) for span in sampled_spans]
                self._budget.used += len(generation.ids)

            # Go on where it aborted the call.
            if generation.finish != "abort":
                break
            if len(ids) >= order.budget:
                generation.finish = "length"
                break
            aborts = 0 if generation.ids else aborts + 1
            if aborts > _MAX_ABORTS:
                raise EngineError(
                    f"the engine aborted {aborts} calls in a row without sampling anything"
                )

        if isinstance(result.message, Exception):
            raise result.message
        generation.drafted = drafted
        generation.accepted = accepted
        return PathReply(result.message, ids, tuple(spans), generation, failed_calls)

    def repeat(
        self, path: ConversationPath, recorded: RecordedTurn, stop: StopText | None
    ) -> PathReply:
        """Add the spans of a recorded turn to a path, as if its reply had just been sampled."""
        path.calls += 1
        self.calls = max(self.calls, recorded.call + 1)

        start = len(path.ids)
        spans: list[int] = []
        for span in recorded.sampled:
            spans.append(path.add(replace(span, start=len(path.ids))))
        ids = path.ids[start:]
        self._budget.used += len(ids)

        generation = recorded_generation(self._trajectory, recorded, ids)
        message = read_reply(self._renderer, path, stop, ids)
        return PathReply(message, ids, tuple(spans), generation, recorded.tries)

    def _request(
        self, path: ConversationPath, order: ReplyOrder, ids: Sequence[int], extras_from: int
    ) -> Request:
        """Return the request for the rest of a reply that has `ids`."""
        stop = order.stop
        if stop and ids:
            stop = stop.continued_after(ids)
        return Request(
            ids=path.ids,
            max_tokens=order.budget - len(ids),
            stop_ids=order.stop_ids,
            seed=order.seed,
            session=self.session,
            group=self._group,
            call=self.calls,
            sampling=order.sampling,
            agent=path.agent,
            media=path.placed,
            messages=path.messages,
            banned_ids=self._renderer.banned_ids,
            extras=self._settings.want,
            routes_from=extras_from,
            min_version=self._settings.min_version,
            stop_text=stop,
            reply_position=len(ids),
            tools=path.tools,
            alternatives=self._settings.alternatives,
        )

    async def _call(
        self, request: Request, previous: Sequence[int], path: ConversationPath, order: ReplyOrder
    ) -> _CallResult:
        """Call the engine once, for the rest of a reply that has the `previous` ids.

        The exception of a parser takes the place of its message, because what was sampled is
        recorded first. Other exceptions become an `EngineError`, a timeout excepted.
        """
        engine = self._engine
        place = self._place
        if place is not None and not place.try_enter():
            await place.enter(len(self._trajectory.turns), order.deadline)
        try:
            try:
                seconds = self._settings.limits.generate_s
                generation = await order.deadline.wait(engine.generate(request), seconds)
            finally:
                if place is not None:
                    place.leave()
            check_generation(generation, request, type(engine).__name__)

            ids = [*previous, *generation.ids] if previous else generation.ids
            message: Message | Exception
            try:
                message = read_reply(self._renderer, path, order.stop, ids)
            except Exception as error:
                # Fails on ids that the tokenizer does not have: the engine's fault.
                self._renderer.decode(ids)
                message = error
            return _CallResult(generation, ids, message)
        except (EngineError, TimeoutError):
            raise
        except Exception as error:
            name = type(engine).__name__
            raise EngineError(f"{name}: {class_name(error)}: {words(error)}") from error


# What a reply says


def reply_text(renderer: Renderer, ids: Sequence[int], *, inside: bool = False) -> str:
    """Decode all text of sampled ids, thinking and calls included, without the end token.

    `inside` is as of `reply_decoder`.
    """
    if ids and ids[-1] in renderer.stop_ids:
        ids = ids[:-1]
    return reply_decoder(renderer, inside)(ids)


def reply_decoder(renderer: Renderer, inside: bool) -> Decode:
    """Return a function that decodes sampled ids.

    With `inside`, they continue a message and keep a leading space.
    """
    if not inside:
        return renderer.decode

    # Tokenizers with marks of word starts drop the space that a text begins with, so the ids are
    # decoded after a letter.
    letter = renderer.encode("x")
    skip = len(renderer.decode(letter))
    return lambda ids: renderer.decode([*letter, *ids])[skip:]


def read_reply(
    renderer: Renderer, path: ConversationPath, stop: StopText | None, ids: Sequence[int]
) -> Message:
    """Parse a reply, its text cut after a stop text; the ids are unchanged."""
    inside = path.inserted is not None
    if stop is None and not inside:
        return renderer.parse(ids, path.tools)

    text = reply_text(renderer, ids, inside=inside)
    if stop is not None:
        text = stop.cut(text)
    return renderer.parse(ids, path.tools, text, path.thinking if inside else None)


def grown_message(
    trajectory: Trajectory,
    renderer: Renderer,
    path: ConversationPath,
    turn: Turn,
    stop: StopText | None,
) -> Message:
    """Return the message that a turn's reply continued, with the reply, cut after a stop text."""
    start = trajectory.reply_start(turn.parent)
    message_ids = path.ids[start:]
    text = reply_text(renderer, message_ids)
    if stop is not None:
        reply = reply_text(renderer, path.ids[turn.context :], inside=True)
        text = text[: len(text) - len(reply) + len(stop.cut(reply))]

    # Calls in inserted text, or answered before, stay plain text.
    calls = turn.reply.tool_calls
    message = renderer.parse(message_ids, path.tools if calls else (), text)
    return with_placed_media(replace(message, tool_calls=calls), renderer, path, start)


def with_placed_media(
    message: Message, renderer: Renderer, path: ConversationPath, start: int
) -> Message:
    """Return a reply with the images and videos that were placed since position `start`.

    They take the place of their text in its content.
    """
    placed = [block for block in path.placed if block.start >= start]
    if not placed or not isinstance(message.content, str) or renderer.vision is None:
        return message

    placeholders = renderer.vision.placeholder_ids
    block_starts = [block.start for block in placed]
    parts: list[ContentPart] = []
    rest = message.content
    after_last = start
    for block in placed:
        # A template may write marks around the placeholder.
        first = block.start
        while first > after_last and path.ids[first - 1] in placeholders:
            first -= 1
        end = block.end
        while end < len(path.ids) and path.ids[end] in placeholders and end not in block_starts:
            end += 1

        # Text that is not there is in the reasoning, or was cut by a stop text.
        block_text = renderer.decode(path.ids[first:end])
        before, separator, after = rest.partition(block_text)
        if separator:
            parts += [before, block.media]
            rest = after
            after_last = end

    if not parts:
        return message
    parts.append(rest)
    return replace(message, content=tuple(part for part in parts if part != ""))


# Its spans


class _Run(NamedTuple):
    """Ids of a reply, from `begin` to `end`, that are all trained or all untrained."""

    begin: int
    end: int
    untrained: str | None
    """The reason; None where they are trained."""


def reply_spans(
    generation: Generation,
    trajectory: Trajectory,
    start: int,
    agent: str,
    sampling: SamplingDistribution | None = None,
) -> Sequence[Span]:
    """Split a reply into spans of one policy version, all trained or all untrained, in order.

    With `missing_logprobs = "mask"`, ids without a logprob become untrained spans. Ids without a
    logprob are counted in the episode's metrics, as `logprobs_masked` or `logprobs_recomputed`.
    `start` is the number of ids before the reply on its path. The caller sets the spans' parents.
    """
    ids = tuple(generation.ids)
    logprobs = tuple(generation.logprobs)
    alternatives = tuple(map(_shortened, generation.alternatives))

    # Where a logprob is an error, `check_generation` has refused replies without.
    lacks_logprobs = generation.missing_logprobs != "error" and None in logprobs
    if not lacks_logprobs and not generation.later_versions:
        return (
            Span(
                origin=Origin.MODEL,
                ids=ids,
                start=start,
                logprobs=logprobs,
                version=generation.version,
                agent=agent,
                sampling=sampling,
                cache_version=generation.cache_version,
                alternatives=alternatives,
            ),
        )

    runs = _runs(generation, trajectory) if lacks_logprobs else [_Run(0, len(ids), None)]
    spans = []
    for run in runs:
        for begin, end, version in _by_version(generation, run):
            spans.append(
                Span(
                    origin=Origin.MODEL,
                    ids=ids[begin:end],
                    start=start + begin,
                    logprobs=logprobs[begin:end],
                    version=version,
                    agent=agent,
                    untrained=run.untrained,
                    sampling=sampling,
                    cache_version=generation.cache_version,
                    alternatives=alternatives[begin:end],
                )
            )
    return spans


def _shortened(alternatives: Alternatives) -> Alternatives:
    """Return alternatives with logprobs of 7 digits: those of float32, in half as many bytes."""
    return tuple((id_, float(f"{logprob:.7g}")) for id_, logprob in alternatives)


def _by_version(generation: Generation, run: _Run) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, policy version) for the parts of a run that one version sampled."""
    changes = [(0, generation.version), *generation.later_versions, (len(generation.ids), 0)]
    for (version_begin, version), (version_end, _) in pairwise(changes):
        begin = max(run.begin, version_begin)
        end = min(run.end, version_end)
        if begin < end:
            yield begin, end, version


def _runs(generation: Generation, trajectory: Trajectory) -> Iterator[_Run]:
    """Yield the runs of a reply that lacks logprobs, and count the ids without one."""
    is_missing = [logprob is None for logprob in generation.logprobs]
    if generation.missing_logprobs != "mask":
        add_counts(trajectory, "logprobs_recomputed", by=sum(is_missing))
        yield _Run(0, len(is_missing), None)
        return

    add_counts(trajectory, "logprobs_masked", by=sum(is_missing))
    begin = 0
    for masked, run in groupby(is_missing):
        end = begin + len(list(run))
        yield _Run(begin, end, NO_LOGPROB if masked else None)
        begin = end

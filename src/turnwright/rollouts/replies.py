"""Replies: sampled in as many calls as it takes, or taken from a record; their
text, and their spans."""

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
        """Sample one reply onto a path, continuing aborted calls."""
        spans: list[int] = []
        ids: Sequence[int] = ()
        extras: dict[str, tuple[int, Any]] = {}
        aborts = failed = drafted = accepted = 0
        turn = len(self._trajectory.turns)  # now: other agents may add turns while this one waits
        path.calls += 1

        while True:
            extras_from = self.extras.first_unknown(path, extras)
            request = self._request(path, order, ids, extras_from)
            self.calls += 1
            call = partial(self._call, request, ids, path, order)
            try:
                generation, ids, reply = await call()
            except (EngineError, TimeoutError) as error:
                again = await self._retries.engine(error, call, order.deadline.wait, turn)
                (generation, ids, reply), tries = again
                failed += tries

            self.extras.add(extras, generation, extras_from)
            drafted += generation.drafted
            accepted += generation.accepted
            if generation.ids:
                start = len(path.ids)
                sampled = reply_spans(
                    generation, self._trajectory, start, path.agent, order.distribution
                )
                spans += [path.add(span) for span in sampled]
                self._budget.used += len(generation.ids)

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

        if isinstance(reply, Exception):
            raise reply
        generation.drafted, generation.accepted = drafted, accepted
        return PathReply(reply, ids, tuple(spans), generation, failed)

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
        return Request(
            path.ids,
            order.budget - len(ids),
            order.stop_ids,
            order.seed,
            self.session,
            self._group,
            self.calls,
            order.sampling,
            path.agent,
            path.placed,
            path.messages,
            self._renderer.banned_ids,
            self._settings.want,
            extras_from,
            min_version=self._settings.min_version,
            stop_text=stop.continued_after(ids) if stop and ids else stop,
            reply_position=len(ids),
            tools=path.tools,
        )

    async def _call(
        self, request: Request, previous: Sequence[int], path: ConversationPath, order: ReplyOrder
    ) -> tuple[Generation, Sequence[int], Message | Exception]:
        """Call the engine once.

        Return its generation, the reply's ids so far (`previous` included), and the parsed reply.
        The exception of a parser takes the place of its reply, because what was sampled is recorded
        first.
        """
        engine, place = self._engine, self._place
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
            try:
                return generation, ids, read_reply(self._renderer, path, order.stop, ids)
            except Exception as error:
                # Fails on ids that the tokenizer does not have: the engine's fault.
                self._renderer.decode(ids)
                return generation, ids, error
        except (EngineError, TimeoutError):
            raise
        except Exception as error:
            name = type(engine).__name__
            raise EngineError(f"{name}: {class_name(error)}: {words(error)}") from error


def reply_text(renderer: Renderer, ids: Sequence[int], *, inside: bool = False) -> str:
    """Decode all text of sampled ids, thinking and calls included, without the end token;
    `inside` as `reply_decoder`."""
    return reply_decoder(renderer, inside)(
        ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids
    )


def reply_decoder(renderer: Renderer, inside: bool) -> Decode:
    """Return a function that decodes sampled ids; with `inside`, they continue a message and
    keep a leading space."""
    if not inside:
        return renderer.decode
    before = renderer.encode(
        "x"
    )  # tokenizers with word-start marks drop the space that a text begins with
    skip = len(renderer.decode(before))
    return lambda ids: renderer.decode([*before, *ids])[skip:]


def read_reply(
    renderer: Renderer, path: ConversationPath, stop: StopText | None, ids: Sequence[int]
) -> Message:
    """Parse a reply, its text cut after a stop text; the ids are unchanged."""
    inside = path.inserted is not None
    if stop is None and not inside:
        return renderer.parse(ids, path.tools)
    text = reply_text(renderer, ids, inside=inside)
    return renderer.parse(
        ids, path.tools, text if stop is None else stop.cut(text), path.thinking if inside else None
    )


def grown_message(
    trajectory: Trajectory,
    renderer: Renderer,
    path: ConversationPath,
    turn: Turn,
    stop: StopText | None,
) -> Message:
    """Return the message that a turn's reply continued, with the reply, cut after a stop text."""
    start = trajectory.reply_start(turn.parent)
    body = path.ids[start:]
    text = reply_text(renderer, body)
    if stop is not None:
        reply = reply_text(renderer, path.ids[turn.context :], inside=True)
        text = text[: len(text) - len(reply) + len(stop.cut(reply))]

    # Calls in inserted text, or answered before, stay plain text.
    calls = turn.reply.tool_calls
    message = renderer.parse(body, path.tools if calls else (), text)
    return with_placed_media(replace(message, tool_calls=calls), renderer, path, start)


def with_placed_media(
    message: Message, renderer: Renderer, path: ConversationPath, start: int
) -> Message:
    """Return a reply with the images and videos placed since position `start` in its content,
    in place of their text."""
    placed = [block for block in path.placed if block.start >= start]
    if not placed or not isinstance(message.content, str) or renderer.vision is None:
        return message

    placeholders = renderer.vision.placeholder_ids
    parts: list[ContentPart] = []
    rest = message.content
    after_last = start
    for block in placed:
        # A template may write marks around the placeholder.
        first, end = block.start, block.end
        while first > after_last and path.ids[first - 1] in placeholders:
            first -= 1
        while (
            end < len(path.ids)
            and path.ids[end] in placeholders
            and end not in [other.start for other in placed]
        ):
            end += 1
        before, found, after = rest.partition(renderer.decode(path.ids[first:end]))
        if found:  # else it is in the reasoning, or cut by a stop text
            parts += [before, block.media]
            rest, after_last = after, end
    return (
        replace(message, content=tuple(part for part in (*parts, rest) if part != ""))
        if parts
        else message
    )


def reply_spans(
    generation: Generation,
    trajectory: Trajectory,
    start: int,
    agent: str,
    sampling: SamplingDistribution | None = None,
) -> Sequence[Span]:
    """Split a reply into spans of one policy version, all trained or all untrained, in order; the
    caller sets their parents.

    With `missing_logprobs = "mask"`, ids without a logprob become untrained spans;
    otherwise the reply is one span. Ids without a logprob are counted in the episode's
    metrics, as `logprobs_masked` or `logprobs_recomputed`. `start` is the number of ids
    before the reply on its path.
    """
    ids, logprobs = tuple(generation.ids), tuple(generation.logprobs)
    cache = generation.cache_version
    incomplete = (
        generation.missing_logprobs != "error" and None in logprobs
    )  # `check_generation` refused others
    if not incomplete and not generation.later_versions:
        return (
            Span(
                Origin.MODEL,
                ids,
                -1,
                start,
                logprobs,
                generation.version,
                (),
                agent,
                None,
                0,
                sampling,
                cache,
            ),
        )
    runs = _runs(generation, trajectory) if incomplete else ((0, len(ids), None),)
    spans = []
    for begin, end, untrained in runs:
        for first, last, version in _by_version(generation, begin, end):
            span = Span(
                Origin.MODEL,
                ids[first:last],
                -1,
                start + first,
                logprobs[first:last],
                version,
                (),
                agent,
            )
            span.untrained, span.sampling, span.cache_version = untrained, sampling, cache
            spans.append(span)
    return spans


def _by_version(generation: Generation, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, policy version) for runs of one version within a run of a reply's ids."""
    starts = [(0, generation.version), *generation.later_versions, (len(generation.ids), 0)]
    for (first, version), (last, _) in pairwise(starts):
        if max(begin, first) < min(end, last):
            yield max(begin, first), min(end, last), version


def _runs(generation: Generation, trajectory: Trajectory) -> Iterator[tuple[int, int, str | None]]:
    """Yield (begin, end, untrained reason) for runs of ids in a reply that lacks logprobs."""
    missing = [logprob is None for logprob in generation.logprobs]
    mask = generation.missing_logprobs == "mask"
    add_counts(trajectory, "logprobs_masked" if mask else "logprobs_recomputed", by=sum(missing))
    if not mask:
        yield 0, len(missing), None
        return
    begin = 0
    for is_missing, run in groupby(missing):
        end = begin + sum(1 for _ in run)
        yield begin, end, NO_LOGPROB if is_missing else None
        begin = end

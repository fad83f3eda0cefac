"""State of an episode's conversation: paths and their ids, budget, engine extras, parsed replies, counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

from turnwright.config import Limits
from turnwright.engines import Generation, StopText
from turnwright.engines.ids import GrowingIds
from turnwright.errors import BackendContractError, LimitReached, UsageError
from turnwright.records.serialization import NO_LOGPROB
from turnwright.renderers import Branch, Extend, Renderer, SampledReply
from turnwright.renderers.history import ConversationState, History
from turnwright.renderers.renderer import Decode
from turnwright.types import (
    ROUTES,
    ContentPart,
    ExpertRoutes,
    MediaPlacement,
    Message,
    Origin,
    SamplingDistribution,
    Span,
    StopReason,
    Tools,
    Trajectory,
    Turn,
)

Mark = tuple[int, int, list[Message], list[SampledReply], int, tuple[Message, ...], str | None, int | None]


@dataclass(slots=True, eq=False)
class ConversationPath:
    """A growing conversation: the end of a path through the spans, and its ids as one list."""

    leaf: int
    ids: list[int]
    messages: list[Message]
    tools: Tools
    agent: str
    seed: int
    """Seeds this path's calls, independently of the calls of other paths."""
    history: History = "append"
    """History mode of the next prompt. A path that began with bare ids is appended to: their messages are unknown."""
    replies: list[SampledReply] = field(default_factory=list)
    """Sampled messages, in order, with their positions on the path."""
    placed: list[MediaPlacement] = field(default_factory=list)
    """Placements of images and videos among the ids."""
    new_messages: tuple[Message, ...] = field(init=False)
    """Messages since the last reply."""
    turn: int = -1
    """The turn of the last reply, -1 before the first."""
    inserted: str | None = None
    """Text the environment inserted inside the last message, if the next reply continues it."""
    kept: int | None = None
    """Number of ids of the last reply before that text."""
    thinking: bool = False
    """Whether the last message had an open thinking block at that point."""
    calls: int = 0

    def __post_init__(self) -> None:
        self.ids = GrowingIds(self.ids)
        self.new_messages = tuple(self.messages)

    @property
    def state(self) -> ConversationState:
        """What the next prompt is rendered from."""
        return ConversationState(self.messages, self.replies, self.ids, self.tools, self.placed)

    def mark(self) -> Mark:
        """Return the state before a reply, for `rewind`."""
        messages, replies = list(self.messages), list(self.replies)
        return self.leaf, len(self.ids), messages, replies, self.turn, self.new_messages, self.inserted, self.kept

    def rewind(self, mark: Mark) -> None:
        """Restore the state before a reply. The call count is not restored, so the next reply differs."""
        self.leaf, size, messages, replies, self.turn, self.new_messages, self.inserted, self.kept = mark
        self.truncate(size)
        self.messages, self.replies = list(messages), list(replies)

    def truncate(self, size: int) -> None:
        """Keep the first `size` ids; callers choose positions outside of image blocks."""
        del self.ids[size:]
        while self.placed and self.placed[-1].end > size:
            block = self.placed.pop()
            assert block.start >= size, f"{size} ids would cut the image block from {block.start} to {block.end}"

    def append(self, ids: Sequence[int], media: Sequence[MediaPlacement] = ()) -> None:
        """Append ids, with media among them."""
        if media:
            self.placed += [block.shifted(len(self.ids)) for block in media]
        self.ids.extend(ids)


KNOWN = frozenset([ROUTES])
"""Supported extras."""


def parse_extras(names: Iterable[str]) -> frozenset[str]:
    """Return extras by name; raise `UsageError` for an unknown one."""
    found = frozenset([names] if isinstance(names, str) else names)
    if unknown := sorted(found - KNOWN):
        raise UsageError(f"want names {unknown[0]!r}; supported extras: {', '.join(sorted(KNOWN))}")
    return found


class EngineExtras:
    """Extras requested for one episode, and the known positions of each span.

    Known positions are stored by span, so a branch from a shared trunk does not request them again.
    """

    def __init__(self, want: frozenset[str], trajectory: Trajectory) -> None:
        self.want = want
        self._trajectory = trajectory
        self._known_positions: dict[int, int] = {}
        """By span: number of first positions whose expert routes are known."""

    def first_unknown(self, path: ConversationPath, reply_extras: Mapping[str, tuple[int, Any]]) -> int:
        """Return the first position of a path with unknown routes; `reply_extras` are those of the reply's earlier calls."""
        if ROUTES not in self.want:
            return 0
        if ROUTES in reply_extras:
            start, routes = reply_extras[ROUTES]
            return start + len(routes)
        position = 0
        for index, used in self._trajectory.chain(path.leaf):
            known = min(self._known_positions.get(index, 0), used)
            position = self._trajectory.spans[index].start + known
            if known < used:
                break
        return min(position, len(path.ids))

    def add(self, reply_extras: dict[str, tuple[int, Any]], generation: Generation, asked_from: int) -> None:
        """Merge the extras of one call into those of earlier calls of the same reply; known positions are dropped.

        `generation.extras` then holds the merged extras. Draft ids are counted in the metrics.
        """
        if not (reply_extras or generation.extras or generation.drafted):
            return
        for name, (start, reported) in generation.extras.items():
            if name != ROUTES:
                reply_extras[name] = (start, reported)
                continue
            routes = ExpertRoutes.of(reported)
            new = routes.slice(asked_from - start, len(routes))
            if not len(new):
                continue
            try:
                reply_extras[name] = (
                    (reply_extras[name][0], reply_extras[name][1].concat(new)) if name in reply_extras else (asked_from, new)
                )
            except ValueError as error:
                raise BackendContractError(f"the engine returned {error} in one reply") from error
        generation.extras = reply_extras
        if generation.drafted:
            add_counts(self._trajectory, "draft_ids", by=generation.drafted)
            add_counts(self._trajectory, "draft_ids_accepted", by=generation.accepted)

    def recorded(self, turn: Turn, generation: Generation) -> None:
        """Store the extras of a recorded turn, and update the known positions of its spans."""
        if not generation.extras:
            return
        turn.extras = dict(generation.extras)
        if ROUTES in turn.extras:
            start, routes = turn.extras[ROUTES]
            end = start + len(routes)
            for index, used in self._trajectory.chain(turn.spans[-1] if turn.spans else turn.prompt):
                known = min(used, end - self._trajectory.spans[index].start)
                if known > self._known_positions.get(index, 0):
                    self._known_positions[index] = known


def reply_text(renderer: Renderer, ids: Sequence[int], *, inside: bool = False) -> str:
    """Decode all text of sampled ids, thinking and calls included, without the end token; `inside` as `reply_decoder`."""
    return reply_decoder(renderer, inside)(ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids)


def read_reply(renderer: Renderer, path: ConversationPath, stop: StopText | None, ids: Sequence[int]) -> Message:
    """Parse a reply, its text cut after a stop text; the ids are unchanged."""
    inside = path.inserted is not None
    if stop is None and not inside:
        return renderer.parse(ids, path.tools)
    text = reply_text(renderer, ids, inside=inside)
    return renderer.parse(ids, path.tools, text if stop is None else stop.cut(text), path.thinking if inside else None)


def extend_message(
    trajectory: Trajectory, renderer: Renderer, path: ConversationPath, turn: Turn, stop: StopText | None
) -> None:
    """Set the extended message of a turn whose reply continued its message."""
    body = path.ids[trajectory.reply_start(turn.parent) :]
    text = reply_text(renderer, body)
    if stop is not None:
        reply = reply_text(renderer, path.ids[turn.context :], inside=True)
        text = text[: len(text) - len(reply) + len(stop.cut(reply))]
    calls = turn.reply.tool_calls  # calls in inserted text, or answered before, stay plain text
    grown = replace(renderer.parse(body, path.tools if calls else (), text), tool_calls=calls)
    turn.grown = with_placed_media(grown, renderer, path, trajectory.reply_start(turn.parent))
    turn.inserted, turn.kept = path.inserted, path.kept
    path.inserted = path.kept = None


def with_placed_media(message: Message, renderer: Renderer, path: ConversationPath, start: int) -> Message:
    """Return a reply with the images and videos placed since position `start` in its content, in place of their text."""
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
        while end < len(path.ids) and path.ids[end] in placeholders and end not in [other.start for other in placed]:
            end += 1
        before, found, after = rest.partition(renderer.decode(path.ids[first:end]))
        if found:  # else it is in the reasoning, or cut by a stop text
            parts += [before, block.media]
            rest, after_last = after, end
    return replace(message, content=tuple(part for part in (*parts, rest) if part != "")) if parts else message


def reply_decoder(renderer: Renderer, inside: bool) -> Decode:
    """Return a function that decodes sampled ids; with `inside`, they continue a message and keep a leading space."""
    if not inside:
        return renderer.decode
    before = renderer.encode("x")  # tokenizers with word-start marks drop the space that a text begins with
    skip = len(renderer.decode(before))
    return lambda ids: renderer.decode([*before, *ids])[skip:]


class Budget:
    """Tokens and turns that an episode has used of its limits, and tokens reserved by running calls."""

    def __init__(self, limits: Limits, *, max_turns: int | None = None, context: int | None = None) -> None:
        """`max_turns` of the environment and `context` of the engine apply in addition to the limits."""
        self._limits = limits
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        self.context = min((c for c in (limits.context, context) if c is not None), default=None)
        """Maximum ids of prompt and reply; None is unlimited."""
        self.used = 0
        """Tokens sampled and observed after opening prompts."""
        self.rejected = 0
        """Replies rejected as invalid and sampled again."""
        self._running_calls = 0
        self._reserved = 0  # tokens that running calls may sample

    def limit_turns(self, max_turns: int) -> None:
        """Lower the turn limit to `max_turns` if it is higher."""
        self._turns = min(self._turns, max_turns)

    def reset(self) -> None:
        """Restore the complete budget for another attempt."""
        self.used = self.rejected = 0

    def left(self, turns: int, context: int) -> tuple[int, StopReason | None]:
        """Return the token budget of the next reply, after `turns` replies and `context` ids, and the limit that sets it."""
        limits = self._limits
        if turns - self.rejected + self._running_calls >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        budget, cause = limits.turn_tokens, StopReason.TURN_LENGTH
        if limits.episode_tokens is not None:
            left = limits.episode_tokens - self.used - self._reserved
            if left < budget:
                budget, cause = left, StopReason.EPISODE_TOKENS
        if self.context is not None and self.context - context < budget:
            budget, cause = self.context - context, StopReason.CONTEXT
        if budget < 1:
            raise LimitReached(cause, f"no token is left for a reply after {context} tokens of context")
        return budget, cause

    def check_observation(self, turns: int, tokens: int) -> None:
        """Raise `LimitReached` if so many observed tokens, after `turns` replies, are more than the episode has left."""
        limit = self._limits.episode_tokens
        if limit is None or self.used + self._reserved + tokens <= limit:
            return
        if turns - self.rejected + self._running_calls >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        raise LimitReached(StopReason.EPISODE_TOKENS, f"{tokens} observed tokens are over limits.episode_tokens = {limit}")

    def reserve(self, tokens: int) -> None:
        """Reserve the tokens that a starting call may sample."""
        self._running_calls += 1
        self._reserved += tokens

    def release(self, tokens: int) -> None:
        """Release the reservation of a finished call; its sampled tokens count as used."""
        self._running_calls -= 1
        self._reserved -= tokens


def reply_spans(
    generation: Generation, trajectory: Trajectory, start: int, agent: str, sampling: SamplingDistribution | None = None
) -> Sequence[Span]:
    """Split a reply into spans of one policy version, all trained or all untrained, in order; the caller sets their parents.

    With `missing_logprobs = "mask"`, ids without a logprob become untrained spans; otherwise the reply is one span. Ids
    without a logprob are counted in the episode's metrics, as `logprobs_masked` or `logprobs_recomputed`. `start` is the number
    of ids before the reply on its path.
    """
    ids, logprobs = tuple(generation.ids), tuple(generation.logprobs)
    cache = generation.cache_version
    incomplete = generation.missing_logprobs != "error" and None in logprobs  # `check_generation` refused others
    if not incomplete and not generation.later_versions:
        return (Span(Origin.MODEL, ids, -1, start, logprobs, generation.version, (), agent, None, 0, sampling, cache),)
    runs = _runs(generation, trajectory) if incomplete else ((0, len(ids), None),)
    spans = []
    for begin, end, untrained in runs:
        for first, last, version in _by_version(generation, begin, end):
            span = Span(Origin.MODEL, ids[first:last], -1, start + first, logprobs[first:last], version, (), agent)
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


def add_counts(trajectory: Trajectory, *names: str, by: int = 1) -> None:
    """Add to metrics of an episode."""
    for name in names:
        trajectory.metrics[name] = trajectory.metrics.get(name, 0) + by


def count_rendered(trajectory: Trajectory, rendered: Extend | Branch) -> None:
    """Count control texts by role, neutralized control texts, rendered media and their ids in the episode's metrics."""
    if rendered.neutralised:
        add_counts(trajectory, "neutralised", by=rendered.neutralised)
    for role, count in rendered.control_text.items():
        add_counts(trajectory, "control_text", f"control_text_{role}", by=count)
    if rendered.tool_images_moved:
        add_counts(trajectory, "tool_media_moved", by=rendered.tool_images_moved)
    if rendered.media:
        add_counts(trajectory, "media_shown", by=len(rendered.media))
        add_counts(trajectory, "media_tokens", by=sum(block.length for block in rendered.media))

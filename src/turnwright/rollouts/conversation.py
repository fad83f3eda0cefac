"""A conversation of an episode: the end of a path through the spans of its trajectory.

A path grows by `append` (what is rendered), `add` (what is sampled) and `replied` (the message of a
reply). It goes back by `branch`, `leave` or an earlier `state`; what follows is another branch of
the trajectory then, which loses nothing.

`PromptWriter` decides what is appended, `ReplySampler` what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwright.engines.ids import GrowingIds
from turnwright.renderers import SampledReply
from turnwright.renderers.history import ConversationState, History
from turnwright.types import MediaPlacement, Message, Origin, Span, Tools, Trajectory


@dataclass(frozen=True, slots=True)
class PathState:
    """What a path was at one time: `saved = path.state`, later `path.state = saved`."""

    leaf: int
    size: int
    """Number of ids."""
    messages: tuple[Message, ...]
    replies: tuple[SampledReply, ...]
    turn: int
    new_messages: tuple[Message, ...]
    inserted: str | None
    kept: int | None
    thinking: bool


@dataclass(slots=True, eq=False)
class ConversationPath:
    """A growing conversation: the end of a path through the spans, and its ids as one list."""

    trajectory: Trajectory
    leaf: int
    ids: list[int]
    messages: list[Message]
    tools: Tools
    agent: str
    seed: int
    """Seeds this path's calls, independently of the calls of other paths."""
    history: History = "append"
    """History mode of the next prompt. A path that began with bare ids is appended to: their
    messages are unknown."""
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
    """Replies asked for. It never goes back, so a reply that is sampled again differs."""

    def __post_init__(self) -> None:
        self.ids = GrowingIds(self.ids)
        self.new_messages = tuple(self.messages)

    @property
    def conversation(self) -> ConversationState:
        """What the next prompt is rendered from."""
        return ConversationState(self.messages, self.replies, self.ids, self.tools, self.placed)

    @property
    def state(self) -> PathState:
        """The path as it is now. Setting it returns the path to an earlier state of its own."""
        return PathState(
            leaf=self.leaf,
            size=len(self.ids),
            messages=tuple(self.messages),
            replies=tuple(self.replies),
            turn=self.turn,
            new_messages=self.new_messages,
            inserted=self.inserted,
            kept=self.kept,
            thinking=self.thinking,
        )

    @state.setter
    def state(self, saved: PathState) -> None:
        self.leaf = saved.leaf
        self._truncate(saved.size)
        self.messages = list(saved.messages)
        self.replies = list(saved.replies)
        self.turn = saved.turn
        self.new_messages = saved.new_messages
        self.inserted = saved.inserted
        self.kept = saved.kept
        self.thinking = saved.thinking

    def append(
        self, origin: Origin, ids: Sequence[int], media: Sequence[MediaPlacement] = ()
    ) -> None:
        """Append ids that were not sampled, as a span of the trajectory."""
        span = Span(
            origin=origin,
            ids=tuple(ids),
            start=len(self.ids),
            media=tuple(media),
            agent=self.agent,
        )
        self.add(span)

    def add(self, span: Span) -> int:
        """Append a span, which becomes the end of the path; return its index in the trajectory."""
        spans = self.trajectory.spans
        span.parent = self.leaf
        self.leaf = len(spans)
        spans.append(span)
        self.follow(span.ids, span.media)
        return self.leaf

    def follow(self, ids: Sequence[int], media: Sequence[MediaPlacement] = ()) -> None:
        """Append ids whose span the trajectory has, with media among them."""
        if media:
            self.placed += [block.shifted(len(self.ids)) for block in media]
        self.ids.extend(ids)

    def branch(self, keep: int) -> None:
        """Go back to the first `keep` ids; what follows becomes another branch of the
        trajectory."""
        spans = [index for index, _ in self.trajectory.chain(self.leaf)]
        while spans and self.trajectory.spans[spans[-1]].start >= keep:
            spans.pop()

        self.leaf = spans[-1] if spans else -1
        self._truncate(keep)

    def leave(self, leaf: int, size: int) -> list[int]:
        """Go back to an earlier end, after `size` ids; return the spans that were appended since,
        the last first."""
        left_spans: list[int] = []
        while self.leaf != leaf:
            left_spans.append(self.leaf)
            self.leaf = self.trajectory.spans[self.leaf].parent
        self._truncate(size)
        return left_spans

    def replied(self, turn: int, message: Message, ids: tuple[int, ...], start: int) -> None:
        """Append the message of a reply, whose ids are on the path from `start` on.

        It replaces the message that it continued, if it did.
        """
        if self.inserted is not None:
            self.messages.pop()
            self.replies.pop()
            self.inserted = None
            self.kept = None

        self.turn = turn
        self.replies.append(SampledReply(len(self.messages), ids, start))
        self.messages.append(message)
        self.new_messages = ()

    def continue_last(self, message: Message, *, inserted: str, kept: int, thinking: bool) -> None:
        """Let the next reply go on in the last message, now `message`, after inserted text.

        `kept` is the number of ids of the last reply before that text, and `thinking` tells whether
        the message has an open thinking block there.
        """
        self.messages[-1] = message
        self.new_messages = ()
        self.inserted = inserted
        self.kept = kept
        self.thinking = thinking

    def restart(self, messages: Sequence[Message]) -> None:
        """Take other messages for the conversation, none of them replied to."""
        self.messages = list(messages)
        self.new_messages = tuple(messages)
        self.turn = -1
        self.inserted = None

    def _truncate(self, size: int) -> None:
        """Keep the first `size` ids; callers choose positions outside of image blocks."""
        del self.ids[size:]
        while self.placed and self.placed[-1].end > size:
            block = self.placed.pop()
            assert block.start >= size, (
                f"{size} ids would cut the image block from {block.start} to {block.end}"
            )

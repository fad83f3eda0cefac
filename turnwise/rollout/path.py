"""A conversation under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.render import SampledReply
from turnwise.render.history import History
from turnwise.types import MediaPlacement, Message

Tools = Sequence[Mapping[str, Any]]
Mark = tuple[int, int, list[Message], list[SampledReply], int, tuple[Message, ...], str | None, int | None]


class ConversationPath:
    """A conversation that goes on: the end of a path through the forest, and its ids as one growing list."""

    __slots__ = (
        "agent",
        "calls",
        "fresh",
        "history",
        "ids",
        "inserted",
        "kept",
        "leaf",
        "messages",
        "noise",
        "placed",
        "replies",
        "thinking",
        "tools",
        "turn",
    )

    def __init__(
        self,
        leaf: int,
        ids: list[int],
        messages: list[Message],
        tools: Tools,
        agent: str,
        noise: int,
        history: History = "append",
        replies: Sequence[SampledReply] = (),
        placed: Sequence[MediaPlacement] = (),
    ) -> None:
        self.leaf = leaf
        self.ids = ids
        self.placed = list(placed)
        """Where images and videos stand among the ids."""
        self.messages = messages
        """The conversation so far."""
        self.fresh: tuple[Message, ...] = tuple(messages)
        """What was said since the last reply."""
        self.turn = -1
        """The turn that ended in the last reply, -1 before the first."""
        self.inserted: str | None = None
        """What the world wrote inside the last message, where the next reply goes on in it."""
        self.kept: int | None = None
        """How many ids of the last reply stand before that."""
        self.history = history
        """What the next prompt shows of it; one that began with bare ids is appended to, since nobody knows what they say."""
        self.replies = list(replies)
        """Those of the messages that were sampled, in order, and where they stand on the path."""
        self.thinking = False
        """Whether the last message had not closed its thinking there."""
        self.tools = tools
        self.agent = agent
        self.noise = noise
        """Names the noise of this path's calls, which so does not depend on what calls of other paths came before."""
        self.calls = 0

    def mark(self) -> Mark:
        """Where it stands before a reply, to come back to."""
        return (
            self.leaf,
            len(self.ids),
            list(self.messages),
            list(self.replies),
            self.turn,
            self.fresh,
            self.inserted,
            self.kept,
        )

    def rewind(self, mark: Mark) -> None:
        """Stand where a reply was sampled, as if it had not been; its noise goes on, so that the next one is another."""
        self.leaf, size, messages, replies, self.turn, self.fresh, self.inserted, self.kept = mark
        self.truncate(size)
        self.messages, self.replies = list(messages), list(replies)

    def truncate(self, size: int) -> None:
        """Keep so many first ids.

        Raises:
            AssertionError: when that would cut the block of an image in two; whoever chooses where to cut knows of them.
        """
        del self.ids[size:]
        while self.placed and self.placed[-1].end > size:
            block = self.placed.pop()
            assert block.start >= size, f"{size} ids would cut the block of an image at {block.start} to {block.end}"

    def append(self, ids: Sequence[int], media: Sequence[MediaPlacement] = ()) -> None:
        """These ids follow, with media among them."""
        if media:
            self.placed += [block.shifted(len(self.ids)) for block in media]
        self.ids.extend(ids)

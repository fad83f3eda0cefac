"""A conversation under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.render import Sampled
from turnwise.render.history import History
from turnwise.types import Message

Tools = Sequence[Mapping[str, Any]]


class Path:
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
        replies: Sequence[Sampled] = (),
    ) -> None:
        self.leaf = leaf
        self.ids = ids
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

"""A conversation under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.types import Message

Tools = Sequence[Mapping[str, Any]]


class Path:
    """A conversation that goes on: the end of a path through the forest, and its ids as one growing list."""

    __slots__ = ("agent", "calls", "fresh", "ids", "inserted", "kept", "leaf", "messages", "noise", "tools", "turn")

    def __init__(self, leaf: int, ids: list[int], messages: list[Message], tools: Tools, agent: str, noise: int) -> None:
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
        self.tools = tools
        self.agent = agent
        self.noise = noise
        """Names the noise of this path's calls, which so does not depend on what calls of other paths came before."""
        self.calls = 0

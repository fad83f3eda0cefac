"""ConversationPath: ids so far, engine extras, parsed replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.engines import Generation, StopText
from turnwise.errors import BackendContractError, UsageError
from turnwise.renderers import Renderer, SampledReply
from turnwise.renderers.base import Decode
from turnwise.renderers.history import History
from turnwise.rollouts.observations import add_counts
from turnwise.types import ROUTES, ExpertRoutes, MediaPlacement, Message, Trajectory, Turn

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


KNOWN = frozenset([ROUTES])
"""What can be asked for."""


def parse_extras(names: Iterable[str]) -> frozenset[str]:
    """Names of extras.

    Raises:
        UsageError: for one that nobody knows.
    """
    found = frozenset([names] if isinstance(names, str) else names)
    if strange := sorted(found - KNOWN):
        raise UsageError(f"want names {strange[0]!r}; an engine can be asked for {', '.join(sorted(KNOWN))}")
    return found


class EngineExtras:
    """What one episode asks for, and how much of each span it was told of.

    By span, not by path: whoever continues a trunk need not be told of it again, whatever became of the branch beside it.
    """

    def __init__(self, want: frozenset[str], trajectory: Trajectory) -> None:
        self.want = want
        self._trajectory = trajectory
        self._told: dict[int, int] = {}
        """By span: of how many first positions the experts are known."""

    def first_unknown(self, path: ConversationPath, mine: Mapping[str, tuple[int, Any]]) -> int:
        """The first position of a path whose experts are not known.

        Args:
            mine: what earlier calls of the same reply told.
        """
        if ROUTES not in self.want:
            return 0
        if ROUTES in mine:
            start, routes = mine[ROUTES]
            return start + len(routes)
        held = 0
        for index, used in self._trajectory.chain(path.leaf):
            known = min(self._told.get(index, 0), used)
            held = self._trajectory.spans[index].start + known
            if known < used:
                break
        return min(held, len(path.ids))

    def add(self, mine: dict[str, tuple[int, Any]], generation: Generation, asked_from: int) -> None:
        """What one call told, behind what earlier calls of the same reply did; what is known already is left out.

        The generation has all of it then. What was drafted for it is counted.

        Raises:
            BackendContractError: when calls tell of unlike numbers of layers or experts.
        """
        if not (mine or generation.extras or generation.drafted):
            return
        for name, (start, given) in generation.extras.items():
            if name != ROUTES:
                mine[name] = (start, given)
                continue
            routes = ExpertRoutes.of(given)
            fresh = routes.slice(asked_from - start, len(routes))
            if not len(fresh):
                continue
            try:
                mine[name] = (mine[name][0], mine[name][1].concat(fresh)) if name in mine else (asked_from, fresh)
            except ValueError as error:
                raise BackendContractError(f"the engine gave {error} in one reply") from error
        generation.extras = mine
        if generation.drafted:
            add_counts(self._trajectory, "draft_ids", by=generation.drafted)
            add_counts(self._trajectory, "draft_ids_accepted", by=generation.accepted)

    def recorded(self, turn: Turn, generation: Generation) -> None:
        """A turn is a part of the record now, and carries what its last answer has."""
        if not generation.extras:
            return
        turn.extras = dict(generation.extras)
        if ROUTES in turn.extras:
            start, routes = turn.extras[ROUTES]
            end = start + len(routes)
            for index, used in self._trajectory.chain(turn.spans[-1] if turn.spans else turn.prompt):
                known = min(used, end - self._trajectory.spans[index].start)
                if known > self._told.get(index, 0):
                    self._told[index] = known


def reply_text(renderer: Renderer, ids: Sequence[int], *, inside: bool = False) -> str:
    """All that sampled ids say, thinking and calls included, without the end token.

    Args:
        inside: whether they go on inside a message, so that their text keeps a space that it begins with.
    """
    return reply_decoder(renderer, inside)(ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids)


def read_reply(renderer: Renderer, path: ConversationPath, stop: StopText | None, ids: Sequence[int]) -> Message:
    """A reply as a message, its text cut right behind a stop text; the ids stay as they were sampled."""
    inside = path.inserted is not None
    if stop is None and not inside:
        return renderer.parse(ids, path.tools)
    text = reply_text(renderer, ids, inside=inside)
    return renderer.parse(ids, path.tools, text if stop is None else stop.cut(text), path.thinking if inside else None)


def extend_message(
    trajectory: Trajectory, renderer: Renderer, path: ConversationPath, turn: Turn, stop: StopText | None
) -> None:
    """A reply that went on inside a message: the message as it has grown."""
    body = path.ids[trajectory.reply_start(turn.parent) :]
    text = reply_text(renderer, body)
    if stop is not None:
        said = reply_text(renderer, path.ids[turn.context :], inside=True)
        text = text[: len(text) - len(said) + len(stop.cut(said))]
    calls = turn.reply.tool_calls
    # Calls are the model's own: one that the world wrote, or that was answered before, is text and no more.
    turn.grown = replace(renderer.parse(body, path.tools if calls else (), text), tool_calls=calls)
    turn.inserted, turn.kept = path.inserted, path.kept
    path.inserted = path.kept = None


def reply_decoder(renderer: Renderer, inside: bool) -> Decode:
    """Decodes sampled ids, those that go on `inside` a message as what stands there."""
    if not inside:
        return renderer.decode
    before = renderer.encode("x")  # tokenizers with word-start marks drop the space that a text begins with
    skip = len(renderer.decode(before))
    return lambda ids: renderer.decode([*before, *ids])[skip:]

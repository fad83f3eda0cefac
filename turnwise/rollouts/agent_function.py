"""Play functions: an agent written as plain code around `model.generate`, recorded like any episode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from turnwise.engines import Sampling, StopText
from turnwise.errors import UsageError
from turnwise.renderers import Branch, Extend, SampledReply
from turnwise.renderers.history import History, render_next
from turnwise.rollouts.conversation import ConversationPath, Tools
from turnwise.rollouts.observations import AgentMediaIntake
from turnwise.rollouts.recorder import Recorder
from turnwise.rollouts.timeouts import Deadline
from turnwise.types import (
    MediaPlacement,
    Message,
    Messages,
    Origin,
    Span,
    Task,
    ToolCall,
    ids_with_media_keys,
    placements_between,
)
from turnwise.types.seeds import derive_seed

AgentFunction = Callable[[Task, "Model"], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What `model.generate` returns."""

    message: Message
    """Put it into the next call's messages, as it is: its ids are found again."""
    ids: tuple[int, ...]
    """As sampled, the end token included."""
    logprobs: tuple[float | None, ...]
    finish: str
    """`stop` or `length`."""

    @property
    def text(self) -> str:
        """The visible text."""
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that it asks for."""
        return self.message.tool_calls


class _TurnState(NamedTuple):
    """Where a path stood when its reply had been sampled, for whoever continues it."""

    tools: Tools
    """What its prompt tells of."""
    noise: int
    """Names the noise of what follows."""
    history: History
    replies: tuple[SampledReply, ...]


class Model:
    """The model as a play function sees it: it samples, records, and enforces the limits."""

    def __init__(self, recorder: Recorder, sampling: Sampling) -> None:
        self._recorder = recorder
        self._sampling = sampling
        self._ends: dict[int, _TurnState] = {}  # by turn
        self._idle: dict[int, ConversationPath] = {}  # by turn: paths that end in its reply and that nobody continues yet
        self._named: Counter[int] = Counter()  # how many paths began with noise of this name
        self._stops: dict[tuple[str, ...], StopText] = {}
        self._busy: set[asyncio.Task[Any]] = set()
        self._turnstile = asyncio.Lock()
        self._look = AgentMediaIntake(recorder.sight, recorder.limits.env_s)
        self._over = False

    async def generate(
        self,
        messages: Messages | Sequence[int],
        *,
        agent: str = "main",
        tools: Tools = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample a reply to a conversation, or to ids.

        A conversation that holds earlier replies of this episode, unchanged, continues them with the ids that were sampled;
        one whose history was edited is rendered anew and becomes a branch. Calls may run at the same time.

        Args:
            messages: the whole conversation (a string is one user message), or ids, which are taken verbatim. Images may stand
                in it in any of the forms of `tw.Image`; an `Image` object is taken in once, so draw on another one later.
            agent: whose call it is; agents do not share paths.
            tools: OpenAI schemas that the model is told of.
            max_tokens: fewer than the limits allow.
            temperature: another one than the run's; None keeps it.
            stop: texts that end the reply, in place of the run's; the reply's text is cut right behind, its ids are not.

        Raises:
            LimitReached: when a limit leaves no room for a reply, or the reply broke one. Uncaught, it ends the episode.
            EngineError, TimeoutError: when the engine fails; leave them uncaught.
            MediaError: for an image that cannot be shown.
            UsageError: for no messages, `max_tokens` under 1, an empty stop text, or a call behind the function's return.
        """
        if self._over:
            raise UsageError("the episode is over: its play function has returned")
        ends = self._stop_text(stop) if stop else None
        async with self._turnstile:  # calls find their paths in the order in which they were made, whoever decodes images
            path = self._path(await self._look(messages), agent, tools)
        sampling = self._sampling if temperature is None else replace(self._sampling, temperature=temperature)
        deadline = Deadline(self._recorder.limits.wall_clock)  # each call of the engine has its own, within the episode's
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            turn = await self._recorder.generate(path, deadline.wait, max_tokens=max_tokens, sampling=sampling, stop=ends)
        finally:
            self._busy.discard(task)
            self._recorder.enter_phase("play")
            deadline.close()
        self._idle[path.turn] = path
        self._ends[path.turn] = _TurnState(path.tools, derive_seed(path.noise, path.calls), path.history, tuple(path.replies))
        spans = [self._recorder.trajectory.spans[i] for i in turn.spans]
        ids = tuple(i for span in spans for i in span.ids)
        logprobs = tuple(p for span in spans for p in span.logprobs or ())
        return Reply(turn.reply, ids, logprobs, turn.finish)

    async def close(self) -> None:
        """The play function has returned: calls that it left behind are cancelled, and no more are taken."""
        self._over = True
        left = [task for task in self._busy if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _stop_text(self, texts: Sequence[str]) -> StopText:
        key = (texts,) if isinstance(texts, str) else tuple(texts)
        if key not in self._stops:
            self._stops[key] = StopText(key, self._recorder.renderer.decode)
        return self._stops[key]

    def _path(self, given: tuple[Message, ...] | list[int], agent: str, tools: Tools) -> ConversationPath:
        if isinstance(given, list):
            return self._attach(agent, given, [], tools)
        messages = list(given)
        turn, known = self._known(messages, agent, tools)
        if turn >= 0:
            return self._continue(turn, tuple(messages[known:]), tools)
        recorder = self._recorder
        replies = self._replies(messages, agent)
        rendered = recorder.render_conversation(messages, replies, tools)
        path = self._attach(agent, rendered.ids, messages, tools, rendered.media)
        path.fresh, path.history = tuple(messages), recorder.history
        starts = rendered.replies or (-1,) * len(replies)
        path.replies = [reply._replace(start=start) for reply, start in zip(replies, starts, strict=True)]
        return path

    def _replies(self, messages: Sequence[Message], agent: str) -> list[SampledReply]:
        """Those of the messages that were sampled in this episode: the very objects, since equal texts may differ in ids."""
        trajectory = self._recorder.trajectory
        own = {id(turn.message): turn for turn in trajectory.turns if turn.agent == agent}
        found = [(number, own[id(message)]) for number, message in enumerate(messages) if id(message) in own]
        return [
            SampledReply(number, tuple(i for span in turn.spans for i in trajectory.spans[span].ids), -1)
            for number, turn in found
        ]

    def _known(self, messages: list[Message], agent: str, tools: Tools) -> tuple[int, int]:
        """The turn whose conversation is the longest beginning of `messages`, and its length; (-1, 0) for none."""
        best, length, same = -1, 0, False
        trajectory = self._recorder.trajectory
        for number, turn in enumerate(trajectory.turns):
            if turn.agent != agent or turn.message not in messages or self._tools(number) != list(tools):
                continue
            conversation = trajectory.conversation(number)
            size = len(conversation)
            if size < length or messages[:size] != conversation:
                continue
            found = messages[size - 1] is turn.message  # replies of equal text may differ in ids: the object itself decides
            if size > length or (found and not same):
                best, length, same = number, size, found
        return best, length

    def _tools(self, turn: int) -> list[Mapping[str, Any]]:
        return list(self._ends[turn].tools) if turn in self._ends else []

    def _continue(self, number: int, fresh: tuple[Message, ...], tools: Tools) -> ConversationPath:
        recorder, trajectory = self._recorder, self._recorder.trajectory
        turn = trajectory.turns[number]
        path = self._idle.pop(number, None)
        if path is None:
            leaf, messages = turn.spans[-1], trajectory.conversation(number)
            replies = tuple(self._replies(messages, turn.agent))
            end = self._ends.get(number) or _TurnState(tools, number, recorder.history, replies)  # its reply broke a limit
            noise = self._name(end.noise)
            placed = trajectory.media_placements(leaf)
            path = ConversationPath(
                leaf, trajectory.path(leaf), messages, tools, turn.agent, noise, end.history, end.replies, placed
            )
            path.turn = number
        recorder.append(path, self._share(path, render_next(path.history, recorder.renderer, path, fresh)), fresh)
        return path

    def _share(self, path: ConversationPath, rendered: Extend | Branch) -> Extend | Branch:
        """Move a path along what another call said alike already; gives what is left to be said."""
        spans = self._recorder.trajectory.spans
        if isinstance(rendered, Branch):
            whole = [*path.ids[: rendered.keep], *rendered.ids]
            placed = [block for block in path.placed if block.end <= rendered.keep]
            placed += [block.shifted(rendered.keep) for block in rendered.media]
            known = self._walk(-1, whole, path.agent, placed)
            shared = sum(used for _, used in known)
            if shared <= rendered.keep:
                return rendered
            path.leaf, path.ids, path.placed = known[-1][0], whole[:shared], [b for b in placed if b.end <= shared]
            return rendered._replace(keep=shared, ids=whole[shared:], media=placements_between(placed, shared, len(whole)))
        shared = 0
        for leaf, used in self._walk(path.leaf, rendered.ids, path.agent, rendered.media):
            path.append(spans[leaf].ids[:used], placements_between(spans[leaf].media, 0, used))
            path.leaf = leaf
            shared += used
        media = placements_between(rendered.media, shared, len(rendered.ids))
        return rendered._replace(ids=rendered.ids[shared:], close=max(0, rendered.close - shared), media=media)

    def _attach(
        self, agent: str, ids: list[int], messages: list[Message], tools: Tools, media: Sequence[MediaPlacement] = ()
    ) -> ConversationPath:
        """A path for ids: as deep as they match what is recorded, the rest as a new span."""
        if not ids:
            raise UsageError("model.generate needs at least one message or id")
        trajectory = self._recorder.trajectory
        noise = self._name(derive_seed(self._recorder.seed, agent, ids_with_media_keys(ids, media)))
        leaf, shared, sampled = -1, 0, False
        for found, used in self._walk(-1, ids, agent, media):
            leaf, shared, sampled = found, shared + used, sampled or trajectory.spans[found].sampled
        if shared < len(ids):
            if self._edits(leaf, shared, sampled):
                branches = trajectory.branches
                branches["edited"] = branches.get("edited", 0) + 1
            seen = placements_between(media, shared, len(ids))
            trajectory.spans.append(Span(Origin.PROMPT, tuple(ids[shared:]), leaf, shared, media=seen, agent=agent))
            leaf = len(trajectory.spans) - 1
        return ConversationPath(leaf, ids, messages, tools, agent, noise, placed=media)

    def _edits(self, leaf: int, position: int, sampled: bool) -> bool:
        """Whether ids that leave the record at a position rewrite a reply, or what was said behind one."""
        spans = self._recorder.trajectory.spans
        if leaf >= 0 and position < spans[leaf].end:
            return sampled
        return any(span.sampled and span.parent == leaf and span.start == position for span in spans)

    def _name(self, noise: int) -> int:
        """A name of its own for each of several paths that begin alike, by the order in which they were asked for."""
        self._named[noise] += 1
        return derive_seed(noise, self._named[noise])

    def _walk(self, leaf: int, ids: Sequence[int], agent: str, media: Sequence[MediaPlacement]) -> list[tuple[int, int]]:
        """The recorded spans that `ids` run along behind the end of `leaf`, as (span, ids matched).

        A span may match in part, and others that branch off it at that point follow. Images match where they are the same,
        and whole.
        """
        spans = self._recorder.trajectory.spans
        ids = ids_with_media_keys(ids, media) if media else ids
        links: list[tuple[int, int]] = []
        position = spans[leaf].end if leaf >= 0 else 0
        done = 0
        while done < len(ids):
            best, most = -1, 0
            for number, span in enumerate(spans):
                if span.parent != leaf or span.start != position or span.agent != agent:
                    continue
                used = _common(ids_with_media_keys(span.ids, span.media) if span.media else span.ids, ids, done)
                used = min((block.start for block in span.media if block.start < used < block.end), default=used)
                if used > most:
                    best, most = number, used
            if best < 0:
                break
            links.append((best, most))
            done += most
            position += most
            leaf = best
        return links


def _common(span: Sequence[int], ids: Sequence[int], offset: int) -> int:
    count = 0
    for a, b in zip(span, ids[offset : offset + len(span)], strict=False):
        if a != b:
            break
        count += 1
    return count

"""Agent functions: plain code around `model.generate`, recorded like any episode.

`Model.generate` finds the conversation that a call continues, and samples on it. Messages are known
by the replies among them (`_longest_known`), ids by the recorded spans that they match (`_walk`).
What matches nothing begins a path of its own, from where it parts from the record (`_attach`).

The turn itself is `Recorder.generate`; `Rollout._run_agent` calls the function and reads its
result.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, Unpack, overload

from turnwright.config import Limits
from turnwright.engines import Sampling, StopText
from turnwright.engines.ids import GrowingIds
from turnwright.envs.user_code import scalar
from turnwright.errors import LimitReached, MediaError, UsageError
from turnwright.renderers import Branch, ChatRenderer, Extend, Renderer, SampledReply
from turnwright.renderers.history import History, render_next
from turnwright.renderers.renderer import vision_of
from turnwright.renderers.tokenizer_face import TokenizerFace
from turnwright.renderers.vision.media_blocks import media_of
from turnwright.rollouts.conversation import ConversationPath
from turnwright.rollouts.counts import count_branch
from turnwright.rollouts.observations import AgentMediaIntake, MediaIntake
from turnwright.rollouts.recorder import Recorder
from turnwright.rollouts.replies import reply_text
from turnwright.rollouts.timeouts import Deadline
from turnwright.types import (
    MediaPlacement,
    Message,
    Messages,
    Origin,
    Span,
    StopReason,
    Task,
    ToolCall,
    Tools,
    Trajectory,
    ids_with_media_keys,
    placements_between,
)
from turnwright.types.seeds import derive_seed

AgentFunction = Callable[[Task, "Model"], Awaitable[Any]]
"""Returns a reward, `Scores` or None."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What `model.generate` returns."""

    message: Message
    """The reply as a message. Pass it on unchanged in later calls, so that its ids are found."""
    ids: tuple[int, ...]
    """Sampled ids, the end token included."""
    logprobs: tuple[float | None, ...]
    finish: str
    """`stop`, or `length` for a reply that was cut. With `limits.on_turn_length = "stop"` (the
    default), the conversation ends with a reply that is cut at a limit of the run: reward it as it
    is."""
    raw_text: str = ""
    """Decoded ids, control tokens and the end token included."""

    @property
    def text(self) -> str:
        """The visible text."""
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the reply."""
        return self.message.tool_calls


class _TurnState(NamedTuple):
    """State of a path after its reply was sampled, for paths that continue it."""

    tools: Tools
    """Tools of its prompt."""
    seed: int
    """Seeds the calls that follow."""
    history: History
    replies: tuple[SampledReply, ...]


class _Options(TypedDict, total=False):
    """Arguments of `Model.generate`, which explains them."""

    agent: str
    tools: Tools
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    stop: Sequence[str]
    stop_ids: Sequence[int]
    media: Sequence[Any]
    branch: str | None
    group: str | None


class _Call(NamedTuple):
    """What a reply is asked for with, besides its conversation."""

    agent: str
    tools: Tools
    max_tokens: int | None
    sampling: Sampling
    stop: StopText | None
    stop_ids: frozenset[int]
    media: Sequence[Any]
    branch: str | None


class Model:
    """The model of an agent function: samples, records, and enforces the limits.

    Example::

        >>> async def play(task, model):
        ...     messages = list(task.messages)
        ...     reply = await model.generate(messages)
        ...     messages += [reply.message, {"role": "user", "content": "Are you sure?"}]
        ...     reply = await model.generate(messages)
        ...     return float(task.answer in reply.text)
        >>> engine = tw.ScriptedEngine(["41", "Oh. 42"])
        >>> (trajectory,) = tw.rollout(play, [tw.Task("6 * 7?", answer="42")], engine)
        >>> trajectory.reward, len(trajectory.turns)
        (1.0, 2)
    """

    def __init__(self, recorder: Recorder, sampling: Sampling, deadline: Deadline) -> None:
        """`deadline` is that of the episode."""
        self._recorder = recorder
        self._deadline = deadline
        self._sampling = sampling
        self._media_intake = AgentMediaIntake(recorder.media_intake, recorder.limits.env_s)
        self._stops: dict[tuple[str, ...], StopText] = {}
        self.limit: LimitReached | None = None
        """The limit that the last call met, whose reply it cut or refused."""

        # Conversations that a call may continue.
        self._turn_states: dict[int, _TurnState] = {}  # by turn
        self._idle: dict[int, ConversationPath] = {}
        """By turn: paths that end in its reply, not continued yet."""
        self._turns_by_text: defaultdict[str, list[int]] = defaultdict(list)
        self._indexed = 0  # turns in `_turns_by_text`
        self._children: defaultdict[int, list[int]] = defaultdict(list)  # spans by their parent
        self._spans_indexed = 0  # spans in `_children`
        self._seed_uses: Counter[int] = Counter()  # paths by initial seed

        # Calls in flight.
        self._path_lock = asyncio.Lock()
        self._busy: set[asyncio.Task[Any]] = set()
        self._closed = False

    @overload
    async def generate(
        self, messages: Messages | Sequence[int], *, n: None = None, **options: Unpack[_Options]
    ) -> Reply: ...
    @overload
    async def generate(
        self, messages: Messages | Sequence[int], *, n: int, **options: Unpack[_Options]
    ) -> list[Reply]: ...
    async def generate(
        self,
        messages: Messages | Sequence[int],
        *,
        agent: str = "main",
        tools: Tools = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        media: Sequence[Any] = (),
        branch: str | None = None,
        group: str | None = None,
        n: int | None = None,
    ) -> Reply | list[Reply]:
        """Sample a reply to a conversation, or to ids.

        A conversation with unchanged earlier replies of this episode continues them with their
        sampled ids. One with an edited history is rendered again and becomes a branch. Calls may
        run concurrently.

        Args:
            messages: the complete conversation (a string is one user message), or ids, which are
                used verbatim. Images may have any form of `tw.Image`; an `Image` object is stored
                once, so use a new one after drawing on it.
            agent: name of the agent; agents do not share paths.
            tools: OpenAI schemas of the tools offered to the model.
            max_tokens: a lower limit than `limits.turn_tokens`.
            temperature, top_p, top_k, min_p: sampling parameters; None uses the run's.
            stop: texts that end the reply, in place of the run's; the reply's text is cut
                after one, its ids are not.
            stop_ids: ids that end the reply, besides the model's end tokens.
            media: images of a prompt of ids, in the order of their placeholders: a placeholder as
                the template writes it, or the ids that it expands to.
            branch: why the conversation is not the last one continued, counted in
                `trajectory.branches`; by default `edited` where it changes what follows a recorded
                prefix, and nothing else.
            group: agents of an episode with the same group are compared with each other, by
                `Scores.agents`: several solvers of what one proposer wrote. None compares an agent
                with itself in the other episodes of the task.
            n: number of replies, sampled at once; returns a list. Each continues the
                prompt as a branch of its own.

        Raises:
            LimitReached: when no token is left for a reply, or the conversation continues one
                that was cut at a limit (its `finish` is `length`). Uncaught, it ends the episode
                without a reward.
            EngineError, TimeoutError: when the engine fails; leave them uncaught.
            MediaError: for an image that cannot be used, or placeholders that do not fit the
                images.
            UsageError: for no messages, `max_tokens` or `n` under 1, an empty stop text, sampling
                parameters out of range, `media` with messages, an agent in two groups, or a call
                after the function's return.
        """
        if group is not None:
            groups = self._recorder.trajectory.agent_groups
            if groups.setdefault(agent, group) != group:
                raise UsageError(f"generate: agent {agent!r} is in group {groups[agent]!r} already")

        call = _Call(
            agent=agent,
            tools=tools,
            max_tokens=max_tokens,
            sampling=self._sampling_with(
                temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
            ),
            stop=self._stop_text(stop) if stop else None,
            stop_ids=frozenset(stop_ids),
            media=media,
            branch=branch,
        )
        if n is None:
            return await self._generate_one(messages, call)

        if n < 1:
            raise UsageError(f"generate: n must be at least 1, not {n}")
        replies = [asyncio.ensure_future(self._generate_one(messages, call)) for _ in range(n)]
        try:
            return list(await asyncio.gather(*replies))
        finally:
            for reply in replies:  # those that are left after an error
                reply.cancel()
            await asyncio.gather(*replies, return_exceptions=True)

    async def _generate_one(self, messages: Messages | Sequence[int], call: _Call) -> Reply:
        """Sample one reply, and record a limit that it met."""
        if self._closed:
            raise UsageError("the episode is over: its agent function has returned")
        try:
            reply, turn = await self._sampled(messages, call)
        except LimitReached as limit:
            self.limit = limit
            raise
        self.limit = self._recorder.limits_met.get(turn)
        return reply

    async def _sampled(self, messages: Messages | Sequence[int], call: _Call) -> tuple[Reply, int]:
        """Sample a reply; return it with the number of its turn."""
        recorder = self._recorder

        # Paths are found in the order of calls, even if one of them decodes images.
        async with self._path_lock:
            prompt = await self._media_intake(messages)
            placed: tuple[MediaPlacement, ...] = ()
            if call.media:
                prompt, placed = await self._place_media(prompt, call.media)
            path = self._path(prompt, call.agent, call.tools, placed, call.branch)

        # A deadline of its own, since a play function may have several calls in flight.
        deadline = Deadline(recorder.limits.wall_clock_s, outer=self._deadline)
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            turn = await recorder.generate(
                path,
                deadline,
                max_tokens=call.max_tokens,
                sampling=call.sampling,
                stop=call.stop,
                stop_ids=call.stop_ids,
            )
        finally:
            self._busy.discard(task)
            recorder.enter_phase("play")
            deadline.close()

        # What a later call needs to continue the conversation.
        self._idle[path.turn] = path
        self._turn_states[path.turn] = _TurnState(
            tools=path.tools,
            seed=derive_seed(path.seed, path.calls),
            history=path.history,
            replies=tuple(path.replies),
        )

        ids: tuple[int, ...] = ()
        logprobs: tuple[float | None, ...] = ()
        for index in turn.spans:
            span = recorder.trajectory.spans[index]
            ids += tuple(span.ids)
            logprobs += tuple(span.logprobs or ())
        reply = Reply(
            message=turn.reply,
            ids=ids,
            logprobs=logprobs,
            finish=turn.finish,
            raw_text=recorder.renderer.decode(ids),
        )
        return reply, path.turn

    async def render(
        self, messages: Messages, replies: Mapping[int, Sequence[int]], tools: Tools = ()
    ) -> list[int]:
        """Return the prompt ids of a conversation whose assistant messages have given ids.

        `replies` has the ids by the index of their message. A last message of the assistant stays
        open: its ids end the prompt, and the next reply continues them.
        """
        prompt = await self._media_intake(messages)
        assert not isinstance(prompt, list)
        open_ids = replies.get(len(prompt) - 1)
        sampled = [SampledReply(number, tuple(ids), -1) for number, ids in sorted(replies.items())]
        if open_ids is not None:
            prompt = prompt[:-1]
            sampled = sampled[:-1]
        rendered = self._recorder.prompts.render_conversation(prompt, sampled, tools)
        return [*rendered.ids, *(open_ids or ())]

    def weigh(self, reply: Reply, weights: float | Sequence[float]) -> None:
        """Set the training weight of a reply, or of each of its ids.

        0 is not trained (reason `weighed`), 1 is the default.

        Raises:
            UsageError: for a reply of another episode, another number of weights than of ids, or
                weights that are negative or not finite. Only ids that the engine sampled have
                weights.
        """
        number = self._number_of(reply, "weigh")
        size = len(reply.ids)
        if isinstance(weights, Iterable):
            id_weights = tuple(map(float, weights))
        else:
            id_weights = (float(weights),) * size
        if len(id_weights) != size:
            raise UsageError(
                f"weigh: {len(id_weights)} weights for {size} sampled ids; give one weight, or one "
                "for each id"
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in id_weights):
            raise UsageError("weigh: weights must be finite and at least 0")
        self._recorder.journal.weigh(number, id_weights)

    def note(self, reply: Reply, info: Mapping[str, Any]) -> None:
        """Record facts about a reply, as JSON values: `turn.info`, in the viewer and in exports.

        Raises:
            UsageError: for a reply of another episode.
        """
        number = self._number_of(reply, "note")
        reward = self._recorder.trajectory.turns[number].reward
        self._recorder.record_step(number, reward, info, env_s=0.0)

    def text_of(self, reply: Reply) -> str:
        """Return the complete text of a reply, thinking and calls as written, without the end
        token."""
        return reply_text(self._recorder.renderer, reply.ids)

    @property
    def trajectory(self) -> Trajectory:
        """The record of the episode so far; do not change it."""
        return self._recorder.trajectory

    @property
    def limits(self) -> Limits:
        """Limits of the episode."""
        return self._recorder.limits

    @property
    def context(self) -> int | None:
        """Maximum ids of prompt and reply in one request, by the limits and the engine; None
        where neither sets one."""
        return self._recorder.context

    @property
    def sampling(self) -> Sampling:
        """How replies are sampled where a call does not choose otherwise."""
        return self._sampling

    @property
    def renderer(self) -> Renderer:
        """The run's renderer."""
        return self._recorder.renderer

    @property
    def media_intake(self) -> MediaIntake:
        """Store of the episode's images."""
        return self._recorder.media_intake

    @cached_property
    def tokenizer(self) -> TokenizerFace:
        """The run's tokenizer and chat template, with the methods of a Hugging Face tokenizer."""
        renderer = self._recorder.renderer
        if not isinstance(renderer, ChatRenderer):
            raise UsageError(
                f"model.tokenizer needs the built-in renderer, not {type(renderer).__name__}"
            )
        return TokenizerFace(renderer)

    def _number_of(self, reply: Reply, who: str) -> int:
        for number, turn in enumerate(self._recorder.trajectory.turns):
            if turn.reply is reply.message:
                return number
        raise UsageError(
            f"{who}: the reply is not of this episode; pass what model.generate returned"
        )

    async def close(self) -> None:
        """Cancel running calls and reject further ones; the agent function has returned."""
        self._closed = True
        abandoned = [task for task in self._busy if task is not asyncio.current_task()]
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)

    def _sampling_with(self, **parameters: Any) -> Sampling:
        """Return the run's sampling with those parameters that a call has set."""
        changes: dict[str, Any] = {}
        for name, value in parameters.items():
            if value is not None:
                changes[name] = scalar(value)
        if not changes:
            return self._sampling

        sampling = replace(self._sampling, **changes)
        fault = sampling.fault()
        if fault:
            raise UsageError(f"generate: {fault}")
        return sampling

    async def _place_media(
        self, prompt: tuple[Message, ...] | list[int], media: Sequence[Any]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Return a prompt of ids with the blocks of its images."""
        vision = vision_of(self._recorder.renderer)
        if not isinstance(prompt, list):
            raise UsageError(
                "media belongs to a prompt of ids; images of messages are parts of their content"
            )
        if vision is None:
            raise MediaError("media: the model has no vision")

        stored = await self._media_intake([{"role": "user", "content": list(media)}])
        assert not isinstance(stored, list)
        stored_media = media_of(stored)
        if len(stored_media) != len(media):
            raise MediaError(
                f"media: {len(media)} items, and {len(stored_media)} images or videos among them"
            )
        return vision.place(prompt, stored_media)

    def _stop_text(self, texts: Sequence[str]) -> StopText:
        key = (texts,) if isinstance(texts, str) else tuple(texts)
        if key not in self._stops:
            self._stops[key] = StopText(key, self._recorder.renderer.decode)
        return self._stops[key]

    def _path(
        self,
        messages_or_ids: tuple[Message, ...] | list[int],
        agent: str,
        tools: Tools,
        media: Sequence[MediaPlacement],
        branch: str | None,
    ) -> ConversationPath:
        """Return the path to sample on: a continued one, or a new one.

        `media` are the blocks of a prompt of ids.
        """
        if isinstance(messages_or_ids, list):
            return self._attach(agent, messages_or_ids, [], tools, media, branch)

        # A conversation of the record, with messages after it.
        messages = list(messages_or_ids)
        turn, size = self._longest_known(messages, agent, tools)
        if turn >= 0:
            self._check_open(turn)
            self._count_branch(branch)
            return self._continue(turn, tuple(messages[size:]), tools)

        # Another one, which may have replies of this episode.
        recorder = self._recorder
        replies = self._replies(messages)
        rendered = recorder.prompts.render_conversation(messages, replies, tools)
        path = self._attach(agent, rendered.ids, messages, tools, rendered.media, branch)
        path.new_messages = tuple(messages)
        path.history = recorder.history
        starts = rendered.replies or (-1,) * len(replies)
        path.replies = [
            reply._replace(start=start) for reply, start in zip(replies, starts, strict=True)
        ]
        return path

    def _check_open(self, turn: int) -> None:
        """Raise `LimitReached` if a turn's reply broke a limit: its conversation cannot go on.

        Other conversations of the episode may, so what is sampled does not depend on which of them
        was cut first.
        """
        limit = self._recorder.limits_met.get(turn)
        if limit is None:
            return

        remedy = ""
        if limit.reason == StopReason.TURN_LENGTH:
            remedy = (
                '; its finish is "length": end the episode there, or set limits.on_turn_length = '
                '"continue"'
            )
        raise LimitReached(
            limit.reason, f"the conversation ended with the reply of turn {turn}: {limit}{remedy}"
        )

    def _replies(self, messages: Sequence[Message]) -> list[SampledReply]:
        """Return the messages that were sampled in this episode.

        Identity decides, since equal texts may have different ids.
        """
        trajectory = self._recorder.trajectory
        turns_by_message = {id(turn.message): turn for turn in trajectory.turns}
        replies: list[SampledReply] = []
        for number, message in enumerate(messages):
            turn = turns_by_message.get(id(message))
            if turn is None:
                continue
            ids: list[int] = []
            for index in turn.spans:
                ids += trajectory.spans[index].ids
            replies.append(SampledReply(number, tuple(ids), -1))
        return replies

    def _longest_known(self, messages: list[Message], agent: str, tools: Tools) -> tuple[int, int]:
        """Return the turn whose conversation is the longest prefix of `messages`, and its length.

        (-1, 0) for none.
        """
        trajectory = self._recorder.trajectory
        for number in range(self._indexed, len(trajectory.turns)):
            self._turns_by_text[trajectory.turns[number].message.text].append(number)
        self._indexed = len(trajectory.turns)

        for size in range(len(messages), 0, -1):
            last = messages[size - 1]
            # The very message comes first: equal texts may have different ids.
            candidates = sorted(
                self._turns_by_text.get(last.text, ()),
                key=lambda number: trajectory.turns[number].message is not last,
            )
            for number in candidates:
                turn = trajectory.turns[number]
                if turn.agent != agent or turn.message != last:
                    continue
                if self._tools(number) != list(tools):
                    continue
                if messages[:size] == self._conversation(number):
                    return number, size
        return -1, 0

    def _conversation(self, number: int) -> list[Message]:
        """Return the conversation up to a turn's reply; a path that ends in it has it at hand."""
        path = self._idle.get(number)
        if path is not None and path.history == "append":
            return path.messages
        return self._recorder.trajectory.conversation(number)

    def _tools(self, turn: int) -> list[Mapping[str, Any]]:
        return list(self._turn_states[turn].tools) if turn in self._turn_states else []

    def _continue(
        self, number: int, new_messages: tuple[Message, ...], tools: Tools
    ) -> ConversationPath:
        """Return a path that goes on with new messages after a turn's reply."""
        path = self._idle.pop(number, None)
        if path is None:
            path = self._path_after(number, tools)
        recorder = self._recorder
        rendered = render_next(path.history, recorder.renderer, path.conversation, new_messages)
        recorder.prompts.append(path, self._skip_shared(path, rendered), new_messages)
        return path

    def _path_after(self, number: int, tools: Tools) -> ConversationPath:
        """Return another path that ends in a turn's reply, which a path continued already."""
        trajectory = self._recorder.trajectory
        turn = trajectory.turns[number]
        leaf = turn.spans[-1]
        messages = trajectory.conversation(number)
        state = self._turn_states.get(number)
        if state is None:  # the reply broke a limit
            replies = tuple(self._replies(messages))
            state = _TurnState(tools, number, self._recorder.history, replies)
        return ConversationPath(
            trajectory=trajectory,
            leaf=leaf,
            ids=trajectory.path(leaf),
            messages=messages,
            tools=tools,
            agent=turn.agent,
            seed=self._unique_seed(state.seed),
            history=state.history,
            replies=list(state.replies),
            placed=trajectory.media_placements(leaf),
            turn=number,
        )

    def _skip_shared(self, path: ConversationPath, rendered: Extend | Branch) -> Extend | Branch:
        """Move a path along spans that another call recorded already.

        Return what is left to append.
        """
        if isinstance(rendered, Branch):
            return self._skip_shared_branch(path, rendered)

        spans = self._recorder.trajectory.spans
        shared = 0
        for leaf, used in self._walk(path.leaf, rendered.ids, path.agent, rendered.media):
            path.follow(spans[leaf].ids[:used], placements_between(spans[leaf].media, 0, used))
            path.leaf = leaf
            shared += used
        return rendered._replace(
            ids=rendered.ids[shared:],
            close=max(0, rendered.close - shared),
            media=placements_between(rendered.media, shared, len(rendered.ids)),
        )

    def _skip_shared_branch(self, path: ConversationPath, branch: Branch) -> Branch:
        ids = [*path.ids[: branch.keep], *branch.ids]
        placed = [block for block in path.placed if block.end <= branch.keep]
        placed += [block.shifted(branch.keep) for block in branch.media]

        # Recorded spans may match more than the path keeps.
        links = self._walk(-1, ids, path.agent, placed)
        shared = sum(used for _, used in links)
        if shared <= branch.keep:
            return branch
        path.leaf = links[-1][0]
        path.ids = GrowingIds(ids[:shared])
        path.placed = [block for block in placed if block.end <= shared]
        return branch._replace(
            keep=shared, ids=ids[shared:], media=placements_between(placed, shared, len(ids))
        )

    def _attach(
        self,
        agent: str,
        ids: list[int],
        messages: list[Message],
        tools: Tools,
        media: Sequence[MediaPlacement],
        branch: str | None,
    ) -> ConversationPath:
        """Return a path for ids: recorded spans as far as they match, and a new span for the rest.

        Raises `LimitReached` if they go on after a reply that broke a limit.
        """
        if not ids:
            raise UsageError("model.generate needs at least one message or id")
        trajectory = self._recorder.trajectory
        seed = self._root_seed(agent, ids, media)

        # Recorded spans that match.
        ended_turns = {trajectory.turns[turn].spans[-1]: turn for turn in self._recorder.limits_met}
        leaf = -1
        shared = 0
        has_sampled = False
        for index, used in self._walk(-1, ids, agent, media):
            span = trajectory.spans[index]
            if index in ended_turns and used == len(span.ids):
                self._check_open(ended_turns[index])
            leaf = index
            shared += used
            has_sampled = has_sampled or span.sampled

        # A span for the rest: an observation where it follows a reply.
        if shared < len(ids):
            if has_sampled:
                self._recorder.prompts.observe(len(ids) - shared)
            origin = Origin.ENV if has_sampled else Origin.PROMPT
            if self._edits(leaf, shared, has_sampled):
                branch = branch or "edited"
                origin = Origin.PROMPT
            rest = Span(
                origin=origin,
                ids=tuple(ids[shared:]),
                parent=leaf,
                start=shared,
                media=placements_between(media, shared, len(ids)),
                agent=agent,
            )
            leaf = len(trajectory.spans)
            trajectory.spans.append(rest)
        self._count_branch(branch)
        return ConversationPath(
            trajectory, leaf, ids, messages, tools, agent, seed, placed=list(media)
        )

    def _count_branch(self, reason: str | None) -> None:
        if reason is not None:
            count_branch(self._recorder.trajectory, reason)

    def _edits(self, leaf: int, position: int, sampled: bool) -> bool:
        """Return whether ids that part from the record at a position change a reply, or what
        follows one."""
        spans = self._recorder.trajectory.spans
        if leaf >= 0 and position < spans[leaf].end:
            return sampled
        return any(
            span.sampled and span.parent == leaf and span.start == position for span in spans
        )

    def _root_seed(self, agent: str, ids: list[int], media: Sequence[MediaPlacement]) -> int:
        """Return the seed of a conversation.

        The first one has that of the episode, so that a function which asks what the loop of an
        environment asks gets the same replies. Others have one of their ids, whatever order they
        begin in.
        """
        episode_seed = self._recorder.seed
        if not self._seed_uses:
            self._seed_uses[episode_seed] += 1
            return episode_seed
        return self._unique_seed(derive_seed(episode_seed, agent, ids_with_media_keys(ids, media)))

    def _unique_seed(self, seed: int) -> int:
        """Return a distinct seed for each of several paths that begin alike, by call order."""
        self._seed_uses[seed] += 1
        return derive_seed(seed, self._seed_uses[seed])

    def _walk(
        self, leaf: int, ids: Sequence[int], agent: str, media: Sequence[MediaPlacement]
    ) -> list[tuple[int, int]]:
        """Return the recorded spans that `ids` match after the end of `leaf`.

        They come as (span, matched ids). A span may match in part, followed by others that branch
        off there. Images match only completely, and by content.
        """
        spans = self._recorder.trajectory.spans
        for number in range(self._spans_indexed, len(spans)):
            self._children[spans[number].parent].append(number)
        self._spans_indexed = len(spans)

        if media:
            ids = ids_with_media_keys(ids, media)
        links: list[tuple[int, int]] = []
        position = spans[leaf].end if leaf >= 0 else 0
        done = 0
        while done < len(ids):
            # The span that matches most goes on.
            best = -1
            most_matched = 0
            for number in self._children.get(leaf, ()):
                span = spans[number]
                if span.start != position or span.agent != agent:
                    continue
                matched = _matched(span, ids, done)
                if matched > most_matched:
                    best = number
                    most_matched = matched
            if best < 0:
                break
            links.append((best, most_matched))
            done += most_matched
            position += most_matched
            leaf = best
        return links


def _matched(span: Span, ids: Sequence[int], begin: int) -> int:
    """Return how many ids of a span `ids` have from `begin` on, images by their keys."""
    span_ids = ids_with_media_keys(span.ids, span.media) if span.media else span.ids
    matched = 0
    for recorded_id, token_id in zip(span_ids, ids[begin : begin + len(span_ids)], strict=False):
        if recorded_id != token_id:
            break
        matched += 1

    # A block that matches in part does not match.
    for block in span.media:
        if block.start < matched < block.end:
            return block.start
    return matched

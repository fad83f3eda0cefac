"""Records sampling and observations of one episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

from turnwise.config import EnvRules, Limits
from turnwise.engines import Engine, Generation, Request, Sampling, StopText
from turnwise.envs.user_code import failure_of
from turnwise.errors import EngineError, EnvError, LimitReached, UsageError
from turnwise.media import MediaStore
from turnwise.records.run_dir import JsonLines
from turnwise.records.serialization import BANNED, INVALID, NO_LOGPROB, REWOUND
from turnwise.renderers import Branch, Extend, Renderer, SampledReply
from turnwise.renderers.history import History, render_from_scratch, render_next
from turnwise.rollouts.conversation import ConversationPath, EngineExtras, Mark, Tools, extend_message, read_reply
from turnwise.rollouts.journal import EpisodeJournal
from turnwise.rollouts.observations import MediaIntake, Render, add_counts, count_rendered, size_of, truncate_messages
from turnwise.rollouts.retries import Retries, Wait, call_engine
from turnwise.types import (
    EpisodeKey,
    Message,
    Origin,
    SamplingDistribution,
    Span,
    StopReason,
    Trajectory,
    Turn,
    placements_between,
)
from turnwise.types.seeds import call_seed, episode_seed


class Budget:
    """What an episode has used up of its limits, and what is promised to calls that run."""

    def __init__(self, limits: Limits, *, max_turns: int | None = None, context: int | None = None) -> None:
        """
        Args:
            limits: of the episode.
            max_turns: a limit of the environment's own, beside `limits.turns`.
            context: what the engine can take, beside `limits.context`.
        """
        self._limits = limits
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        self._context = min((c for c in (limits.context, context) if c is not None), default=None)
        self.used = 0
        """Tokens sampled and observed behind opening prompts."""
        self.rejected = 0
        """Replies that were asked for again."""
        self._under_way = 0  # calls that run, and
        self._promised = 0  # the tokens that they may sample

    def limit_turns(self, most: int) -> None:
        """Grant at most so many turns, or fewer where another limit says so."""
        self._turns = min(self._turns, most)

    def reset(self) -> None:
        """Another attempt has all of it again."""
        self.used = self.rejected = 0

    def left(self, turns: int, context: int) -> tuple[int, StopReason | None]:
        """How many tokens the next reply may have, and which limit makes it so few.

        Args:
            turns: replies sampled so far.
            context: ids in front of the reply.

        Raises:
            LimitReached: when there is no room for a reply.
        """
        limits = self._limits
        if turns - self.rejected + self._under_way >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        budget, cause = limits.turn_tokens, StopReason.TURN_LENGTH
        if limits.episode_tokens is not None:
            left = limits.episode_tokens - self.used - self._promised
            if left < budget:
                budget, cause = left, StopReason.EPISODE_TOKENS
        if self._context is not None and self._context - context < budget:
            budget, cause = self._context - context, StopReason.CONTEXT
        if budget < 1:
            raise LimitReached(cause, f"no token is left for a reply behind {context} tokens of context")
        return budget, cause

    def reserve(self, tokens: int) -> None:
        """A call begins that may sample so many."""
        self._under_way += 1
        self._promised += tokens

    def release(self, tokens: int) -> None:
        """The call is over; what it sampled counts as used."""
        self._under_way -= 1
        self._promised -= tokens


def reply_spans(
    generation: Generation, trajectory: Trajectory, start: int, agent: str, sampling: SamplingDistribution | None = None
) -> Sequence[Span]:
    """A reply as spans whose ids share a fate, in order; their parents are for the caller to set.

    With `mask`, ids without a logprob are spans of their own, untrained; otherwise the reply is one span. Either way the ids
    without one are counted in the episode's metrics, as `logprobs_masked` or `logprobs_recomputed`.

    Args:
        start: how many ids stand before the reply on its path.
        sampling: distribution that the reply was sampled from.
    """
    ids, logprobs = tuple(generation.ids), tuple(generation.logprobs)
    if None not in logprobs:
        return (Span(Origin.MODEL, ids, -1, start, logprobs, generation.version, (), agent, sampling=sampling),)
    spans = []
    for begin, end, untrained in _runs(generation, trajectory):
        span = Span(Origin.MODEL, ids[begin:end], -1, start + begin, logprobs[begin:end], generation.version, (), agent)
        span.untrained, span.sampling = untrained, sampling
        spans.append(span)
    return spans


def _runs(generation: Generation, trajectory: Trajectory) -> Iterator[tuple[int, int, str | None]]:
    """Where runs of ids that share a fate begin and end, and why they are not trained, in a reply that lacks logprobs."""
    lost = [logprob is None for logprob in generation.logprobs]
    mask = generation.missing_logprobs == "mask"
    add_counts(trajectory, "logprobs_masked" if mask else "logprobs_recomputed", by=sum(lost))
    if not mask:
        yield 0, len(lost), None
        return
    begin = 0
    for gone, run in groupby(lost):
        end = begin + sum(1 for _ in run)
        yield begin, end, NO_LOGPROB if gone else None
        begin = end


_MOST_ABORTS = 100
"""Aborted calls in a row without one new id, after which the engine counts as broken."""


@lru_cache(maxsize=64)
def _distribution(sampling: Sampling, banned_ids: frozenset[int]) -> SamplingDistribution:
    """Return one object for all replies that are sampled alike."""
    return SamplingDistribution(sampling.temperature, sampling.top_p, sampling.top_k, banned_ids)


class Recorder:
    """The record of one running episode, under its limits.

    Used by the loop over an environment and by play functions alike. Every sampled id is in the journal before anything
    else happens to it.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        engine: Engine,
        renderer: Renderer,
        limits: Limits,
        *,
        sampling: Sampling,
        seed: int,
        journal: JsonLines | None = None,
        max_turns: int | None = None,
        min_version: int = 0,
        stop: StopText | None = None,
        history: History = "append",
        sight: MediaIntake | None = None,
        rules: EnvRules | None = None,
        want: frozenset[str] = frozenset(),
        settings: str = "",
        context: int | None = None,
    ) -> None:
        """
        Args:
            trajectory: an empty one, which is filled.
            engine: what samples.
            renderer: of the engine's model.
            limits: of the episode.
            sampling: the distribution to sample from.
            seed: the run's.
            journal: where each turn is written before the next begins.
            max_turns: a limit of the environment's own, beside `limits.turns`.
            min_version: the oldest policy that may answer.
            stop: texts that end a reply.
            history: what a prompt shows of earlier turns.
            sight: takes images in; they are kept in memory where none is given.
            rules: how often the engine and the reward are asked again.
            want: what the engine is asked for beside ids and logprobs.
            settings: the name under which the journal has all of these.
            context: maximum number of ids of context plus reply; None sets no limit.
        """
        self.trajectory = trajectory
        self.sight = (sight or MediaIntake(MediaStore(), renderer)).of_episode()
        self.history = history
        self.engine, self.renderer, self.limits = engine, renderer, limits
        self.phase = ""
        """Current phase of the episode, for failures and the watchdog."""
        self.since = 0.0
        """Beginning of the phase, by `time.monotonic`."""
        self.enter_phase("reset", time.monotonic())
        trajectory.template = renderer.fingerprint
        key = trajectory.key
        self._seed = seed
        self._name(key)
        self._group = f"{key.phase}/{key.step}/{key.task}"
        self._sampling, self._distribution = sampling, _distribution(sampling, frozenset(renderer.banned_ids))
        self._budget = Budget(limits, max_turns=max_turns, context=context)
        self.unrewarded = False
        """Whether the world could not say the reward of some turn."""
        self._min_version, self.stop = min_version, stop
        self.told: list[Tools] = []
        """The tools that the model was told of, by turn."""
        self._calls = 0
        self._extras = EngineExtras(want, trajectory)
        self.entries = EpisodeJournal(journal, trajectory, settings)
        self.again = Retries(rules or EnvRules(), trajectory, self.seed)
        """Asks the engine, and for the reward, again."""

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase, which lasts until the next one: a failure is recorded under the phase that it left behind.

        Args:
            name: of the phase.
            since: its beginning, by `time.monotonic`; None keeps the beginning of the phase before, which it belongs to.
        """
        self.phase = name
        if since is not None:
            self.since = since

    def _name(self, key: EpisodeKey) -> None:
        self._own = key
        self.seed = episode_seed(self._seed, key)
        """Names the noise of the attempt."""
        self.session = f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt}"

    def limit_turns(self, most: Any) -> None:
        """Grant the turns that an environment says it has, `Env.max_turns`; None leaves the limit as it is.

        Raises:
            EnvError: for what is no number of turns.
        """
        if most is None:
            return
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise EnvError(f"max_turns is {most!r:.80}; it is a whole number of at least 1, or None")
        self._budget.limit_turns(most)

    @property
    def turn(self) -> int:
        """The turn that is under way, from 0."""
        done = len(self.trajectory.turns)
        return done if self.phase in ("reset", "generate", "play") else max(0, done - 1)

    def release(self) -> None:
        """The engine may forget the attempt."""
        try:
            self.engine.release(self.session)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # behind the end: what broke earlier is told rather than this
            self.trajectory.error = self.trajectory.error or failure_of(error, "close")

    def restart_attempt(self) -> None:
        """The attempt failed beyond mending: what it sampled stays, untrained, and the next one has noise of its own."""
        self.entries.failed_attempt()
        self.trajectory.fail_attempt()
        self.release()
        self._budget.reset()
        self.sight.reset()
        self.unrewarded = False
        self.told.clear()
        self._name(replace(self._own, attempt=self._own.attempt + 1))

    # Growing the forest

    def open(self, messages: Sequence[Message], tools: Tools = (), agent: str = "main") -> ConversationPath:
        """A new conversation.

        Raises:
            TemplateError: when the template cannot show it.
        """
        self.entries.tools = tools
        rendered = self.render_conversation(messages, (), tools)
        leaf = self._add(Span(Origin.PROMPT, tuple(rendered.ids), media=rendered.media, agent=agent))
        return ConversationPath(
            leaf, list(rendered.ids), list(messages), tools, agent, self.seed, self.history, placed=rendered.media
        )

    def render_conversation(self, messages: Sequence[Message], replies: Sequence[SampledReply], tools: Tools) -> Extend:
        """The prompt of a conversation that no path leads to.

        Raises:
            TemplateError: when the template cannot show it.
        """
        rendered = render_from_scratch(self.history, self.renderer, messages, replies, tools)
        count_rendered(self.trajectory, rendered)
        return rendered

    def append_observation(self, path: ConversationPath, messages: tuple[Message, ...]) -> None:
        """What the world says behind the last reply of a path.

        Raises:
            TemplateError: when the template cannot show it.
        """
        self.append(path, *self.render_observation(path, messages))

    def render_observation(
        self, path: ConversationPath, messages: tuple[Message, ...]
    ) -> tuple[Extend | Branch, tuple[Message, ...]]:
        """What `observe` appends; the path stays as it is, so another thread may work it out while nobody else uses it."""
        messages, rendered = self.truncate_observation(messages, partial(render_next, path.history, self.renderer, path))
        return rendered, messages

    def truncate_observation(
        self, messages: tuple[Message, ...], render: Render
    ) -> tuple[tuple[Message, ...], Extend | Branch]:
        """Messages, cut where they are longer than an observation may be, and what they render to."""
        rendered = render(messages)
        most = self.limits.observation_tokens
        if most is not None and size_of(self.renderer, messages, rendered) > most:
            messages, rendered, cut = truncate_messages(self.renderer, messages, render, rendered, most)
            if cut:
                self.entries.changed = True
                add_counts(self.trajectory, "observation_tokens_cut", by=cut)
        return messages, rendered

    def append(self, path: ConversationPath, rendered: Extend | Branch, messages: tuple[Message, ...] = ()) -> None:
        """What rendering made of messages, behind a path or behind an earlier point of it."""
        ids, close, replies, media = rendered.ids, 0, rendered.replies, rendered.media
        count_rendered(self.trajectory, rendered)
        if isinstance(rendered, Branch):
            self._branch(path, rendered)
            if replies is None:
                replies = tuple(r.start if r.start + len(r.ids) <= rendered.keep else -1 for r in path.replies)
        else:
            close = rendered.close
        if replies is not None:
            path.replies = [reply._replace(start=start) for reply, start in zip(path.replies, replies, strict=True)]
        if close:
            path.leaf = self._add(Span(Origin.TEMPLATE, tuple(ids[:close]), path.leaf, len(path.ids), agent=path.agent))
            path.append(ids[:close])
            ids, media = ids[close:], placements_between(media, close, len(ids)) if media else ()
        if ids:
            origin = Origin.ENV if path.ids else Origin.PROMPT
            path.leaf = self._add(Span(origin, tuple(ids), path.leaf, len(path.ids), media=media, agent=path.agent))
            path.append(ids, media)
        self._budget.used += len(rendered.ids)
        path.messages.extend(messages)
        path.fresh = messages

    def record_step(self, turn: int, reward: float | None, info: Mapping[str, Any], env_s: float) -> None:
        """The world's verdict on a turn; in the journal before the next one."""
        record = self.trajectory.turns[turn]
        if info:
            record.info = dict(info)
        record.reward, record.env_s = reward, env_s
        self.entries.env_step(turn)
        if reward is None:
            self.unrewarded = True

    def reject(self, path: ConversationPath, mark: Mark, info: Mapping[str, Any], *, trained: bool, env_s: float) -> None:
        """The last reply of a path is not taken: it stays as a branch, and the next one is sampled where it was.

        It is none of the turns that the limits grant; its tokens count.
        """
        turn = self.trajectory.turns[path.turn]
        self.record_step(path.turn, 0.0, info, env_s)
        if not trained:
            self.mark_untrained(turn, turn.context, INVALID)
        path.rewind(mark)
        branches = self.trajectory.branches
        branches["asked_again"] = branches.get("asked_again", 0) + 1
        self._budget.rejected += 1

    def mark_untrained(self, turn: Turn, position: int, reason: str = REWOUND) -> None:
        """Ids of a reply from a path position on are not trained: the world took them out of the context."""
        for index in turn.spans:
            span = self.trajectory.spans[index]
            if span.trained and span.end > position:
                span.untrained_from = min(span.trained, max(0, position - span.start))
                span.untrained = reason
                self.entries.untrained(index, span.untrained_from, reason)

    def _branch(self, path: ConversationPath, branch: Branch) -> None:
        reasons = self.trajectory.branches
        reasons[branch.reason] = reasons.get(branch.reason, 0) + 1
        links = self.trajectory.chain(path.leaf)
        while links and self.trajectory.spans[links[-1][0]].start >= branch.keep:
            links.pop()
        path.leaf = links[-1][0] if links else -1
        path.truncate(branch.keep)

    def _add(self, span: Span) -> int:
        self.trajectory.spans.append(span)
        return len(self.trajectory.spans) - 1

    # Sampling

    async def generate(
        self,
        path: ConversationPath,
        wait: Wait,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: StopText | None = None,
    ) -> Turn:
        """Sample the next reply of a path and write it down.

        Args:
            path: where the reply goes; it grows by it.
            wait: waits for the engine under a deadline, `wait(awaitable, seconds)`.
            max_tokens: fewer tokens than `limits.turn_tokens` allows.
            sampling: another distribution than the episode's.
            stop: other texts that end the reply than the episode's.

        Raises:
            LimitReached: when a limit leaves no room for a reply, or the reply itself broke one (it is recorded then).
            EngineError: when the engine fails or breaks its contract.
            TimeoutError: when it does not answer in time.
        """
        budget, cause = self._budget.left(len(self.trajectory.turns), len(path.ids))
        if max_tokens is not None and max_tokens < budget:
            if max_tokens < 1:
                raise UsageError(f"max_tokens is at least 1, not {max_tokens}")
            budget, cause = max_tokens, None
        context, prompt, call = len(path.ids), path.leaf, self._calls
        began = time.monotonic()
        self.enter_phase("generate", began)
        self._budget.reserve(budget)
        sampling, stop = sampling or self._sampling, stop or self.stop
        try:
            reply, ids, spans, generation, tries = await self._sample(path, wait, budget, sampling, stop)
        finally:
            self._budget.release(budget)
        turn = Turn(path.agent, prompt, context, spans, path.fresh, reply, path.turn, generation.finish)
        turn.generate_s, turn.retries, turn.cached = time.monotonic() - began, tries, generation.cached_tokens
        self._extras.recorded(turn, generation)
        self.trajectory.turns.append(turn)
        self.told.append(path.tools)
        path.turn = len(self.trajectory.turns) - 1
        if generation.finish != "length" or self.limits.on_turn_length == "continue":  # what was cut off is not malformed
            for wrong in reply.call_error_kinds:
                add_counts(self.trajectory, "malformed_calls", f"malformed_{wrong}")
        if path.inserted is not None:  # the message grows, what the world wrote inside it included
            extend_message(self.trajectory, self.renderer, path, turn, stop)
            path.messages.pop()
            path.replies.pop()
        begins = self.trajectory.reply_start(path.turn)
        path.replies.append(SampledReply(len(path.messages), tuple(path.ids[begins:]), begins))
        path.messages.append(turn.message)
        path.fresh = ()
        self.entries.turn(turn, path.tools, call)
        self._judge(turn, ids, generation, cause)
        return turn

    async def _sample(
        self, path: ConversationPath, wait: Wait, budget: int, sampling: Sampling, stop: StopText | None
    ) -> tuple[Message, Sequence[int], tuple[int, ...], Generation, int]:
        """One reply of at most `budget` ids, an aborted call continued.

        Returns:
            What it says, its ids, spans, the last answer, and how many calls failed before they were answered.
        """
        spans: list[int] = []
        ids: Sequence[int] = ()
        extras: dict[str, tuple[int, Any]] = {}
        aborts, failed, turn = 0, 0, len(self.trajectory.turns)
        read, seconds = partial(read_reply, self.renderer, path, stop), self.limits.generate_s
        while True:
            asked = self._extras.first_unknown(path, extras)
            request = self._request(
                path, budget - len(ids), sampling, stop.continued_after(ids) if stop and ids else stop, asked
            )
            call = self.engine, request, ids, read, wait, seconds
            try:
                generation, ids, reply = await call_engine(*call)
            except (EngineError, TimeoutError) as error:
                (generation, ids, reply), tries = await self.again.engine(error, partial(call_engine, *call), wait, turn)
                failed += tries
            self._extras.add(extras, generation, asked)
            if generation.ids:
                self._add_reply(path, generation, sampling, spans)
            if generation.finish != "abort":
                break
            if len(ids) >= budget:
                generation.finish = "length"
                break
            aborts = 0 if generation.ids else aborts + 1
            if aborts > _MOST_ABORTS:
                raise EngineError(f"the engine aborted {aborts} calls in a row without sampling anything")
        return reply, ids, tuple(spans), generation, failed

    def _request(
        self, path: ConversationPath, max_tokens: int, sampling: Sampling, stop: StopText | None, routes_from: int
    ) -> Request:
        call, self._calls = self._calls, self._calls + 1
        path.calls += 1
        return Request(
            path.ids,
            max_tokens,
            self.renderer.stop_ids,
            call_seed(path.noise, path.calls - 1),
            self.session,
            self._group,
            call,
            sampling,
            path.agent,
            path.placed,
            path.messages,
            self.renderer.banned_ids,
            self._extras.want,
            routes_from,
            min_version=self._min_version,
            stop_text=stop,
        )

    def _add_reply(self, path: ConversationPath, generation: Generation, sampling: Sampling, added: list[int]) -> None:
        distribution = self._distribution
        if sampling is not self._sampling:
            distribution = _distribution(sampling, distribution.banned_ids)
        for span in reply_spans(generation, self.trajectory, len(path.ids), path.agent, distribution):
            span.parent = path.leaf
            path.leaf = self._add(span)
            added.append(path.leaf)
        path.ids.extend(generation.ids)
        self._budget.used += len(generation.ids)

    def _judge(self, turn: Turn, ids: Sequence[int], generation: Generation, cause: StopReason | None) -> None:
        """End the episode where the reply itself breaks a limit."""
        if not self.renderer.invalid_ids.isdisjoint(ids):
            banned = next((at for at, one in enumerate(ids) if one in self.renderer.banned_ids), None)
            if banned is not None:
                self.mark_untrained(turn, turn.context + banned, BANNED)
            raise LimitReached(StopReason.INVALID_TOKEN, "the reply holds a control token out of place")
        if generation.finish == "length" and cause is not None:
            if cause is StopReason.TURN_LENGTH and self.limits.on_turn_length == "continue":
                return
            raise LimitReached(cause, f"the reply reached {len(ids)} tokens without an end")

    def close(self) -> None:
        """The episode is over: everything about it is in the journal now."""
        self.entries.close()


Trace = Callable[[str, Sequence[tuple[str, float]], float], None]
"""Hears of an episode that is over: its session, its phases and when each began, when the last ended (`time.monotonic`)."""


class TimedRecorder(Recorder):
    """Slower by a list's entry for each phase, so it takes the place of `Recorder` only where somebody asked for it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._began: list[tuple[str, float]] = []
        super().__init__(*args, **named)

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase, and keep its beginning."""
        self._began.append((name, time.monotonic()))
        super().enter_phase(name, since)

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Phases with their beginnings, in order; of equal consecutive phases the first."""
        began = self._began
        return [row for number, row in enumerate(began) if not number or began[number - 1][0] != row[0]]

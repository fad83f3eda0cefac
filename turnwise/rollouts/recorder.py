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
    """Tokens and turns that an episode has used of its limits, and tokens reserved by running calls."""

    def __init__(self, limits: Limits, *, max_turns: int | None = None, context: int | None = None) -> None:
        """
        Args:
            limits: limits of the episode.
            max_turns: turn limit of the environment, in addition to `limits.turns`.
            context: context limit of the engine, in addition to `limits.context`.
        """
        self._limits = limits
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        self._context = min((c for c in (limits.context, context) if c is not None), default=None)
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
        """Return the token budget of the next reply and the limit that determines it.

        Args:
            turns: replies sampled so far.
            context: ids before the reply.

        Raises:
            LimitReached: when no token is left for a reply.
        """
        limits = self._limits
        if turns - self.rejected + self._running_calls >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        budget, cause = limits.turn_tokens, StopReason.TURN_LENGTH
        if limits.episode_tokens is not None:
            left = limits.episode_tokens - self.used - self._reserved
            if left < budget:
                budget, cause = left, StopReason.EPISODE_TOKENS
        if self._context is not None and self._context - context < budget:
            budget, cause = self._context - context, StopReason.CONTEXT
        if budget < 1:
            raise LimitReached(cause, f"no token is left for a reply after {context} tokens of context")
        return budget, cause

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
    """Split a reply into spans whose ids are all trained or all untrained, in order; the caller sets their parents.

    With `missing_logprobs = "mask"`, ids without a logprob become untrained spans; otherwise the reply is one span. Ids
    without a logprob are counted in the episode's metrics, as `logprobs_masked` or `logprobs_recomputed`.

    Args:
        start: number of ids before the reply on its path.
        sampling: distribution the reply was sampled from.
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


_MAX_ABORTS = 100
"""Consecutive aborted calls without a new id, after which the engine counts as broken."""


@lru_cache(maxsize=64)
def _distribution(sampling: Sampling, banned_ids: frozenset[int]) -> SamplingDistribution:
    """Return one shared object for all replies with equal sampling parameters."""
    return SamplingDistribution(sampling.temperature, sampling.top_p, sampling.top_k, banned_ids)


class Recorder:
    """The record of one running episode, under its limits.

    The environment loop and agent functions both use it. Every sampled id is in the journal before anything else uses it.
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
        media_intake: MediaIntake | None = None,
        rules: EnvRules | None = None,
        want: frozenset[str] = frozenset(),
        settings: str = "",
        context: int | None = None,
    ) -> None:
        """
        Args:
            trajectory: an empty trajectory to fill.
            seed: seed of the run.
            journal: file in which each turn is written before the next begins.
            max_turns: turn limit of the environment, in addition to `limits.turns`.
            min_version: oldest policy version that may sample.
            media_intake: stores media; by default in memory.
            settings: name of these settings in the journal.
            context: maximum number of ids of context plus reply; None sets no limit.

        The other arguments are those of `Rollout`.
        """
        self.trajectory = trajectory
        self.media_intake = (media_intake or MediaIntake(MediaStore(), renderer)).of_episode()
        self.history = history
        self.engine, self.renderer, self.limits = engine, renderer, limits
        self.phase = ""
        """Current phase of the episode, for failures and the watchdog."""
        self.since = 0.0
        """Start of the phase, by `time.monotonic`."""
        self.enter_phase("reset", time.monotonic())
        trajectory.template = renderer.fingerprint
        key = trajectory.key
        self._seed = seed
        self._set_key(key)
        self._group = f"{key.phase}/{key.step}/{key.task}"
        self._sampling, self._distribution = sampling, _distribution(sampling, frozenset(renderer.banned_ids))
        self._budget = Budget(limits, max_turns=max_turns, context=context)
        self.unrewarded = False
        """Whether the environment returned no reward for some turn."""
        self._min_version, self.stop = min_version, stop
        self.tools_by_turn: list[Tools] = []
        """Tools offered to the model, by turn."""
        self._calls = 0
        self._extras = EngineExtras(want, trajectory)
        self.journal = EpisodeJournal(journal, trajectory, settings)
        self.retries = Retries(rules or EnvRules(), trajectory, self.seed)

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase, which lasts until the next. Failures are recorded under the current phase.

        Args:
            name: name of the phase.
            since: start of the phase, by `time.monotonic`; None keeps the start of the previous phase, which includes it.
        """
        self.phase = name
        if since is not None:
            self.since = since

    def _set_key(self, key: EpisodeKey) -> None:
        self._key = key
        self.seed = episode_seed(self._seed, key)
        """Seed of the attempt's random streams."""
        self.session = f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt}"

    def limit_turns(self, max_turns: Any) -> None:
        """Apply the turn limit that an environment sets, `Env.max_turns`; None leaves the limit unchanged.

        Raises:
            EnvError: for a value that is not a number of turns.
        """
        if max_turns is None:
            return
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise EnvError(f"max_turns is {max_turns!r:.80}; it must be an integer of at least 1, or None")
        self._budget.limit_turns(max_turns)

    @property
    def turn(self) -> int:
        """Index of the current turn."""
        done = len(self.trajectory.turns)
        return done if self.phase in ("reset", "generate", "play") else max(0, done - 1)

    def release(self) -> None:
        """Release the attempt's session in the engine."""
        try:
            self.engine.release(self.session)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an earlier error takes precedence
            self.trajectory.error = self.trajectory.error or failure_of(error, "close")

    def restart_attempt(self) -> None:
        """Start over after an unrecoverable failure: sampled ids stay, untrained, and the new attempt has a seed of its own."""
        self.journal.failed_attempt()
        self.trajectory.fail_attempt()
        self.release()
        self._budget.reset()
        self.media_intake.reset()
        self.unrewarded = False
        self.tools_by_turn.clear()
        self._set_key(replace(self._key, attempt=self._key.attempt + 1))

    # Prompts and observations

    def open(self, messages: Sequence[Message], tools: Tools = (), agent: str = "main") -> ConversationPath:
        """Start a conversation.

        Raises:
            TemplateError: when the template cannot render it.
        """
        self.journal.tools = tools
        rendered = self.render_conversation(messages, (), tools)
        leaf = self._add(Span(Origin.PROMPT, tuple(rendered.ids), media=rendered.media, agent=agent))
        return ConversationPath(
            leaf, list(rendered.ids), list(messages), tools, agent, self.seed, self.history, placed=rendered.media
        )

    def render_conversation(self, messages: Sequence[Message], replies: Sequence[SampledReply], tools: Tools) -> Extend:
        """Render the prompt of a conversation that extends no recorded path.

        Raises:
            TemplateError: when the template cannot render it.
        """
        rendered = render_from_scratch(self.history, self.renderer, messages, replies, tools)
        count_rendered(self.trajectory, rendered)
        return rendered

    def append_observation(self, path: ConversationPath, messages: tuple[Message, ...]) -> None:
        """Append an observation after the last reply of a path.

        Raises:
            TemplateError: when the template cannot render it.
        """
        self.append(path, *self.render_observation(path, messages))

    def render_observation(
        self, path: ConversationPath, messages: tuple[Message, ...]
    ) -> tuple[Extend | Branch, tuple[Message, ...]]:
        """Render an observation, truncated to the limit. The path is unchanged, so a worker thread may call this."""
        messages, rendered = self.truncate_observation(messages, partial(render_next, path.history, self.renderer, path.state))
        return rendered, messages

    def truncate_observation(
        self, messages: tuple[Message, ...], render: Render
    ) -> tuple[tuple[Message, ...], Extend | Branch]:
        """Return messages, truncated to `limits.observation_tokens`, and what they render to."""
        rendered = render(messages)
        limit = self.limits.observation_tokens
        if limit is not None and size_of(self.renderer, messages, rendered) > limit:
            messages, rendered, cut = truncate_messages(self.renderer, messages, render, rendered, limit)
            if cut:
                self.journal.observation_changed = True
                add_counts(self.trajectory, "observation_tokens_cut", by=cut)
        return messages, rendered

    def append(self, path: ConversationPath, rendered: Extend | Branch, messages: tuple[Message, ...] = ()) -> None:
        """Append rendered ids to a path, or branch off at an earlier position."""
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
        path.new_messages = messages

    def record_step(self, turn: int, reward: float | None, info: Mapping[str, Any], env_s: float) -> None:
        """Record the environment's reward and info for a turn; the journal has them before the next turn."""
        record = self.trajectory.turns[turn]
        if info:
            record.info = dict(info)
        record.reward, record.env_s = reward, env_s
        self.journal.env_step(turn)
        if reward is None:
            self.unrewarded = True

    def reject(self, path: ConversationPath, mark: Mark, info: Mapping[str, Any], *, trained: bool, env_s: float) -> None:
        """Keep the last reply of a path as a branch, and return the path to where the reply was sampled.

        A rejected reply does not count toward the turn limit; its tokens count.
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
        """Exclude ids of a reply from training, from a path position on: the environment removed them from the context."""
        for index in turn.spans:
            span = self.trajectory.spans[index]
            if span.trained and span.end > position:
                span.untrained_from = min(span.trained, max(0, position - span.start))
                span.untrained = reason
                self.journal.untrained(index, span.untrained_from, reason)

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
        """Sample the next reply of a path and record it.

        Args:
            path: the path, extended by the reply.
            wait: waits for the engine under a deadline, `wait(awaitable, seconds)`.
            max_tokens: a lower limit than `limits.turn_tokens`.
            sampling: sampling parameters; None uses the episode's.
            stop: texts that end the reply; None uses the episode's.

        Raises:
            LimitReached: when no token is left for a reply, or the reply itself breaks a limit (it is recorded then).
            EngineError: when the engine fails or breaks its contract.
            TimeoutError: when the engine misses its deadline.
        """
        budget, cause = self._budget.left(len(self.trajectory.turns), len(path.ids))
        if max_tokens is not None and max_tokens < budget:
            if max_tokens < 1:
                raise UsageError(f"max_tokens must be at least 1, not {max_tokens}")
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
        turn = Turn(path.agent, prompt, context, spans, path.new_messages, reply, path.turn, generation.finish)
        turn.generate_s, turn.retries, turn.cached = time.monotonic() - began, tries, generation.cached_tokens
        self._extras.recorded(turn, generation)
        self.trajectory.turns.append(turn)
        self.tools_by_turn.append(path.tools)
        path.turn = len(self.trajectory.turns) - 1
        if generation.finish != "length" or self.limits.on_turn_length == "continue":  # a truncated call is not malformed
            for kind in reply.call_error_kinds:
                add_counts(self.trajectory, "malformed_calls", f"malformed_{kind}")
        if path.inserted is not None:  # the reply continues the last message, after the environment's insertion
            extend_message(self.trajectory, self.renderer, path, turn, stop)
            path.messages.pop()
            path.replies.pop()
        start = self.trajectory.reply_start(path.turn)
        path.replies.append(SampledReply(len(path.messages), tuple(path.ids[start:]), start))
        path.messages.append(turn.message)
        path.new_messages = ()
        self.journal.turn(turn, path.tools, call)
        self._check_reply(turn, ids, generation, cause)
        return turn

    async def _sample(
        self, path: ConversationPath, wait: Wait, budget: int, sampling: Sampling, stop: StopText | None
    ) -> tuple[Message, Sequence[int], tuple[int, ...], Generation, int]:
        """Sample one reply of at most `budget` ids, continuing aborted calls.

        Returns:
            The parsed reply, its ids, its spans, the last generation, and the number of failed calls.
        """
        spans: list[int] = []
        ids: Sequence[int] = ()
        extras: dict[str, tuple[int, Any]] = {}
        aborts, failed, turn = 0, 0, len(self.trajectory.turns)
        read, seconds = partial(read_reply, self.renderer, path, stop), self.limits.generate_s
        while True:
            extras_from = self._extras.first_unknown(path, extras)
            request = self._request(
                path, budget - len(ids), sampling, stop.continued_after(ids) if stop and ids else stop, extras_from
            )
            call = self.engine, request, ids, read, wait, seconds
            try:
                generation, ids, reply = await call_engine(*call)
            except (EngineError, TimeoutError) as error:
                (generation, ids, reply), tries = await self.retries.engine(error, partial(call_engine, *call), wait, turn)
                failed += tries
            self._extras.add(extras, generation, extras_from)
            if generation.ids:
                self._add_reply(path, generation, sampling, spans)
            if generation.finish != "abort":
                break
            if len(ids) >= budget:
                generation.finish = "length"
                break
            aborts = 0 if generation.ids else aborts + 1
            if aborts > _MAX_ABORTS:
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
            call_seed(path.seed, path.calls - 1),
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

    def _check_reply(self, turn: Turn, ids: Sequence[int], generation: Generation, cause: StopReason | None) -> None:
        """Raise `LimitReached` if the reply itself breaks a limit."""
        if not self.renderer.invalid_ids.isdisjoint(ids):
            banned = next((at for at, one in enumerate(ids) if one in self.renderer.banned_ids), None)
            if banned is not None:
                self.mark_untrained(turn, turn.context + banned, BANNED)
            raise LimitReached(StopReason.INVALID_TOKEN, "the reply contains a misplaced control token")
        if generation.finish == "length" and cause is not None:
            if cause is StopReason.TURN_LENGTH and self.limits.on_turn_length == "continue":
                return
            raise LimitReached(cause, f"the reply reached {len(ids)} tokens without an end token")

    def close(self) -> None:
        """Write the end of the episode to the journal."""
        self.journal.close()


Trace = Callable[[str, Sequence[tuple[str, float]], float], None]
"""Callback for finished episodes: session, phases with their starts, and the end of the last (`time.monotonic`)."""


class TimedRecorder(Recorder):
    """Recorder that stores the start of each phase. Slower, so it is used only with `on_episode`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._began: list[tuple[str, float]] = []
        super().__init__(*args, **kwargs)

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase and store its start."""
        self._began.append((name, time.monotonic()))
        super().enter_phase(name, since)

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Phases with their starts, in order; consecutive equal phases are merged."""
        began = self._began
        return [row for number, row in enumerate(began) if not number or began[number - 1][0] != row[0]]

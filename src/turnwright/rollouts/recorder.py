"""Record of one episode: sampling, observations, and the journal that has them before anything can fail on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from turnwright.config import EnvRules, Limits
from turnwright.config.schema import OnTurnLength
from turnwright.engines import Engine, Generation, Request, Sampling, StopText
from turnwright.engines.protocols import check_generation
from turnwright.envs import NewHistory, Scores
from turnwright.envs.user_code import failure_of
from turnwright.errors import EngineError, EnvError, LimitReached, UsageError, class_name, words
from turnwright.media import MediaStore
from turnwright.records.journal import RecordedTurn
from turnwright.records.run_dir import EventLog
from turnwright.records.serialization import (
    BANNED,
    INVALID,
    REWOUND,
    Event,
    apply_event,
    key_row,
    outcome_row,
    span_row,
    turn_row,
)
from turnwright.renderers import Branch, Extend, Renderer, SampledReply
from turnwright.renderers.history import History, render_from_scratch, render_next
from turnwright.renderers.renderer import common_prefix_length
from turnwright.rollouts.conversation import (
    Budget,
    ConversationPath,
    EngineExtras,
    Mark,
    add_counts,
    count_rendered,
    extend_message,
    read_reply,
    reply_spans,
)
from turnwright.rollouts.observations import MediaIntake, Render, size_of, truncate_messages
from turnwright.rollouts.resume import RestartEpisode, ResumeDiffers, ResumedTurns, observation_row, recorded_generation
from turnwright.rollouts.retries import Retries
from turnwright.rollouts.timeouts import Deadline, EpisodePlace
from turnwright.types import (
    FAILED_ATTEMPT,
    EpisodeKey,
    Message,
    Origin,
    SamplingDistribution,
    Span,
    StopReason,
    Tools,
    Trajectory,
    Turn,
    ids_with_media_keys,
    placements_between,
)
from turnwright.types.seeds import call_seed, episode_seed

NO_OBSERVATION: Any = object()
"""No observation since the last turn."""
_MAX_ABORTS = 100
"""Consecutive aborted calls without a new id, after which the engine counts as broken."""


@lru_cache(maxsize=64)
def _distribution(sampling: Sampling, banned_ids: frozenset[int]) -> SamplingDistribution:
    """Return one shared object for all replies with equal sampling parameters."""
    return SamplingDistribution(**sampling.settings(), banned_ids=banned_ids)


class Recorder:
    """The record of one running episode, under its limits.

    The environment loop and agent functions both use it. A reply is in the journal before anything else uses it.
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
        journal: EventLog | None = None,
        max_turns: int | None = None,
        min_version: int = 0,
        stop: StopText | None = None,
        history: History = "append",
        media_intake: MediaIntake | None = None,
        rules: EnvRules | None = None,
        want: frozenset[str] = frozenset(),
        settings: str = "",
        context: int | None = None,
        place: EpisodePlace | None = None,
        blank: bool = False,
        resumed: ResumedTurns | None = None,
    ) -> None:
        """Fill an empty trajectory; `seed` is the run's, and `settings` the name of these settings in the journal.

        `resumed` has the recorded turns of an interrupted episode: they answer its calls before the engine does.
        The turn limit of the environment and the engine's `context` apply in addition to `limits`. Policy versions under
        `min_version` may not sample. Calls wait for a `place`, if given. Media are stored in memory by default, and gray with
        `blank`. The other arguments are those of `Rollout`.
        """
        self.trajectory = trajectory
        self.media_intake = (media_intake or MediaIntake(MediaStore(), renderer)).of_episode(blank=blank)
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
        self.context = self._budget.context
        """Maximum ids of prompt and reply; None where neither the limits nor the engine set one."""
        self.unrewarded = False
        """Whether the environment returned no reward for some turn."""
        self._min_version, self.stop = min_version, stop
        self.tools_by_turn: list[Tools] = []
        """Tools offered to the model, by turn."""
        self.limits_met: dict[int, LimitReached] = {}
        """Turns whose reply itself broke a limit, by number: nothing may continue their conversations."""
        self._calls = 0
        self._place = place
        self._extras = EngineExtras(want, trajectory)
        self.journal = EpisodeJournal(journal, trajectory, settings)
        self.retries = Retries(rules or EnvRules(), trajectory, self.seed)
        self._effects = rules is not None and rules.effects
        self.resumed = resumed or ResumedTurns()
        """Turns of an earlier process that answer calls before the engine does."""
        for event in self.resumed.failed_events:
            self.journal.repeat(event)
            if event["e"] == "failed_attempt":
                self._set_key(replace(self._key, attempt=self._key.attempt + 1))
        if self._effects and self.resumed.left and self.resumed.state is None:
            self.restart_attempt(ResumeDiffers("its environment has effects, and no state of it was recorded"))

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase, which lasts until the next. Failures are recorded under the current phase.

        `since` is its start, by `time.monotonic`; None keeps the start of the previous phase, which includes it.
        """
        self.phase = name
        if since is not None:
            self.since = since

    def _set_key(self, key: EpisodeKey) -> None:
        self._key = key
        self.seed = episode_seed(self._seed, key)
        """Seed of the attempt's random streams."""
        self.session = key.session

    def limit_turns(self, max_turns: Any) -> None:
        """Apply the turn limit that an environment sets, `Env.max_turns`; raise `EnvError` if it is no number of turns."""
        if max_turns is None:
            return
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise EnvError(f"max_turns is {max_turns!r:.80}; it must be an integer of at least 1, or None")
        self._budget.limit_turns(max_turns)

    def set_on_turn_length(self, handling: OnTurnLength | None) -> None:
        """Apply the handling of truncated replies that an environment sets, `Env.on_turn_length`."""
        if handling not in (None, "stop", "continue"):
            raise EnvError(f'on_turn_length is {handling!r:.80}; write "stop", "continue" or None')
        if handling is not None:
            self.limits = replace(self.limits, on_turn_length=handling)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode ids without special tokens."""
        special = self.renderer.special_ids
        return self.renderer.decode([i for i in ids if i not in special])

    @property
    def waits(self) -> bool:
        """Whether a call waits for a place."""
        return self._place is not None and self._place.waiting > 0

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

    def restart_attempt(self, error: RestartEpisode) -> None:
        """Start over after an unrecoverable failure: sampled ids stay, untrained, and the new attempt has a seed of its own."""
        failure = failure_of(error, self.phase, len(self.trajectory.turns) - 1)
        self.journal.failed_attempt()
        self.trajectory.fail_attempt()
        if isinstance(error, ResumeDiffers):
            self.trajectory.failures.append(replace(failure, recovery="attempt"))
            add_counts(self.trajectory, "resume_new_attempts")
        self.resumed.drop(self.trajectory)
        self.release()
        self._budget.reset()
        self.media_intake.reset()
        self.unrewarded = False
        self.tools_by_turn.clear()
        self.limits_met.clear()
        self._set_key(replace(self._key, attempt=self._key.attempt + 1))

    def _repeat(
        self, path: ConversationPath, recorded: RecordedTurn, stop: StopText | None
    ) -> tuple[Message, Sequence[int], tuple[int, ...], Generation, int]:
        """Add the spans of a recorded turn to a path; return what `_sample` returned for it."""
        path.calls += 1
        self._calls = max(self._calls, recorded.call + 1)
        start, first = len(path.ids), len(self.trajectory.spans)
        for span in recorded.sampled:
            path.leaf = self._add(replace(span, parent=path.leaf, start=len(path.ids)))
            path.ids.extend(span.ids)
        ids = path.ids[start:]
        self._budget.used += len(ids)
        generation = recorded_generation(self.trajectory, recorded, ids)
        spans = tuple(range(first, len(self.trajectory.spans)))
        return read_reply(self.renderer, path, stop, ids), ids, spans, generation, recorded.tries

    # Prompts and observations

    def open(self, messages: Sequence[Message], tools: Tools = (), agent: str = "main") -> ConversationPath:
        """Start a conversation."""
        self.journal.tools = tools
        rendered = self.render_conversation(messages, (), tools)
        leaf = self._add(Span(Origin.PROMPT, tuple(rendered.ids), media=rendered.media, agent=agent))
        return ConversationPath(
            leaf, list(rendered.ids), list(messages), tools, agent, self.seed, self.history, placed=list(rendered.media)
        )

    def render_conversation(self, messages: Sequence[Message], replies: Sequence[SampledReply], tools: Tools) -> Extend:
        """Render the prompt of a conversation that extends no recorded path."""
        rendered = render_from_scratch(self.history, self.renderer, messages, replies, tools)
        count_rendered(self.trajectory, rendered)
        return rendered

    def append_observation(self, path: ConversationPath, messages: tuple[Message, ...]) -> None:
        """Append an observation after the last reply of a path."""
        self.append(path, *self.render_observation(path, messages))

    def render_observation(
        self, path: ConversationPath, messages: tuple[Message, ...]
    ) -> tuple[Extend | Branch, tuple[Message, ...]]:
        """Render an observation, truncated to the limit. The path is unchanged, so a worker thread may call this."""
        if self.limits.observation_tokens is None:
            return render_next(path.history, self.renderer, path.state, messages), messages
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
        """Append rendered ids to a path, or branch off at an earlier position.

        Raises `LimitReached` for an observation over `limits.episode_tokens`, which is not recorded, and counted.
        """
        if path.ids:
            self.observe(len(rendered.ids))
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
        path.messages.extend(messages)
        path.new_messages = messages

    def rewrite(self, path: ConversationPath, history: NewHistory) -> None:
        """Go on with another conversation, as a branch from where its ids part from those of the path.

        Raises `EnvError` for indices that the conversation does not have, for one that begins with a reply, and within a
        message of the model (`rollout.history = "inline"`).
        """
        if self.history == "inline":
            raise EnvError('NewHistory needs messages; with rollout.history = "inline" the conversation is one message')
        history.check(len(path.messages))

        own = {reply.message: reply for reply in path.replies}
        messages: list[Message] = []
        replies: list[SampledReply] = []
        for item in history.messages:
            if isinstance(item, int) and item in own:
                if not messages:
                    raise EnvError("NewHistory begins with a reply; keep or write a message before it")
                replies.append(own[item]._replace(message=len(messages), start=-1))
            messages.append(path.messages[item] if isinstance(item, int) else item)

        prompt = render_from_scratch(path.history, self.renderer, messages, replies, path.tools)
        sent = ids_with_media_keys(path.ids, path.placed)
        keep = common_prefix_length(ids_with_media_keys(prompt.ids, prompt.media), sent)
        media = placements_between(prompt.media, keep, len(prompt.ids))
        met = prompt.neutralised, prompt.control_text
        starts = prompt.replies or tuple(-1 for _ in replies)
        path.replies = replies
        self.append(path, Branch(keep, prompt.ids[keep:], "rewritten", *met, starts, media, prompt.tool_images_moved))
        path.messages, path.new_messages, path.turn, path.inserted = messages, tuple(messages), -1, None
        self.journal.observation_changed = True

    def observe(self, tokens: int) -> None:
        """Count observed tokens as used; raise `LimitReached`, and count them as left out, if the episode has fewer left."""
        try:
            self._budget.check_observation(len(self.trajectory.turns), tokens)
        except LimitReached:
            add_counts(self.trajectory, "observation_tokens_left_out", by=tokens)
            raise
        self._budget.used += tokens

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
            self.mark_untrained(turn.spans, turn.context, INVALID)
        path.rewind(mark)
        branches = self.trajectory.branches
        branches["asked_again"] = branches.get("asked_again", 0) + 1
        self._budget.rejected += 1

    def mark_untrained(self, spans: Iterable[int], position: int, reason: str = REWOUND) -> None:
        """Exclude ids of a reply's spans from training, from a path position on."""
        for index in spans:
            span = self.trajectory.spans[index]
            if span.trained and span.end > position:
                span.untrained_from = min(span.trained, max(0, position - span.start))
                span.untrained = reason
                self.journal.untrained(index, span.untrained_from, reason)

    def weigh(self, number: int, weights: tuple[float, ...]) -> None:
        """Set the training weights of a turn's sampled ids."""
        turn = self.trajectory.turns[number]
        if weights != (turn.weights or (1.0,) * len(weights)):
            turn.weights = weights
            self.journal.weights(number, weights)

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
        deadline: Deadline,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: StopText | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Turn:
        """Sample the next reply of a path and record it; `sampling` and `stop` are the episode's by default.

        `stop_ids` end the reply besides the model's end tokens. A reply that itself breaks a limit is in `limits_met` then.

        Raises `LimitReached` when no token is left for a reply; `EngineError` when the engine fails or breaks its contract;
        `TimeoutError` when the engine misses its deadline.
        """
        budget, cause = self._budget.left(len(self.trajectory.turns), len(path.ids))
        if max_tokens is not None and max_tokens < budget:
            if max_tokens < 1:
                raise UsageError(f"max_tokens must be at least 1, not {max_tokens}")
            budget, cause = max_tokens, None
        sampling, stop = sampling or self._sampling, stop or self.stop
        recorded = await self.resumed.take(path, self._distribution_of(sampling), budget) if self.resumed.left else None
        context, prompt, call = len(path.ids), path.leaf, self._calls if recorded is None else recorded.call
        seed = call_seed(path.seed, path.calls)
        began = time.monotonic()
        self.enter_phase("generate", began)
        self._budget.reserve(budget)
        try:
            if recorded is not None:
                reply, ids, spans, generation, tries = self._repeat(path, recorded, stop)
            else:
                ends = self.renderer.stop_ids | stop_ids if stop_ids else self.renderer.stop_ids
                reply, ids, spans, generation, tries = await self._sample(path, deadline, budget, sampling, stop, seed, ends)
        except BaseException:
            self._leave_out(path, context, prompt)
            raise
        finally:
            self._budget.release(budget)
        turn = Turn(path.agent, prompt, context, spans, path.new_messages, reply, path.turn, generation.finish)
        turn.generate_s = time.monotonic() - began if recorded is None else recorded.turn.generate_s
        turn.retries, turn.cached = tries, generation.cached_tokens
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
        sampled = self.trajectory.spans[spans[0]].ids if len(spans) == 1 and start == context else tuple(path.ids[start:])
        path.replies.append(SampledReply(len(path.messages), sampled, start))
        path.messages.append(turn.message)
        path.new_messages = ()
        row: dict[str, Any] = {"call": call, "seed": seed}
        if generation.drafted:
            row["drafts"] = generation.drafted, generation.accepted
        if recorded is not None:
            row["resumed"] = True
        self.journal.turn(turn, path.tools, row)
        if self._effects:
            await self.journal.durable()
        limit = self._limit_of(turn, ids, generation, cause)
        if limit is not None:
            self.limits_met[path.turn] = limit
        return turn

    def _leave_out(self, path: ConversationPath, context: int, prompt: int) -> None:
        """Return a path to where a reply was asked for; what was sampled before the call failed stays in the record, untrained.

        A play function may catch the failure and go on.
        """
        spans: list[int] = []
        while path.leaf != prompt:
            spans.append(path.leaf)
            path.leaf = self.trajectory.spans[path.leaf].parent
        path.truncate(context)
        self.mark_untrained(spans, 0, FAILED_ATTEMPT)

    def _distribution_of(self, sampling: Sampling) -> SamplingDistribution:
        return self._distribution if sampling is self._sampling else _distribution(sampling, self._distribution.banned_ids)

    async def _sample(
        self,
        path: ConversationPath,
        deadline: Deadline,
        budget: int,
        sampling: Sampling,
        stop: StopText | None,
        seed: int,
        stop_ids: frozenset[int],
    ) -> tuple[Message, Sequence[int], tuple[int, ...], Generation, int]:
        """Sample one reply of at most `budget` ids, continuing aborted calls.

        Return the parsed reply, its ids, its spans, the last generation, and the number of failed calls.
        """
        distribution = self._distribution_of(sampling)
        spans: list[int] = []
        ids: Sequence[int] = ()
        extras: dict[str, tuple[int, Any]] = {}
        aborts, failed, turn, drafted, accepted = 0, 0, len(self.trajectory.turns), 0, 0
        path.calls += 1
        while True:
            extras_from = self._extras.first_unknown(path, extras)
            request = Request(
                path.ids,
                budget - len(ids),
                stop_ids,
                seed,
                self.session,
                self._group,
                self._calls,
                sampling,
                path.agent,
                path.placed,
                path.messages,
                self.renderer.banned_ids,
                self._extras.want,
                extras_from,
                min_version=self._min_version,
                stop_text=stop.continued_after(ids) if stop and ids else stop,
                reply_position=len(ids),
                tools=path.tools,
            )
            self._calls += 1
            call = request, ids, path, stop, deadline
            try:
                generation, ids, reply = await self._call_engine(*call)
            except (EngineError, TimeoutError) as error:
                (generation, ids, reply), tries = await self.retries.engine(
                    error, partial(self._call_engine, *call), deadline.wait, turn
                )
                failed += tries
            self._extras.add(extras, generation, extras_from)
            drafted, accepted = drafted + generation.drafted, accepted + generation.accepted
            if generation.ids:
                for span in reply_spans(generation, self.trajectory, len(path.ids), path.agent, distribution):
                    span.parent = path.leaf
                    path.leaf = self._add(span)
                    spans.append(path.leaf)
                path.ids.extend(generation.ids)
                self._budget.used += len(generation.ids)
            if generation.finish != "abort":
                break
            if len(ids) >= budget:
                generation.finish = "length"
                break
            aborts = 0 if generation.ids else aborts + 1
            if aborts > _MAX_ABORTS:
                raise EngineError(f"the engine aborted {aborts} calls in a row without sampling anything")
        if isinstance(reply, Exception):
            raise reply
        generation.drafted, generation.accepted = drafted, accepted
        return reply, ids, tuple(spans), generation, failed

    async def _call_engine(
        self, request: Request, previous: Sequence[int], path: ConversationPath, stop: StopText | None, deadline: Deadline
    ) -> tuple[Generation, Sequence[int], Message | Exception]:
        """Call the engine once; return its generation, the reply's ids so far (`previous` included), and the parsed reply.

        The exception of a parser takes the place of its reply, because what was sampled is recorded first.
        """
        engine, place = self.engine, self._place
        if place is not None and not place.try_enter():
            await place.enter(len(self.trajectory.turns), deadline)
        try:
            try:
                generation = await deadline.wait(engine.generate(request), self.limits.generate_s)
            finally:
                if place is not None:
                    place.leave()
            check_generation(generation, request, type(engine).__name__)
            ids = [*previous, *generation.ids] if previous else generation.ids
            try:
                return generation, ids, read_reply(self.renderer, path, stop, ids)
            except Exception as error:
                self.renderer.decode(ids)  # fails on ids that the tokenizer does not have: the engine's fault
                return generation, ids, error
        except (EngineError, TimeoutError):
            raise
        except Exception as error:
            raise EngineError(f"{type(engine).__name__}: {class_name(error)}: {words(error)}") from error

    def _limit_of(
        self, turn: Turn, ids: Sequence[int], generation: Generation, cause: StopReason | None
    ) -> LimitReached | None:
        """Return the limit that a reply itself breaks; None for a reply that the conversation may go on after."""
        if not self.renderer.invalid_ids.isdisjoint(ids):
            banned = next((at for at, one in enumerate(ids) if one in self.renderer.banned_ids), None)
            if banned is not None:
                self.mark_untrained(turn.spans, turn.context + banned, BANNED)
            return LimitReached(StopReason.INVALID_TOKEN, "the reply contains a misplaced control token")

        if generation.finish != "length" or cause is None:
            return None
        if cause is StopReason.TURN_LENGTH and self.limits.on_turn_length == "continue":
            return None
        return LimitReached(cause, f"the reply reached {len(ids)} tokens without an end token")

    def close(self) -> None:
        """Write the end of the episode to the journal."""
        self.resumed.drop(self.trajectory)
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


class EpisodeJournal:
    """Writes the entries of one episode: opened, each turn, failed attempts, closed."""

    def __init__(self, journal: EventLog | None, trajectory: Trajectory, settings: str = "") -> None:
        """`settings` is the name of the episode's settings in the journal; without a journal nothing is written."""
        self._journal = journal
        self._trajectory = trajectory
        self._key = key_row(trajectory.key)
        self._written = 0  # spans that the journal holds
        self._steps: list[tuple[int, float | None, Mapping[str, Any], float, int]] = []
        self._untrained: list[tuple[int, int, str]] = []
        self._weights: list[tuple[int, tuple[float, ...]]] = []
        self.observation: Any = NO_OBSERVATION
        """Last observation as the environment returned it; written with the next turn, or with the last entry."""
        self.observation_changed = False
        """Whether the messages of the next turn differ from it: it was truncated, or rewound the reply before it."""
        self.tools: Sequence[Any] = ()
        """Tools offered when the conversation was opened."""
        self._written_tools: Sequence[Any] = ()  # tools of this attempt that the journal has
        self._scores: dict[str, Any] = {}
        self._last_turn: Turn | None = None
        if journal is not None:
            event = {"e": "opened", "k": self._key, "template": trajectory.template}
            journal.append(event | {"settings": settings} if settings else event)

    def env_step(self, turn: int) -> None:
        """Queue a turn's reward and info for the next entry."""
        record, self._last_turn = self._trajectory.turns[turn], None
        self._steps.append((turn, record.reward, record.info, record.env_s, record.retries))

    def untrained(self, span: int, position: int, reason: str) -> None:
        """Queue for the next entry that a span is untrained from one of its positions on."""
        if span < self._written:  # else its row will have it
            self._untrained.append((span, position, reason))

    def weights(self, turn: int, weights: tuple[float, ...]) -> None:
        """Queue the training weights of a turn's ids for the next entry."""
        self._weights.append((turn, weights))

    def reward(self, whose: str, value: Any) -> None:
        """Store a reward, the episode's `own` or its `group`'s, and its failures so far; written with the last entry."""
        if self._journal is not None:
            failed = sum(failure.phase == "reward" for failure in self._trajectory.failures)
            self._scores[whose] = [_scores_row(value), failed]

    def repeat(self, event: Event) -> None:
        """Write an event of an earlier process again, and apply it to the trajectory."""
        if self._journal is not None:
            self._journal.append(event | {"resumed": True})
        apply_event(self._trajectory, event)
        self._written = len(self._trajectory.spans)

    async def durable(self) -> None:
        """Return when every entry so far is on the disk."""
        if self._journal is not None:
            await self._journal.durable()

    def step(self, turn: int, row: Mapping[str, Any]) -> None:
        """Write the result of a step in an environment with effects, -1 for its reset, with the state after it."""
        if self._journal is not None:
            self._journal.append({**row, "e": "step", "k": self._key, "n": turn})

    def turn(self, turn: Turn, tools: Sequence[Any], call: Mapping[str, Any]) -> None:
        """Write a turn with the tools of its prompt.

        `call` has the number and seed of its first call, its drafted and accepted ids, and `resumed` if an earlier process
        sampled it.
        """
        if self._journal is not None:
            event = self._entry("turn")
            event |= {"n": len(self._trajectory.turns) - 1, **call, "turn": turn_row(turn)}
            if tools is not self._written_tools:
                event |= self._tools_row(tools)
            if self.observation_changed:
                event["said"] = observation_row(self.observation)
            self._journal.append(event)
        self.observation, self.observation_changed, self._last_turn = NO_OBSERVATION, False, turn

    def failed_attempt(self) -> None:
        """Write the end of an attempt that failed for good."""
        if self._journal is not None:
            self._journal.append({"answers": []} | self._entry("failed_attempt") | self._closing_fields())
        self._steps, self._untrained, self._weights, self._written_tools, self._last_turn = [], [], [], (), None
        self.observation, self.observation_changed, self.tools = NO_OBSERVATION, False, ()

    def close(self) -> None:
        """Write the end of the episode."""
        if self._journal is not None:
            event = {"answers": []} | self._entry("closed") | self._closing_fields()
            if self._scores:
                event["scores"] = self._scores
            self._journal.append(event | outcome_row(self._trajectory))

    def _entry(self, name: str) -> dict[str, Any]:
        """Return an entry with what is new since the last one."""
        spans = self._trajectory.spans
        entry: dict[str, Any] = {"e": name, "k": self._key, "spans": list(map(span_row, spans[self._written :]))}
        self._written = len(spans)
        if self._steps:
            entry["answers"], self._steps = self._steps, []
        if self._untrained:
            entry["rewound"], self._untrained = self._untrained, []
        if self._weights:
            entry["weights"], self._weights = self._weights, []
        return entry

    def _closing_fields(self) -> dict[str, Any]:
        """Return fields that no turn holds: an observation without a reply, tools without a turn, retries of the last step."""
        fields = {} if self.observation is NO_OBSERVATION else {"said": observation_row(self.observation)}
        if self._last_turn is not None and self._last_turn.retries:  # the step failed each time
            fields["retries"] = self._last_turn.retries
        return fields | self._tools_row(self.tools) if self.tools and self.tools is not self._written_tools else fields

    def _tools_row(self, tools: Sequence[Any]) -> dict[str, Any]:
        assert self._journal is not None
        previous, self._written_tools = self._written_tools, tools
        return {"tools": self._journal.append_definition("tools", list(tools)) if tools else ""} if tools or previous else {}


def _scores_row(value: Any) -> Any:
    if isinstance(value, Scores):
        row = {"own": value.own, "turns": value.turns, "parts": value.parts, "metrics": value.metrics, "agents": value.agents}
        return {name: part for name, part in row.items() if part or name == "own"}
    return None if value is None else float(value)

"""The record of one episode: what is asked, sampled and observed.

`Recorder.generate` is one turn, from top to bottom: budget, order, reply, turn, journal, limits.
The parts that it puts together have modules of their own. `ReplySampler.sample` calls the engine,
`PromptWriter` renders what is not sampled, `ConversationPath` keeps the ids of a conversation,
`EpisodeJournal` writes, `Budget.left` has the limits, and `ResumedTurns.take` finds the replies
that an earlier process sampled.

Who asks for turns is not here: `episode._attempt` for an environment, `Model` for a play function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwright.config.schema import OnTurnLength
from turnwright.engines import Engine, Sampling, StopText
from turnwright.envs.user_code import failure_of
from turnwright.errors import EnvError, LimitReached, UsageError
from turnwright.media import MediaStore
from turnwright.records.serialization import BANNED, INVALID
from turnwright.renderers import Renderer
from turnwright.rollouts.budget import Budget
from turnwright.rollouts.conversation import ConversationPath, PathState
from turnwright.rollouts.counts import add_counts, count_branch
from turnwright.rollouts.episode_journal import EpisodeJournal, ReplyCalls
from turnwright.rollouts.episode_settings import EpisodeSettings
from turnwright.rollouts.observations import MediaIntake
from turnwright.rollouts.prompt_writer import PromptWriter
from turnwright.rollouts.replies import (
    PathReply,
    ReplyOrder,
    ReplySampler,
    distribution_of,
    grown_message,
)
from turnwright.rollouts.resume import RestartEpisode, ResumeDiffers, ResumedTurns
from turnwright.rollouts.retries import Retries
from turnwright.rollouts.timeouts import Deadline, EpisodePlace
from turnwright.types import (
    FAILED_ATTEMPT,
    EpisodeKey,
    Message,
    StopReason,
    Tools,
    Trajectory,
    Turn,
)
from turnwright.types.seeds import call_seed, episode_seed

Trace = Callable[[str, Sequence[tuple[str, float]], float], None]
"""Callback for finished episodes: session, phases with their starts, and the end of the last
(`time.monotonic`)."""


class Recorder:
    """The record of one running episode, under its limits.

    The environment loop and agent functions both use it. `prompts` writes what the model reads,
    a `ReplySampler` what it samples, and `journal` keeps both on the disk: a reply is there before
    anything else uses it.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        engine: Engine,
        renderer: Renderer,
        settings: EpisodeSettings,
        *,
        seed: int,
        media_intake: MediaIntake | None = None,
        journal: EpisodeJournal | None = None,
        place: EpisodePlace | None = None,
        resumed: ResumedTurns | None = None,
        keep_phases: bool = False,
    ) -> None:
        """Fill an empty trajectory; `seed` is the run's.

        Media are stored in memory by default, and nothing is written without a `journal`. Calls
        wait for a `place`, if given. `resumed` has the recorded turns of an interrupted episode,
        which answer its calls before the engine does. `keep_phases` is a little slower.
        """
        self.trajectory = trajectory
        self.renderer = renderer
        self.limits = settings.limits
        self.history = settings.history
        self.stop = settings.stop
        shared_intake = media_intake or MediaIntake(MediaStore(), renderer)
        self.media_intake = shared_intake.of_episode(blank=settings.blank)

        # Where the episode is.
        self.phase = ""
        """Current phase of the episode, for failures and the watchdog."""
        self.since = 0.0
        """Start of the phase, by `time.monotonic`."""
        self._phases: list[tuple[str, float]] | None = [] if keep_phases else None
        self.enter_phase("reset", time.monotonic())

        # Sampling and its limits.
        self._engine = engine
        self._run_seed = seed
        self._sampling = settings.sampling
        self._distribution = distribution_of(self._sampling, frozenset(renderer.banned_ids))
        self._budget = Budget(
            settings.limits, max_turns=settings.max_turns, context=settings.context
        )
        self._effects = settings.rules.effects
        self.context = self._budget.context
        """Maximum ids of prompt and reply; None where neither the limits nor the engine set one."""

        # What happened in the current attempt.
        self.unrewarded = False
        """Whether the environment returned no reward for some turn."""
        self.tools_by_turn: list[Tools] = []
        """Tools offered to the model, by turn."""
        self.limits_met: dict[int, LimitReached] = {}
        """Turns whose reply itself broke a limit, by number: nothing may continue their
        conversations."""

        # The parts that write and sample.
        trajectory.template = renderer.fingerprint
        self.journal = journal or EpisodeJournal(None, trajectory)
        self.journal.open()
        self.prompts = PromptWriter(
            trajectory, renderer, settings.history, settings.limits, self._budget, self.journal
        )
        self.retries = Retries(settings.rules, trajectory, episode_seed(seed, trajectory.key))
        self._sampler = ReplySampler(
            trajectory, engine, renderer, settings, self._budget, self.retries, place
        )
        self._begin_attempt(trajectory.key)

        # What an earlier process played. Its failed attempts stay in the record.
        self.resumed = resumed or ResumedTurns()
        """Turns of an earlier process that answer calls before the engine does."""
        for event in self.resumed.failed_events:
            self.journal.repeat(event)
            if event["e"] == "failed_attempt":
                self._begin_attempt(replace(self._key, attempt=self._key.attempt + 1))
        if self._effects and self.resumed.left and self.resumed.state is None:
            self.restart_attempt(
                ResumeDiffers("its environment has effects, and no state of it was recorded")
            )

    # The episode

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase, which lasts until the next. Failures are recorded under the current phase.

        `since` is its start, by `time.monotonic`; None keeps the start of the previous phase, which
        includes it.
        """
        self.phase = name
        if since is not None:
            self.since = since
        if self._phases is not None:
            self._phases.append((name, time.monotonic()))

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Phases with their starts, in order; consecutive equal phases are one. Empty unless
        kept."""
        merged: list[tuple[str, float]] = []
        for name, start in self._phases or ():
            if not merged or merged[-1][0] != name:
                merged.append((name, start))
        return merged

    @property
    def waits(self) -> bool:
        """Whether a call waits for a place."""
        return self._sampler.waits

    @property
    def turn(self) -> int:
        """Index of the current turn."""
        recorded_turns = len(self.trajectory.turns)
        if self.phase in ("reset", "generate", "play"):
            return recorded_turns
        return max(0, recorded_turns - 1)

    def limit_turns(self, max_turns: Any) -> None:
        """Apply the turn limit that an environment sets, `Env.max_turns`.

        Raises `EnvError` if it is no number of turns.
        """
        if max_turns is None:
            return
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise EnvError(
                f"max_turns is {max_turns!r:.80}; it must be an integer of at least 1, or None"
            )
        self._budget.limit_turns(max_turns)

    def set_on_turn_length(self, handling: OnTurnLength | None) -> None:
        """Apply the handling of truncated replies that an environment sets, `Env.on_turn_length`.

        Raises `EnvError` if it is not one of `stop`, `continue` and None.
        """
        if handling not in (None, "stop", "continue"):
            raise EnvError(f'on_turn_length is {handling!r:.80}; write "stop", "continue" or None')
        if handling is not None:
            self.limits = replace(self.limits, on_turn_length=handling)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode ids without special tokens."""
        special_ids = self.renderer.special_ids
        return self.renderer.decode([token_id for token_id in ids if token_id not in special_ids])

    def open(
        self, messages: Sequence[Message], tools: Tools = (), agent: str = "main"
    ) -> ConversationPath:
        """Start a conversation."""
        return self.prompts.open(messages, tools, agent, self.seed)

    def record_step(
        self, number: int, reward: float | None, info: Mapping[str, Any], env_s: float
    ) -> None:
        """Record the environment's reward and info for a turn; they are written with the next
        one."""
        turn = self.trajectory.turns[number]
        if info:
            turn.info = dict(info)
        turn.reward = reward
        turn.env_s = env_s
        self.journal.env_step(number)
        if reward is None:
            self.unrewarded = True

    def reject(
        self,
        path: ConversationPath,
        before: PathState,
        info: Mapping[str, Any],
        *,
        trained: bool,
        env_s: float,
    ) -> None:
        """Keep the last reply of a path as a branch, and return the path to its state `before` it.

        A rejected reply does not count toward the turn limit; its tokens count.
        """
        turn = self.trajectory.turns[path.turn]
        self.record_step(path.turn, 0.0, info, env_s)
        if not trained:
            self.journal.mark_untrained(turn.spans, turn.context, INVALID)
        path.state = before
        count_branch(self.trajectory, "asked_again")
        self._budget.rejected += 1

    def restart_attempt(self, error: RestartEpisode) -> None:
        """Start over after an unrecoverable failure.

        Sampled ids stay, untrained, and the new attempt has a seed of its own.
        """
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
        self._begin_attempt(replace(self._key, attempt=self._key.attempt + 1))

    def _begin_attempt(self, key: EpisodeKey) -> None:
        self._key = key
        self.seed = episode_seed(self._run_seed, key)
        """Seed of the attempt's random streams."""
        self.session = key.session
        self._sampler.begin_attempt(key.session)

    def release(self) -> None:
        """Release the attempt's session in the engine."""
        try:
            self._engine.release(self.session)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an earlier error takes precedence
            self.trajectory.error = self.trajectory.error or failure_of(error, "close")

    def close(self) -> None:
        """Write the end of the episode to the journal."""
        self.resumed.drop(self.trajectory)
        self.journal.close()

    # A turn

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
        """Sample the next reply of a path and record it.

        `sampling` and `stop` are the episode's by default. `stop_ids` end the reply besides the
        model's end tokens. A reply that itself breaks a limit is in `limits_met` then.

        Raises `LimitReached` when no token is left for a reply; `EngineError` when the engine fails
        or breaks its contract; `TimeoutError` when the engine misses its deadline.
        """
        # How long the reply may be, and which limit says so.
        max_ids, limit_reason = self._budget.left(len(self.trajectory.turns), len(path.ids))
        if max_tokens is not None and max_tokens < max_ids:
            if max_tokens < 1:
                raise UsageError(f"max_tokens must be at least 1, not {max_tokens}")
            max_ids = max_tokens
            limit_reason = None

        # What it is sampled with.
        distribution = self._distribution
        if sampling is not None and sampling is not self._sampling:
            distribution = distribution_of(sampling, distribution.banned_ids)
        end_ids = self.renderer.stop_ids
        order = ReplyOrder(
            budget=max_ids,
            sampling=sampling or self._sampling,
            distribution=distribution,
            stop=stop or self.stop,
            stop_ids=end_ids | stop_ids if stop_ids else end_ids,
            seed=call_seed(path.seed, path.calls),
            deadline=deadline,
        )

        # The reply: an earlier process sampled it, or the engine does.
        recorded = None
        if self.resumed.left:
            recorded = await self.resumed.take(path, distribution, max_ids)
        first_call = self._sampler.calls if recorded is None else recorded.call
        leaf_before = path.leaf
        context = len(path.ids)
        began = time.monotonic()
        self.enter_phase("generate", began)
        self._budget.reserve(max_ids)
        try:
            if recorded is None:
                reply = await self._sampler.sample(path, order)
            else:
                reply = self._sampler.repeat(path, recorded, order.stop)
        except BaseException:
            # What was sampled before the call failed stays in the record, untrained. A play
            # function may catch the failure and go on from where the reply was asked for.
            left_spans = path.leave(leaf_before, context)
            self.journal.mark_untrained(left_spans, 0, FAILED_ATTEMPT)
            raise
        finally:
            self._budget.release(max_ids)
        seconds = time.monotonic() - began if recorded is None else recorded.turn.generate_s

        # The turn, written before anything else uses it.
        turn = self._add_turn(path, reply, leaf_before, context, order.stop)
        turn.generate_s = seconds
        calls = ReplyCalls(
            first=first_call,
            seed=order.seed,
            drafted=reply.generation.drafted,
            accepted=reply.generation.accepted,
            resumed=recorded is not None,
        )
        self.journal.turn(turn, path.tools, calls)
        if self._effects:
            await self.journal.durable()

        # The limit that the reply itself breaks. The caller decides what it ends.
        limit = self._limit_of(turn, reply, limit_reason)
        if limit is not None:
            self.limits_met[path.turn] = limit
        return turn

    def _add_turn(
        self,
        path: ConversationPath,
        reply: PathReply,
        prompt: int,
        context: int,
        stop: StopText | None,
    ) -> Turn:
        """Add the turn of a reply to the trajectory, and its message to the path.

        `prompt` is the span that ends the context, and `context` its number of ids.
        """
        trajectory = self.trajectory
        generation = reply.generation
        turn = Turn(
            agent=path.agent,
            prompt=prompt,
            context=context,
            spans=reply.spans,
            messages=path.new_messages,
            reply=reply.message,
            parent=path.turn,
            finish=generation.finish,
        )
        turn.retries = reply.failed_calls
        turn.cached = generation.cached_tokens
        self._sampler.extras.recorded(turn, generation)

        # A call that was cut off is not malformed.
        if generation.finish != "length" or self.limits.on_turn_length == "continue":
            for kind in reply.message.call_error_kinds:
                add_counts(trajectory, "malformed_calls", f"malformed_{kind}")

        # The reply may continue the last message, after what the environment inserted there.
        if path.inserted is not None:
            turn.grown = grown_message(trajectory, self.renderer, path, turn, stop)
            turn.inserted = path.inserted
            turn.kept = path.kept

        number = len(trajectory.turns)
        trajectory.turns.append(turn)
        self.tools_by_turn.append(path.tools)

        # The path has the ids of the whole message, which may begin in an earlier reply. Most
        # messages are one span, whose ids need no copy.
        start = trajectory.reply_start(number)
        if len(reply.spans) == 1 and start == context:
            message_ids = tuple(trajectory.spans[reply.spans[0]].ids)
        else:
            message_ids = tuple(path.ids[start:])
        path.replied(number, turn.message, message_ids, start)
        return turn

    def _limit_of(
        self, turn: Turn, reply: PathReply, reason: StopReason | None
    ) -> LimitReached | None:
        """Return the limit that a reply itself breaks; None if the conversation may go on after it.

        `reason` is the limit that set the reply's maximum length, None if the caller did.
        """
        renderer = self.renderer
        if not renderer.invalid_ids.isdisjoint(reply.ids):
            for position, token_id in enumerate(reply.ids):
                if token_id in renderer.banned_ids:
                    self.journal.mark_untrained(turn.spans, turn.context + position, BANNED)
                    break
            return LimitReached(
                StopReason.INVALID_TOKEN, "the reply contains a misplaced control token"
            )

        if reply.generation.finish != "length" or reason is None:
            return None
        if reason is StopReason.TURN_LENGTH and self.limits.on_turn_length == "continue":
            return None
        return LimitReached(
            reason, f"the reply reached {len(reply.ids)} tokens without an end token"
        )

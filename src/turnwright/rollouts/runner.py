"""`Rollout` plays episodes against an engine, concurrently, and records them.

`Rollout.play` is what callers use and `Rollout.play_episode` the course of one episode: a
`Recorder`, then an environment (`_run_env`) or a play function (`_run_agent`), then its record.
Whatever user code raises ends one episode (`_fail`); only Ctrl-C, a cancelled rollout, a record
that cannot be written and a bug that keeps coming back (`UserErrorCounter`) end all of them.

The turns themselves are in `episode.run_episode` and `Recorder.generate`, what concurrent episodes
share in `RolloutStream`, why an episode ends in `endings`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from turnwright.config import EnvRules, Limits
from turnwright.config.names import HISTORY_MODES, HISTORY_OBJECT, history_error
from turnwright.config.values import values_of
from turnwright.engines import Engine, HasContextLimit, Sampling, StopText
from turnwright.engines.protocols import add_pixel_source, give_renderer, gives_alternatives
from turnwright.envs import Env, Scores
from turnwright.envs.isolation.process_env import ProcessEnvFactories
from turnwright.envs.resolve import load_object
from turnwright.envs.threads import AbandonableThreads
from turnwright.envs.user_code import failure_of
from turnwright.errors import (
    ConfigError,
    LimitReached,
    ProcessDied,
    RepeatedUserError,
    TraceError,
    UsageError,
    words,
)
from turnwright.media import MediaStore
from turnwright.records import RunDir, trajectory_row
from turnwright.records.journal import RecordedEpisode
from turnwright.records.run_dir import RECORD_VERSION, EventLog
from turnwright.renderers import Renderer
from turnwright.renderers.history import POLICIES, History, policy_name
from turnwright.renderers.renderer import vision_of
from turnwright.renderers.row_arguments import check_row_arguments
from turnwright.renderers.vision import PixelCache
from turnwright.rollouts.agent_function import AgentFunction, Model
from turnwright.rollouts.endings import stop_of_failure, stop_of_result
from turnwright.rollouts.engine_extras import parse_extras
from turnwright.rollouts.env_session import START_S, EnvSession, is_over
from turnwright.rollouts.episode import compute_reward, reward_value, run_episode
from turnwright.rollouts.episode_journal import EpisodeJournal
from turnwright.rollouts.episode_settings import EpisodeSettings
from turnwright.rollouts.episode_spec import EpisodeSpec
from turnwright.rollouts.group_rewards import GroupRewards
from turnwright.rollouts.observations import MediaIntake
from turnwright.rollouts.play_again import MAX_DEATHS, is_death
from turnwright.rollouts.recorder import Recorder, Trace
from turnwright.rollouts.render_check import RenderCheck
from turnwright.rollouts.resume import EarlierEpisodes, ResumedTurns
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.stream import EngineRequest, GroupPlayer, RolloutStream
from turnwright.rollouts.timeouts import Deadline, EpisodePlace, Stop
from turnwright.rollouts.watchdog import PendingEpisode
from turnwright.types import EpisodeKey, Failure, FailureKind, StopReason, Trajectory

MAX_ERROR_TASKS = 3
"""Number of tasks with the same bug at which the run stops."""
FIRST_EPISODES = 32
"""Number of first episodes in which a bug is also counted across samples of one task."""
REPEATED_ERROR_SHARE = 0.2
"""Share of the first episodes with the same bug above which the run stops."""


class UserErrorCounter:
    """Counts bugs in user code, by exception type and line, as episodes end."""

    def __init__(self) -> None:
        self._episodes = 0
        self._tasks: defaultdict[tuple[str, str], list[str]] = defaultdict(list)

    def record(self, trajectory: Trajectory) -> None:
        """Count a finished episode; raise `RepeatedUserError` when a bug occurred too often."""
        self._episodes += 1
        error = trajectory.error
        if error is None or error.kind != FailureKind.USER_BUG:
            return

        failed_tasks = self._tasks[error.type, error.place or error.phase]
        failed_tasks.append(trajectory.task.id)
        different_tasks = list(dict.fromkeys(failed_tasks))
        if len(different_tasks) >= MAX_ERROR_TASKS:
            listed = ", ".join(different_tasks[:MAX_ERROR_TASKS])
            where = f"in {len(different_tasks)} tasks ({listed})"
            raise RepeatedUserError(self._message(error, where))

        is_early = self._episodes <= FIRST_EPISODES
        if is_early and len(failed_tasks) > REPEATED_ERROR_SHARE * FIRST_EPISODES:
            where = f"in {len(failed_tasks)} of the first {self._episodes} episodes"
            raise RepeatedUserError(self._message(error, where))

    def _message(self, error: Failure, where: str) -> str:
        place = f" at {error.place}" if error.place else ""
        return (
            f"{error.type}{place} in {error.phase}, {where}: "
            f"{error.message or 'without a message'}. It is a bug in the code, which no retry "
            "fixes: see the tracebacks in trajectories.jsonl, fix it, then start a new run"
        )


def parse_history(history: Any) -> History:
    """Return a history mode or policy.

    Given is a mode by name, a built-in policy as `name:N`, `file.py:policy`, or a policy as an
    object. Raises `ConfigError` for another text, `UsageError` for another object.
    """
    if not isinstance(history, str):
        if not callable(history):
            raise UsageError(
                "history is a mode, a policy's name or a function of (conversation, replies), not "
                f"{history!r:.60}"
            )
        policy: History = history
        return policy

    problem = history_error(history)
    if problem:
        raise ConfigError(f"rollout.history = {history!r}: {problem}")
    if history in HISTORY_MODES:
        return history
    if history.startswith(HISTORY_OBJECT):
        raise ConfigError(
            f"the run was started with the history policy {history.removeprefix(HISTORY_OBJECT)!r} "
            "as an object: resume it with the same call of turnwright.train() and resume=True"
        )

    if ".py" in history:
        loaded = load_object(history)
        if not callable(loaded):
            raise ConfigError(
                f"{history} is {type(loaded).__name__}; a history policy is a function of "
                "(conversation, replies)"
            )
        loaded_policy: History = loaded
        return loaded_policy

    name, _, number = history.partition(":")
    return POLICIES[name](int(number))


class Rollout:
    """Plays episodes against an engine, concurrently, on one event loop."""

    tools_offered = 0
    """Maximum number of tools offered to the model in an episode so far."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        settings: RolloutSettings | None = None,
        *,
        run: RunDir | None = None,
        earlier: EarlierEpisodes | None = None,
        media: MediaStore | None = None,
        pixels: PixelCache | None = None,
        on_episode: Trace | None = None,
        journal: EventLog | None = None,
        elsewhere: GroupPlayer | None = None,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> None:
        """
        Args:
            engine: samples the replies; its optional capabilities (`turnwright.engines.protocols`)
                are detected here.
            renderer: renders prompts and observations for the engine's model.
            settings: how episodes are played.
            run: run directory in which every turn is recorded.
            earlier: episodes of an earlier process, finished or interrupted.
            media: media store; by default in the run's directory, or in memory.
            pixels: cache of preprocessed images of `media`, shared by trainer and rollout.
            on_episode: receives the phases of each finished episode and their starts.
            journal: takes the events of episodes in place of the run's journal.
            elsewhere: plays the groups, in place of this process.
            on_finished: receives each finished episode; it must not raise.

        Raises:
            UsageError: for an empty stop text, an unknown history or sanity check, or
                alternatives of an engine that does not return them.
        """
        settings = settings or RolloutSettings()
        if settings.alternatives and not gives_alternatives(engine):
            raise UsageError(
                f"alternatives = {settings.alternatives}: {type(engine).__name__} does not return "
                "the most likely ids; the local engine, vLLM and SGLang do; leave it out, or use "
                "one of these"
            )
        self.engine = engine
        self.renderer = renderer
        self.settings = settings
        self.limits = settings.limits
        self.sanity = RenderCheck(
            renderer,
            settings.sanity,
            settings.sanity_share,
            run.path if run is not None else None,
        )
        self._stop = StopText(settings.stop, renderer.decode) if settings.stop else None
        self.history = parse_history(settings.history)
        self.want = parse_extras(settings.want)
        self._bugs = UserErrorCounter() if settings.stop_on_bugs else None

        # What is written, and what an earlier process wrote.
        self._journal = run.journal if journal is None and run is not None else journal
        self._records = run.trajectories if run is not None and run.keeps_trajectories else None
        earlier = earlier or EarlierEpisodes()
        self._recorded = dict(earlier.finished)
        self._interrupted = dict(earlier.interrupted)
        self._history_name = (
            settings.history
            if isinstance(settings.history, str)
            else f"{HISTORY_OBJECT}{policy_name(settings.history)}"
        )
        self._settings_names: dict[tuple[Any, ...], tuple[EnvRules, str]] = {}

        # What is running, and what ended.
        self._on_episode = on_episode
        self._on_finished = on_finished
        self.elsewhere = elsewhere
        self._stream: RolloutStream | None = None
        self._running: dict[int, Recorder] = {}
        self.finished = 0
        """Number of finished episodes."""
        self.resumed_turns = 0
        """Turns of interrupted episodes that were not sampled again."""
        self.abandoned = 0
        """Synchronous environment calls that missed their deadline; each may block a thread
        forever."""
        self.abandoned_calls: list[str] = []
        """Names of these calls: episode and method."""

        # Images, and what the engine can do.
        store = media or MediaStore(run.path / "media" if run is not None else None)
        self.media_intake = MediaIntake(
            store, renderer, self.limits.images, self.limits.episode_images
        )
        vision = vision_of(renderer)
        self.pixels = pixels or (None if vision is None else PixelCache(vision, store))
        """Cache of preprocessed images, for engine and trainer; None for a text-only model."""
        self._context_source = engine if isinstance(engine, HasContextLimit) else None
        give_renderer(engine, renderer)
        if self.pixels is not None:
            add_pixel_source(engine, self.pixels)

    async def play(
        self,
        episodes: Sequence[EpisodeSpec],
        *,
        extras: Iterable[str] | None = None,
        min_version: int = 0,
        sampling: Sampling | None = None,
        blank: bool = False,
    ) -> list[Trajectory]:
        """Play episodes, with at most `concurrency` engine calls at once.

        Args:
            episodes: episodes in any order.
            extras: engine extras to request besides ids and logprobs; None uses the rollout's
                `want`.
            min_version: oldest policy version that may sample; an older one breaks the engine's
                contract.
            sampling: sampling parameters; None uses the rollout's.
            blank: whether every image becomes a gray one of its size.

        Returns:
            One trajectory per episode, in the order of `episodes`.

        Raises:
            TraceError: when the record cannot be written.
            UsageError: for an agent function where history is `inline`, or unknown extras.
            RepeatedUserError: when the same bug in user code broke too many episodes and
                `stop_on_bugs` is set.
            TaskError: for a row whose `chat_template_kwargs` are not those of the renderer.
        """
        check_row_arguments((episode.task for episode in episodes), self.renderer)

        async def submit(stream: RolloutStream) -> list[Trajectory]:
            return await stream.submit(
                episodes, extras=extras, min_version=min_version, sampling=sampling, blank=blank
            )

        if self._stream is not None and self._stream.loop is asyncio.get_running_loop():
            return await submit(self._stream)
        async with RolloutStream(self) as stream:
            return await submit(stream)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[RolloutStream]:
        """Open a stream, which `play` uses too until it is closed."""
        async with RolloutStream(self) as stream:
            self._stream = stream
            try:
                yield stream
            finally:
                self._stream = None

    def recorded(self, key: EpisodeKey) -> Trajectory | None:
        """Return an episode that an earlier process finished."""
        return self._recorded.get(key)

    def resume(self, episodes: Mapping[EpisodeKey, RecordedEpisode]) -> None:
        """Add interrupted episodes; their recorded turns are not sampled again."""
        self._interrupted.update(episodes)

    def take_interrupted(self, key: EpisodeKey) -> RecordedEpisode | None:
        """Return the record of an interrupted episode that is about to be played, and forget it."""
        return self._interrupted.pop(key, None)

    def finished_elsewhere(
        self, trajectories: Iterable[Trajectory], *, tools: int, resumed: int
    ) -> None:
        """Count episodes that were played elsewhere, and write their records.

        `tools` is the maximum number of tools offered in them, `resumed` the number of turns taken
        from records. Errors are as of `count_error`.
        """
        self.tools_offered = max(self.tools_offered, tools)
        self.resumed_turns += resumed
        for trajectory in trajectories:
            if self._records is not None:
                self._records.append(trajectory_row(trajectory, self.renderer))
            self.episode_finished(trajectory)

    def episode_finished(self, trajectory: Trajectory) -> None:
        """Count an episode; errors as of `count_error`."""
        self.finished += 1
        if self._on_finished is not None:
            self._on_finished(trajectory)
        self.count_error(trajectory)

    def count_abandoned(self, threads: AbandonableThreads) -> None:
        """Count the calls that the threads of a closed stream have abandoned."""
        self.abandoned += threads.abandoned
        self.abandoned_calls += threads.names

    def count_error(self, trajectory: Trajectory) -> None:
        """Count the error of a finished episode.

        Raises `RepeatedUserError` when a bug occurred too often.
        """
        if self._bugs is not None:
            self._bugs.record(trajectory)

    def drop_recorded(self, trajectories: Iterable[Trajectory]) -> None:
        """Drop recorded episodes that a step was trained on."""
        for trajectory in trajectories:
            self._recorded.pop(trajectory.key, None)
            self._interrupted.pop(trajectory.key, None)

    async def within_prompt_limit(
        self, episodes: Sequence[EpisodeSpec]
    ) -> tuple[set[str], list[str]]:
        """Return the ids of tasks whose opening prompts are within `limits.prompt_tokens`, and of
        the others.

        `episodes` has one of each task.
        """
        limit = self.limits.prompt_tokens
        if limit is None:
            return {episode.task.id for episode in episodes}, []

        sizes = await self.prompt_sizes(episodes)
        fitting: set[str] = set()
        for episode, size in zip(episodes, sizes, strict=True):
            if size is None or size <= limit:
                fitting.add(episode.task.id)
        too_long = [episode.task.id for episode in episodes if episode.task.id not in fitting]
        return fitting, too_long

    async def prompt_sizes(self, episodes: Sequence[EpisodeSpec]) -> list[int | None]:
        """Return the number of ids of each opening prompt, tools included.

        None for agent functions and failing resets.
        """
        threads = AbandonableThreads()
        stop = Stop()
        in_processes = ProcessEnvFactories()

        async def measure_all() -> list[int | None]:
            return [
                await self._prompt_size(episode, in_processes, threads, stop)
                for episode in episodes
            ]

        try:
            async with asyncio.TaskGroup() as group:
                # A separate task, since user code may cancel the task it runs in.
                task = group.create_task(measure_all())
                try:
                    await asyncio.wait([task])
                except BaseException:
                    stop.asked = True
                    raise
            return task.result()
        finally:
            await in_processes.close()
            threads.close()

    async def _prompt_size(
        self,
        episode: EpisodeSpec,
        in_processes: ProcessEnvFactories,
        threads: AbandonableThreads,
        stop: Stop,
    ) -> int | None:
        """Return the size of an opening prompt; try again where the environment's process died."""
        make = episode.make
        if make is None:
            return None
        if episode.rules.isolation == "process":
            make = in_processes.of(make)
        for _ in range(MAX_DEATHS):
            with suppress(ProcessDied):
                return await self._prompt_size_once(episode, make, threads, stop)
        return None

    async def _prompt_size_once(
        self,
        episode: EpisodeSpec,
        make: Callable[[], Env],
        threads: AbandonableThreads,
        stop: Stop,
    ) -> int | None:
        deadline = Deadline(START_S + self.limits.env_s, stop)
        recorder = Recorder(
            Trajectory(episode.task, episode.key),
            self.engine,
            self.renderer,
            EpisodeSettings(self.limits, self.settings.sampling, episode.rules),
            seed=self.settings.seed,
            media_intake=self.media_intake,
        )
        no_retries = replace(episode.rules, retries=replace(episode.rules.retries, episode=0))
        session = EnvSession(make, episode.task, no_retries, recorder, deadline, threads)
        try:
            messages, tools = await session.reset()
            return len(self.renderer.open(self.media_intake.take_in(messages), tools).ids)
        except BaseException as error:
            if deadline.passes(error):
                raise
            deadline.clear()
            # The end of a process says nothing about the prompt. Other failures recur when the
            # episode is played, and are recorded then.
            if is_death(failure_of(error, "reset")):
                raise ProcessDied(words(error)) from error
            return None
        finally:
            deadline.extend(self.limits.env_s)
            with suppress(Exception):
                await session.close()
            deadline.close()

    def pending(self) -> list[PendingEpisode]:
        """Return the running episodes, longest in their phase first.

        Those that wait for a place are left out. May be called from another thread.
        """
        now = time.monotonic()
        episodes: list[PendingEpisode] = []
        for recorder in list(self._running.values()):  # a copy: other threads end episodes
            if not recorder.waits:
                since = recorder.since
                episodes.append(
                    PendingEpisode(
                        recorder.trajectory.key.label,
                        recorder.turn,
                        recorder.phase,
                        now - since,
                        since,
                    )
                )
        if self.elsewhere is not None:
            episodes += self.elsewhere.pending(now)
        return sorted(episodes, key=lambda episode: -episode.seconds)

    async def play_episode(
        self,
        episode: EpisodeSpec,
        make: Callable[[], Env] | None,
        request: EngineRequest,
        threads: AbandonableThreads,
        group_rewards: GroupRewards,
        stop: Stop,
        place: EpisodePlace,
    ) -> Trajectory:
        """Play one episode of a stream, in the environment of `make`."""
        # Its record, which an interrupted play may have begun.
        began = time.monotonic()
        trajectory = Trajectory(episode.task, episode.key)
        settings = self._settings_of(episode, request)
        interrupted = self.take_interrupted(episode.key)
        resumed = None
        if interrupted is not None:
            resumed = ResumedTurns(interrupted, in_order=episode.play is None)
        recorder = Recorder(
            trajectory,
            self.engine,
            self.renderer,
            settings,
            seed=self.settings.seed,
            media_intake=self.media_intake,
            journal=EpisodeJournal(
                self._journal, trajectory, self._settings_name(episode, settings)
            ),
            place=place,
            resumed=resumed,
            keep_phases=self._on_episode is not None,
        )

        # Its turns and its reward.
        self._running[id(recorder)] = recorder
        deadline = Deadline(self.limits.wall_clock_s, stop)
        try:
            if episode.play is not None:
                await self._run_agent(episode.play, recorder, request.sampling, deadline)
            else:
                await self._run_env(episode, make, recorder, deadline, threads)
        finally:
            deadline.close()
            del self._running[id(recorder)]
            recorder.release()

        # Its end. A cancelled episode does not come here: in the journal it never ended, so it is
        # played again.
        if self._on_episode is not None:
            self._on_episode(recorder.session, recorder.phases, time.monotonic())
        trajectory.wall_s = time.monotonic() - began
        self.resumed_turns += recorder.resumed.answered
        self.tools_offered = max(self.tools_offered, *map(len, recorder.tools_by_turn), 0)
        self.sanity.check(recorder)

        # The last of a group closes its siblings too, whose rewards wait for it.
        for ended in await group_rewards.episode_done(recorder, episode.group_reward):
            ended.close()
            if self._records is not None:
                self._records.append(trajectory_row(ended.trajectory, self.renderer))
        return trajectory

    def _settings_of(self, episode: EpisodeSpec, request: EngineRequest) -> EpisodeSettings:
        """Return what an episode is played with."""
        return EpisodeSettings(
            limits=self.limits,
            sampling=request.sampling,
            rules=episode.rules,
            history=self.history,
            stop=self._stop,
            max_turns=episode.max_turns,
            context=None if self._context_source is None else self._context_source.context,
            want=request.want,
            alternatives=self.settings.alternatives,
            min_version=request.min_version,
            blank=request.blank,
        )

    def _settings_name(self, episode: EpisodeSpec, settings: EpisodeSettings) -> str:
        """Return the name of an episode's settings in the journal; write them if they are new."""
        if self._journal is None:
            return ""
        blank = settings.blank or self.media_intake.store.blank
        is_play = episode.play is not None
        has_group_reward = episode.group_reward is not None
        key = (
            id(settings.rules),
            settings.max_turns,
            settings.context,
            settings.want,
            blank,
            settings.sampling,
            is_play,
            has_group_reward,
        )
        if key not in self._settings_names:
            # The name is made of the row's text, so the order of its fields stays.
            row = {
                "v": RECORD_VERSION,
                "seed": self.settings.seed,
                "limits": values_of(Limits, settings.limits),
                "stop": list(settings.stop.texts) if settings.stop is not None else [],
                "history": self._history_name,
                "sanity": self.sanity.settings,
                "rules": values_of(EnvRules, settings.rules),
                "max_turns": settings.max_turns,
                "context": settings.context,
                "want": sorted(settings.want),
                "blank": blank,
                "sampling": settings.sampling.settings(),
                "play": is_play,
                "group": has_group_reward,
            }
            name = self._journal.append_definition("settings", row)
            # The reference keeps the id of `rules` unique.
            self._settings_names[key] = settings.rules, name
        return self._settings_names[key][1]

    async def _run_env(
        self,
        episode: EpisodeSpec,
        make: Callable[[], Env] | None,
        recorder: Recorder,
        deadline: Deadline,
        threads: AbandonableThreads,
    ) -> None:
        """Play an episode in its environment, and ask for its reward."""
        trajectory = recorder.trajectory
        assert make is not None
        session = EnvSession(make, episode.task, episode.rules, recorder, deadline, threads)
        try:
            # What was sampled until a limit is rewarded like any other episode.
            try:
                await run_episode(session, recorder, deadline)
            except LimitReached as limit:
                trajectory.stop = StopReason(limit.reason)
            began = time.monotonic()
            trajectory.reward = await compute_reward(session, recorder)
            trajectory.reward_s = time.monotonic() - began
        except BaseException as error:
            self._fail(recorder, error, deadline, getattr(make, "__name__", type(make).__name__))
        finally:
            await self._close(session, recorder, deadline)

    async def _close(self, session: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
        """Close an episode's environment, in a time of its own after the episode's deadline."""
        recorder.enter_phase("close", time.monotonic())
        deadline.extend(self.limits.env_s)
        try:
            await session.close()
        except BaseException as error:
            if self._ends_rollout(error, deadline):
                raise
            # The reward stays, and an earlier error takes precedence.
            if recorder.trajectory.error is None:
                recorder.trajectory.error = failure_of(error, "close")

    async def _run_agent(
        self, play: AgentFunction, recorder: Recorder, sampling: Sampling, deadline: Deadline
    ) -> None:
        """Play an episode by an agent function, whose result is its reward."""
        trajectory = recorder.trajectory
        recorder.enter_phase("play")
        model = Model(recorder, sampling, deadline)
        try:
            try:
                result = await deadline.wait(play(trajectory.task, model), self.limits.wall_clock_s)
                trajectory.stop = stop_of_result(result, model.limit)
            except LimitReached as limit:
                trajectory.stop = StopReason(limit.reason)
                result = None

            # What a given-up episode earned until then is no reward.
            recorder.enter_phase("reward")
            if trajectory.stop is StopReason.ABORTED and isinstance(result, Scores):
                result = Scores(None, metrics=result.metrics)
            trajectory.reward = reward_value(result, recorder, "the agent function's return value")
        except BaseException as error:
            self._fail(recorder, error, deadline, getattr(play, "__name__", type(play).__name__))
        finally:
            await model.close()

    def _fail(
        self, recorder: Recorder, error: BaseException, deadline: Deadline, name: str
    ) -> None:
        """Record an exception as the episode's error; the episode has no reward then.

        `name` is that of an environment without one in its task. Raises an exception that ends the
        rollout.
        """
        if self._ends_rollout(error, deadline):
            raise error
        deadline.clear()
        trajectory = recorder.trajectory
        last_turn = len(trajectory.turns) - 1
        failure = failure_of(error, recorder.phase, last_turn, trajectory.task.env or name)
        out_of_time = deadline.expired or is_over(error)
        trajectory.error = failure
        trajectory.reward = None
        trajectory.stop = stop_of_failure(failure, error, recorder.phase, out_of_time=out_of_time)

    def _ends_rollout(self, error: BaseException, deadline: Deadline) -> bool:
        """Return whether an exception ends the rollout instead of one episode.

        Raises `TraceError` when the record cannot be written any more.
        """
        broken = self._journal.broken if self._journal is not None else ""
        if broken and not deadline.passes(error):
            raise TraceError(broken) from error
        return deadline.passes(error)


def left_out(limit: int, tasks: Sequence[str]) -> dict[str, Any]:
    """Return the content of `left_out.json`: tasks over `limits.prompt_tokens`."""
    return {"limits.prompt_tokens": limit, "count": len(tasks), "tasks": list(tasks)}


def left_out_note(limit: int, tasks: Sequence[str], *, listed: bool) -> str:
    """Return one line about tasks over `limits.prompt_tokens`.

    `listed` tells whether left_out.json has all of them.
    """
    examples = ", ".join(tasks[:5]) + (", ..." if len(tasks) > 5 else "")
    full_list = " (full list: left_out.json)" if listed else ""
    return f"skipped {len(tasks)} tasks with prompts over {limit} tokens: {examples}{full_list}"

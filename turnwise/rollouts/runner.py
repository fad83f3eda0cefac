"""Rollout: schedules EpisodeSpecs; history option; stops on repeated user errors."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from turnwise.config import EnvRules, Limits
from turnwise.config.constraints import check_section
from turnwise.config.schema import HISTORY_MODES, HISTORY_OBJECT, history_error
from turnwise.engines import AcceptsPixelSource, Engine, HasContextLimit, NeedsRenderer, Sampling, StopText
from turnwise.envs import Env
from turnwise.envs.resolve import load_object
from turnwise.envs.rewards.workers import reward_processes
from turnwise.envs.user_code import failure_of
from turnwise.errors import ConfigError, EngineError, LimitReached, RepeatedUserError, TraceError, UsageError
from turnwise.media import MediaStore
from turnwise.records import RunDir, trajectory_row
from turnwise.records.run_dir import JsonLines
from turnwise.records.serialization import LOOP
from turnwise.renderers import Renderer
from turnwise.renderers.history import POLICIES, History, policy_name
from turnwise.renderers.vision import PixelCache
from turnwise.rollouts.agent_function import AgentFunction, Model
from turnwise.rollouts.conversation import parse_extras
from turnwise.rollouts.env_session import START_S, EnvCaller, EnvSession, is_over
from turnwise.rollouts.episode import compute_reward, reward_value, run_episode
from turnwise.rollouts.group_rewards import GroupReward, GroupRewards, complete_groups
from turnwise.rollouts.observations import MediaIntake
from turnwise.rollouts.recorder import Recorder, TimedRecorder, Trace
from turnwise.rollouts.render_check import SHARE, RenderCheck, Sanity
from turnwise.rollouts.timeouts import AbandonableThreads, Deadline, PendingEpisode, Stop, Watchdog
from turnwise.types import EpisodeKey, Failure, FailureKind, Group, StopReason, Task, Trajectory, as_messages
from turnwise.types.seeds import episode_seed

TASKS = 3
"""The same mistake in so many tasks stops the run."""
FIRST = 32
"""So many episodes are looked at for mistakes that always strike, also where there is but one task."""
REPEATED_ERROR_SHARE = 0.2
"""More than this share of them stops the run."""


class UserErrorCounter:
    """Counts mistakes by type and line as episodes end."""

    def __init__(self) -> None:
        self._episodes = 0
        self._tasks: defaultdict[tuple[str, str], list[str]] = defaultdict(list)

    def record(self, trajectory: Trajectory) -> None:
        """One more episode has ended.

        Raises:
            RepeatedUserError: when a mistake was met once too often.
        """
        self._episodes += 1
        error = trajectory.error
        if error is None or error.kind != FailureKind.USER_BUG:
            return
        seen = self._tasks[error.type, error.place or error.phase]
        seen.append(trajectory.task.id)
        tasks = list(dict.fromkeys(seen))
        if len(tasks) >= TASKS:
            shown = ", ".join(tasks[:TASKS])
            raise RepeatedUserError(self._told(error, f"in {len(tasks)} tasks ({shown})"))
        if self._episodes <= FIRST and len(seen) > REPEATED_ERROR_SHARE * FIRST:
            raise RepeatedUserError(self._told(error, f"in {len(seen)} of the first {self._episodes} episodes"))

    def _told(self, error: Failure, where: str) -> str:
        place = f" at {error.place}" if error.place else ""
        return (
            f"{error.type}{place} in {error.phase}, {where}: {error.message or 'without a message'}. It is a mistake in the "
            "code, which no retry mends: the tracebacks stand in trajectories.jsonl; mend it, then start a new run"
        )


def parse_history(said: Any) -> History:
    """The mode or policy that is meant: a mode by its name, `name:N` for one that is shipped, `file.py:policy`, or an object.

    Raises:
        ConfigError: for a name that is not known, a number that does not fit, or a file without such a policy.
        UsageError: for an object that is no policy.
    """
    if not isinstance(said, str):
        if not callable(said):
            raise UsageError(f"history is a mode, a policy's name or a function of (conversation, replies), not {said!r:.60}")
        policy: History = said
        return policy
    if wrong := history_error(said):
        raise ConfigError(f"rollout.history = {said!r}: {wrong}")
    if said in HISTORY_MODES:
        return said
    if said.startswith(HISTORY_OBJECT):
        raise ConfigError(
            f"the run was begun with the history policy {said.removeprefix(HISTORY_OBJECT)!r} as an object: go on with the "
            "same call of turnwise.train() and resume=True"
        )
    if ".py" in said:
        found = load_object(said)
        if not callable(found):
            raise ConfigError(f"{said} is {type(found).__name__}; a history policy is a function of (conversation, replies)")
        loaded: History = found
        return loaded
    name, _, number = said.partition(":")
    return POLICIES[name](int(number))


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to be played."""

    task: Task
    key: EpisodeKey
    make: Callable[[], Env] | None = None
    """Makes its environment; None where `play` is given."""
    play: AgentFunction | None = None
    max_turns: int | None = None
    """A limit of the environment's own."""
    rules: EnvRules = field(default_factory=EnvRules)
    """What becomes of the model's mistakes and the world's failures."""
    group_reward: GroupReward | None = None
    """Compares all episodes of its task, once the last of them is over."""


class EpisodeSettings:
    """Writes the settings of episodes down, and names them."""

    def __init__(
        self,
        journal: JsonLines,
        history: History,
        stop: StopText | None,
        seed: int,
        limits: Limits,
        sanity: Sequence[Any],
    ) -> None:
        """
        Args:
            journal: where they go.
            history: as the rollout was given it.
            sanity: level, how often, and the share of episodes.
        """
        self._journal = journal
        self._common = {
            "v": LOOP,
            "seed": seed,
            "limits": asdict(limits),
            "stop": list(stop.texts) if stop is not None else [],
            "history": history if isinstance(history, str) else f"{HISTORY_OBJECT}{policy_name(history)}",
            "sanity": sanity,
        }
        self._named: dict[tuple[Any, ...], tuple[EnvRules, str]] = {}

    def name(self, episode: EpisodeSpec, *, context: int | None, want: frozenset[str], blank: bool, sampling: Sampling) -> str:
        """The name under which the journal has what an episode is played by.

        Args:
            context: most ids that the engine takes.
            want: what the engine is asked for beside ids and logprobs.
            blank: whether images are shown in one grey.
            sampling: the distribution to sample from.
        """
        alone, rules = episode.group_reward is None, episode.rules
        varies = id(rules), episode.max_turns, context, want, blank, sampling, episode.play is None, alone
        if varies in self._named:
            return self._named[varies][1]
        row = self._common | {
            "rules": {one.name: getattr(rules, one.name) for one in fields(EnvRules)},
            "max_turns": episode.max_turns,
            "context": context,
            "want": sorted(want),
            "blank": blank,
            "sampling": asdict(sampling),
            "play": episode.play is not None,
            "group": not alone,
        }
        name = self._journal.append_definition("settings", row)
        self._named[varies] = rules, name  # kept, so that no other rules get this id
        return name


class _Asked(NamedTuple):
    """What one call of `Rollout.play` asks of the engine."""

    want: frozenset[str]
    min_version: int
    sampling: Sampling


class Rollout:
    """Plays episodes against an engine, many at a time, within one event loop."""

    tools_told = 0
    """Most tools that the model was told of in an episode since the rollout was made."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        concurrency: int = 256,
        run: RunDir | None = None,
        records: bool = True,
        recorded: Mapping[EpisodeKey, Trajectory] | None = None,
        stop: Sequence[str] = (),
        history: History = "append",
        sanity: Sanity = "strict",
        sanity_every: Literal["episode", "turn"] = "episode",
        sanity_share: float = SHARE,
        stop_on_bugs: bool = False,
        watchdog_s: float = 120.0,
        media: MediaStore | None = None,
        pixels: PixelCache | None = None,
        want: Iterable[str] = (),
        on_episode: Trace | None = None,
    ) -> None:
        """
        Args:
            engine: what samples; its optional capabilities are looked for here (`turnwise.engines.base`).
            renderer: of the engine's model.
            limits: of every episode.
            sampling: the distribution to sample from.
            seed: names the noise of every episode, together with its key.
            concurrency: most episodes at once.
            run: where they are written down, turn by turn.
            records: whether finished episodes are written to trajectories.jsonl too, for people (it can be derived later).
            recorded: finished episodes of an earlier process, taken as they are instead of being played again.
            stop: texts that end a reply.
            history: what a prompt shows of earlier turns: `append`, `inline`, `template`, `name:N`, `file.py:policy`, or a
                policy.
            sanity: whether episodes that are over are compared with a full render (`strict`, `ignore_strippable`, `off`).
            sanity_every: the last turn of an episode, or each.
            sanity_share: of the episodes, chosen by their keys.
            stop_on_bugs: whether the same mistake in a person's code, met in several tasks, stops the rollout; else every
                episode that it breaks is a record.
            watchdog_s: seconds without progress after which what is pending is printed to standard error.
            media: where images are kept; by default in the run's directory, or in memory.
            pixels: what the model's processor makes of images of `media`, where trainer and rollout share it.
            want: what the engine is asked for beside ids and logprobs: `routes`, the experts of every position.
            on_episode: receives the phases of each finished episode and their beginnings.

        Raises:
            UsageError: for a concurrency under 1, an empty stop text, a history that there is not, another kind of sanity
                check, or a `want` that nobody knows.
        """
        if concurrency < 1:
            raise UsageError(f"concurrency is at least 1, not {concurrency}")
        check_section(limits or Limits(), "limits")
        self.engine, self.renderer = engine, renderer
        self.limits, self.sampling = limits or Limits(), sampling or Sampling()
        self.seed, self.concurrency = seed, concurrency
        self.sanity = RenderCheck(renderer, sanity, sanity_every, sanity_share, run.path if run is not None else None)
        self._stop = StopText(stop, renderer.decode) if stop else None
        self.history = parse_history(history)
        self._want, self._on_episode = parse_extras(want), on_episode
        self.finished = 0
        """Episodes finished since the rollout was made."""
        self.abandoned = 0
        """Synchronous calls of environments that did not return by their deadline; each may hold a thread for ever."""
        self.abandoned_calls: list[str] = []
        """Their names: episode and method."""
        self._run = run
        self._records = run.trajectories if run is not None and records else None
        self._recorded = dict(recorded or {})
        self.watchdog_s = watchdog_s
        self._bugs = UserErrorCounter() if stop_on_bugs else None
        self._running: dict[int, Recorder] = {}
        alike = history, self._stop, seed, self.limits, self.sanity.settings
        self._settings = EpisodeSettings(run.journal, *alike) if run is not None else None
        store = media or MediaStore(run.path / "media" if run is not None else None)
        self.sight = MediaIntake(store, renderer, self.limits.images, self.limits.episode_images)
        self.pixels = pixels or (None if renderer.vision is None else PixelCache(renderer.vision, store))
        """What the model's processor makes of images, for engine and trainer; None for a model that sees none."""
        self._limited = engine if isinstance(engine, HasContextLimit) else None
        if isinstance(engine, NeedsRenderer):
            engine.set_renderer(renderer)
        if isinstance(engine, AcceptsPixelSource) and self.pixels is not None:
            engine.add_pixel_source(self.pixels)

    async def play(
        self,
        episodes: Sequence[EpisodeSpec],
        *,
        extras: Iterable[str] | None = None,
        min_version: int = 0,
        sampling: Sampling | None = None,
    ) -> list[Trajectory]:
        """Play episodes, at most `concurrency` at once.

        Args:
            episodes: in any order.
            extras: what the engine is asked for beside ids and logprobs; None is the `want` of the rollout.
            min_version: the oldest policy that may answer; an older one breaks the engine's contract.
            sampling: the distribution to sample from; None is that of the rollout.

        Returns:
            One trajectory per episode, in their order, whatever order they finish in.

        Raises:
            TraceError: when the record cannot be written.
            UsageError: for a play function where history is `inline`, or unknown extras.
            RepeatedUserError: when the same mistake in a person's code broke too many episodes, and `stop_on_bugs` was said.
        """
        if self.history == "inline" and any(episode.play is not None for episode in episodes):
            raise UsageError('history = "inline" is for environments: a play function says itself what follows a reply')
        asked = _Asked(self._want if extras is None else parse_extras(extras), min_version, sampling or self.sampling)
        keys, grouped = [episode.key for episode in episodes], [episode.group_reward is not None for episode in episodes]
        results: list[Trajectory | None] = complete_groups(keys, [self._recorded.get(key) for key in keys], grouped)
        for found in filter(None, results):
            self._ended(found)
        waiting = iter([number for number, found in enumerate(results) if found is None])
        threads = AbandonableThreads(self.concurrency)
        played = [
            episode.key for episode, found in zip(episodes, results, strict=True) if found is None and episode.group_reward
        ]
        stop = Stop()
        siblings = GroupRewards(played, threads, self.limits.reward_s, stop)
        generations = gc.get_threshold()
        # Episodes are made of a great many small objects and no cycles: looking for cycles every 700 of them cost 8% here.
        gc.set_threshold(max(generations[0], 100_000), *generations[1:])

        async def work() -> None:
            try:
                for number in waiting:
                    episode = episodes[number]
                    if episode.rules.isolation == "process":
                        episode = replace(episode, make=homes.get(id(episode.make)))
                    results[number] = trajectory = await self._episode(episode, asked, threads, siblings, stop)
                    self.finished += 1
                    self._ended(trajectory)
            except BaseException:
                stop.asked = True  # the task group cancels the others now
                raise

        try:
            with Watchdog(self.pending, lambda: self.finished, self.watchdog_s):
                async with reward_processes(), _homes(episodes) as homes, asyncio.TaskGroup() as group:
                    workers = min(self.concurrency, sum(found is None for found in results))
                    tasks = [group.create_task(work()) for _ in range(workers)]
                    try:
                        if tasks:
                            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                    except BaseException:
                        stop.asked = True
                        raise
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            gc.set_threshold(*generations)
            threads.close()
            self.abandoned += threads.abandoned
            self.abandoned_calls += threads.names
        assert None not in results, "an episode ended without a record"
        return results  # type: ignore[return-value]

    def _ended(self, trajectory: Trajectory) -> None:
        if self._bugs is not None:
            self._bugs.record(trajectory)

    def drop_recorded(self, step: int) -> None:
        """Let go of recorded episodes of training steps up to this one."""
        self._recorded = {k: t for k, t in self._recorded.items() if k.phase != "train" or k.step > step}

    async def within_prompt_limit(self, episodes: Sequence[EpisodeSpec]) -> tuple[set[str], list[str]]:
        """Return the ids of tasks whose opening prompt, tools included, is within `limits.prompt_tokens`, and those of others.

        Args:
            episodes: one for each task.
        """
        most = self.limits.prompt_tokens
        if most is None:
            return {episode.task.id for episode in episodes}, []
        sizes = await self.prompt_sizes(episodes)
        fits = {e.task.id for e, size in zip(episodes, sizes, strict=True) if size is None or size <= most}
        return fits, [episode.task.id for episode in episodes if episode.task.id not in fits]

    async def prompt_sizes(self, episodes: Sequence[EpisodeSpec]) -> list[int | None]:
        """How many ids each opening prompt has, tools included; None where a play function or a failing reset hides it."""
        threads, stop = AbandonableThreads(), Stop()

        async def size(episode: EpisodeSpec) -> int | None:
            if episode.make is None:
                return None
            deadline = Deadline(START_S + self.limits.env_s, stop)
            world: EnvCaller | None = None
            try:
                make = homes.get(id(episode.make), episode.make)
                apart = episode.rules.isolation == "process"
                world = await EnvCaller.make(make, deadline, threads, self.limits.env_s, isolated=apart)
                seed = episode_seed(self.seed, episode.key) & 0x7FFFFFFF
                opening = await world.call(world.env.reset, episode.task, seed=seed, seconds=self.limits.env_s)
                messages = episode.task.messages if opening is None else as_messages(opening)
                return len(self.renderer.open(self.sight.take_in(messages), world.env.tools).ids)
            except BaseException as error:
                if deadline.passes(error):
                    raise
                deadline.clear()
                return None  # it will fail again, and be recorded, when it is played
            finally:
                if world is not None:
                    deadline.extend(self.limits.env_s)
                    with suppress(Exception):
                        await world.call(world.env.close, seconds=self.limits.env_s)
                deadline.close()

        async def each() -> list[int | None]:
            return [await size(episode) for episode in episodes]

        try:
            async with _homes(episodes) as homes, asyncio.TaskGroup() as group:
                task = group.create_task(each())  # of its own: user code may cancel the task that it runs in
                try:
                    await asyncio.wait([task])
                except BaseException:
                    stop.asked = True
                    raise
            return task.result()
        finally:
            threads.close()

    def pending(self) -> list[PendingEpisode]:
        """What runs right now, what has been in its phase longest first; may be asked from another thread."""
        now = time.monotonic()
        running = list(self._running.values())
        rows = [PendingEpisode(r.session, r.turn, r.phase, now - r.since, r.since) for r in running]
        return sorted(rows, key=lambda row: -row.seconds)

    async def _episode(
        self, episode: EpisodeSpec, asked: _Asked, threads: AbandonableThreads, siblings: GroupRewards, stop: Stop
    ) -> Trajectory:
        began = time.monotonic()
        trajectory = Trajectory(episode.task, episode.key)
        context = None if self._limited is None else self._limited.context
        recorder = (Recorder if self._on_episode is None else TimedRecorder)(
            trajectory,
            self.engine,
            self.renderer,
            self.limits,
            sampling=asked.sampling,
            seed=self.seed,
            journal=self._run.journal if self._run else None,
            max_turns=episode.max_turns,
            min_version=asked.min_version,
            stop=self._stop,
            history=self.history,
            sight=self.sight,
            rules=episode.rules,
            want=asked.want,
            settings=self._named(episode, asked, context),
            context=context,
        )
        self._running[id(recorder)] = recorder
        deadline = Deadline(self.limits.wall_clock, stop)
        try:
            if episode.play is not None:
                await self._play(episode.play, recorder, asked.sampling, deadline)
            else:
                await self._env(episode, recorder, deadline, threads)
        finally:
            deadline.close()
            del self._running[id(recorder)]
            recorder.release()
        if self._on_episode is not None and isinstance(recorder, TimedRecorder):
            self._on_episode(recorder.session, recorder.phases, time.monotonic())
        # Not reached by an episode that was stopped from outside: for the journal it never ended, and it is played again.
        trajectory.wall_s = time.monotonic() - began
        self.tools_told = max(self.tools_told, *map(len, recorder.told), 0)
        self.sanity.check(recorder)
        for done in await siblings.episode_done(recorder, episode.group_reward):
            done.close()
            if self._records is not None:
                self._records.append(trajectory_row(done.trajectory, self.renderer))
        return trajectory

    def _named(self, episode: EpisodeSpec, asked: _Asked, context: int | None) -> str:
        """What the journal calls the settings of an episode."""
        if self._settings is None:
            return ""
        blank = self.sight.store.blank
        return self._settings.name(episode, context=context, want=asked.want, blank=blank, sampling=asked.sampling)

    async def _env(self, episode: EpisodeSpec, recorder: Recorder, deadline: Deadline, threads: AbandonableThreads) -> None:
        trajectory = recorder.trajectory
        assert episode.make is not None
        player = EnvSession(episode.make, episode.task, episode.rules, recorder, deadline, threads)
        try:
            try:
                await run_episode(player, recorder, deadline)
            except LimitReached as limit:
                trajectory.stop = StopReason(limit.reason)
            assert player.world is not None
            began = time.monotonic()
            trajectory.reward = await compute_reward(player, recorder)
            trajectory.reward_s = time.monotonic() - began
        except BaseException as error:
            self._fail(recorder, error, deadline)
        finally:
            await self._close(player, recorder, deadline)

    async def _close(self, player: EnvSession, recorder: Recorder, deadline: Deadline) -> None:
        recorder.enter_phase("close", time.monotonic())
        deadline.extend(self.limits.env_s)  # closing has its time even where the episode used up its own
        try:
            await player.close()
        except BaseException as error:
            if self._ends(error, deadline):
                raise
            if recorder.trajectory.error is None:  # the reward stands, and what broke earlier is told rather than this
                recorder.trajectory.error = failure_of(error, "close")

    async def _play(self, play: AgentFunction, recorder: Recorder, sampling: Sampling, deadline: Deadline) -> None:
        trajectory = recorder.trajectory
        recorder.enter_phase("play")
        model = Model(recorder, sampling)
        try:
            try:
                reward = await deadline.wait(play(trajectory.task, model), self.limits.wall_clock)
                trajectory.stop = StopReason.DONE
            except LimitReached as limit:
                trajectory.stop, reward = StopReason(limit.reason), None
            recorder.enter_phase("reward")
            trajectory.reward = reward_value(reward, recorder, "what the play function returned")
        except BaseException as error:
            self._fail(recorder, error, deadline)
        finally:
            await model.close()

    def _ends(self, error: BaseException, deadline: Deadline) -> bool:
        """Whether an exception ends the rollout, and not its episode alone."""
        broken = self._run.journal.broken if self._run is not None else ""
        if broken and not deadline.passes(error):
            raise TraceError(broken) from error  # nothing can be recorded any more
        return deadline.passes(error)

    def _fail(self, recorder: Recorder, error: BaseException, deadline: Deadline) -> None:
        """Write down what broke; the episode has no reward then."""
        if self._ends(error, deadline):
            raise error
        deadline.clear()
        trajectory = recorder.trajectory
        trajectory.error = failure_of(error, recorder.phase, len(trajectory.turns) - 1)
        trajectory.reward = None
        if trajectory.error.kind == FailureKind.TIMEOUT:
            over = deadline.expired or is_over(error)
            trajectory.stop = StopReason.WALL_CLOCK if over else StopReason.TIMEOUT
        elif issubclass(type(error), EngineError):
            trajectory.stop = StopReason.ENGINE_ERROR
        elif trajectory.error.kind == FailureKind.TOOL:
            trajectory.stop = StopReason.TOOL_ERROR
        elif trajectory.error.kind == FailureKind.REWARD or recorder.phase == "reward":
            trajectory.stop = StopReason.REWARD_ERROR
        else:
            trajectory.stop = StopReason.ENV_ERROR


def _homes(episodes: Sequence[EpisodeSpec]) -> AbstractAsyncContextManager[Mapping[int, Callable[[], Env]]]:
    """The factories that stand for those of episodes whose environments live in processes, by the `id` of theirs."""
    apart = [e.make for e in episodes if e.make is not None and e.rules.isolation == "process"]
    if not apart:
        return nullcontext({})
    from turnwise.envs.isolation.process_env import fork_servers  # which few runs need

    return fork_servers(apart)


def left_out(most: int, out: Sequence[str]) -> dict[str, Any]:
    """Return what `left_out.json` says of tasks over `limits.prompt_tokens`."""
    return {"limits.prompt_tokens": most, "count": len(out), "tasks": list(out)}


def left_out_note(most: int, out: Sequence[str], *, listed: bool) -> str:
    """Return one line on tasks over `limits.prompt_tokens`; `listed` where left_out.json has all of them."""
    examples = ", ".join(out[:5]) + (", ..." if len(out) > 5 else "")
    return f"skipped {len(out)} tasks with prompts over {most} tokens: {examples}" + (
        " (full list: left_out.json)" if listed else ""
    )


def group_by_task(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Trajectories by task and step, in the order of their first."""
    groups: dict[tuple[str, int, str], Group] = {}
    for trajectory in trajectories:
        key = trajectory.key
        found = groups.setdefault((key.phase, key.step, key.task), Group(trajectory.task, []))
        found.trajectories.append(trajectory)
    return list(groups.values())


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

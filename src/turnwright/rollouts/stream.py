"""The stream of groups: submissions of episodes that are played side by side.

`RolloutStream.submit` starts a submission and `RolloutStream._play` is its course: take what an
earlier process finished, play what is missing, each episode as soon as the gate lets it start.
Submissions share what the stream opens: threads, worker processes, the watchdog, and the places of
engine calls.

One episode is played by `Rollout.play_episode`. Who enters the engine first is decided by
`CallGate`, which groups belong to a training step by `BatchScheduler`. Groups may be played on
other machines, by a `GroupPlayer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from turnwright.engines import Sampling
from turnwright.envs import Env
from turnwright.envs.isolation.process_env import ProcessEnvFactories
from turnwright.envs.isolation.process_pool import ProcessPool
from turnwright.envs.rewards.workers import use_pool
from turnwright.envs.threads import AbandonableThreads
from turnwright.errors import UsageError, first_exception
from turnwright.rollouts.engine_extras import parse_extras
from turnwright.rollouts.garbage import GarbageWatch
from turnwright.rollouts.group_rewards import GroupRewards, complete_groups
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.timeouts import CallGate, EpisodePlace, Stop
from turnwright.rollouts.watchdog import PendingEpisode, Watchdog
from turnwright.types import EpisodeKey, GroupKey, Trajectory

if TYPE_CHECKING:
    from turnwright.rollouts.episode_spec import EpisodeSpec


class EngineRequest(NamedTuple):
    """What a submission requests from the engine."""

    want: frozenset[str]
    min_version: int
    sampling: Sampling
    blank: bool


class GroupPlayer(Protocol):
    """Plays the groups of a stream elsewhere, such as on other machines.

    The stream has their retries and their results.
    """

    def open(self, rollout: Any, gate: CallGate) -> AbstractAsyncContextManager[Any]:
        """Return what keeps it open for a stream of a `Rollout`.

        Its engine calls take places of `gate`.
        """

    async def play(
        self,
        episodes: Sequence[EpisodeSpec],
        request: EngineRequest,
        *,
        training: bool,
        grouped: bool,
        on_start: Callable[[], None],
    ) -> list[Trajectory]:
        """Play episodes of one task; `on_start` is called when they start.

        If they are `grouped`, they are compared, so all of them are played by one process.
        """

    def pending(self, now: float) -> list[PendingEpisode]:
        """Return the running episodes; `now` is `time.monotonic()`.

        May be called from another thread.
        """


class EpisodePlayer(Protocol):
    """What a stream needs of a `Rollout`."""

    settings: RolloutSettings
    finished: int
    history: Any
    want: frozenset[str]
    elsewhere: GroupPlayer | None

    def pending(self) -> list[PendingEpisode]:
        """Return the running episodes."""

    def recorded(self, key: EpisodeKey) -> Trajectory | None:
        """Return a finished episode of an earlier process."""

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
        """Play one episode."""

    def episode_finished(self, trajectory: Trajectory) -> None:
        """Take note of an episode that ended."""

    def count_error(self, trajectory: Trajectory) -> None:
        """Count a recorded episode's bug in user code, if it has one."""

    def count_abandoned(self, threads: AbandonableThreads) -> None:
        """Count the calls that missed their deadline."""


class _Announced:
    """Episodes of a submission that have not started yet, as the gate counts them."""

    def __init__(self, gate: CallGate, episodes: int) -> None:
        self._gate = gate
        self.episodes = episodes
        gate.announce(episodes)

    def take_back(self, episodes: int) -> None:
        """Take back some of them."""
        self.episodes -= episodes
        self._gate.announce(-episodes)


@dataclass(frozen=True, slots=True)
class _Submission:
    """Episodes that are played together, and what they are played with."""

    episodes: Sequence[EpisodeSpec]
    request: EngineRequest
    training: bool
    announced: _Announced
    """Its episodes that have not started, where they are of training; else none."""
    stop: Stop = field(default_factory=Stop)
    results: list[Trajectory | None] = field(default_factory=list)
    """Trajectories in the order of `episodes`; None for those that have not ended."""

    @property
    def missing(self) -> list[int]:
        """Numbers of the episodes without a result."""
        return [number for number, result in enumerate(self.results) if result is None]

    def started(self, episodes: int) -> None:
        """Take note of episodes that start, or need no start."""
        if self.training:
            self.announced.take_back(episodes)


class RolloutStream:
    """Plays submissions of episodes side by side, each with its own sampling and oldest version.

    Example::

        async with RolloutStream(rollout) as stream:
            first, second = stream.submit(group), stream.submit(other, min_version=3)
            trajectories = await first
    """

    def __init__(self, rollout: EpisodePlayer) -> None:
        """Prepare a stream; `async with` opens it."""
        settings = rollout.settings
        self._rollout = rollout
        self.gate = CallGate(settings.concurrency, settings.environments)
        self._submissions: set[asyncio.Task[list[Trajectory]]] = set()
        self._in_processes = ProcessEnvFactories()

    async def __aenter__(self) -> Self:
        rollout, settings = self._rollout, self._rollout.settings
        self.loop = asyncio.get_running_loop()
        self._threads = AbandonableThreads(4 * settings.concurrency)

        self._stack = AsyncExitStack()
        self._stack.enter_context(GarbageWatch())
        self._stack.enter_context(
            Watchdog(rollout.pending, lambda: rollout.finished, settings.watchdog_s)
        )
        self._workers = ProcessPool()
        self._stack.push_async_callback(self._workers.close)
        if rollout.elsewhere is not None:
            await self._stack.enter_async_context(rollout.elsewhere.open(rollout, self.gate))
        return self

    async def __aexit__(self, *error: object) -> None:
        rollout = self._rollout
        try:
            for task in self._submissions:
                task.cancel()
            if self._submissions:
                await asyncio.wait(self._submissions)
            await self._in_processes.close()
            await self._stack.aclose()
        finally:
            self._threads.close()
            rollout.count_abandoned(self._threads)

    def submit(
        self,
        episodes: Sequence[EpisodeSpec],
        *,
        extras: Iterable[str] | None = None,
        min_version: int = 0,
        sampling: Sampling | None = None,
        blank: bool = False,
        training: bool = False,
    ) -> asyncio.Task[list[Trajectory]]:
        """Play episodes; siblings of a group belong in one submission.

        Returns a task of the trajectories in the order of `episodes`; cancelling it ends its
        episodes. The calls of a `training` submission can be held. Other arguments and errors are
        as of `Rollout.play`.
        """
        rollout = self._rollout
        has_agent_functions = any(episode.play is not None for episode in episodes)
        if rollout.history == "inline" and has_agent_functions:
            raise UsageError(
                'history = "inline" is for environments: an agent function composes what follows '
                "a reply itself"
            )

        request = EngineRequest(
            want=rollout.want if extras is None else parse_extras(extras),
            min_version=min_version,
            sampling=sampling or rollout.settings.sampling,
            blank=blank,
        )
        announced = _Announced(self.gate, len(episodes) if training else 0)
        task = self.loop.create_task(
            self._play(_Submission(episodes, request, training, announced))
        )
        self._submissions.add(task)
        task.add_done_callback(self._submissions.discard)
        task.add_done_callback(lambda _: announced.take_back(announced.episodes))
        return task

    async def _play(self, submission: _Submission) -> list[Trajectory]:
        # What an earlier process finished is not played again.
        submission.results.extend(self._recorded(submission.episodes))
        for recorded in submission.results:
            if recorded is not None:
                self._rollout.count_error(recorded)
        missing = submission.missing
        submission.started(len(submission.episodes) - len(missing))

        # Play the others. The first exception ends all of them.
        if self._rollout.elsewhere is None:
            plays = self._plays_here(submission, missing)
        else:
            plays = self._plays_elsewhere(self._rollout.elsewhere, submission, missing)
        try:
            with use_pool(self._workers):
                await _run_together(plays, submission.stop)
        except BaseExceptionGroup as errors:
            raise first_exception(errors) from None
        finally:
            # The last submission ends the processes of environments.
            if self._submissions == {asyncio.current_task()}:
                await self._in_processes.close()

        assert None not in submission.results, "an episode ended without a record"
        return submission.results  # type: ignore[return-value]

    def _recorded(self, episodes: Sequence[EpisodeSpec]) -> list[Trajectory | None]:
        """Return the recorded results of episodes, without those of incomplete groups."""
        keys = [episode.key for episode in episodes]
        return complete_groups(
            keys,
            recorded=[self._rollout.recorded(key) for key in keys],
            grouped=[episode.group_reward is not None for episode in episodes],
        )

    def _plays_here(
        self, submission: _Submission, missing: Sequence[int]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what plays each of the missing episodes."""
        episodes = [submission.episodes[number] for number in missing]
        group_rewards = GroupRewards(
            [episode.key for episode in episodes if episode.group_reward is not None],
            self._threads,
            self._rollout.settings.limits.reward_s,
            submission.stop,
        )
        for number in missing:
            yield self._play_here(submission, number, group_rewards)

    async def _play_here(
        self, submission: _Submission, number: int, group_rewards: GroupRewards
    ) -> None:
        """Play one episode of a submission when the gate lets it start, and set its result."""
        episode = submission.episodes[number]
        place = EpisodePlace(self.gate, submission.training, submission.request.min_version)
        try:
            await place.start()
            submission.started(1)
            try:
                if submission.stop.asked:
                    raise asyncio.CancelledError
                make = episode.make
                if make is not None and episode.rules.isolation == "process":
                    make = self._in_processes.of(make)
                trajectory = await self._rollout.play_episode(
                    episode,
                    make,
                    submission.request,
                    self._threads,
                    group_rewards,
                    submission.stop,
                    place,
                )
                submission.results[number] = trajectory
                self._rollout.episode_finished(trajectory)
            finally:
                place.end()
        except BaseException:
            submission.stop.asked = True  # the task group cancels the others now
            raise

    def _plays_elsewhere(
        self, elsewhere: GroupPlayer, submission: _Submission, missing: Sequence[int]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what has each group of the missing episodes played elsewhere."""
        numbers_by_group: dict[GroupKey, list[int]] = {}
        for number in missing:
            group = submission.episodes[number].key.group
            numbers_by_group.setdefault(group, []).append(number)
        for numbers in numbers_by_group.values():
            yield self._play_elsewhere(elsewhere, submission, numbers)

    async def _play_elsewhere(
        self, elsewhere: GroupPlayer, submission: _Submission, numbers: Sequence[int]
    ) -> None:
        """Have the episodes of one group played elsewhere, and set their results."""
        episodes = [submission.episodes[number] for number in numbers]
        trajectories = await elsewhere.play(
            episodes,
            submission.request,
            training=submission.training,
            grouped=episodes[0].group_reward is not None,
            on_start=lambda: submission.started(len(episodes)),
        )
        for number, trajectory in zip(numbers, trajectories, strict=True):
            submission.results[number] = trajectory


async def _run_together(plays: Iterable[Coroutine[Any, Any, None]], stop: Stop) -> None:
    """Run coroutines side by side; the first that fails cancels the others.

    A cancellation of the caller sets `stop`. Raises `BaseExceptionGroup` of what they raised.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(play) for play in plays]
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except BaseException:
            stop.asked = True
            raise

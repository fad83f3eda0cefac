"""Stream of episodes: what concurrent submissions share, for as long as it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
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
        """Return what keeps it open for a stream of a `Rollout`, whose engine calls
        take places of `gate`."""

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
    """Episodes of a submission that have not started yet."""

    def __init__(self, gate: CallGate, episodes: int) -> None:
        self._gate, self.episodes = gate, episodes
        gate.announce(episodes)

    def take_back(self, episodes: int) -> None:
        """Take back some of them."""
        self.episodes -= episodes
        self._gate.announce(-episodes)


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
        """Play episodes; siblings of a group belong in one submission. Arguments and
        errors as of `Rollout.play`.

        Returns a task of the trajectories in the order of `episodes`; cancelling it ends its
        episodes. The calls of a `training` submission can be held.
        """
        rollout = self._rollout
        if rollout.history == "inline" and any(episode.play is not None for episode in episodes):
            raise UsageError(
                'history = "inline" is for environments: an agent function composes what follows '
                "a reply itself"
            )
        want = rollout.want if extras is None else parse_extras(extras)
        request = EngineRequest(want, min_version, sampling or rollout.settings.sampling, blank)
        announced = _Announced(self.gate, len(episodes) if training else 0)
        task = self.loop.create_task(self._play(episodes, request, training, announced))
        self._submissions.add(task)
        task.add_done_callback(self._submissions.discard)
        task.add_done_callback(lambda _: announced.take_back(announced.episodes))
        return task

    async def _play(
        self,
        episodes: Sequence[EpisodeSpec],
        request: EngineRequest,
        training: bool,
        announced: _Announced,
    ) -> list[Trajectory]:
        rollout = self._rollout
        keys, grouped = (
            [episode.key for episode in episodes],
            [episode.group_reward is not None for episode in episodes],
        )
        results: list[Trajectory | None] = complete_groups(
            keys, [rollout.recorded(key) for key in keys], grouped
        )
        for found in filter(None, results):
            rollout.count_error(found)
        stop = Stop()
        missing = [number for number, found in enumerate(results) if found is None]
        announced.take_back(announced.episodes - len(missing) if training else 0)
        siblings = [keys[number] for number in missing if grouped[number]]
        group_rewards = GroupRewards(
            siblings, self._threads, rollout.settings.limits.reward_s, stop
        )

        async def play(number: int) -> None:
            place = EpisodePlace(self.gate, training, request.min_version)
            try:
                await place.start()
                announced.take_back(1 if training else 0)
                try:
                    if stop.asked:
                        raise asyncio.CancelledError
                    episode = episodes[number]
                    make = episode.make
                    if make is not None and episode.rules.isolation == "process":
                        make = self._in_processes.of(make)
                    given = request, self._threads, group_rewards, stop, place
                    results[number] = trajectory = await rollout.play_episode(episode, make, *given)
                    rollout.episode_finished(trajectory)
                finally:
                    place.end()
            except BaseException:
                stop.asked = True  # the task group cancels the others now
                raise

        starts: Iterable[Coroutine[Any, Any, None]] = map(play, missing)
        if rollout.elsewhere is not None:
            starts = self._elsewhere(
                rollout.elsewhere, episodes, missing, results, request, training, announced
            )
        try:
            with use_pool(self._workers):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(start) for start in starts]
                    try:
                        if tasks:
                            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                    except BaseException:
                        stop.asked = True
                        raise
        except BaseExceptionGroup as errors:
            raise first_exception(errors) from None
        finally:
            if self._submissions == {asyncio.current_task()}:
                await self._in_processes.close()
        assert None not in results, "an episode ended without a record"
        return results  # type: ignore[return-value]

    def _elsewhere(
        self,
        elsewhere: GroupPlayer,
        episodes: Sequence[EpisodeSpec],
        missing: Sequence[int],
        results: list[Trajectory | None],
        request: EngineRequest,
        training: bool,
        announced: _Announced,
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what has each group of the missing episodes played elsewhere,
        and sets its results."""

        async def play(numbers: Sequence[int]) -> None:
            group = [episodes[number] for number in numbers]
            played = await elsewhere.play(
                group,
                request,
                training=training,
                grouped=group[0].group_reward is not None,
                on_start=lambda: announced.take_back(len(group) if training else 0),
            )
            for number, trajectory in zip(numbers, played, strict=True):
                results[number] = trajectory

        groups: dict[GroupKey, list[int]] = {}
        for number in missing:
            groups.setdefault(episodes[number].key.group, []).append(number)
        yield from map(play, groups.values())

"""Pool of workers: places groups, and asks again elsewhere when a worker is lost or fails.

`WorkerPool.play` is one group from its request to its trajectories: placed (`_place`), asked of a
worker (`_ask`), and asked for again until each of its episodes ended. What arrives is written to
the run's journal by a `GroupRecord`; workers join at a `RunServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config import RunConfig
from turnwright.envs.spec import EnvSpec
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.records import RunDir
from turnwright.records.serialization import Event
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.stream import EngineRequest
from turnwright.rollouts.timeouts import CallGate
from turnwright.rollouts.watchdog import PendingEpisode
from turnwright.types import EpisodeKey, Trajectory
from turnwright_cluster.base import GroupSpec, WorkerFailed, WorkerLost
from turnwright_cluster.code import code_of
from turnwright_cluster.record import GroupRecord
from turnwright_cluster.remote import RemoteWorker
from turnwright_cluster.server import RunServer

if TYPE_CHECKING:
    from turnwright_cluster.ray_workers import RayWorkers

MAX_FAILED = 5
"""Number of times that a group fails before the run stops; workers that are lost do not count."""
STOP_SHARE = 0.5
"""Share of a lease that a worker gets beyond it to stop the groups of environments with effects."""


@dataclass(slots=True)
class _Asked:
    """A group that the stream waits for."""

    spec: GroupSpec
    effects: bool
    """Whether its environment changes something lasting."""
    grouped: bool
    """Whether its episodes are rewarded together, so that none is finished without the others."""
    since: float = field(default_factory=time.monotonic)
    finished: dict[EpisodeKey, Trajectory] = field(default_factory=dict)
    plays: dict[EpisodeKey, list[tuple[Event, ...]]] = field(default_factory=dict)
    """Events of interrupted plays of its episodes."""
    definitions: dict[str, Any] = field(default_factory=dict)
    """Values that they refer to, by name."""
    worker: str = ""
    """Name of the worker that has it; empty while it waits for one."""
    tried: Counter[str] = field(default_factory=Counter)
    """How often each worker had it."""
    failed: int = 0
    record: GroupRecord | None = None
    """What the present worker sent so far."""
    resumed: int = 0
    """Turns that were not sampled again."""
    tools: int = 0
    """Maximum number of tools offered in a turn."""

    def left(self) -> GroupSpec:
        """Return what is not finished, with the turns that are known of it."""
        keys = tuple(key for key in self.spec.keys if key not in self.finished)
        plays = {key: tuple(self.plays[key]) for key in keys if self.plays.get(key)}
        return replace(self.spec, keys=keys, plays=plays, definitions=dict(self.definitions))

    def give(self, worker: str) -> None:
        """Give it to a worker, or with an empty name to none."""
        self.worker = worker
        self.record = None
        self.tried[worker] += bool(worker)

    def start(self, record: GroupRecord) -> None:
        """Take what a worker sends into a record."""
        self.record = record

    def count_failure(self, failed: bool) -> int:
        """Count a failure, and return how many there were."""
        self.failed += failed
        return self.failed

    def turns(self, key: EpisodeKey) -> int:
        """Return the number of turns of an episode so far."""
        if self.record is None:
            return 0
        return sum(event["e"] == "turn" for event in self.record.events.get(key, []))

    def take(self, record: GroupRecord) -> None:
        """Take what a worker finished and began."""
        if not self.grouped or len(record.finished) == len(self.spec.keys):
            self.finished |= record.finished
        for key, events in record.events.items():
            if key not in self.finished and events:
                play = tuple(event for event in events if event["e"] != "closed")
                self.plays.setdefault(key, []).append(play)
        self.definitions |= record.definitions
        self.resumed += record.resumed_turns
        self.tools = max(self.tools, record.tools)


class WorkerPool:
    """Plays the groups of a run on workers; see `turnwright.rollouts.stream.GroupPlayer`."""

    def __init__(
        self,
        config: RunConfig,
        env_specs: Sequence[EnvSpec],
        run: RunDir,
        source: Path,
        *,
        recipe: Path | None = None,
        note: Callable[[str], None],
        resumed: bool = False,
    ) -> None:
        """`source` is the directory of tokenizer and template; the environments must be those that
        the recipe names."""
        names = [spec.name for spec in env_specs]
        if not config.env and config.rollout.function is None:
            raise ConfigError(
                "[scale]: workers are sent names, not objects: name the environment in [[env]] of "
                "a recipe"
            )
        if len(set(names)) < len(names):
            raise ConfigError(
                f"[scale]: workers find environments by name, and two are called {_twice(names)}; "
                "set env.name"
            )

        self._config = config
        self._run = run
        self._note = note
        uses = [env.use for env in config.env]
        self._server = RunServer(
            config,
            run.path,
            source,
            journal=run.journal,
            recipe=recipe,
            code=lambda: code_of(uses),
            on_join=self._joined,
            on_change=self._serve_queue,
            note=note,
        )
        self._ray_workers = None if config.scale.ray is None else self._connect_to_ray()
        self._workers: list[RemoteWorker] = []
        self._queue: deque[tuple[_Asked, asyncio.Future[RemoteWorker]]] = deque()
        """Groups that wait for a worker."""
        self._asked: list[_Asked] = []
        self._resumed = resumed
        self.asked_again: Counter[str] = Counter()
        """Groups that were asked for again, by reason: `lost`, `failed`."""

    @contextlib.asynccontextmanager
    async def open(self, rollout: Rollout, gate: CallGate) -> AsyncIterator[None]:
        self._rollout = rollout
        self._opened = time.monotonic()
        async with self._server.open(rollout, gate), self._ray():
            watch = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    def _connect_to_ray(self) -> RayWorkers:
        try:
            from turnwright_cluster.ray_workers import RayWorkers
        except ImportError as error:
            raise ConfigError(
                f"scale.ray needs Ray ({error.name} is missing): pip install 'turnwright[ray]'"
            ) from None
        return RayWorkers(
            self._config.scale,
            on_death=self._server.lose_named,
            note=self._note,
            shared=self._config.engines_on_ray,
        )

    @contextlib.asynccontextmanager
    async def _ray(self) -> AsyncIterator[None]:
        """Keep the workers on a Ray cluster running."""
        workers = self._ray_workers
        if workers is None:
            yield
            return
        workers.start(self._server.url_at(workers.host), self._server.token)
        try:
            yield
        finally:
            await workers.close()

    async def play(
        self,
        episodes: Sequence[EpisodeSpec],
        request: EngineRequest,
        *,
        training: bool,
        grouped: bool,
        on_start: Callable[[], None],
    ) -> list[Trajectory]:
        first = episodes[0]
        keys = [episode.key for episode in episodes]
        spec = GroupSpec(
            env=first.env,
            task=first.task,
            keys=tuple(keys),
            sampling=request.sampling,
            extras=request.want,
            min_version=request.min_version,
            blank=request.blank,
            training=training,
        )
        asked = _Asked(spec, first.rules.effects, grouped)
        for key in keys:
            interrupted = self._rollout.take_interrupted(key)
            if interrupted is not None:
                plays = (*interrupted.other_plays, interrupted)
                asked.plays[key] = [tuple(play.events) for play in plays]
                asked.definitions.update(interrupted.definitions)

        self._asked.append(asked)
        try:
            if asked.effects and asked.plays and self._resumed:
                # The workers of the killed process may still act.
                await asyncio.sleep(self._opened + self._lease_end() - time.monotonic())
            worker = await self._place(asked)
            on_start()
            await self._ask(worker, asked)
            while asked.left().keys:
                await self._ask(await self._place(asked), asked)
        finally:
            self._asked.remove(asked)
            self._serve_queue()

        trajectories = [asked.finished[key] for key in keys]
        self._rollout.finished_elsewhere(trajectories, tools=asked.tools, resumed=asked.resumed)
        return trajectories

    async def _ask(self, worker: RemoteWorker, asked: _Asked) -> None:
        """Ask one worker for what is left of a group."""
        spec = asked.left()
        record = GroupRecord(spec, self._run.journal)
        asked.start(record)
        try:
            await worker.play(spec, record.add)
            missing = [key for key in spec.keys if key not in record.finished]
            if missing:
                raise WorkerFailed(
                    f"answered a group of which {len(missing)} of {len(spec.keys)} episodes did "
                    "not end"
                )
        except WorkerLost as lost:
            asked.take(record)
            reason = "failed" if isinstance(lost, WorkerFailed) else "lost"
            self._again(asked, worker, reason, lost)
            await self._until_stopped(asked, worker)
        else:
            asked.take(record)
        finally:
            asked.give("")
            self._serve_queue()

    async def _until_stopped(self, asked: _Asked, worker: RemoteWorker) -> None:
        """Wait until a worker has stopped by itself, if what it does has effects."""
        if asked.effects and asked.left().keys:
            await asyncio.sleep(worker.seen + self._lease_end() - time.monotonic())

    def _again(self, asked: _Asked, worker: RemoteWorker, reason: str, error: Exception) -> None:
        """Count a group that is asked for again; stop when none of several workers could play
        it."""
        why = str(error)
        self.asked_again[reason] += 1
        phase, step, task = asked.spec.group
        self._run.journal.append(
            {"e": "asked_again", "g": [phase, step, task], "worker": worker.name, "why": why}
        )
        group = f"group {phase} {asked.spec.keys[0].metrics_step} / {task}"
        self._note(f"{group} is asked for again: worker {worker.name}: {why}")
        if asked.count_failure(reason != "lost") >= MAX_FAILED:
            raise TurnwrightError(
                f"{group} failed on workers {MAX_FAILED} times, the last "
                f"{worker.name}: {why}. Fix the cause, then resume with --resume "
                f"{self._run.given_path}"
            )

    async def _place(self, asked: _Asked) -> RemoteWorker:
        """Wait for a worker with room; a group that was asked for before goes first, and to another
        worker if there is one."""
        future: asyncio.Future[RemoteWorker] = asyncio.get_running_loop().create_future()
        if asked.tried:
            self._queue.appendleft((asked, future))
        else:
            self._queue.append((asked, future))
        self._serve_queue()
        return await future

    def _serve_queue(self) -> None:
        """Give groups that wait to the workers with the most room."""
        loads = Counter(asked.worker for asked in self._asked)
        while self._queue:
            asked, future = self._queue[0]
            if future.done():
                # It does not wait any more.
                self._queue.popleft()
                continue

            worker = self._best_free(asked, loads)
            if worker is None:
                return
            self._queue.popleft()
            loads[worker.name] += 1
            asked.give(worker.name)
            future.set_result(worker)

    def _best_free(self, asked: _Asked, loads: Counter[str]) -> RemoteWorker | None:
        """Return the worker with room that had a group the least often, and of those the one with
        the most room; None without one."""
        free = [
            worker
            for worker in self._workers
            if not worker.gone and loads[worker.name] < worker.room
        ]
        return min(
            free,
            key=lambda worker: (asked.tried[worker.name], loads[worker.name] / worker.room),
            default=None,
        )

    def _joined(self, worker: RemoteWorker) -> None:
        self._workers = [present for present in self._workers if not present.gone] + [worker]
        self._note(f"worker {worker.name} joined: up to {worker.room} groups at once")
        self._serve_queue()

    def _lease_end(self) -> float:
        return self._config.scale.lease_s * (1 + STOP_SHARE)

    async def _watch(self) -> None:
        """Ask elsewhere for groups whose worker is there and does nothing; stop when there is no
        worker for too long."""
        limits = self._config.limits
        most = self._config.scale.stall_s or limits.wall_clock_s + limits.env_s + limits.reward_s
        present = time.monotonic()
        while True:
            await asyncio.sleep(min(most / 4, 1.0))
            if not self._queue or any(not worker.gone for worker in self._workers):
                present = time.monotonic()
            elif time.monotonic() - present > self._config.scale.wait_s:
                self._give_up()
            for worker in self._workers:
                for lease in list(worker.leases.values()):
                    idle = time.monotonic() - lease.active
                    if not lease.calls and idle > most:
                        reason = f"it did nothing for {idle:.0f} s (scale.stall_s = {most:g})"
                        worker.cut(lease, WorkerFailed(f"slow: {reason}"))

    def _give_up(self) -> None:
        """End the groups that wait: there is no worker."""
        message = (
            f"no worker for {self._config.scale.wait_s:g} s (scale.wait_s): start some with "
            f"turnwright worker --join {self._server.url}, then resume with --resume "
            f"{self._run.given_path}"
        )
        for _, future in self._queue:
            if not future.done():
                future.set_exception(TurnwrightError(message))

    def pending(self, now: float) -> list[PendingEpisode]:
        episodes: list[PendingEpisode] = []
        for asked in list(self._asked):
            phase = f"worker {asked.worker}" if asked.worker else "queue for a worker"
            for key in asked.spec.keys:
                if key not in asked.finished:
                    turns = asked.turns(key)
                    episodes.append(
                        PendingEpisode(key.label, turns, phase, now - asked.since, asked.since)
                    )
        return episodes


def _twice(names: Sequence[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)

"""The worker in a process: it plays groups on a stream there, and each group's events go to the
caller.

`StreamWorker` is a `RolloutWorker`. Its rollout writes to an `EventRouter` in place of a journal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnwright.envs.spec import EnvSpec
from turnwright.errors import ConfigError, TraceError
from turnwright.records.journal import InterruptedEpisodes
from turnwright.records.run_dir import definition_name
from turnwright.records.serialization import Event, key_row
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.stream import RolloutStream
from turnwright.rollouts.timeouts import CallGate
from turnwright.types import GroupKey
from turnwright_cluster.base import GroupSpec, OnTurn, PlayedGroup


class EventRouter:
    """Journal of a rollout that sends each event to the group that it belongs to, after the
    definitions that it refers to."""

    broken = ""
    """Nothing is ever broken here: a group that is not asked for any more is cancelled."""

    def __init__(self, flush: Callable[[], Awaitable[None]]) -> None:
        """`flush` returns when every event so far is on the disk of the run."""
        self._flush = flush
        self._routes: dict[GroupKey, OnTurn] = {}
        self._defined: dict[GroupKey, set[str]] = {}
        self._definitions: dict[str, Event] = {}

    def open(self, group: GroupKey, on_turn: OnTurn, definitions: Mapping[str, Any]) -> None:
        """Send the events of a group to `on_turn`; `definitions` are of tools, by name, from an
        earlier play."""
        self._routes[group] = on_turn
        self._defined[group] = set()
        for name, value in definitions.items():
            self._definitions[name] = {"e": "tools", "name": name, "value": value}

    def close(self, group: GroupKey) -> None:
        """Drop what a group still sends."""
        del self._routes[group]
        del self._defined[group]

    def append(self, value: Any) -> None:
        """Pass an event to its group; raise `TraceError` for a group that was closed."""
        phase, step, task = value["k"][:3]
        group = phase, step, task
        on_turn = self._routes.get(group)
        if on_turn is None:
            raise TraceError(f"group {phase}/{step}/{task} is not asked for any more")
        for name in filter(None, (value.get("settings"), value.get("tools"))):
            if name not in self._defined[group]:
                self._defined[group].add(name)
                on_turn(self._definitions[name])
        on_turn(value)

    def append_definition(self, kind: str, value: Any) -> str:
        name = definition_name(kind, value)
        self._definitions.setdefault(name, {"e": kind, "name": name, "value": value})
        return name

    async def durable(self) -> None:
        await self._flush()


class StreamWorker:
    """Plays groups on a stream of this process."""

    def __init__(
        self,
        name: str,
        rollout: Rollout,
        stream: RolloutStream,
        router: EventRouter,
        specs: Mapping[str, EnvSpec],
    ) -> None:
        """The rollout writes its events to `router`; `specs` are the environments of the recipe by
        name."""
        self.name = name
        self._rollout = rollout
        self._stream = stream
        self._router = router
        self._specs = specs

    @property
    def gate(self) -> CallGate:
        """Gate of its engine calls."""
        return self._stream.gate

    async def play(self, spec: GroupSpec, on_turn: OnTurn) -> PlayedGroup:
        env_spec = self._specs.get(spec.env)
        if env_spec is None:
            raise ConfigError(
                f"there is no environment {spec.env!r} here; environments are "
                f"{', '.join(self._specs)}"
            )

        count = 0

        def count_and_send(event: Event) -> None:
            nonlocal count
            count += 1
            on_turn(event)

        self._router.open(spec.group, count_and_send, spec.definitions)
        try:
            self._rollout.resume(_interrupted(spec))
            episodes = [EpisodeSpec.of(env_spec, spec.task, key) for key in spec.keys]
            await self._stream.submit(
                episodes,
                blank=spec.blank,
                training=spec.training,
                extras=spec.extras,
                min_version=spec.min_version,
                sampling=spec.sampling,
            )
        finally:
            self._router.close(spec.group)
        return PlayedGroup(spec.group, count)

    async def close(self) -> None:
        """Do nothing: the code that opened the stream closes it."""


def _interrupted(spec: GroupSpec) -> Mapping[Any, Any]:
    """Return the episodes that the group's recorded plays began."""
    interrupted = InterruptedEpisodes()
    for name, value in spec.definitions.items():
        interrupted.read({"e": "tools", "name": name, "value": value})
    for key, plays in spec.plays.items():
        for play in plays:
            interrupted.read({"e": "opened", "k": key_row(key)})
            for event in play:
                interrupted.read(event)
    return interrupted.episodes(lambda _: spec.task)

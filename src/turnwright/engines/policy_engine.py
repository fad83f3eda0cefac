"""Several policies as one engine: each agent's calls go to the engine of its policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from turnwright.engines.protocols import (
    Engine,
    Generation,
    HasContextLimit,
    HasRenderer,
    Request,
    SupportsSleep,
    add_pixel_source,
    give_renderer,
)
from turnwright.errors import UsageError
from turnwright.types.seeds import derive_seed


class AgentPolicies:
    """The policy of each agent, by name or pattern."""

    def __init__(self, agents: Mapping[str, Sequence[str]]) -> None:
        """Take the agents of each policy, as names or patterns (`solver-*`); an agent's first
        fitting policy plays it."""
        self.agents = {policy: tuple(patterns) for policy, patterns in agents.items()}
        self._known: dict[str, str] = {}

    def of(self, agent: str) -> str:
        """Return the policy of an agent; raise `UsageError` if none plays it."""
        if agent not in self._known:
            fits = (
                name
                for name, patterns in self.agents.items()
                if any(fnmatchcase(agent, one) for one in patterns)
            )
            found = next(fits, None)
            if found is None:
                have = "; ".join(
                    f"{name}: {', '.join(patterns)}" for name, patterns in self.agents.items()
                )
                raise UsageError(
                    f"no policy plays the agent {agent!r:.80}; the policies and their agents are "
                    f"{have}"
                )
            self._known[agent] = found
        return self._known[agent]


class PolicyEngine:
    """Several policies as one engine. Each has an engine of its own, so neither
    caches nor weights are shared.

    Example::

        engine = tw.PolicyEngine({"asker": small, "solver": large}, agents={"solver": ["solver-*"]})
        trajectories = tw.rollout(play, tasks, engine=engine)
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        agents: Mapping[str, Sequence[str]] | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        """
        Args:
            engines: engine of each policy.
            agents: agents of each policy, as names or patterns; a policy that is not listed
                plays the agent of its name.
            fixed: policies that are never trained, so that versions do not apply to them.

        Raises:
            UsageError: for no engine, or a policy without one.
        """
        agents = agents or {}
        if not engines or (unknown := sorted({*agents, *fixed} - engines.keys())):
            raise UsageError(
                "PolicyEngine: "
                f"{f'no engine for policy {unknown[0]!r}' if engines else 'it needs an engine'}"
            )
        self.engines = dict(engines)
        self.policies = AgentPolicies({name: agents.get(name, (name,)) for name in engines})
        self.fixed = frozenset(fixed)

    async def generate(self, request: Request) -> Generation:
        """Sample one reply with the policy of `request.agent`; raises as its engine, and
        `UsageError` if it has none."""
        name = self.policies.of(request.agent)
        engine = self.engines[name]
        return await (
            _play_fixed(engine, request) if name in self.fixed else engine.generate(request)
        )

    def release(self, session: str) -> None:
        """End a session with every policy."""
        for engine in self.engines.values():
            engine.release(session)

    async def close(self) -> None:
        """Close every engine."""
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    async def sleep(self) -> None:
        """Release the memory of those engines that can."""
        await asyncio.gather(
            *(
                engine.sleep()
                for engine in self.engines.values()
                if isinstance(engine, SupportsSleep)
            )
        )

    @property
    def context(self) -> int | None:
        """Smallest maximum number of ids of context plus reply; None while none is known."""
        limits = [
            engine.context
            for engine in self.engines.values()
            if isinstance(engine, HasContextLimit)
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def renderer(self) -> Any:
        """Renderer of the first engine that has one."""
        found = (
            engine.renderer for engine in self.engines.values() if isinstance(engine, HasRenderer)
        )
        return next((renderer for renderer in found if renderer is not None), None)

    def set_renderer(self, renderer: Any) -> None:
        """Pass the renderer to every engine that takes one."""
        for engine in self.engines.values():
            give_renderer(engine, renderer)

    def add_pixel_source(self, pixels: Any) -> None:
        """Pass the source of pixel values to every engine that takes one."""
        for engine in self.engines.values():
            add_pixel_source(engine, pixels)


async def _play_fixed(engine: Engine, request: Request) -> Generation:
    """Sample with a policy that is not trained, whatever its version."""
    generation = await engine.generate(replace(request, min_version=0))
    generation.fixed = True
    return generation


class PastVersions:
    """Earlier versions of a policy as opponents: the episodes of a task play against one of the
    last ones, drawn by seed, step and task."""

    context = None
    """Its engines have the limit of the policy that they are versions of."""

    def __init__(
        self,
        load: Callable[[int], Engine],
        current: Engine,
        *,
        every: int,
        keep: int,
        lag: int = 0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            current: engine of the policy itself, which plays until `begin`.
            load: returns the engine of the version of a step; called in a thread, at
                most once while it is used.
            every: steps between versions, from step 0 on.
            keep: number of versions to draw from.
            lag: steps that a version may be missing, since episodes of a step can
                begin that much before it.
            seed: of the draws.
        """
        self._load, self._current, self._began = load, current, False
        self.every, self.keep, self._lag, self._seed = every, keep, lag, seed
        self._engines: dict[int, asyncio.Future[Engine]] = {}
        self._calls: Counter[int] = Counter()
        self._sources: list[Callable[[Engine], None]] = []

    def begin(self) -> None:
        """Play versions from here on."""
        self._began = True

    def steps(self, step: int) -> range:
        """Return the steps of the versions that episodes of a step are drawn from."""
        last = max(0, step - self._lag) // self.every
        return range(max(0, last - self.keep + 1) * self.every, last * self.every + 1, self.every)

    def oldest(self, step: int) -> int:
        """Return the step of the oldest version that a run needs which resumes at a step: groups of
        `lag` steps before it may be unfinished."""
        return self.steps(step - self._lag).start

    def step_of(self, group: str) -> int:
        """Return the step of the version that the episodes of a group
        (`Request.group`) play against."""
        steps = self.steps(int(group.split("/", 2)[1]))
        return steps[derive_seed(self._seed, "past", group) % len(steps)]

    async def generate(self, request: Request) -> Generation:
        """Sample one reply with the version of the request's group."""
        if not self._began:
            return await _play_fixed(self._current, request)
        step = self.step_of(request.group)
        self._calls[step] += 1
        try:
            return await _play_fixed(await self._engine(step), request)
        finally:
            self._calls[step] -= 1

    async def _engine(self, step: int) -> Engine:
        future = self._engines.get(step)
        if (
            future is None
            or future.cancelled()
            or (future.done() and future.exception() is not None)
        ):
            future = self._engines[step] = asyncio.ensure_future(self._loaded(step))
        return await asyncio.shield(future)

    async def _loaded(self, step: int) -> Engine:
        idle = [old for old in self._open() if not self._calls[old]]
        for old in sorted(idle)[: max(0, len(self._engines) - self.keep)]:
            await self._engines.pop(old).result().close()
        engine = await asyncio.to_thread(self._load, step)
        for give in self._sources:
            give(engine)
        return engine

    def release(self, session: str) -> None:
        """End a session."""
        for engine in self._open().values():
            engine.release(session)

    async def close(self) -> None:
        """Close the engines of all versions."""
        await asyncio.gather(*(engine.close() for engine in self._open().values()))
        self._engines.clear()

    def _open(self) -> dict[int, Engine]:
        """Return the engines of the versions that are loaded, by step."""
        done = {
            step: future
            for step, future in self._engines.items()
            if future.done() and not future.cancelled()
        }
        return {
            step: future.result() for step, future in done.items() if future.exception() is None
        }

    def set_renderer(self, renderer: Any) -> None:
        """Pass the renderer to every version."""
        self._give(lambda engine: give_renderer(engine, renderer))

    def add_pixel_source(self, pixels: Any) -> None:
        """Pass the source of pixel values to every version."""
        self._give(lambda engine: add_pixel_source(engine, pixels))

    def _give(self, give: Callable[[Engine], None]) -> None:
        self._sources.append(give)
        for engine in self._open().values():
            give(engine)

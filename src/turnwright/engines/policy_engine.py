"""Several policies as one engine: each agent's calls go to the engine of its policy.

`AgentPolicies` says which policy plays an agent. `PolicyEngine` has an engine for each policy and
passes every call on. `PastVersions` is the engine of one fixed policy, an opponent: it plays
earlier versions of a trained policy and loads each when an episode first needs it.

How policies share the weights of one model, with a LoRA adapter each, is not here
(`LocalEngine.adapter`), nor is how they are trained (`Policy` in `training/policies.py`). Read on
in `Engine`, the contract that these engines keep and that they demand of the engines they hold.
"""

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
    gives_alternatives,
)
from turnwright.errors import UsageError
from turnwright.types.seeds import derive_seed


class AgentPolicies:
    """The policy of each agent, by name or pattern."""

    def __init__(self, agents: Mapping[str, Sequence[str]]) -> None:
        """Take the agents of each policy, as names or patterns (`solver-*`).

        The first policy that fits an agent plays it.
        """
        self.agents = {policy: tuple(patterns) for policy, patterns in agents.items()}
        self._policy_of: dict[str, str] = {}
        """Policy of each agent that has called."""

    def of(self, agent: str) -> str:
        """Return the policy of an agent; raise `UsageError` if none plays it."""
        if agent not in self._policy_of:
            self._policy_of[agent] = self._first_fitting(agent)
        return self._policy_of[agent]

    def _first_fitting(self, agent: str) -> str:
        for policy, patterns in self.agents.items():
            if any(fnmatchcase(agent, pattern) for pattern in patterns):
                return policy

        listed = [f"{policy}: {', '.join(patterns)}" for policy, patterns in self.agents.items()]
        raise UsageError(
            f"no policy plays the agent {agent!r:.80}; the policies and their agents are "
            f"{'; '.join(listed)}"
        )


class PolicyEngine:
    """Several policies as one engine.

    Each policy has an engine of its own, so neither caches nor weights are shared.

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
        if not engines:
            raise UsageError("PolicyEngine: it needs an engine")
        agents = agents or {}
        unknown = sorted({*agents, *fixed} - engines.keys())
        if unknown:
            raise UsageError(f"PolicyEngine: no engine for policy {unknown[0]!r}")

        self.engines = dict(engines)
        self.policies = AgentPolicies({name: agents.get(name, (name,)) for name in engines})
        self.fixed = frozenset(fixed)

    async def generate(self, request: Request) -> Generation:
        """Sample one reply with the policy of `request.agent`.

        Raises as the policy's engine, and `UsageError` if no policy plays the agent.
        """
        policy = self.policies.of(request.agent)
        engine = self.engines[policy]
        if policy in self.fixed:
            return await _play_fixed(engine, request)
        return await engine.generate(request)

    def release(self, session: str) -> None:
        """End a session with every policy."""
        for engine in self.engines.values():
            engine.release(session)

    async def close(self) -> None:
        """Close every engine."""
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    async def sleep(self) -> None:
        """Release the memory of those engines that can."""
        able = [engine for engine in self.engines.values() if isinstance(engine, SupportsSleep)]
        await asyncio.gather(*(engine.sleep() for engine in able))

    @property
    def context(self) -> int | None:
        """Smallest maximum number of ids of context plus reply; None while none is known."""
        limits: list[int] = []
        for engine in self.engines.values():
            limit = engine.context if isinstance(engine, HasContextLimit) else None
            if limit is not None:
                limits.append(limit)
        return min(limits, default=None)

    @property
    def gives_alternatives(self) -> bool:
        """Whether every engine returns the most likely ids with each sampled one."""
        return all(map(gives_alternatives, self.engines.values()))

    @property
    def renderer(self) -> Any:
        """Renderer of the first engine that has one."""
        for engine in self.engines.values():
            renderer = engine.renderer if isinstance(engine, HasRenderer) else None
            if renderer is not None:
                return renderer
        return None

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
    """Earlier versions of a policy as opponents.

    The episodes of a task play against one of the last versions, drawn by seed, step and task.
    """

    context = None
    """Its engines have the limit of the policy that they are versions of."""
    gives_alternatives = True
    """Its engines are in this process."""

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
            load: returns the engine of the version of a step; called in a thread, at
                most once while it is used.
            current: engine of the policy itself, which plays until `begin`.
            every: steps between versions, from step 0 on.
            keep: number of versions to draw from.
            lag: steps that a version may be missing, since episodes of a step can
                begin that much before it.
            seed: of the draws.
        """
        self.every = every
        self.keep = keep
        self._load = load
        self._current = current
        self._lag = lag
        self._seed = seed
        self._began = False
        self._engines: dict[int, asyncio.Future[Engine]] = {}
        """Engine of each step's version, which may still be loading."""
        self._calls: Counter[int] = Counter()
        """Number of calls in flight of each step's version; an engine with none may be closed."""
        self._equipment: list[Callable[[Engine], None]] = []
        """What every engine is given once loaded: renderer and pixel sources."""

    def begin(self) -> None:
        """Play versions from here on."""
        self._began = True

    def steps(self, step: int) -> range:
        """Return the steps of the versions that episodes of a step are drawn from."""
        last = max(0, step - self._lag) // self.every
        first = max(0, last - self.keep + 1)
        return range(first * self.every, last * self.every + 1, self.every)

    def oldest(self, step: int) -> int:
        """Return the step of the oldest version that a run needs which resumes at a step.

        Groups of `lag` steps before it may be unfinished.
        """
        return self.steps(step - self._lag).start

    def step_of(self, group: str) -> int:
        """Return the step of the version that a group's episodes (`Request.group`) play against."""
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
        """Return the engine of a step's version, which all calls that need it load together."""
        future = self._engines.get(step)
        if future is None or _has_failed(future):
            future = asyncio.ensure_future(self._load_version(step))
            self._engines[step] = future
        # A cancelled call must not cancel the loading that others wait for.
        return await asyncio.shield(future)

    async def _load_version(self, step: int) -> Engine:
        # Make room: close the oldest engines that no call uses.
        idle = [old for old in self._open() if not self._calls[old]]
        for old in sorted(idle)[: max(0, len(self._engines) - self.keep)]:
            await self._engines.pop(old).result().close()

        engine = await asyncio.to_thread(self._load, step)
        for equip in self._equipment:
            equip(engine)
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
        engines: dict[int, Engine] = {}
        for step, future in self._engines.items():
            if future.done() and not _has_failed(future):
                engines[step] = future.result()
        return engines

    def set_renderer(self, renderer: Any) -> None:
        """Pass the renderer to every version."""
        self._equip(lambda engine: give_renderer(engine, renderer))

    def add_pixel_source(self, pixels: Any) -> None:
        """Pass the source of pixel values to every version."""
        self._equip(lambda engine: add_pixel_source(engine, pixels))

    def _equip(self, equip: Callable[[Engine], None]) -> None:
        """Give something to every loaded engine, and to those that are loaded later."""
        self._equipment.append(equip)
        for engine in self._open().values():
            equip(engine)


def _has_failed(future: asyncio.Future[Engine]) -> bool:
    """Return whether loading ended without an engine."""
    if not future.done():
        return False
    return future.cancelled() or future.exception() is not None

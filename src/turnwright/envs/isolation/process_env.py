"""Environments in separate processes.

`ProcessEnvs` is a factory like the one that it runs elsewhere; its environments pass each call to
their process, which `fork_server.py` starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from turnwright.config import Limits
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.isolation.fork_server import ForkedProcess, ForkServer
from turnwright.types import Message, Task, Trajectory


class ProcessEnv(Env):
    """Async proxy of an environment in a process; cancelling a call ends it: `close` for a second,
    then its group is killed."""

    snapshots = False
    max_turns: int | None = None

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._process: ForkedProcess | None = None
        self._has_reward = True
        self._limits: Limits | None = None

    @property
    def exited(self) -> bool:
        """Whether the process ended or is being ended."""
        return self._process is not None and not self._process.is_connected

    async def start(self) -> None:
        """Start the process.

        Separate from `reset`, with its own deadline, since concurrent starts wait for each other.
        """
        self._process = await self._fork_server.fork()

    def set_limits(self, limits: Limits) -> None:
        """Keep the limits for the environment, which receives them with `reset`."""
        self._limits = limits

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...] | None:
        """Begin the episode; start the process if `start` was not called."""
        if self._process is None:
            await self.start()
        opened = await self._ask("reset", task, seed, self._limits)
        messages: tuple[Message, ...] | None
        messages, tools, has_reward, has_snapshots, max_turns, on_turn_length = opened
        self.tools = tools
        self._has_reward = has_reward
        self.snapshots = has_snapshots
        self.max_turns = max_turns
        self.on_turn_length = on_turn_length
        return messages

    async def step(self, action: Action) -> Step:
        """Call `step` of the environment, with the action's text computed here."""
        sent = replace(action, raw_source=partial(str, action.raw))
        step: Step = await self._ask("step", sent)
        return step

    async def reward(self, trajectory: Trajectory) -> float | None:
        """Call `reward` of the environment; 0.0 without a call if it is not overridden."""
        if not self._has_reward:
            return 0.0
        reward: float | None = await self._ask("reward", trajectory)
        return reward

    async def isolated_reward(self, trajectory: Trajectory) -> float | None:
        """Call `reward`, which already runs in a separate process."""
        return await self.reward(trajectory)

    async def snapshot(self) -> Any:
        return await self._ask("snapshot")

    async def restore(self, state: Any) -> None:
        await self._ask("restore", state)

    async def close(self) -> None:
        """Close the environment if its process is connected, and end the process."""
        process = self._process
        if process is None:
            return
        try:
            if process.is_connected and not process.has_ended:
                await process.ask("close")
        finally:
            await process.end()

    def drop(self) -> None:
        """Disconnect and end the process."""
        if self._process is not None:
            self._process.drop()

    async def _ask(self, method: str, *args: Any) -> Any:
        assert self._process is not None
        return await self._process.ask(method, *args)


class ProcessEnvs:
    """Factory that runs each environment of another factory in its own process.

    Example::

        envs = ProcessEnvs(Guess)
        trajectories = await rollout.play(episodes(envs, tasks, ...))
        await envs.close()
    """

    def __init__(self, factory: Callable[[], Env]) -> None:
        self.fork_server = ForkServer(factory)

    def __call__(self) -> ProcessEnv:
        """Make an environment; its process starts with `reset`."""
        return ProcessEnv(self.fork_server)

    async def reset(self) -> None:
        """Mark the factory as async, so that environments are made on the event loop."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every process."""
        await self.fork_server.close()


class ProcessEnvFactories:
    """For each factory of environments the one that runs them in processes."""

    def __init__(self) -> None:
        self._in_processes: dict[int, tuple[ProcessEnvs, Callable[[], Env]]] = {}

    def of(self, factory: Callable[[], Env]) -> ProcessEnvs:
        """Return the factory's, made at the first request."""
        if id(factory) not in self._in_processes:
            # The reference keeps the id unique.
            self._in_processes[id(factory)] = (ProcessEnvs(factory), factory)
        envs, _ = self._in_processes[id(factory)]
        return envs

    async def close(self) -> None:
        """End the processes of all."""
        in_processes = self._in_processes
        self._in_processes = {}
        for envs, _ in in_processes.values():
            await envs.close()

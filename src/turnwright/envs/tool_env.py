"""Tool environment: the model calls tools until it replies without a call.

`tool_env` checks the tools once and returns a factory; `ToolEnv.step` is a turn. How a call is
checked, run and answered is in `Tools.call_all` of `tools/tool.py`; tools with a state of their own
are in `tools/stateful.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwright.envs.env import Action, Env, Scores, Step
from turnwright.envs.rewards.rewards import RewardedFactory, Rewards
from turnwright.envs.rewards.workers import run_isolated
from turnwright.envs.scripted_play import Speak
from turnwright.envs.tasks import TaskSource
from turnwright.envs.threads import ABANDONED_CALLS
from turnwright.envs.tools.results import Keeps, ResultLimit
from turnwright.envs.tools.stateful import (
    Lifetime,
    ToolInstance,
    ToolSet,
    ToolSource,
    add_to_opening,
    parse_tools,
)
from turnwright.envs.tools.tool import Tool, Tools
from turnwright.envs.user_code import as_number, call_user
from turnwright.errors import ConfigError
from turnwright.types import Message, Task, Trajectory

Reward = Callable[..., Any]
"""``reward(trajectory)`` or ``reward(trajectory, task)``, sync or async; returns a float, `Scores`,
or None (not computed)."""

NO_REWARD = (
    "a tool_env without reward= or calc_reward, so only rewards that its tools return count, and "
    "without those nothing is learned; give reward=function, which takes the finished trajectory"
)


def tool_env(
    tools: Iterable[Callable[..., Any] | Tool | ToolSource],
    reward: Reward | None = None,
    max_turns: int | None = None,
    system: str | None = None,
    *,
    tasks: TaskSource | None = None,
    solver: Speak | None = None,
    demonstrator: Speak | None = None,
    single_turn_best: float | None = None,
    lifetime: Lifetime | None = None,
    result_chars: int | None = 32_768,
    result_keeps: Keeps = "start",
) -> ToolEnvFactory:
    """Make an environment of tools: results answer a reply with tool calls; a reply without calls
    ends the episode.

    Example::

        >>> def double(number: int) -> int:
        ...     '''Double a number.
        ...
        ...     Args:
        ...         number: the number
        ...     '''
        ...     return 2 * number
        >>> env = tool_env(tools=[double], max_turns=6)
        >>> env
        tool_env(tools=[double], max_turns=6)

    Args:
        tools: functions (schema from hints and docstring) or `@tool` objects; classes,
            instantiated per episode (a `StatefulTool`, or a class whose public methods are
            tools); `mcp_tools(...)`.
        reward: function of the finished trajectory, and of its task if it takes a second argument;
            None is 0. Rewards of tools are added.
        max_turns: maximum replies per episode, in addition to the run's limit.
        system: system message for tasks without one.
        tasks, solver, demonstrator, single_turn_best: as on an Env class; see
            `turnwright.envs.resolve.as_env_spec`.
        lifetime: of instances of tool classes: `trajectory`, or `call` (created and released around
            each call). By default as each class declares.
        result_chars: maximum characters of a result; longer ones are truncated with a
            visible marker. None: no limit.
        result_keeps: part of a truncated result to keep: `start`, `end`, or both `ends`.

    Returns:
        A factory of environments, which share the tools; the tools are checked once.

    Raises:
        ToolSchemaError: for an invalid tool, or two tools with the same name.
        ConfigError: for a reward that cannot be called with a trajectory, or an invalid setting.
    """
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"tool_env: max_turns is {max_turns}; it is at least 1, or left out")
    if lifetime not in (None, "trajectory", "call"):
        raise ConfigError(f'tool_env: lifetime = {lifetime!r}; write "trajectory" or "call"')
    if result_keeps not in ("start", "ends", "end"):
        raise ConfigError(
            f'tool_env: result_keeps = {result_keeps!r}; write "start", "ends" or "end"'
        )
    if result_chars is not None and result_chars < 1:
        raise ConfigError(f"tool_env: result_chars is {result_chars}; it is at least 1, or None")

    kit = parse_tools(tools, lifetime, ResultLimit(result_chars, result_keeps))
    return ToolEnvFactory(
        system, max_turns, tasks, solver, demonstrator, single_turn_best, reward, kit
    )


@dataclass(frozen=True, slots=True)
class ToolEnvFactory(RewardedFactory):
    """Factory returned by `tool_env`: each call makes a new environment."""

    kit: ToolSet

    @property
    def needs_rewards_of_calls(self) -> bool:
        """Whether only results of tools can have rewards: there is no function, and no class with
        `calc_reward`."""
        return self.reward is None and not self.kit.rewards_episode

    def __call__(self) -> ToolEnv:
        return ToolEnv(self)

    def __repr__(self) -> str:
        names = [tool.name for tool in self.kit.shared]
        names += [source.name for source in self.kit.sources]
        arguments = [f"tools=[{', '.join(names)}]"]
        if self.reward is not None:
            arguments.append(f"reward={getattr(self.reward, '__name__', repr(self.reward))}")
        if self.max_turns is not None:
            arguments.append(f"max_turns={self.max_turns!r}")
        if self.system is not None:
            arguments.append(f"system={self.system!r}")
        return f"tool_env({', '.join(arguments)})"


class ToolEnv(Env):
    """Environment of one episode with tools; made by `tool_env`.

    The methods are async, so a turn without a sync tool needs no thread.
    """

    def __init__(self, factory: ToolEnvFactory) -> None:
        self._factory = factory
        self._task: Task | None = None
        self._tools: Tools = factory.kit.known if factory.kit.sources else factory.kit.shared
        self.instances: list[ToolInstance] = []
        """Tool instances of the episode, released at its end."""
        self.abandoned: list[str] = []
        """Calls of synchronous tools that missed their deadline; each may hold a thread forever."""
        self.tools = self._tools.schemas

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Return the task's messages, with the output of each stateful tool's `create` appended."""
        self._task = task
        ABANDONED_CALLS.set(self.abandoned)
        self._tools, created = await self._factory.kit.open(task, self.instances)
        self.tools = self._tools.schemas
        return self._factory.opening(add_to_opening(task.messages, created))

    async def step(self, action: Action) -> Step:
        """Run the tool calls of a reply, async ones concurrently; a reply without calls ends the
        episode."""
        if not action.tool_calls:
            return Step(terminated=True)
        outcomes = await self._tools.call_all(action.tool_calls)

        info: dict[str, Any] = {}
        for outcome in outcomes:
            for key, value in outcome.metrics.items():
                info[key] = info[key] + value if key in info else value
        info["tool_calls"] = len(outcomes)
        info["tool_log"] = [
            {"tool": outcome.tool[:80], "s": outcome.seconds, "error": outcome.error}
            for outcome in outcomes
        ]
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            info["tool_errors"] = len(errors)
            for kind in dict.fromkeys(errors):
                info[f"tool_errors/{kind}"] = errors.count(kind)
        cut_results = sum(outcome.cut for outcome in outcomes)
        if cut_results:
            info["tool_results_cut"] = cut_results

        messages = tuple(outcome.message for outcome in outcomes)
        reward = sum(outcome.reward for outcome in outcomes)
        return Step(messages, reward, info=info)

    @property
    def isolated_rewards(self) -> Sequence[Reward]:
        """Reward parts that run in a separate process."""
        function = self._factory.reward
        return function.isolated_rewards if isinstance(function, Rewards) else ()

    @property
    def functions(self) -> Sequence[Reward]:
        """All reward functions."""
        function = self._factory.reward
        if isinstance(function, Rewards):
            return [part.function for part in function.parts.values()]
        return [] if function is None else [function]

    async def reward(self, trajectory: Trajectory) -> float | Scores | None:
        """Compute the reward function of the finished trajectory plus the rewards of stateful
        tools."""
        return await self._scored(trajectory, self._factory.reward)

    async def isolated_reward(self, trajectory: Trajectory) -> float | Scores | None:
        """Compute the reward with the function in a separate process; stateful tools stay in this
        one."""
        function = self._factory.reward
        if isinstance(function, Rewards):
            function = function.isolated()
        elif function is not None:
            name = getattr(function, "__name__", type(function).__name__)
            function = partial(run_isolated, name, function)
        return await self._scored(trajectory, function)

    async def _scored(
        self, trajectory: Trajectory, function: Reward | None
    ) -> float | Scores | None:
        """Return what `function` computes, plus the rewards of the tool instances."""
        scores = Scores()
        if function is not None:
            args = self._factory.reward_args(trajectory, self._task or trajectory.task)
            reward: float | Scores | None = await call_user(partial(function, *args), {})
            if reward is None or not self.instances:
                return reward
            if isinstance(reward, Scores):
                scores = reward
            else:
                scores = Scores(as_number(reward, "the reward"))
        for instance in self.instances:
            scores = scores.with_added(await instance.reward())
        return scores

    async def close(self) -> None:
        """Release all tool instances concurrently.

        Raises `ToolFailure`: the first failed release.
        """
        releases = [instance.release() for instance in self.instances]
        results = await asyncio.gather(*releases, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

"""Tools as a whole environment: the model calls them until it answers without a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwise.envs.base import Action, Env, Scores, Step
from turnwise.envs.rewards.rewards import Rewards, takes_task
from turnwise.envs.rewards.workers import run_isolated
from turnwise.envs.scripted_play import Speak
from turnwise.envs.tasks import TaskSource
from turnwise.envs.tools.results import Keeps, ResultLimit
from turnwise.envs.tools.stateful import Lifetime, ToolInstance, ToolSet, ToolSource, add_to_opening, parse_tools
from turnwise.envs.tools.tool import Tool, Tools
from turnwise.envs.user_code import ABANDONED_THREADS, as_number, call_user
from turnwise.errors import ConfigError
from turnwise.types import Message, Task, Trajectory

Reward = Callable[..., Any]
"""``reward(trajectory)`` or ``reward(trajectory, task)``, sync or async; a float, `Scores`, or None for "not computed"."""


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
    """An environment of tools: a reply with tool calls is answered by their results, one without ends the episode.

    Example::

        env = tool_env(tools=[calculator], reward=correct, max_turns=6)

    Args:
        tools: functions (schema from hints and docstring) or what `@tool` makes of them; classes, of which each episode has an
            object of its own (a `StatefulTool`, or one whose public methods are tools); `mcp_tools(...)`.
        reward: of the finished trajectory, and of its task where it takes a second argument; none is 0 (tools may give some).
        max_turns: most replies of an episode, besides the run's own limit.
        system: a system message for tasks that have none.
        tasks, solver, demonstrator, single_turn_best: as on an Env class; see `turnwise.envs.resolve.as_env_spec`.
        lifetime: of the objects of classes: `trajectory`, or `call`, created and released around each call. By default what
            each class says.
        result_chars: longer results are cut to so many characters, with a mark that the model sees; None cuts none.
        result_keeps: what stays of them: the `start`, the `end`, or both `ends`.

    Returns:
        A factory of environments; the tools, checked once, are shared by all that it makes.

    Raises:
        ToolSchemaError: when a tool cannot be one, or two have one name.
        ConfigError: for a reward that cannot be called with a trajectory, or a setting that there is not.
    """
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"tool_env: max_turns is {max_turns}; it is at least 1, or left out")
    if lifetime not in (None, "trajectory", "call"):
        raise ConfigError(f'tool_env: lifetime = {lifetime!r}; write "trajectory" or "call"')
    if result_keeps not in ("start", "ends", "end"):
        raise ConfigError(f'tool_env: result_keeps = {result_keeps!r}; write "start", "ends" or "end"')
    if result_chars is not None and result_chars < 1:
        raise ConfigError(f"tool_env: result_chars is {result_chars}; it is at least 1, or None")
    kit = parse_tools(tools, lifetime, ResultLimit(result_chars, result_keeps))
    with_task = reward is not None and takes_task(reward)
    return ToolEnvFactory(kit, reward, with_task, max_turns, system, tasks, solver, demonstrator, single_turn_best)


@dataclass(frozen=True, slots=True)
class ToolEnvFactory:
    """What `tool_env` returns: call it for a fresh environment."""

    kit: ToolSet
    reward: Reward | None = None
    reward_takes_task: bool = False
    max_turns: int | None = None
    system: str | None = None
    tasks: TaskSource | None = None
    solver: Speak | None = None
    demonstrator: Speak | None = None
    single_turn_best: float | None = None

    def __call__(self) -> ToolEnv:
        """A fresh environment."""
        return ToolEnv(self)

    @property
    def group_reward(self) -> Callable[..., Any] | None:
        """What of `rewards(...)` compares the episodes of a task."""
        return self.reward.group if isinstance(self.reward, Rewards) else None

    def __repr__(self) -> str:
        names = [*(tool.name for tool in self.kit.shared), *(source.name for source in self.kit.sources)]
        given = [f"tools=[{', '.join(names)}]"]
        if self.reward is not None:
            given.append(f"reward={getattr(self.reward, '__name__', repr(self.reward))}")
        given.extend(f"{key}={getattr(self, key)!r}" for key in ("max_turns", "system") if getattr(self, key) is not None)
        return f"tool_env({', '.join(given)})"


class ToolEnv(Env):
    """One episode with tools; made by `tool_env`.

    Its methods are async, so that a turn without a blocking tool costs no thread; a sync tool or reward gets one of its own.
    """

    def __init__(self, factory: ToolEnvFactory) -> None:
        self._factory = factory
        self._task: Task | None = None
        self._tools: Tools = factory.kit.known if factory.kit.sources else factory.kit.shared
        self.lives: list[ToolInstance] = []
        """What lives as long as the episode, and is released at its end."""
        self.abandoned: list[str] = []
        """Calls of synchronous tools that did not return by their deadline; each may hold a thread for ever."""
        self.tools = self._tools.schemas

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Open with the task's own messages, and with what tools that live have to show.

        Raises:
            TaskError, ToolSchemaError, ToolFailure: as `ToolSet.open`.
        """
        self._task = task
        ABANDONED_THREADS.set(self.abandoned)
        self._tools, shown = await self._factory.kit.open(task, self.lives)
        self.tools = self._tools.schemas
        messages = add_to_opening(task.messages, shown)
        if self._factory.system is not None and not any(message.role == "system" for message in messages):
            return (Message("system", self._factory.system), *messages)
        return messages

    async def step(self, action: Action) -> Step:
        """Run the calls of a reply, async ones at the same time; without any the episode is over.

        Raises:
            ToolFailure: when a tool raised it.
        """
        if not action.tool_calls:
            return Step(terminated=True)
        outcomes = await self._tools.call_all(action.tool_calls)
        info: dict[str, Any] = {}
        for outcome in outcomes:
            for key, value in outcome.metrics.items():
                info[key] = info[key] + value if key in info else value
        info["tool_calls"] = len(outcomes)
        info["tool_log"] = [{"tool": one.tool[:80], "s": one.seconds, "error": one.error} for one in outcomes]
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            info["tool_errors"] = len(errors)
            info |= {f"tool_errors/{kind}": errors.count(kind) for kind in dict.fromkeys(errors)}
        if cut := sum(outcome.cut for outcome in outcomes):
            info["tool_results_cut"] = cut
        return Step(tuple(outcome.message for outcome in outcomes), sum(outcome.reward for outcome in outcomes), info=info)

    @property
    def isolated_rewards(self) -> Sequence[Reward]:
        """The parts of its reward that run in a process of their own."""
        return self._factory.reward.isolated_rewards if isinstance(self._factory.reward, Rewards) else ()

    @property
    def functions(self) -> Sequence[Reward]:
        """All parts of its reward."""
        function = self._factory.reward
        return [part.function for part in function.parts.values()] if isinstance(function, Rewards) else [function or _none]

    async def reward(self, trajectory: Trajectory) -> float | Scores | None:
        """What the reward function says of the finished trajectory, and what tools that live add to it."""
        return await self._scored(trajectory, self._factory.reward)

    async def isolated_reward(self, trajectory: Trajectory) -> float | Scores | None:
        """The same, the function in a process of its own; tools that live stay here."""
        function = self._factory.reward
        if isinstance(function, Rewards):
            function = function.isolated()
        elif function is not None:
            function = partial(run_isolated, getattr(function, "__name__", type(function).__name__), function)
        return await self._scored(trajectory, function)

    async def _scored(self, trajectory: Trajectory, function: Reward | None) -> float | Scores | None:
        scores = Scores()
        if function is not None:
            args = (trajectory, self._task or trajectory.task) if self._factory.reward_takes_task else (trajectory,)
            found: float | Scores | None = await call_user(partial(function, *args), {})
            if found is None or not self.lives:
                return found
            scores = found if isinstance(found, Scores) else Scores(as_number(found, "the reward"))
        for life in self.lives:
            scores = scores.with_added(await life.reward())
        return scores

    async def close(self) -> None:
        """Release whatever lives, all at the same time.

        Raises:
            ToolFailure: what the first of them raised that could not be released.
        """
        if self.lives:
            results = await asyncio.gather(*(life.release() for life in self.lives), return_exceptions=True)
            failed = [result for result in results if isinstance(result, BaseException)]
            if failed:
                raise failed[0]


def _none(trajectory: Trajectory) -> float:
    return 0.0

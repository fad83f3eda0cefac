"""Tools as a whole environment: the model calls them until it answers without a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from turnwise.env.base import Action, Env, Step
from turnwise.env.drive import Speak, settle
from turnwise.env.tasks import TaskSource
from turnwise.env.tools import Tool, Tools, in_thread
from turnwise.errors import ConfigError
from turnwise.types import Message, Task, Trajectory

Reward = Callable[..., Any]
"""``reward(trajectory)`` or ``reward(trajectory, task)``, sync or async; a float, or None for "not computed"."""


def tool_env(
    tools: Iterable[Callable[..., Any] | Tool],
    reward: Reward | None = None,
    max_turns: int | None = None,
    system: str | None = None,
    *,
    tasks: TaskSource | None = None,
    solver: Speak | None = None,
    demonstrator: Speak | None = None,
    single_turn_best: float | None = None,
) -> ToolEnvFactory:
    """An environment of tools: a reply with tool calls is answered by their results, one without ends the episode.

    Example::

        env = tool_env(tools=[calculator], reward=correct, max_turns=6)

    Args:
        tools: functions (schema from hints and docstring) or what `@tool` makes of them.
        reward: of the finished trajectory, and of its task where it takes a second argument; none is 0 (tools may give some).
        max_turns: most replies of an episode, besides the run's own limit.
        system: a system message for tasks that have none.
        tasks, solver, demonstrator, single_turn_best: as on an Env class; see `turnwise.env.resolve.as_world`.

    Returns:
        A factory of environments; the tools, checked once, are shared by all that it makes.

    Raises:
        ToolSchemaError: when a tool cannot be one, or two have one name.
        ConfigError: for a reward that cannot be called with a trajectory, or `max_turns` under 1.
    """
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"tool_env: max_turns is {max_turns}; it is at least 1, or left out")
    return ToolEnvFactory(
        Tools(tools), reward, _takes_task(reward), max_turns, system, tasks, solver, demonstrator, single_turn_best
    )


@dataclass(frozen=True, slots=True)
class ToolEnvFactory:
    """What `tool_env` returns: call it for a fresh environment."""

    tools: Tools
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

    def __repr__(self) -> str:
        given = [f"tools=[{', '.join(tool.name for tool in self.tools)}]"]
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
        self.tools = factory.tools.schemas

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Open with the task's own messages."""
        self._task = task
        if self._factory.system is not None and not any(message.role == "system" for message in task.messages):
            return (Message("system", self._factory.system), *task.messages)
        return task.messages

    async def step(self, action: Action) -> Step:
        """Run the calls of a reply, in order; without any the episode is over.

        Raises:
            ToolFailure: when a tool raised it.
        """
        if not action.tool_calls:
            return Step(terminated=True)
        outcomes = [await self._factory.tools.call(call) for call in action.tool_calls]
        info: dict[str, Any] = {"tool_calls": len(outcomes)}
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            info["tool_errors"] = len(errors)
            info |= {f"tool_errors/{kind}": errors.count(kind) for kind in dict.fromkeys(errors)}
        for outcome in outcomes:
            info |= outcome.metrics
        return Step(tuple(outcome.message for outcome in outcomes), sum(outcome.reward for outcome in outcomes), info=info)

    async def reward(self, trajectory: Trajectory) -> float | None:
        """What the reward function says of the finished trajectory."""
        function = self._factory.reward
        if function is None:
            return 0.0
        args = (trajectory, self._task or trajectory.task) if self._factory.reward_takes_task else (trajectory,)
        if inspect.iscoroutinefunction(function):
            result = await function(*args)
        else:
            result = await settle(await in_thread(lambda: function(*args), {}))
        found: float | None = result
        return found


def _takes_task(reward: Reward | None) -> bool:
    """Whether the second positional parameter of a reward function is for the task."""
    if reward is None:
        return False
    if not callable(reward):
        raise ConfigError(f"tool_env: reward is {type(reward).__name__}; it is a function of the trajectory")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [parameter for parameter in signature.parameters.values() if parameter.kind in kinds][1:2]
    takes = bool(second) and (second[0].name == "task" or second[0].default is inspect.Parameter.empty)
    try:
        signature.bind(*([None, None] if takes else [None]))
    except TypeError as error:
        name = getattr(reward, "__name__", "reward")
        raise ConfigError(f"tool_env: {name} is called as {name}(trajectory) or {name}(trajectory, task): {error}") from error
    return takes

"""Episodes with TRL's environments: public methods are tools, `get_reward` and reward
functions score the episode.

`TrlEnv` is the episode. With `env.faithful` it does as TRL does, also in TRL's words, and uses the
instances of environments again: see `docs/compat.md`. Classes, functions and arguments are read in
`adapter.py`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turnwright.config import Limits
from turnwright.envs.env import Action, Scores, Step
from turnwright.envs.rewards.workers import run_isolated
from turnwright.envs.tool_env import ToolEnv, ToolEnvFactory
from turnwright.envs.tools.results import Content, read_content
from turnwright.envs.tools.tool import Tool, Tools
from turnwright.envs.tools.tool_schema import ToolSignature, tool_signature
from turnwright.envs.user_code import as_number, call_user, describe_value, number_of
from turnwright.errors import EnvError, RewardError, TaskError, suggest_or_list, words
from turnwright.types import Message, Task, ToolCall, Trajectory
from turnwright_compat.common import TrainerState, accepted

POOL_CHECK_S = 0.02
"""Interval of checks for an instance that another episode gives back."""
LIFETIME = ("reset", "get_reward")
"""Public methods that are no tools."""


def make_tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a function, with the schema that transformers writes where it is installed."""
    signature = tool_signature(function)
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        return Tool(function, signature)
    return Tool(function, ToolSignature(get_json_schema(function), {}))


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """One environment class, or function that makes an environment."""

    make: Callable[[], Any]
    name: str
    templates: Mapping[str, Tool]
    """Tools by method, of an instance that no episode uses."""
    has_reward: bool
    needs_row: bool
    """Whether `reset` has parameters without a default."""
    pool: list[Any] = field(default_factory=list)
    """Instances for later episodes, with `faithful`."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One of `reward_funcs`, with its weight."""

    function: Callable[..., Any]
    name: str
    weight: float


@dataclass(frozen=True, slots=True)
class TrlOptions:
    """Settings of an environment of TRL."""

    faithful: bool
    tools: tuple[Tool, ...]
    environments: Mapping[str | None, EnvironmentClass]
    """By the row's column `environment`; None for the only one."""
    rewards: tuple[RewardFunction, ...]
    conversational: bool


@dataclass(frozen=True, slots=True)
class TrlFactory(ToolEnvFactory):
    """Factory of episodes with TRL's environments."""

    options: TrlOptions

    def __call__(self) -> TrlEnv:
        return TrlEnv(self)

    def __repr__(self) -> str:
        environments = [environment.name for environment in self.options.environments.values()]
        tools = [tool.name for tool in self.options.tools]
        return f"trl:GRPOTrainer({', '.join([*environments, *tools])})"


class TrlEnv(ToolEnv):
    """Episode with an environment of TRL, or with tools alone; a reply without calls ends it."""

    def __init__(self, factory: TrlFactory) -> None:
        super().__init__(factory)
        self._options = factory.options
        self._limits = Limits()
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._turns = 0
        self._chosen: EnvironmentClass | None = None
        self._environment: Any = None
        first = next(iter(factory.options.environments.values()), None)
        self._open(() if first is None else tuple(first.templates.values()))

    def set_limits(self, limits: Limits) -> None:
        """Keep the limits: a faithful episode executes no tool at its last turn."""
        self._limits = limits

    def set_decoder(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Keep the decoder, for completions without tools, which TRL does not parse."""
        self._decode = decode

    def _open(self, methods: Sequence[Tool]) -> None:
        self._tools = Tools([*self._options.tools, *methods], self._factory.kit.shared.cut)
        self.tools = self._tools.schemas

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Make the row's environment, reset it with the row, and append what it
        returns to the last message."""
        if not task.messages:
            task = replace(task, messages=(Message("user", ""),))
        self._task = task
        chosen = self._chosen = self._class_of(task)
        if chosen is None:
            self._open(())
            return self._factory.opening(task.messages)

        self._environment = await self._taken(chosen)
        bound_tools = [
            replace(tool, function=getattr(self._environment, key))
            for key, tool in chosen.templates.items()
        ]
        self._open(bound_tools)

        row = self._row(task)
        if None not in self._options.environments:
            row.pop("environment", None)
        method = self._environment.reset
        observation = await call_user(method, accepted(method, row))
        return self._factory.opening(_appended(task.messages, observation, chosen.name))

    async def _taken(self, chosen: EnvironmentClass) -> Any:
        """Return an instance for this episode: with `faithful` one of the pool, else a new one.

        A factory may make as many as a batch of TRL has, such as one for each address of a server;
        then the episode waits for one that another gives back.
        """
        while True:
            if self._options.faithful and chosen.pool:
                return chosen.pool.pop()
            try:
                return await call_user(chosen.make, {})
            except RuntimeError as error:
                if words(error) != "StopIteration":
                    raise
            if not self._options.faithful:
                raise EnvError(
                    f"{chosen.name}: environment_factory makes no further instance; set "
                    "env.faithful = true to use each again"
                )
            await asyncio.sleep(POOL_CHECK_S)

    def _class_of(self, task: Task) -> EnvironmentClass | None:
        environments = self._options.environments
        if not environments or None in environments:
            return environments.get(None)

        name = task.info.get("environment")
        if name not in environments:
            raise TaskError(
                f"task {task.id}: the column environment is {name!r}, which is none of "
                f"environment_factory; {suggest_or_list(str(name), list(map(str, environments)))}"
            )
        return environments[name]

    def _row(self, task: Task) -> dict[str, Any]:
        """Return the columns of the row."""
        return copy.deepcopy(task.columns) | {"prompt": _prompt(task, self._options.conversational)}

    async def step(self, action: Action) -> Step:
        """Run the calls of a reply."""
        self._turns += 1
        if not self._options.faithful:
            return await super().step(action)

        calls = [call for call in action.tool_calls if call.error is None]
        if not calls:
            return Step(terminated=True)
        if self._turns >= self._last_turn:
            return Step(truncated=True)

        # TRL appends the results of asynchronous tools after all others.
        tools = {tool.name: tool.function for tool in self._tools}
        ordered = sorted(calls, key=lambda call: inspect.iscoroutinefunction(tools.get(call.name)))
        return Step(tuple([await self._answer(call, tools) for call in ordered]))

    @property
    def _last_turn(self) -> int:
        return min(self._limits.turns, self._factory.max_turns or self._limits.turns)

    async def _answer(self, call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> Message:
        """Answer a call in TRL's words."""
        result: Any
        try:
            if call.name not in tools:
                raise ValueError(f"Tool {call.name} not found.")
            result = await call_user(tools[call.name], call.arguments)
        except Exception as error:
            result = {"error": words(error)}
        content = _parts(result, call.name) if isinstance(result, list) else str(result)
        return Message("tool", content, name=call.name, tool_call_id=call.id or None)

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """All reward functions."""
        return [reward.function for reward in self._options.rewards]

    async def reward(self, trajectory: Trajectory) -> Scores:
        """Add the weighted reward functions and `get_reward`."""
        return await self._total(trajectory, isolated=False)

    async def isolated_reward(self, trajectory: Trajectory) -> Scores:
        """Compute rewards that do not read the environment in a separate process."""
        return await self._total(trajectory, isolated=True)

    async def _total(self, trajectory: Trajectory, isolated: bool) -> Scores:
        weighted: dict[str, tuple[float, float]] = {}  # weight and value by name
        metrics: dict[str, float] = {}
        for reward in self._options.rewards:
            arguments = accepted(reward.function, self._score_arguments(trajectory, metrics))
            reads_episode = bool({"environments", "log_metric", "log_extra"} & set(arguments))
            if isolated and not reads_episode:
                call = partial(reward.function, **arguments)
                returned = await run_isolated(reward.name, call)
            else:
                returned = await call_user(reward.function, arguments)
            value = _read_reward(returned, reward.name)
            if value is not None:
                weighted[reward.name] = (reward.weight, value)

        if self._chosen is not None and self._chosen.has_reward:
            returned = await call_user(self._environment.get_reward, {})
            value = as_number(returned, f"{self._chosen.name}.get_reward")
            if value is not None:
                weighted[self._chosen.name] = (1.0, value)

        total = None
        if weighted:
            total = sum(weight * value for weight, value in weighted.values())
        parts = {name: value for name, (_, value) in weighted.items()}
        return Scores(total, parts=parts, metrics=metrics)

    def _score_arguments(self, trajectory: Trajectory, metrics: dict[str, float]) -> dict[str, Any]:
        """Return what TRL passes to a reward function, for a batch of this episode."""
        task = self._task or trajectory.task
        turns = trajectory.turns
        messages = [message.to_dict() for message in trajectory.messages]
        opening = len(turns[0].messages) if turns else len(messages)
        prompt, completion = messages[:opening], messages[opening:]

        path = trajectory.path(turns[-1].spans[-1]) if turns and turns[-1].spans else ()
        ids = list(path[turns[0].context :]) if turns else []
        if self._decode is None:
            text = "".join(message.text for message in trajectory.messages[opening:])
        else:
            text = self._decode(ids)
        if not self.tools:
            completion = [{"role": "assistant", "content": text}]

        def log_metric(name: str, value: float) -> None:
            metrics[str(name)] = number_of(value) or 0.0

        conversational = self._options.conversational
        row = {key: [value] for key, value in self._row(task).items() if key != "prompt"}
        arguments = {
            **row,
            "prompts": [prompt if conversational else _prompt(task, False)],
            "completions": [completion if conversational else text],
            "completion_ids": [ids],
            "trainer_state": TrainerState(trajectory.key.step),
            "log_extra": lambda column, values: None,
            "log_metric": log_metric,
        }
        if self._environment is not None:
            arguments["environments"] = [self._environment]
        return arguments

    async def close(self) -> None:
        """Keep the instance for later episodes, with `faithful`."""
        if self._environment is not None and self._chosen is not None and self._options.faithful:
            self._chosen.pool.append(self._environment)
        self._environment = None


def _prompt(task: Task, conversational: bool) -> Any:
    if conversational:
        return [message.to_dict() for message in task.messages]
    return "".join(message.text for message in task.messages)


def _parts(value: Any, name: str) -> Content:
    """Read a list of content parts."""
    if all(isinstance(part, Mapping) and "type" in part for part in value):
        return Message.of({"role": "user", "content": list(value)}).content
    return read_content(value, name)


def _appended(messages: tuple[Message, ...], observation: Any, name: str) -> tuple[Message, ...]:
    """Return messages whose last one ends with what `reset` returned: text without a
    separator, or content parts."""
    if observation is None:
        return messages
    if not isinstance(observation, (str, list)):
        raise EnvError(
            f"{name}.reset returned {describe_value(observation)}; return None, text or a list of "
            "content parts"
        )

    last = messages[-1]
    content: Content
    if isinstance(observation, str) and isinstance(last.content, str):
        content = last.content + observation
    else:
        added = observation if isinstance(observation, str) else _parts(observation, name)
        before = () if last.content == "" else _as_parts(last.content)
        content = (*before, *_as_parts(added))
    return (*messages[:-1], replace(last, content=content))


def _as_parts(content: Content) -> tuple[Any, ...]:
    return (content,) if isinstance(content, str) else content


def _read_reward(returned: Any, name: str) -> float | None:
    try:
        values = list(returned)
    except TypeError:
        raise RewardError(
            f"{name} returned {describe_value(returned)}; return a list with one reward per "
            "completion"
        ) from None
    if len(values) != 1:
        raise RewardError(
            f"{name} returned {len(values)} rewards for 1 completion; return one per completion"
        )
    return as_number(values[0], name)

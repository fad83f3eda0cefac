"""Episodes with verl's tools and interactions, whose objects all episodes share: state is
kept by instance ids.

`VerlEnv` is the episode: `step` runs the calls of a reply, or passes a reply without calls to the
interaction, and `reward` adds `compute_score` and the rewards of the tools' instances. With
`env.faithful` it does as verl does, also in verl's words: see `docs/compat.md`. Files, classes and
arguments are read in `adapter.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

from turnwright.config import Limits
from turnwright.envs.env import Action, Scores, Step
from turnwright.envs.rewards.workers import run_isolated
from turnwright.envs.tool_env import ToolEnv, ToolEnvFactory
from turnwright.envs.tools.results import (
    Content,
    ToolResult,
    join_content,
    read_content,
    read_result,
)
from turnwright.envs.tools.stateful import (
    Lifetime,
    RowArguments,
    ToolInstance,
    arguments_of,
    as_tool_failure,
)
from turnwright.envs.tools.tool import Tool, Tools
from turnwright.envs.user_code import as_number, call_user, describe_value, number_of
from turnwright.errors import EnvError, RewardError, TaskError, suggest_or_list, words
from turnwright.types import Message, Task, ToolCall, Trajectory
from turnwright_compat.common import accepted

__all__ = [
    "FunctionSource",
    "Interaction",
    "Lifetime",
    "SharedTool",
    "VerlEnv",
    "VerlFactory",
    "VerlOptions",
    "dumped_schema",
]


def dumped_schema(schema: Any) -> dict[str, Any]:
    """Return a schema, an object of pydantic or a mapping, as verl renders it."""
    if hasattr(schema, "model_dump"):
        dumped: dict[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
        return dumped
    return dict(schema) if isinstance(schema, Mapping) else {}


@dataclass(slots=True)
class AgentData:
    """State of an episode that tools may read."""

    messages: list[dict[str, Any]]
    tools_kwargs: Mapping[str, Any]
    request_id: str = field(default_factory=lambda: uuid4().hex)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0


@dataclass(frozen=True, slots=True)
class SharedTool:
    """Source of one `BaseTool` object."""

    tool: Any
    template: Tool
    lifetime: Lifetime
    faithful: bool

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.template.name

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def open(self, row: RowArguments, instances: list[ToolInstance]) -> ToolInstance:
        """Make the instance of one episode."""
        return _Instance(self, row.given.get(self.name) or {})


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Source of one function, which keeps its place in the order of the tools."""

    tool: Tool

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.tool.name

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The one tool."""
        return (self.tool,)

    def open(self, row: RowArguments, instances: list[ToolInstance]) -> ToolInstance:
        """Return itself: a function has no state."""
        return self

    async def create(self) -> Content:
        """Do nothing."""
        return ""

    async def reward(self) -> float | None:
        """Return 0.0."""
        return 0.0

    async def release(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Instance:
    """Instance of a `SharedTool` in one episode, or the maker of one for each call."""

    source: SharedTool
    row_arguments: Mapping[str, Mapping[str, Any]]
    """Arguments of the row by the method that takes them: `create_kwargs`, `execute_kwargs`, ..."""
    tools: tuple[Tool, ...] = ()
    _agent_data: AgentData | None = None
    _id: Any = None
    """Id of the instance while it lives; None with a lifetime of one call."""

    @property
    def name(self) -> str:
        return self.source.name

    def bind(self, agent_data: AgentData) -> None:
        """Keep the state of the episode, which `execute` may read."""
        self._agent_data = agent_data

    async def create(self) -> Content:
        """Begin the lifetime, unless each call has its own."""
        if self.source.lifetime == "call":
            self.tools = (replace(self.source.template, function=self._call),)
            return ""

        self.tools = (replace(self.source.template, function=self._execute),)
        with as_tool_failure(f"{self.name}: create"):
            self._id, created = await self._begin()
        return created

    async def _begin(self) -> tuple[Any, Content]:
        """Call `create`; return the id of an instance, and what the tool tells the model."""
        method = self.source.tool.create
        arguments = {"instance_id": uuid4().hex, **self._arguments_of("create")}
        returned = await call_user(method, accepted(method, arguments))

        instance_id = returned
        response: Any = None
        if type(returned) is tuple and len(returned) == 2:
            instance_id, response = returned
        if self.source.faithful:
            return instance_id, ""  # verl does not show it
        return instance_id, read_content(response, self.name)

    def _arguments_of(self, method: str) -> dict[str, Any]:
        """Return the row's arguments of a method, in verl's form and one by one."""
        key = f"{method}_kwargs"
        of_row = self.row_arguments.get(key) or {}
        arguments = {name: value for name, value in of_row.items() if value is not None}
        return {**arguments, key: arguments}

    async def _execute(self, **arguments: Any) -> Any:
        return await self._run(self._id, arguments)

    async def _run(self, instance_id: Any, arguments: dict[str, Any]) -> Any:
        method = self.source.tool.execute
        further = {**self._arguments_of("execute"), "agent_data": self._agent_data}
        return await call_user(partial(method, instance_id, arguments), accepted(method, further))

    async def _call(self, **arguments: Any) -> Any:
        """Begin an instance for one call, and end it, whatever the call raises."""
        if self.source.faithful:
            instance_id, _ = await self._begin()
            try:
                return await self._run(instance_id, arguments)
            finally:
                await self._end(instance_id)

        with as_tool_failure(f"{self.name}: create", bugs=True):
            instance_id, created = await self._begin()
        try:
            result = read_result(await self._run(instance_id, arguments), self.name)
        finally:
            with as_tool_failure(f"{self.name}: release", bugs=True):
                await self._end(instance_id)
        return replace(result, content=join_content(created, result.content))

    async def reward(self) -> float | None:
        """Call `calc_reward` of an instance that lived for the episode."""
        if self._id is None:
            return 0.0

        method = self.source.tool.calc_reward
        arguments = accepted(method, self._arguments_of("calc_reward"))
        returned = await call_user(partial(method, self._id), arguments)
        if returned is not None and number_of(returned) is None:
            # verl itself never asks, so a tool may return anything here: its own sandbox tool
            # returns a list of outputs.
            return 0.0
        return as_number(returned, f"{self.name}: calc_reward")

    async def release(self) -> None:
        """Release an instance that lived for the episode, once."""
        instance_id = self._id
        self._id = None
        if instance_id is not None:
            with as_tool_failure(f"{self.name}: release"):
                await self._end(instance_id)

    async def _end(self, instance_id: Any) -> None:
        method = self.source.tool.release
        arguments = accepted(method, self._arguments_of("release"))
        await call_user(partial(method, instance_id), arguments)


@dataclass(frozen=True, slots=True)
class Interaction:
    """A `BaseInteraction` object."""

    target: Any

    async def call(self, method: str, *args: Any, given: Mapping[str, Any]) -> Any:
        """Call a method with those of the row's arguments that it takes."""
        function = getattr(self.target, method)
        return await call_user(partial(function, *args), accepted(function, given))


@dataclass(frozen=True, slots=True)
class VerlOptions:
    """Settings of an environment of verl's tools."""

    faithful: bool
    reward: Callable[..., Any] | None
    interactions: Mapping[str, Interaction]
    max_parallel_calls: int | None
    max_user_turns: int | None
    response_length: int
    truncate_side: str


@dataclass(frozen=True, slots=True)
class VerlFactory(ToolEnvFactory):
    """Factory of episodes with verl's tools."""

    options: VerlOptions

    def __call__(self) -> VerlEnv:
        return VerlEnv(self)

    def __repr__(self) -> str:
        functions = [tool.name for tool in self.kit.shared]
        sources = [source.name for source in self.kit.sources]
        return f"verl:tools({', '.join([*functions, *sources, *self.options.interactions])})"


class VerlEnv(ToolEnv):
    """Episode with verl's tools; a reply without calls goes to the
    interaction, or ends the episode."""

    def __init__(self, factory: VerlFactory) -> None:
        super().__init__(factory)
        self._options = factory.options
        self._limits = Limits()
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._data = AgentData([], {})
        self._extra: dict[str, Any] = {}
        self._interaction: Interaction | None = None
        self._interaction_id: Any = None
        self._interaction_kwargs: dict[str, Any] = {}

    def set_limits(self, limits: Limits) -> None:
        """Keep the limits: a faithful episode executes no tool at its last turn."""
        self._limits = limits

    def set_decoder(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Keep the decoder, for the `solution_str` of `compute_score`."""
        self._decode = decode

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Open the tools that the row selects and start its interaction."""
        extra_info = task.info.get("extra_info")
        self._extra = dict(extra_info) if isinstance(extra_info, Mapping) else {}
        row = arguments_of(task)
        if self._extra.get("need_tools_kwargs") and not row.given:
            raise TaskError(
                f"task {task.id}: need_tools_kwargs is set and there are no tools_kwargs; give the "
                "row some"
            )

        selected = self._extra.get("tool_selection")
        if selected:
            task = replace(task, info={**task.info, "tools": list(selected)})
        opening = await super().reset(task, seed=seed)
        if selected:
            # The tools stand in the order in which the row selects them.
            tools = {tool.name: tool for tool in self._tools}
            self._tools = Tools([tools[name] for name in dict.fromkeys(selected)], self._tools.cut)
            self.tools = self._tools.schemas

        self._task = task
        self._data = AgentData([message.to_dict() for message in opening], row.given)
        for instance in self.instances:
            if isinstance(instance, _Instance):
                instance.bind(self._data)
        await self._start_interaction(task)
        return opening

    async def _start_interaction(self, task: Task) -> None:
        interactions = self._options.interactions
        if not interactions:
            return

        kwargs = self._extra.get("interaction_kwargs") or task.info.get("interaction_kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise TaskError(
                f"task {task.id}: interaction_kwargs is {type(kwargs).__name__}; write an object "
                "with a name"
            )
        name = kwargs.get("name")
        if name is None and len(interactions) == 1:
            name = next(iter(interactions))
        if not isinstance(name, str) or name not in interactions:
            raise TaskError(
                f"task {task.id}: interaction_kwargs names {name!r}, which is no interaction here; "
                f"{suggest_or_list(str(name), interactions)}"
            )

        self._interaction = interactions[name]
        self._interaction_kwargs = {**kwargs, "name": name}
        started = await self._interaction.call(
            "start_interaction", self._data.request_id, given=self._interaction_kwargs
        )
        self._interaction_id = started or self._data.request_id

    async def step(self, action: Action) -> Step:
        """Run the calls of a reply; pass one without calls to the interaction."""
        data, options = self._data, self._options
        data.assistant_turns += 1
        data.messages.append(action.message.to_dict())

        calls = action.tool_calls
        if options.faithful:
            if data.assistant_turns >= self._limits.turns:
                return Step(truncated=True)
            calls = tuple(call for call in calls if call.error is None)
        if options.max_user_turns is not None and data.user_turns >= options.max_user_turns:
            return Step(truncated=True)
        if not calls:
            return await self._interact()

        call_count = len(calls)
        calls = calls[: options.max_parallel_calls]
        if options.faithful:
            step = await self._step_faithfully(calls)
        else:
            message = replace(action.message, tool_calls=calls)
            step = await super().step(replace(action, message=message))
            data.tool_rewards.append(step.reward or 0.0)

        data.user_turns += 1
        data.messages += [message.to_dict() for message in step.observation or ()]  # type: ignore[union-attr]
        dropped = call_count - len(calls)
        if dropped:
            step = step._replace(info={**step.info, "tool_calls_dropped": dropped})
        return step

    async def _interact(self) -> Step:
        """Let the simulated user answer; without one a reply without calls ends the episode."""
        data = self._data
        if self._interaction is None:
            return Step(terminated=True)

        messages = [dict(message) for message in data.messages]
        answer = await self._interaction.call(
            "generate_response", self._interaction_id, messages, given=self._interaction_kwargs
        )
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise EnvError(
                f"generate_response returned {describe_value(answer)}; return (terminate, text, "
                "score, extra)"
            )

        terminate, text, score, extra = answer
        data.user_turns += 1
        reward = as_number(score, "the interaction's score")
        data.turn_scores.append(reward or 0.0)
        message = Message("user", text or "")
        data.messages.append(message.to_dict())

        info: dict[str, Any] = {}
        if isinstance(extra, Mapping):
            info = {str(key): value for key, value in extra.items()}
        info["interaction_score"] = reward
        # verl lists the scores of turns for `compute_score`, and adds none of them itself.
        step_reward = 0.0 if self._options.faithful else reward or 0.0
        return Step(message, step_reward, bool(terminate), info=info)

    async def _step_faithfully(self, calls: Sequence[ToolCall]) -> Step:
        """Answer calls in verl's words; their rewards are listed, not added."""
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        rewards = [result.reward for _, result in answers]
        self._data.tool_rewards.extend(rewards)
        info = {"tool_calls": len(calls), "tool_rewards": rewards}
        return Step(tuple(message for message, _ in answers), 0.0, info=info)

    async def _answer(self, call: ToolCall) -> tuple[Message, ToolResult]:
        tools = {tool.name: tool for tool in self._tools}
        if call.name not in tools:
            result = ToolResult(f"Unknown function '{call.name}'. Available tools: {list(tools)}")
        else:
            try:
                returned = await call_user(tools[call.name].function, call.arguments)
                result = _result_as_in_verl(returned, call.name)
            except Exception as error:
                result = ToolResult(f"Error executing tool '{call.name}': {words(error)}")

        content: Content
        if isinstance(result.content, str):
            content = self._cut(result.content)
        else:
            content = tuple(
                self._cut(part) if isinstance(part, str) else part for part in result.content
            )
        return Message("tool", content, tool_call_id=call.id or None), result

    def _cut(self, text: str) -> str:
        """Cut a response as verl does: `left` keeps the end of it, `right` the start."""
        length = self._options.response_length
        side = self._options.truncate_side
        if len(text) <= length:
            return text
        if side == "left":
            return "(truncated)..." + text[-length:]
        if side == "right":
            return text[:length] + "...(truncated)"
        return text[: length // 2] + "...(truncated)..." + text[-(length // 2) :]

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """All reward functions."""
        return [] if self._options.reward is None else [self._options.reward]

    async def reward(self, trajectory: Trajectory) -> Scores:
        """Compute `compute_score` and the rewards of the tools' instances."""
        return await self._total(trajectory, isolated=False)

    async def isolated_reward(self, trajectory: Trajectory) -> Scores:
        """Compute `compute_score` in a separate process; the tools stay in this one."""
        return await self._total(trajectory, isolated=True)

    async def _total(self, trajectory: Trajectory, isolated: bool) -> Scores:
        function = self._options.reward
        scores = Scores()
        if function is not None:
            call = partial(function, **accepted(function, self._score_arguments(trajectory)))
            if isolated:
                name = getattr(function, "__name__", "compute_score")
                returned = await run_isolated(name, call)
            else:
                returned = await call_user(call, {})
            scores = read_score(returned)

        if not self._options.faithful:
            for instance in self.instances:
                scores = scores.with_added(await instance.reward())
        return scores

    def _score_arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return what verl passes to `compute_score`."""
        task = self._task or trajectory.task
        data = self._data
        extra_info = {
            **self._extra,
            "num_turns": data.user_turns + data.assistant_turns + 1,
            "tool_rewards": list(data.tool_rewards),
            "turn_scores": list(data.turn_scores),
            "rollout_reward_scores": {},
        }
        return {
            "data_source": task.info.get("data_source"),
            "solution_str": self._solution(trajectory),
            "ground_truth": task.answer,
            "extra_info": extra_info,
        }

    def _solution(self, trajectory: Trajectory) -> str:
        """Return the text after the opening prompt, observations included,
        without special tokens."""
        turns = trajectory.turns
        if self._decode is None or not turns or not turns[-1].spans:
            later_messages = trajectory.messages[len(turns[0].messages) :]
            return "\n".join(message.text for message in later_messages)
        path = trajectory.path(turns[-1].spans[-1])
        return self._decode(path[turns[0].context :])

    async def close(self) -> None:
        """End the interaction and release all tools."""
        try:
            if self._interaction is not None and self._interaction_id is not None:
                kwargs = {"instance_id": self._interaction_id, **self._interaction_kwargs}
                await self._interaction.call("finalize_interaction", given=kwargs)
        finally:
            self._interaction = None
            await super().close()


def _result_as_in_verl(value: Any, name: str) -> ToolResult:
    """Read a tool's return value as verl does: text of what is neither text, nor a
    dict, nor a response."""
    reward = 0.0
    metrics: dict[str, Any] = {}
    if isinstance(value, tuple):
        if not 1 <= len(value) <= 3:
            raise TypeError(
                f"the tool returned {len(value)} values; return (response, reward, metrics)"
            )
        if len(value) > 1:
            reward = number_of(value[1]) or 0.0
        if len(value) > 2:
            metrics = dict(value[2] or {})
        value = value[0]

    content: Content
    if isinstance(value, Mapping):
        content = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, str) or hasattr(value, "image"):
        content = read_content(value, name)
    else:
        content = str(value)
    return ToolResult(content, reward, metrics)


def read_score(value: Any) -> Scores:
    """Read the value of `compute_score`: a number, or a dict with `score` and other values."""
    if not isinstance(value, Mapping):
        return Scores(as_number(value, "compute_score"))
    if "score" not in value:
        raise RewardError(
            f"compute_score returned {describe_value(value)}; a dict has the key 'score'"
        )

    numbers = {str(key): number_of(other) for key, other in value.items() if key != "score"}
    parts = {name: number for name, number in numbers.items() if number is not None}
    return Scores(as_number(value["score"], "compute_score"), parts=parts)

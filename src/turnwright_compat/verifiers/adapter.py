"""Verifiers v1 tasksets.

A task is one reply: `TasksetEnv` opens with its prompts, and has verifiers score a trace of the
episode. `check_taskset` refuses tasks that need verifiers' own loop. Environments of
`verifiers.legacy` are played by a package of their own, `contrib/verifiers_legacy`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwright.envs.env import Action, Env, Scores, Step
from turnwright.envs.foreign import ForeignObject, adapt
from turnwright.envs.scripted_play import Speak
from turnwright.envs.tasks import TaskSource, split_tasks
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Message, Task, Trajectory, as_messages

ROW = "verifiers"
"""Key of the verifiers row in a task's info."""


def check_taskset(source_env: Any) -> None:
    """Raise `ConfigError` when the tasks of a taskset need tool servers, containers, or hooks
    in verifiers' own loop."""
    kind = type(source_env).task_type()
    v1: Any = importlib.import_module("verifiers.v1")
    servers = type(source_env).toolsets(source_env.config)
    needs = [
        (servers, "its toolsets are servers, which receive the state from verifiers' own rollout"),
        (kind.NEEDS_CONTAINER, "its tasks need a container"),
        (kind.setup is not v1.Task.setup, "setup(trace, runtime) needs a runtime"),
        (kind.finalize is not v1.Task.finalize, "finalize(trace, runtime) needs a runtime"),
    ]
    for needed, why in needs:
        if needed:
            raise ConfigError(
                f"verifiers_env({type(source_env).__name__}): {why}; here a task is one reply and "
                "its score"
            )


def task_of_taskset(task: Any) -> Task:
    """Convert a task of `verifiers.v1`: its prompts open the episode;
    `info["verifiers"]` has its row."""
    data = task.data
    messages: list[Any] = []
    if data.system_prompt is not None:
        messages.append(Message("system", data.system_prompt))

    prompt = data.prompt
    if not isinstance(prompt, str):
        prompt = [_openai(message) for message in prompt or ()]
    messages += as_messages(prompt)
    return Task(messages, info={ROW: data.model_dump(mode="json")})


class TasksetEnv(Env):
    """Environment of one task; made by `verifiers_env`."""

    def __init__(self, source_env: Any) -> None:
        self._source_env = source_env
        self._task: Any = None

    def reset(self, task: Task, *, seed: int | None = None) -> None:
        """Make verifiers' task of the row; refuse one that needs more than a reply."""
        row = task.info.get(ROW)
        if row is None:
            raise EnvError(
                f'verifiers_env: the task {task.id} has no row in info["{ROW}"]; take tasks of the '
                "taskset"
            )

        kind = type(self._source_env).task_type()
        self._task = kind(kind.data_type().model_validate(row), self._source_env.config.task)
        fault = self._fault(row)
        if fault:
            raise EnvError(
                f"verifiers_env: {kind.__name__} {task.id} {fault}; here a task is one reply and "
                "its score"
            )

    def _fault(self, row: Mapping[str, Any]) -> str:
        """Return why the task cannot be played here; empty if it can."""
        task = self._task
        has_servers = bool(type(task).toolsets(task.config))
        scoring = [method for name in ("reward", "metric") for method in task.hooks(name)]
        judging = [judge.score for judge in task.plugged_judges()]
        if row.get("prompt") is None:
            return "has no prompt: it needs a simulated user to begin"
        if has_servers:
            return "has tool servers"
        if any(map(_needs_runtime, scoring)):
            return "is scored in a runtime"
        if any(map(_needs_runtime, judging)):
            return "is judged in a runtime"
        return ""

    def step(self, action: Action) -> Step:
        """End the episode after one reply."""
        return Step(terminated=True)

    async def reward(self, trajectory: Trajectory) -> Scores:
        """Compute the task's reward and metric methods, by name."""
        trace = self._trace(trajectory)
        await self._task.score(trace)

        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        parts = {
            name: float(reward.score)
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        is_complete = len(parts) == len(trace.rewards)
        return Scores(float(trace.reward) if is_complete else None, (), parts, metrics)

    def _trace(self, trajectory: Trajectory) -> Any:
        """Convert the episode to a verifiers trace: one node per message."""
        v1 = importlib.import_module("verifiers.v1")
        traces = importlib.import_module("verifiers.v1.trace")
        states = importlib.import_module("verifiers.v1.state")
        graph = importlib.import_module("verifiers.v1.graph")
        task = self._task
        trace = traces.Trace(
            task=traces.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            state=states.state_cls(type(task))(),
            agent=traces.AgentInfo(config=v1.AgentConfig()),
        )

        last = len(trajectory.messages) - 1
        for number, message in enumerate(trajectory.messages):
            node = graph.MessageNode(
                parent=number - 1 if number else None,
                message=_theirs(message),
                sampled=bool(trajectory.turns) and number == last,
            )
            trace.nodes.append(node)
        if trajectory.turns:
            finish = "length" if trajectory.turns[-1].finish == "length" else "stop"
            trace.calls.append(traces.ModelCall(node=last, finish_reason=finish))
        trace.stop("agent_completed")
        trace.ok = True
        return trace


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _openai(message: Any) -> dict[str, Any]:
    """Convert a verifiers message to OpenAI's format."""
    fields = message.model_dump(mode="json")
    row = {key: value for key, value in fields.items() if value is not None}
    row["tool_calls"] = [
        {"id": call["id"], "name": call["name"], "arguments": call["arguments"]}
        for call in row.get("tool_calls", ())
    ]
    return row


def _theirs(message: Message) -> dict[str, Any]:
    """Convert a message to the verifiers format."""
    row: dict[str, Any] = {"role": message.role, "content": message.text_with_alt}
    if message.role == "assistant":
        row["reasoning_content"] = message.reasoning
        row["tool_calls"] = [
            {
                "id": call.id or f"call_{number}",
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments)),
            }
            for number, call in enumerate(message.tool_calls)
        ] or None
    if message.role == "tool":
        row |= {"tool_call_id": message.tool_call_id or "", "name": message.name}
    return row


def verifiers_env(
    env: Any,
    *,
    max_turns: int | None = None,
    tasks: TaskSource | None = None,
    solver: Speak | None = None,
    demonstrator: Speak | None = None,
    single_turn_best: float | None = None,
) -> VerifiersFactory:
    """Make an environment from one of `verifiers`; needs `pip install '.[verifiers]'`.

    - A `MultiTurnEnv` of `verifiers.legacy` (single-turn and tool environments included) is played
      turn by turn with its `setup_state`, `env_response`, stop conditions and clean-up. Its rubric
      is the reward, with named parts. Needs `pip install ./contrib/verifiers_legacy`.
    - A `Taskset` of `verifiers.v1` is played with one reply per task, scored by the task's
      `@reward` and `@metric` methods. Tasks that need verifiers' own agent loop or containers are
      rejected with the reason.

    Example::

        env = verifiers_env(vf.load_environment("wordle"))

    Args:
        env: the environment or taskset; or a function without arguments that returns one, called
            once per process, as `isolation = "process"` requires.
        max_turns: maximum replies per episode, in addition to the limits of the
            environment and the run.
        tasks: by default the rows of its dataset. Held out are the rows of its evaluation dataset,
            if it has one, else one in five; of an infinite taskset every second task.
        solver, demonstrator, single_turn_best: as on an Env class.

    Raises:
        ConfigError: for other objects, and for environments that cannot be played.
    """
    factory = VerifiersFactory(env, max_turns, tasks, solver, demonstrator, single_turn_best)
    factory.factory  # noqa: B018 - raises here for environments that cannot be played
    return factory


@dataclass(eq=False)
class VerifiersFactory:
    """Factory returned by `verifiers_env`: each call makes a new environment."""

    source: Any
    max_turns: int | None = None
    given: TaskSource | None = None
    solver: Speak | None = None
    demonstrator: Speak | None = None
    single_turn_best: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments: a function is called again in another process."""
        return {key: value for key, value in vars(self).items() if key != "factory"}

    def __repr__(self) -> str:
        name = getattr(self.source, "__name__", None) or type(self.source).__name__
        return f"verifiers_env({name})"

    def __call__(self) -> Env:
        env: Env = self.factory()
        return env

    @functools.cached_property
    def factory(self) -> Any:
        """Factory of the environment or taskset, which all episodes share."""
        factory = _factory(self.source)
        if factory is not None:
            return factory

        if not callable(self.source) or isinstance(self.source, type):
            raise ConfigError(
                f"verifiers_env({self.source!r:.80}): give a MultiTurnEnv of verifiers.legacy "
                "(with contrib/verifiers_legacy) or a Taskset of verifiers 0.4 (an instance, not a "
                "class or its name), or a function without arguments giving one"
            )
        made = self.source()
        factory = _factory(made)
        if factory is not None:
            return factory
        raise ConfigError(
            f"{self!r} gave {type(made).__name__}, no MultiTurnEnv and no Taskset of verifiers"
        )

    @property
    def tasks(self) -> TaskSource:
        """Given tasks, else the rows of the dataset."""
        return self.given if self.given is not None else self.factory.tasks


def _factory(source: Any) -> Any:
    """Return a factory for a taskset, or for an object that an installed
    package knows; else None."""
    has_hooks = all(hasattr(source, name) for name in ("load", "task_type", "bounded"))
    if isinstance(source, type) or not has_hooks:
        return adapt(ForeignObject(source, "verifiers_env"))
    check_taskset(source)
    return _TasksetFactory(source)


@dataclass(frozen=True, slots=True)
class _TasksetFactory:
    taskset: Any

    def __call__(self) -> TasksetEnv:
        return TasksetEnv(self.taskset)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return the tasks of a split; those of an infinite taskset belong to both in turn."""
        is_eval = split != "train"
        if not self.taskset.bounded:
            of_split = itertools.islice(self.taskset, int(is_eval), None, 2)
            return [task_of_taskset(task) for task in itertools.islice(of_split, n or 1000)]

        unique = {task.id: task for task in map(task_of_taskset, self.taskset)}
        return split_tasks([*unique.values()], seed=seed)[is_eval][: n or None]

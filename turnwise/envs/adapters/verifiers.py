"""Verifiers v1 tasksets."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.adapters.verifiers_legacy import LegacyEnv, check_legacy, task_of_row
from turnwise.envs.base import Action, Env, Scores, Step
from turnwise.envs.scripted_play import Speak
from turnwise.envs.tasks import TaskSource, split_tasks
from turnwise.errors import ConfigError, EnvError
from turnwise.types import Message, Task, Trajectory, as_messages

ROW = "verifiers"
"""Where a task's info holds the row as verifiers has it."""


def check_taskset(world: Any) -> None:
    """See that the tasks of a taskset can be played.

    Raises:
        ConfigError: for what needs tool servers, boxes, or hooks in verifiers' own loop.
    """
    kind = type(world).task_type()
    v1: Any = importlib.import_module("verifiers.v1")
    needs = [
        (type(world).toolsets(world.config), "its toolsets are servers, which are told of the state by verifiers' own rollout"),
        (kind.NEEDS_CONTAINER, "its tasks need a container"),
        (kind.setup is not v1.Task.setup, "setup(trace, runtime) needs a runtime"),
        (kind.finalize is not v1.Task.finalize, "finalize(trace, runtime) needs a runtime"),
    ]
    for needed, why in needs:
        if needed:
            raise ConfigError(f"verifiers_env({type(world).__name__}): {why}; here a task is one reply and its score")


def task_of_taskset(task: Any) -> Task:
    """A task of `verifiers.v1`: its prompts open the episode, and its row stands in `info["verifiers"]`."""
    data = task.data
    messages: list[Any] = [] if data.system_prompt is None else [Message("system", data.system_prompt)]
    prompt = data.prompt if isinstance(data.prompt, str) else [_openai(message) for message in data.prompt or ()]
    return Task([*messages, *as_messages(prompt)], info={ROW: data.model_dump(mode="json")})


class TasksetEnv(Env):
    """One task; made by `verifiers_env`."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._task: Any = None

    def reset(self, task: Task, *, seed: int | None = None) -> None:
        """Open with the task's own messages.

        Raises:
            EnvError: when the task needs more than a reply and a score.
        """
        row = task.info.get(ROW)
        if row is None:
            raise EnvError(f'verifiers_env: the task {task.id} has no row in info["{ROW}"]; take tasks of the taskset')
        kind = type(self._world).task_type()
        self._task = made = kind(kind.data_type().model_validate(row), self._world.config.task)
        for needed, why in (
            (row.get("prompt") is None, "has no prompt: somebody who plays the user has to begin"),
            (kind.toolsets(made.config), "has tool servers"),
            ([f for name in ("reward", "metric") for f in made.hooks(name) if _needs_runtime(f)], "is scored in a runtime"),
            ([judge for judge in made.plugged_judges() if _needs_runtime(judge.score)], "is judged in a runtime"),
        ):
            if needed:
                raise EnvError(f"verifiers_env: {kind.__name__} {task.id} {why}; here a task is one reply and its score")

    def step(self, action: Action) -> Step:
        """The one reply."""
        return Step(terminated=True)

    async def reward(self, trajectory: Trajectory) -> Scores:
        """What the task's own methods say, by their names.

        Raises:
            Exception: what they raise.
        """
        trace = self._trace(trajectory)
        await self._task.score(trace)
        given = {name: reward for name, reward in trace.rewards.items()}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        parts = {name: float(reward.score) for name, reward in given.items() if reward is not None}
        own = None if len(parts) < len(given) else float(trace.reward)
        return Scores(own, (), parts, metrics)

    def _trace(self, trajectory: Trajectory) -> Any:
        """The episode as verifiers records one: a node for each message."""
        v1: Any = importlib.import_module("verifiers.v1")
        module: Any = importlib.import_module("verifiers.v1.trace")
        states: Any = importlib.import_module("verifiers.v1.state")
        graph: Any = importlib.import_module("verifiers.v1.graph")
        task = self._task
        trace = module.Trace(
            task=module.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=states.state_cls(type(task))(),
            agent=module.AgentInfo(config=v1.AgentConfig()),
        )
        messages = trajectory.messages
        for number, message in enumerate(messages):
            sampled, parent = bool(trajectory.turns) and number == len(messages) - 1, number - 1 if number else None
            trace.nodes.append(graph.MessageNode(parent=parent, message=_theirs(message), sampled=sampled))
        if trajectory.turns:
            finish = "length" if trajectory.turns[-1].finish == "length" else "stop"
            trace.calls.append(module.ModelCall(node=len(messages) - 1, finish_reason=finish))
        trace.stop("agent_completed")
        trace.ok = True
        return trace


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _openai(message: Any) -> dict[str, Any]:
    """A message of verifiers' own type in OpenAI's shape."""
    row = {key: value for key, value in message.model_dump(mode="json").items() if value is not None}
    calls = row.get("tool_calls", ())
    return row | {"tool_calls": [{"id": c["id"], "name": c["name"], "arguments": c["arguments"]} for c in calls]}


def _theirs(message: Message) -> dict[str, Any]:
    """A message as verifiers reads one."""
    row: dict[str, Any] = {"role": message.role, "content": message.text_with_alt}
    if message.role == "assistant":
        row["reasoning_content"] = message.reasoning
        row["tool_calls"] = [
            {"id": call.id or f"call_{number}", "name": call.name, "arguments": json.dumps(dict(call.arguments))}
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
    """An environment made with `verifiers`; needs `pip install '.[verifiers]'`.

    What it is decides how it is played:

    - A `MultiTurnEnv` of `verifiers.legacy` (single-turn and tool environments are ones) turn by turn: `setup_state`,
      `env_response`, its stop conditions and clean-up; its rubric is the reward, whose parts are named.
    - A `Taskset` of `verifiers.v1` one reply a task, scored by the task's `@reward` and `@metric` methods. That API runs
      agents in a loop and in boxes of its own; what needs those is refused by name.

    Example::

        env = verifiers_env(vf.load_environment("wordle"))

    Args:
        env: the environment or the taskset; or a function without arguments that gives one, called once in each process,
            which `isolation = "process"` needs.
        max_turns: most replies of an episode, besides the environment's own limit and the run's.
        tasks: by default the rows of its dataset. Held out are those of its evaluation dataset, where it has one of its own,
            else one in five; of an endless taskset every second task.
        solver, demonstrator, single_turn_best: as on an Env class.

    Raises:
        ConfigError: when it is neither, or cannot be played here.
    """
    factory = VerifiersFactory(env, max_turns, tasks, solver, demonstrator, single_turn_best)
    factory.world  # noqa: B018 - so that what cannot be played is refused here
    return factory


@dataclass(eq=False)
class VerifiersFactory:
    """What `verifiers_env` returns: call it for a fresh environment."""

    source: Any
    max_turns: int | None = None
    given: TaskSource | None = None
    solver: Speak | None = None
    demonstrator: Speak | None = None
    single_turn_best: float | None = None
    _world: Any = field(default=None, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What it was given: a function is called anew in another process."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_world": None, "_lock": threading.Lock()}

    def __repr__(self) -> str:
        return f"verifiers_env({getattr(self.source, '__name__', None) or type(self.source).__name__})"

    def __call__(self) -> Env:
        """A fresh environment of an episode."""
        return LegacyEnv(self.world) if _is_legacy(self.world) else TasksetEnv(self.world)

    @property
    def world(self) -> Any:
        """The environment or the taskset, which all episodes share.

        Raises:
            ConfigError: as `verifiers_env`.
        """
        with self._lock:
            if self._world is None:
                made = self.source
                if not _is_legacy(made) and not _is_taskset(made):
                    if not callable(made) or isinstance(made, type):
                        raise ConfigError(
                            f"verifiers_env({made!r:.80}): give a MultiTurnEnv of verifiers.legacy or a Taskset of verifiers "
                            "0.4 (an instance, not a class or its name), or a function without arguments that gives one"
                        )
                    made = made()
                if _is_legacy(made):
                    check_legacy(made)
                elif _is_taskset(made):
                    check_taskset(made)
                else:
                    raise ConfigError(f"{self!r} gave {type(made).__name__}, no MultiTurnEnv and no Taskset of verifiers")
                self._world = made
            return self._world

    @property
    def tasks(self) -> TaskSource:
        """The rows of its dataset, where no other tasks were given."""
        return self.given if self.given is not None else self._tasks

    def _tasks(self, split: str, n: int, seed: int) -> list[Task]:
        world = self.world
        if _is_legacy(world):
            if world.eval_dataset_source is not None and world.dataset_source is not None:
                return _cut(map(task_of_row, world.get_dataset() if split == "train" else world.get_eval_dataset()), n)
            whole = list(map(task_of_row, world.get_dataset()))
        elif world.bounded:
            whole = [task_of_taskset(task) for task in world]
        else:
            return _cut(map(task_of_taskset, itertools.islice(world, int(split != "train"), None, 2)), n or 1000)
        unique = list({task.id: task for task in whole}.values())
        train, held_out = split_tasks(unique, seed=seed)
        return _cut(train if split == "train" else held_out, n)


def _cut(tasks: Iterable[Task], n: int) -> list[Task]:
    return list(itertools.islice(tasks, n or None))


def _is_legacy(world: Any) -> bool:
    return not isinstance(world, type) and all(hasattr(world, name) for name in ("env_response", "init_state", "rubric"))


def _is_taskset(world: Any) -> bool:
    return not isinstance(world, type) and all(hasattr(world, name) for name in ("load", "task_type", "bounded"))

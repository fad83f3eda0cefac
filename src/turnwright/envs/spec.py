"""Environment specification: factory, tasks and scripted players of one environment of a run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from turnwright.config.schema import EnvRules
from turnwright.config.validation import check_rules_of_play
from turnwright.envs.env import EnvFactory
from turnwright.envs.likely_names import likely_name
from turnwright.envs.scripted_play import ScriptedEpisode, Speak, play_scripted, run
from turnwright.envs.tasks import TaskSource, check_disjoint
from turnwright.envs.user_code import is_interrupt, user_location
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Message, Task, Tools
from turnwright.types.outcomes import shortened

# Agent function, ``async def play(task, model) -> reward``.
Play = Callable[[Task, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment of a run with its tasks and scripted players.

    Example::

        spec = resolve_env("hop")
        env = spec.factory()
        train, held_out = spec.train_and_eval_tasks(n_train=960, n_eval=256, seed=0)
    """

    name: str
    factory: EnvFactory | None = None
    """Makes a new environment; None with only an agent function."""
    agent_function: Play | None = None
    """Agent function that replaces the environment."""
    task_source: Callable[[str, int, int], list[Task]] | None = field(default=None, repr=False)
    """Tasks of (split, n, seed)."""
    solver: Speak | None = field(default=None, repr=False)
    """Optimal player, which receives only the model's messages."""
    demonstrator: Speak | None = field(default=None, repr=False)
    """Deliberately poor player for the warm-up."""
    single_turn_best: float | None = None
    """Best success rate possible in one turn, if known."""
    max_turns: int | None = None
    """Maximum turns set by the environment, in addition to the run's limit."""
    group_reward: Callable[..., Any] | None = field(default=None, repr=False)
    """Reward that compares all episodes of a task; not used in evaluations."""
    weight: float = 1.0
    rules: EnvRules = field(default_factory=EnvRules)
    """How mistakes of the model and failures of the environment are handled."""
    texts_function: Callable[[int, int], Iterable[str]] | None = field(default=None, repr=False)
    """Sample texts of the environment for (n, seed)."""

    def __post_init__(self) -> None:
        if self.agent_function is not None:
            check_rules_of_play(self.rules, self.name)

    def tasks(self, split: str, n: int = 0, seed: int = 0) -> list[Task]:
        """Return up to `n` tasks of a split, `train` or `eval`; 0 returns all of a finite source.

        Ids are unique; `Task.env` is set to the name of this environment.

        Raises:
            TaskError: when the tasks cannot be read.
            ValueError: for another split.
        """
        check_split(split)
        if self.task_source is None:
            raise ConfigError(
                f"{self.name} has no tasks; give it a tasks hook, or [[env]] tasks = a .jsonl file "
                "or file.py:function"
            )
        return [
            task if task.env else replace(task, env=self.name)
            for task in self.task_source(split, n, seed)
        ]

    def train_and_eval_tasks(
        self, n_train: int, n_eval: int, seed: int = 0
    ) -> tuple[list[Task], list[Task]]:
        """Return training and held-out tasks, checked to be disjoint.

        Raises:
            TaskError: as `tasks`, or when a task is in both splits, by id or by content.
        """
        train, held_out = self.tasks("train", n_train, seed), self.tasks("eval", n_eval, seed)
        check_disjoint(train, held_out)
        return train, held_out

    def demonstrations(
        self, n: int, seed: int = 0, *, speak: Speak | None = None, turns: int | None = None
    ) -> list[ScriptedEpisode]:
        """Play `n` episodes on training tasks with a scripted player, by default the
        demonstrator, else the solver.

        Tasks repeat when there are fewer than `n`.

        Raises:
            ConfigError: without an environment or a player.
        """
        speak = speak or self.demonstrator or self.solver
        if self.factory is None or speak is None:
            raise ConfigError(
                f"{self.name} has no demonstrations; give its class a demonstrator(messages, rng) "
                "or a solver"
            )
        factory, player, tasks = self.factory, speak, self.tasks("train", n, seed)
        limit = turns or self.max_turns or 16

        async def play(number: int) -> ScriptedEpisode:
            task, rng = tasks[number % len(tasks)], random.Random(f"{seed}/{number}")
            try:
                return await play_scripted(factory(), task, player, rng, turns=limit, seed=number)
            except BaseException as error:
                if is_interrupt(error) or isinstance(
                    error, (asyncio.CancelledError, GeneratorExit)
                ):
                    raise
                raise EnvError(
                    f"{self.name}: in a demonstration of task {task.id}, {_describe(error)}"
                ) from error

        async def play_all() -> list[ScriptedEpisode]:
            return [await play(number) for number in range(n)]

        return run(play_all())

    def texts(
        self, n: int = 500, seed: int = 0, render: Callable[[Tools], str] | None = None
    ) -> list[str]:
        """Return sample texts for tokenizer training: `texts_function`, else tasks,
        tools and demonstrations.

        `render` returns a template's text for tools; without it only their
        schemas are in the texts.
        """
        if self.texts_function is not None:
            return list(self.texts_function(n, seed))
        if self.factory is None or (self.demonstrator or self.solver) is None:
            return [
                message.text for task in self.tasks("train", n, seed) for message in task.messages
            ]
        texts: list[str] = []
        schemas: dict[str, None] = {}
        for played in self.demonstrations(n, seed):
            texts.extend(
                message.text for turn in played.trajectory.turns for message in turn.messages
            )
            texts.extend(played.replies)
            schemas.update(
                dict.fromkeys(json.dumps(dict(tool), ensure_ascii=False) for tool in played.tools)
            )
        prompts = (
            [render([json.loads(schema) for schema in schemas])] * 2
            if render is not None and schemas
            else []
        )
        return [*prompts, *schemas, *texts]  # twice, since pairs that occur once are not merged


def _describe(error: BaseException) -> str:
    """Describe an exception of user code in one line: what it broke, or
    what it raised and where."""
    if isinstance(error, EnvError):
        return str(error)
    phase, place = next(iter(getattr(error, "__notes__", [])), "it"), user_location(error)
    return (
        f"{phase} raised {type(error).__name__}: "
        f"{shortened(str(error) + likely_name(error))}{place and f' ({place})'}"
    )


def check_split(split: str) -> None:
    """Raise a ValueError for a split other than `train` and `eval`."""
    if split not in ("train", "eval"):
        raise ValueError(f"a split is 'train' or 'eval', not {split!r}")


@dataclass(frozen=True, slots=True)
class FactoryOptions:
    """Options of the factories that `tool_env`, `gym_env` and similar functions return;
    named as on an Env class."""

    system: str | None
    """System message for tasks without one."""
    max_turns: int | None
    tasks: TaskSource | None
    solver: Speak | None
    demonstrator: Speak | None
    single_turn_best: float | None

    def opening(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the messages, with the system message prepended if they have none."""
        if self.system is None or any(message.role == "system" for message in messages):
            return messages
        return (Message("system", self.system), *messages)

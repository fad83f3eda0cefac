"""Environment specification: factory, tasks and scripted players of one environment of a run.

`EnvSpec` is what the rest of the package gets of an environment, whatever it was named by:
`resolve_env` makes one of a recipe's section, `as_env_spec` of an object.
"""

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

Play = Callable[[Task, Any], Awaitable[Any]]
"""Agent function, ``async def play(task, model) -> reward``."""

_DEMONSTRATED_TURNS = 16
"""Maximum turns of a demonstration where neither caller nor environment sets one."""


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

        tasks = []
        for task in self.task_source(split, n, seed):
            tasks.append(task if task.env else replace(task, env=self.name))
        return tasks

    def train_and_eval_tasks(
        self, n_train: int, n_eval: int, seed: int = 0
    ) -> tuple[list[Task], list[Task]]:
        """Return training and held-out tasks, checked to be disjoint.

        Raises:
            TaskError: as `tasks`, or when a task is in both splits, by id or by content.
        """
        train = self.tasks("train", n_train, seed)
        held_out = self.tasks("eval", n_eval, seed)
        check_disjoint(train, held_out)
        return train, held_out

    def demonstrations(
        self, n: int, seed: int = 0, *, speak: Speak | None = None, turns: int | None = None
    ) -> list[ScriptedEpisode]:
        """Play `n` episodes on training tasks with a scripted player.

        The player is `speak`, else the demonstrator, else the solver. Tasks repeat when there are
        fewer than `n`.

        Raises:
            ConfigError: without an environment or a player.
        """
        player = speak or self.demonstrator or self.solver
        factory = self.factory
        if factory is None or player is None:
            raise ConfigError(
                f"{self.name} has no demonstrations; give its class a demonstrator(messages, rng) "
                "or a solver"
            )
        tasks = self.tasks("train", n, seed)
        max_turns = turns or self.max_turns or _DEMONSTRATED_TURNS

        async def play(number: int) -> ScriptedEpisode:
            task = tasks[number % len(tasks)]
            rng = random.Random(f"{seed}/{number}")
            try:
                return await play_scripted(
                    factory(), task, player, rng, turns=max_turns, seed=number
                )
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                if is_interrupt(error):
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
        """Return sample texts for tokenizer training.

        They are those of `texts_function`, else of tasks, tools and demonstrations. `render`
        returns a template's text for tools; without it only their schemas are in the texts.
        """
        if self.texts_function is not None:
            return list(self.texts_function(n, seed))

        player = self.demonstrator or self.solver
        if self.factory is None or player is None:
            tasks = self.tasks("train", n, seed)
            return [message.text for task in tasks for message in task.messages]

        texts: list[str] = []
        schemas: dict[str, None] = {}  # in order, each once
        for episode in self.demonstrations(n, seed):
            for turn in episode.trajectory.turns:
                texts.extend(message.text for message in turn.messages)
            texts.extend(episode.replies)
            for tool in episode.tools:
                schemas[json.dumps(dict(tool), ensure_ascii=False)] = None

        if render is None or not schemas:
            return [*schemas, *texts]
        # Twice, since pairs that occur once are not merged.
        prompt = render([json.loads(schema) for schema in schemas])
        return [prompt, prompt, *schemas, *texts]


def _describe(error: BaseException) -> str:
    """Describe an exception of user code in one line: what it broke, or what it raised and where.

    The phase of the episode is the first note, which `ScriptedRunner` adds.
    """
    if isinstance(error, EnvError):
        return str(error)
    phase = next(iter(getattr(error, "__notes__", [])), "it")
    message = shortened(str(error) + likely_name(error))
    place = user_location(error)
    suffix = f" ({place})" if place else ""
    return f"{phase} raised {type(error).__name__}: {message}{suffix}"


def check_split(split: str) -> None:
    """Raise a ValueError for a split other than `train` and `eval`."""
    if split not in ("train", "eval"):
        raise ValueError(f"a split is 'train' or 'eval', not {split!r}")


@dataclass(frozen=True, slots=True)
class FactoryOptions:
    """Options of the factories that `tool_env`, `gym_env` and similar functions return.

    They are named as on an Env class.
    """

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

"""Environments of the `verifiers` package as worlds: `verifiers.legacy` turn by turn, tasks of `verifiers.v1` in one reply."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from turnwise.env.adapters.verifiers_tasksets import TasksetEnv, check_taskset, task_of_taskset
from turnwise.env.adapters.verifiers_turns import LegacyEnv, check_legacy, task_of_row
from turnwise.env.base import Env
from turnwise.env.drive import Speak
from turnwise.env.tasks import TaskSource, split_tasks
from turnwise.errors import ConfigError
from turnwise.types import Task


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

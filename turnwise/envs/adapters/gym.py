"""Gymnasium."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from turnwise.envs.base import Action, Env, Step
from turnwise.envs.scripted_play import Speak
from turnwise.envs.tasks import TaskSource
from turnwise.errors import ConfigError, EnvError, InvalidAction
from turnwise.types import Image, Messages, Task, as_messages

SEEDS = 1 << 31


def seed_of(task: Task) -> int:
    """What seeds the world of a task, from 0 to 2**31 - 1: its `info["seed"]`, else a hash of its id."""
    given = task.info.get("seed")
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    return int.from_bytes(blake2b(task.id.encode(), digest_size=8).digest(), "big") % SEEDS


def seeded_tasks(split: str, n: int, seed: int) -> list[Task]:
    """One task per seed: even ones to train on, odd ones held out; 1000 where none are asked for."""
    rng = random.Random(f"{split} {seed}")
    drawn = rng.sample(range(SEEDS // 2), n or 1000)
    return [Task(info={"seed": 2 * number + (split != "train")}) for number in drawn]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What a person says of a world of another library beside what that library needs; the fields are those of an Env class."""

    system: str | None = None
    """A system message for tasks that have none."""
    max_turns: int | None = None
    tasks: TaskSource | None = seeded_tasks
    solver: Speak | None = None
    demonstrator: Speak | None = None
    single_turn_best: float | None = None

    def opening(self, task: Task) -> list[Any]:
        """The task's messages, behind the system message where they have none."""
        messages: list[Any] = list(task.messages)
        if self.system is not None and not any(message.role == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.system})
        return messages


ParseAction = Callable[[str], Any]
"""A reply's text to an action of the space; raises `InvalidAction` (or ValueError) for what is none."""
ShowObservation = Callable[[Any, Any], Messages]
"""(observation, the Gymnasium environment) to what the model is told."""

_HIGHLIGHTED = re.compile(r"\x1b\[4[0-7]m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_WORD = re.compile(r"(?<![\w.-])[\w-]+(?![\w-]|\.\w)")


def gym_env(
    id: str,
    *,
    action: ParseAction | None = None,
    observation: ShowObservation | None = None,
    actions: Sequence[str] | None = None,
    system: str | None = None,
    max_turns: int | None = None,
    tasks: TaskSource | None = None,
    solver: Speak | None = None,
    demonstrator: Speak | None = None,
    single_turn_best: float | None = None,
    **make: Any,
) -> GymEnvFactory:
    """An environment of Gymnasium's registry; needs `pip install '.[gym]'`.

    Example::

        env = gym_env("FrozenLake-v1", actions=["left", "down", "right", "up"], render_mode="ansi", is_slippery=False)

    Args:
        id: what `gymnasium.make` is given.
        action: reads a reply. By default the last word of it that names one of `actions`, or a number of a `Discrete` space;
            the whole reply of a `Text` space.
        observation: says what the model is told. By default what `render()` says under `render_mode="ansi"` (a highlighted
            character stands in brackets), a string as it is, a whole number as `State 3.`; what `render()` draws under
            `render_mode="rgb_array"`, and observations that are images (uint8 [height, width, 3 or 4]), are shown.
        actions: names of a `Discrete` space's actions, in their order.
        system: a system message for tasks that have none.
        max_turns: most replies of an episode, besides the run's own limit.
        tasks: by default one per seed, none of them in both splits. A task's `info["seed"]` seeds the environment, so all
            episodes of a group begin alike; a task without one is seeded by its id.
        solver, demonstrator, single_turn_best: as on an Env class.
        make: further arguments of `gymnasium.make`.

    Raises:
        ConfigError: when gymnasium is not installed or does not know the id.
    """
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(f"gym_env({id!r}) needs gymnasium; pip install gymnasium") from error
    try:
        gymnasium.spec(id)
    except gymnasium.error.Error as error:
        raise ConfigError(f"gym_env({id!r}): {error}") from error
    return GymEnvFactory(
        id,
        action,
        observation,
        tuple(actions or ()),
        make,
        system=system,
        max_turns=max_turns,
        tasks=seeded_tasks if tasks is None else tasks,
        solver=solver,
        demonstrator=demonstrator,
        single_turn_best=single_turn_best,
    )


@dataclass(frozen=True, slots=True)
class GymEnvFactory(AdapterOptions):
    """What `gym_env` returns: call it for a fresh environment."""

    id: str
    parse: ParseAction | None = None
    show: ShowObservation | None = None
    actions: tuple[str, ...] = ()
    make: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> GymEnv:
        """A fresh environment; Gymnasium's own is made by `reset`."""
        return GymEnv(self)

    def __repr__(self) -> str:
        return f"gym_env({self.id!r})"


class GymEnv(Env):
    """One episode of a Gymnasium environment; made by `gym_env`. Synchronous, so each call runs in a thread."""

    def __init__(self, factory: GymEnvFactory) -> None:
        self._factory = factory
        self._world: Any = None

    def reset(self, task: Task, *, seed: int | None = None) -> Messages:
        """Make and reset Gymnasium's environment: the task's messages, then the first observation.

        Raises:
            EnvError: when a space needs `action=` or `observation=` and there is none.
        """
        gymnasium: Any = importlib.import_module("gymnasium")
        self._world = gymnasium.make(self._factory.id, **self._factory.make)
        observation, _ = self._world.reset(seed=seed_of(task))
        self._read = self._factory.parse or _parser(self._world.action_space, self._factory.actions, self._factory.id)
        said = self._observation_message(observation)
        return [*self._factory.opening(task), *as_messages(said)]

    def step(self, action: Action) -> Step:
        """Take the action that a reply names. `terminated` and `truncated` stay apart, as Gymnasium has them.

        Raises:
            InvalidAction: when it names none.
        """
        try:
            chosen = self._read(action.text)
        except InvalidAction:
            raise
        except ValueError as error:
            raise InvalidAction(str(error) or "that is no action") from error
        if not self._world.action_space.contains(chosen):
            raise InvalidAction(f"{chosen!r} is no action; actions are {self._world.action_space}")
        observation, reward, terminated, truncated, info = self._world.step(chosen)
        return Step(self._observation_message(observation), reward, terminated, truncated, _plain(info))

    def close(self) -> None:
        """Close Gymnasium's environment."""
        if self._world is not None:
            self._world.close()

    def _observation_message(self, observation: Any) -> Any:
        if self._factory.show is not None:
            return self._factory.show(observation, self._world)
        if self._world.render_mode == "rgb_array":
            return Image(self._world.render(), alt=_words(observation))
        if _is_image(observation):
            return Image(observation)
        if self._world.render_mode == "ansi":
            drawn = self._world.render()
            return _ESCAPES.sub("", _HIGHLIGHTED.sub(r"[\1]", drawn if isinstance(drawn, str) else "".join(drawn))).strip("\n")
        if (words := _words(observation)) is not None:
            return words
        kind = type(observation).__name__
        raise EnvError(
            f"gym_env({self._factory.id!r}): its observations are {kind}, which have no text of their own; "
            "give observation=a function of (observation, env)"
        )


def _words(observation: Any) -> str | None:
    """An observation that is a text or a number, in words."""
    if isinstance(observation, str):
        return observation
    value = observation.item() if getattr(observation, "shape", None) == () else observation
    return f"State {value}." if isinstance(value, int) else None


def _is_image(observation: Any) -> bool:
    """Whether an observation is pixels: uint8 [height, width, 3 or 4]."""
    shape: tuple[int, ...] = getattr(observation, "shape", ())
    return len(shape) == 3 and shape[2] in (3, 4) and str(getattr(observation, "dtype", "")) == "uint8"


def _parser(space: Any, names: Sequence[str], id: str) -> ParseAction:
    """How replies are read where nobody said."""
    kind = type(space).__name__
    if kind == "Text" and not names:
        return lambda text: text
    if kind != "Discrete":
        raise EnvError(f"gym_env({id!r}): its actions are {space}; give action=a function from a reply's text to one of them")
    first, count = int(space.start), int(space.n)
    if names and len(names) != count:
        raise EnvError(f"gym_env({id!r}): actions= has {len(names)} names, and the space has {count} actions; name each")
    known = {str(first + number): first + number for number in range(count)}
    known |= {name.casefold(): first + number for number, name in enumerate(names)}
    wanted = f"one of {', '.join(names)}" if names else f"a number from {first} to {first + count - 1}"

    def read(text: str) -> int:
        """The whole reply, or else the last word that is an action."""
        whole = text.strip().casefold()
        if whole in known:
            return known[whole]
        found = [known[word] for word in _WORD.findall(whole) if word in known]
        if not found:
            raise InvalidAction(f"Say {wanted}.")
        return found[-1]

    return read


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of an info is a plain value, for the record of the turn; arrays are left out."""
    values = {str(key): value.item() if getattr(value, "shape", None) == () else value for key, value in info.items()}
    return {key: value for key, value in values.items() if value is None or isinstance(value, (bool, int, float, str))}

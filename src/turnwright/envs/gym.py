"""Gymnasium environments: a reply is parsed to an action, an observation becomes a message.

`gym_env` returns a factory; `GymEnv.step` is a turn. What an action and an observation are by
default is in `_parser` and `GymEnv._show`.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from turnwright.envs.env import Action, Env, Step
from turnwright.envs.scripted_play import Speak
from turnwright.envs.spec import FactoryOptions
from turnwright.envs.tasks import TaskSource
from turnwright.envs.user_code import scalar
from turnwright.errors import ConfigError, EnvError, InvalidAction
from turnwright.types import Image, Messages, Task, as_messages

SEEDS = 1 << 31
"""Number of seeds of Gymnasium's environments, from 0."""

ParseAction = Callable[[str], Any]
"""Maps a reply's text to an action of the space; raises `InvalidAction` (or ValueError) for other
text."""

ShowObservation = Callable[[Any, Any], Messages]
"""Maps (observation, Gymnasium environment) to messages for the model."""

_HIGHLIGHTED = re.compile(r"\x1b\[4[0-7]m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_WORD = re.compile(r"(?<![\w.-])[\w-]+(?![\w-]|\.\w)")


def seed_of(task: Task) -> int:
    """Return the environment seed of a task: its `info["seed"]`, else a hash of its id from 0 to
    2**31 - 1."""
    seed = task.info.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0:
        return seed
    return int.from_bytes(blake2b(task.id.encode(), digest_size=8).digest(), "big") % SEEDS


def seeded_tasks(split: str, n: int, seed: int) -> list[Task]:
    """Return `n` tasks, one per seed, by default 1000: even seeds for training, odd seeds held
    out."""
    numbers = random.Random(f"{split} {seed}").sample(range(SEEDS // 2), n or 1000)
    is_held_out = split != "train"
    return [Task(info={"seed": 2 * number + is_held_out}) for number in numbers]


@contextmanager
def model_mistakes() -> Iterator[None]:
    """Raise each ValueError of a parser as an `InvalidAction`."""
    try:
        yield
    except InvalidAction:
        raise
    except ValueError as error:
        raise InvalidAction(str(error) or "that is no action") from error


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
    """Make an environment of Gymnasium's registry; needs `pip install '.[gym]'`.

    Example::

        >>> moves = ["left", "down", "right", "up"]
        >>> env = tw.gym_env(
        ...     "FrozenLake-v1", actions=moves, render_mode="ansi", is_slippery=False
        ... )
        >>> goal = ["down", "down", "right", "right", "down", "right"]
        >>> engine = tw.ScriptedEngine(goal)
        >>> (trajectory,) = tw.rollout(env, [tw.Task("go", info={"seed": 0})], engine)
        >>> trajectory.reward
        1.0

    Args:
        id: environment id for `gymnasium.make`.
        action: parses a reply. By default the last word that is one of `actions` or a number of a
            `Discrete` space, or the complete reply for a `Text` space.
        observation: converts an observation. By default the text of `render()` for
            `render_mode="ansi"` (a highlighted character in brackets) or its image for
            `render_mode="rgb_array"`; image observations (uint8 [height, width, 3 or 4]), strings
            unchanged, and integers as `State 3.`.
        actions: names of a `Discrete` space's actions, in order.
        system: system message for tasks without one.
        max_turns: maximum replies per episode, in addition to the run's limit.
        tasks: by default one per seed, disjoint between splits. `info["seed"]` of a task, else a
            hash of its id, seeds the environment, so all episodes of a group start alike.
        solver, demonstrator, single_turn_best: as on an Env class.
        make: further arguments of `gymnasium.make`.

    Raises:
        ConfigError: when gymnasium is not installed or the id is unknown.
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
        system=system,
        max_turns=max_turns,
        tasks=seeded_tasks if tasks is None else tasks,
        solver=solver,
        demonstrator=demonstrator,
        single_turn_best=single_turn_best,
        id=id,
        parse=action,
        show=observation,
        actions=tuple(actions or ()),
        make=make,
    )


@dataclass(frozen=True, slots=True)
class GymEnvFactory(FactoryOptions):
    """Factory returned by `gym_env`: each call makes a new environment."""

    id: str
    parse: ParseAction | None
    show: ShowObservation | None
    actions: tuple[str, ...]
    make: Mapping[str, Any]

    def __call__(self) -> GymEnv:
        """Make a new environment; `reset` makes Gymnasium's."""
        return GymEnv(self)

    def __repr__(self) -> str:
        return f"gym_env({self.id!r})"


class GymEnv(Env):
    """One episode of a Gymnasium environment; made by `gym_env`.

    Synchronous, so each call runs in a thread.
    """

    def __init__(self, factory: GymEnvFactory) -> None:
        self._factory = factory
        self._gym_env: Any = None

    def reset(self, task: Task, *, seed: int | None = None) -> Messages:
        """Make and reset Gymnasium's environment; return the task's messages and the first
        observation."""
        factory = self._factory
        gymnasium: Any = importlib.import_module("gymnasium")
        self._gym_env = gymnasium.make(factory.id, **factory.make)
        observation, _ = self._gym_env.reset(seed=seed_of(task))

        self._parse = factory.parse or _parser(
            self._gym_env.action_space, factory.actions, factory.id
        )
        opening = factory.opening(task.messages)
        return [*opening, *as_messages(self._show(observation))]

    def step(self, action: Action) -> Step:
        """Take the action of a reply; `terminated` and `truncated` are Gymnasium's."""
        with model_mistakes():
            chosen = self._parse(action.text)
        if not self._gym_env.action_space.contains(chosen):
            raise InvalidAction(
                f"{chosen!r} is no action; actions are {self._gym_env.action_space}"
            )
        observation, reward, terminated, truncated, info = self._gym_env.step(chosen)

        # The record keeps plain values; arrays are left out of it.
        plain_info = {}
        for key, value in info.items():
            plain = scalar(value)
            if plain is None or isinstance(plain, (bool, int, float, str)):
                plain_info[str(key)] = plain
        return Step(self._show(observation), reward, terminated, truncated, plain_info)

    def close(self) -> None:
        if self._gym_env is not None:
            self._gym_env.close()

    def _show(self, observation: Any) -> Any:
        """Return the message of an observation, by `observation=` or by default."""
        if self._factory.show is not None:
            return self._factory.show(observation, self._gym_env)
        if self._gym_env.render_mode == "rgb_array":
            return Image(self._gym_env.render(), alt=_words(observation))

        shape: tuple[int, ...] = getattr(observation, "shape", ())
        has_pixels = len(shape) == 3 and shape[2] in (3, 4)
        if has_pixels and str(getattr(observation, "dtype", "")) == "uint8":
            return Image(observation)

        if self._gym_env.render_mode == "ansi":
            drawing = self._gym_env.render()
            text = drawing if isinstance(drawing, str) else "".join(drawing)
            text = _HIGHLIGHTED.sub(r"[\1]", text)
            return _ESCAPES.sub("", text).strip("\n")

        words = _words(observation)
        if words is None:
            raise EnvError(
                f"gym_env({self._factory.id!r}): its observations are "
                f"{type(observation).__name__}, which have no default text; give observation=a "
                "function of (observation, env)"
            )
        return words


def _words(observation: Any) -> str | None:
    """Convert a text or integer observation to text; None for others."""
    if isinstance(observation, str):
        return observation
    value = scalar(observation)
    return f"State {value}." if isinstance(value, int) else None


def _parser(space: Any, names: Sequence[str], id: str) -> ParseAction:
    """Return the default parser of replies for an action space.

    Raises `EnvError` for a space without a default, or the wrong number of names.
    """
    kind = type(space).__name__
    if kind == "Text" and not names:
        return lambda text: text
    if kind != "Discrete":
        raise EnvError(
            f"gym_env({id!r}): its actions are {space}; give action=a function from a reply's text "
            "to one of them"
        )
    first = int(space.start)
    count = int(space.n)
    if names and len(names) != count:
        raise EnvError(
            f"gym_env({id!r}): actions= has {len(names)} names, and the space has {count} actions; "
            "name each"
        )

    action_of = {str(number): number for number in range(first, first + count)}
    for number, name in enumerate(names, first):
        action_of[name.casefold()] = number
    if names:
        wanted = f"one of {', '.join(names)}"
    else:
        wanted = f"a number from {first} to {first + count - 1}"

    def parse(text: str) -> int:
        """Parse the complete reply, or else its last word that is an action."""
        reply = text.strip().casefold()
        if reply in action_of:
            return action_of[reply]
        for word in reversed(_WORD.findall(reply)):
            if word in action_of:
                return action_of[word]
        raise InvalidAction(f"Say {wanted}.")

    return parse

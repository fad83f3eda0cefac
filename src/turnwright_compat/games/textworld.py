"""TextWorld: games by their file, `textworld:game.z8`.

The model writes commands; the reward is what the score grows by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwright.envs.env import Action, Env, Step
from turnwright.envs.foreign import ForeignObject, Framework, Registered
from turnwright.envs.gym import seed_of
from turnwright.errors import ConfigError, EnvError, InvalidAction, suggest_or_list
from turnwright.files import resolved
from turnwright.types import Message, Task
from turnwright_compat.games.registries import library

SUFFIXES = (".z8", ".z5", ".ulx")
"""Endings of the files of games."""

_ARGUMENTS = ("games", "system")


def adapt(found: ForeignObject) -> TextWorldFactory:
    """Make the factory of a game; `[env.args]` are `games`, further files, and `system`."""
    library("textworld", "textworld")
    args = dict(found.args)
    for key in args:
        if key not in _ARGUMENTS:
            raise ConfigError(
                f"{found.where} has no argument {key!r}; {suggest_or_list(key, _ARGUMENTS)}"
            )

    further = args.get("games", [])
    if not isinstance(further, (list, tuple)):
        further = [further]
    games = tuple(str(resolved(str(file), found.base)) for file in (found.target.id, *further))
    for game in games:
        if not Path(game).is_file() or not game.endswith(SUFFIXES):
            raise ConfigError(
                f"{found.where}: {game}: no game; name a {', '.join(SUFFIXES)} file, such as "
                "tw-make writes"
            )

    return TextWorldFactory(games, args.get("system"))


@dataclass(frozen=True, slots=True)
class TextWorldFactory:
    """Factory of episodes of some games."""

    games: tuple[str, ...]
    system: str | None

    def __call__(self) -> TextWorldEnv:
        return TextWorldEnv(self)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return a task for each game; every second of several is held out, and a single one is in
        both splits by its seed."""
        held_out = split == "eval"
        numbers = range(len(self.games))
        if len(self.games) > 1:
            numbers = numbers[int(held_out) :: 2]

        return [
            Task(
                id=f"{Path(self.games[number]).stem}-{split}",
                info={"game": number, "seed": int(held_out)},
            )
            for number in numbers
        ]


class TextWorldEnv(Env):
    """One game."""

    def __init__(self, factory: TextWorldFactory) -> None:
        self._factory = factory
        self._game: Any = None
        self._score = 0
        self._max_score = 0

    def reset(self, task: Task, *, seed: int | None = None) -> list[Message]:
        """Start the game; return its opening text."""
        number = task.info.get("game", 0)
        games = self._factory.games
        if type(number) is not int or not 0 <= number < len(games):
            raise EnvError(f"task {task.id}: game is {number!r}; it is a number below {len(games)}")

        textworld = library("textworld", "textworld")
        wanted = textworld.EnvInfos(max_score=True, won=True, lost=True)
        self._game = textworld.start(games[number], wanted)
        self._game.seed(seed_of(task) % 2**31)
        state = self._game.reset()
        self._score = 0
        self._max_score = state.get("max_score") or 0

        opening = Message("user", str(state["feedback"]).strip())
        system = self._factory.system
        return [opening] if system is None else [Message("system", system), opening]

    def step(self, action: Action) -> Step:
        """Send the last line of the reply as a command."""
        lines = action.text.strip().splitlines()
        if not lines:
            raise InvalidAction("write a command, such as look")

        # A Z-machine reads ASCII, up to the first zero.
        command = lines[-1].strip().encode("ascii", "replace").decode().replace("\0", " ")
        state, score, done = self._game.step(command)

        score = score or 0
        gained = score - self._score
        self._score = score
        return Step(
            str(state["feedback"]).strip(),
            gained / max(self._max_score, 1),
            terminated=bool(done),
            info={"score": score, "won": bool(state.get("won"))},
        )

    def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()


def find(id: str) -> Registered:
    """Return the name of a file for `adapt`."""
    return Registered("textworld", id)


def ids() -> Iterable[str]:
    """Return nothing: games are files."""
    return ()


FRAMEWORK = Framework("textworld", adapt, find, ids, recognizes=False)

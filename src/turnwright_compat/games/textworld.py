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
    more = args.get("games", [])
    games = tuple(
        str(resolved(str(one), found.base))
        for one in (found.target.id, *(more if isinstance(more, (list, tuple)) else [more]))
    )
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
        names = [Path(game).stem for game in self.games]
        out = split == "eval"
        chosen = [number for number in range(len(names)) if len(names) == 1 or number % 2 == out]
        return [
            Task(id=f"{names[number]}-{split}", info={"game": number, "seed": int(out)})
            for number in chosen
        ]


class TextWorldEnv(Env):
    """One game."""

    def __init__(self, factory: TextWorldFactory) -> None:
        self._factory = factory
        self._game: Any = None
        self._score = self._most = 0

    def reset(self, task: Task, *, seed: int | None = None) -> list[Message]:
        """Start the game; return its opening text."""
        number = task.info.get("game", 0)
        games = self._factory.games
        if type(number) is not int or not 0 <= number < len(games):
            raise EnvError(f"task {task.id}: game is {number!r}; it is a number below {len(games)}")
        textworld = library("textworld", "textworld")
        self._game = textworld.start(
            games[number], textworld.EnvInfos(max_score=True, won=True, lost=True)
        )
        self._game.seed(seed_of(task) % 2**31)
        state = self._game.reset()
        self._score, self._most = 0, state.get("max_score") or 0
        system = self._factory.system
        return [
            *([] if system is None else [Message("system", system)]),
            Message("user", str(state["feedback"]).strip()),
        ]

    def step(self, action: Action) -> Step:
        """Send the last line of the reply as a command."""
        lines = action.text.strip().splitlines()
        if not lines:
            raise InvalidAction("write a command, such as look")
        # A Z-machine reads ASCII, up to the first zero.
        command = lines[-1].strip().encode("ascii", "replace").decode().replace("\0", " ")
        state, score, done = self._game.step(command)
        score = score or 0
        gained, self._score = score - self._score, score
        info = {"score": score, "won": bool(state.get("won"))}
        return Step(
            str(state["feedback"]).strip(),
            gained / max(self._most, 1),
            terminated=bool(done),
            info=info,
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

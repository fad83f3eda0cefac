"""TextArena: its games by id, `textarena:TicTacToe-v0`.

The model plays one seat, an opponent the others. `adapt` reads `[env.args]` and makes the factory;
`TextArenaEnv` is one game, in which `_opponents` moves for all other seats.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwright.envs.env import Action, Env, Step
from turnwright.envs.foreign import ForeignObject, Framework, Registered
from turnwright.envs.gym import seed_of, seeded_tasks
from turnwright.envs.user_code import number_of
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Message, Task
from turnwright_compat.games.registries import call_with_args, library, with_functions

Opponent = Callable[[str, random.Random], str]
"""Maps what a seat has seen so far, and a generator seeded by the task, to its action."""

_SHARED_RANDOM = threading.Lock()
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_SENDER = re.compile(r"\[(?:GAME|Game|Player \d+|Player)\]")
_MOST_PLAYERS = 16

_MOVES = 1000
"""Maximum moves of opponents in one step of the model."""


def random_opponent(seen: str, rng: random.Random) -> str:
    """Choose one of the bracketed texts that its seat read last, as in `[4]`; most games
    write legal actions so."""
    actions_by_line: list[list[str]] = []
    for line in seen.splitlines():
        actions = _BRACKETED.findall(_SENDER.sub("", line))
        if actions:
            actions_by_line.append(actions)
    if not actions_by_line:
        return "[0]"
    return rng.choice([action for actions in actions_by_line[-6:] for action in actions])


def adapt(found: ForeignObject) -> TextArenaFactory:
    """Make the factory of a game; `[env.args]` are those of its class, and `seat`, `players`,
    `opponent`, `system`."""
    id = found.target.id
    args = with_functions(found.args, ("opponent",), found)
    seat = args.pop("seat", 0)
    players = args.pop("players", None)
    opponent = args.pop("opponent", "random")
    system = args.pop("system", None)
    if opponent != "random" and not callable(opponent):
        raise ConfigError(
            f"{found.where}: opponent is {opponent!r}; write random, or file.py:function(seen, rng)"
        )

    game = call_with_args(partial(_make, id), args, found.where)
    players = players or _players(game)
    if type(seat) is not int or type(players) is not int or not 0 <= seat < players:
        raise ConfigError(
            f"{found.where}: seat is {seat!r} of {players} players; the first seat is 0"
        )
    return TextArenaFactory(
        id=id,
        args=args,
        seat=seat,
        players=players,
        opponent=random_opponent if opponent == "random" else opponent,
        system=system,
    )


def _make(id: str, **args: Any) -> Any:
    """Make a game, without its wrappers of observations."""
    registry = library("textarena.envs.registration", "textarena")
    game = registry.make(id, **args)
    while hasattr(game, "env"):
        game = game.env
    return game


def _players(game: Any) -> int:
    """Return the fewest players of a game: its class names the kind of its state, and its
    `reset` refuses too few."""
    try:
        source = inspect.getsource(type(game))
    except (OSError, TypeError):
        source = ""
    kind = re.search("SinglePlayer|TwoPlayer|MinimalMulti|FFAMulti|TeamMulti", source)
    fewest = 3
    if kind is not None:
        fewest = {"SinglePlayer": 1, "TwoPlayer": 2}.get(kind[0], 3)

    # What `reset` draws is put back into the shared generator.
    with _SHARED_RANDOM:
        shared = random.getstate()
        try:
            for players in range(fewest, _MOST_PLAYERS):
                with contextlib.suppress(Exception):
                    game.reset(num_players=players, seed=0)
                    return players
        finally:
            random.setstate(shared)
    return fewest  # the error of its reset is reported where it is played


@dataclass(frozen=True, slots=True)
class TextArenaFactory:
    """Factory of one game."""

    id: str
    args: Mapping[str, Any]
    seat: int
    players: int
    opponent: Opponent
    system: str | None

    def __call__(self) -> TextArenaEnv:
        """Make an environment; `reset` makes the game."""
        return TextArenaEnv(self)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return one task for each seed of the game."""
        return seeded_tasks(split, n, seed)


class TextArenaEnv(Env):
    """One game.

    Its random numbers are its own, although TextArena draws them from Python's shared generator.
    """

    def __init__(self, factory: TextArenaFactory) -> None:
        self._factory = factory
        self._game: Any = None
        self._random: Any = None

    def reset(self, task: Task, *, seed: int | None = None) -> list[Message]:
        """Start the game; opponents move until it is the model's turn."""
        factory = self._factory
        game_seed = seed_of(task)
        self._random = random.Random(game_seed).getstate()
        self._rng = random.Random(f"{game_seed} opponents")
        self._seen = {player: "" for player in range(factory.players)}
        with self._own_random():
            self._game = _make(factory.id, **factory.args)
            self._game.reset(num_players=factory.players, seed=game_seed)
            over = self._opponents(self._game.state.done)
        if over:
            raise EnvError(f"textarena:{factory.id}: the game ended before the model's first turn")

        messages = list(task.messages)
        if factory.system is not None:
            messages.insert(0, Message("system", factory.system))
        return [*messages, Message("user", self._news(factory.seat))]

    def step(self, action: Action) -> Step:
        """Play the reply; the reward is TextArena's for the seat, at the end."""
        seat = self._factory.seat
        state = self._game.state
        with self._own_random():
            over = self._opponents(self._act(action.text))
        if not over:
            return Step(self._news(seat), 0.0)

        reward = number_of((state.rewards or {}).get(seat, 0.0)) or 0.0
        ends = self._ends_of_players()
        own_end = ends.get(seat, {})
        info: dict[str, Any] = {
            "reason": str(own_end.get("reason") or ""),
            "invalid_move": bool(own_end.get("invalid_move")),
        }
        opponent_failed = any(
            end.get("invalid_move") for player, end in ends.items() if player != seat
        )
        if opponent_failed and self._factory.players == 2:
            # A win that an opponent's illegal action gave away is no success.
            return Step(None, 0.0, truncated=True, info=info | {"opponent_invalid": True})
        return Step(None, reward, terminated=True, info=info)

    def _ends_of_players(self) -> dict[Any, Mapping[str, Any]]:
        """Return what the game says of how it ended for each player."""
        game_info = getattr(self._game.state, "game_info", None)
        if not isinstance(game_info, Mapping):
            return {}
        return {player: end for player, end in game_info.items() if isinstance(end, Mapping)}

    def close(self) -> None:
        if self._game is not None and hasattr(self._game, "close"):
            with contextlib.suppress(Exception):
                self._game.close()

    def _opponents(self, over: bool) -> bool:
        """Move for the other seats until it is the model's turn; return whether the game is
        over."""
        for _ in range(_MOVES):
            player = self._game.state.current_player_id
            if over or player == self._factory.seat:
                return over
            self._look(player)
            over = self._act(self._factory.opponent(self._seen[player], self._rng))
        raise EnvError(
            f"textarena:{self._factory.id}: opponents moved {_MOVES} times without a turn of the "
            "model"
        )

    def _act(self, text: str) -> bool:
        """Play an action of the current player; return whether the game is over."""
        done, _ = self._game.step(action=text)
        return bool(done)

    def _look(self, player: int) -> str:
        """Return what the game sent to a player since its last turn, without its own actions."""
        state = self._game.state
        state.current_player_id = player
        _, sent = self._game.get_observation()
        names = state.role_mapping or {}
        parts: list[Any] = []
        if isinstance(sent, str):
            parts = [sent]
        else:
            for sender, text, *_ in sent:
                if sender == -1:  # the game itself
                    parts.append(text)
                elif sender != player:
                    parts.append(f"[{names.get(sender, f'Player {sender}')}] {text}")
        news = "\n".join(str(part).strip("\n") for part in parts)
        self._seen[player] += f"{news}\n"
        return news

    def _news(self, player: int) -> str:
        return self._look(player) or "Your turn."

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let the shared generator draw the numbers of this game."""
        with _SHARED_RANDOM:
            shared = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(shared)


def find(id: str) -> Registered | None:
    """Return an id for `adapt`; None for an unknown one."""
    return Registered("textarena", id) if id in ids() else None


def ids() -> Iterable[str]:
    """Return the registered ids."""
    library("textarena", "textarena")
    return list(library("textarena.envs.registration", "textarena").ENV_REGISTRY)


FRAMEWORK = Framework("textarena", adapt, find, ids, recognizes=False)

"""TextArena: its games by id, `textarena:TicTacToe-v0`.

The model plays one seat, an opponent the others.
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
_MOVES = 1000  # of opponents in one step of the model


def random_opponent(seen: str, rng: random.Random) -> str:
    """Choose one of the bracketed texts that its seat read last, as in `[4]`; most games
    write legal actions so."""
    lines = [
        found for line in seen.splitlines() if (found := _BRACKETED.findall(_SENDER.sub("", line)))
    ]
    return rng.choice([text for line in lines[-6:] for text in line]) if lines else "[0]"


def adapt(found: ForeignObject) -> TextArenaFactory:
    """Make the factory of a game; `[env.args]` are those of its class, and `seat`, `players`,
    `opponent`, `system`."""
    id = found.target.id
    args = with_functions(found.args, ("opponent",), found)
    own = {key: args.pop(key) for key in ("seat", "players", "opponent", "system") if key in args}
    opponent = own.get("opponent", "random")
    if opponent != "random" and not callable(opponent):
        raise ConfigError(
            f"{found.where}: opponent is {opponent!r}; write random, or file.py:function(seen, rng)"
        )
    seat, players = own.get("seat", 0), own.get("players")
    game = call_with_args(partial(_make, id), args, found.where)
    players = players or _players(game)
    if type(seat) is not int or type(players) is not int or not 0 <= seat < players:
        raise ConfigError(
            f"{found.where}: seat is {seat!r} of {players} players; the first seat is 0"
        )
    return TextArenaFactory(
        id,
        args,
        seat,
        players,
        random_opponent if opponent == "random" else opponent,
        own.get("system"),
    )


def _make(id: str, **args: Any) -> Any:
    """Make a game, without its wrappers of observations."""
    registry = library("textarena.envs.registration", "textarena")
    made = registry.make(id, **args)
    while hasattr(made, "env"):
        made = made.env
    return made


def _players(game: Any) -> int:
    """Return the fewest players of a game: its class names the kind of its state, and its
    `reset` refuses too few."""
    try:
        text = inspect.getsource(type(game))
    except (OSError, TypeError):
        text = ""
    found = re.search("SinglePlayer|TwoPlayer|MinimalMulti|FFAMulti|TeamMulti", text)
    fewest = 3 if found is None else {"SinglePlayer": 1, "TwoPlayer": 2}.get(found[0], 3)
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
        factory, game_seed = self._factory, seed_of(task)
        self._random = random.Random(game_seed).getstate()
        self._rng = random.Random(f"{game_seed} opponents")
        self._seen = {player: "" for player in range(factory.players)}
        with self._own_random():
            self._game = _make(factory.id, **factory.args)
            self._game.reset(num_players=factory.players, seed=game_seed)
            over = self._opponents(self._game.state.done)
        if over:
            raise EnvError(f"textarena:{factory.id}: the game ended before the model's first turn")
        system = [] if factory.system is None else [Message("system", factory.system)]
        return [*system, *task.messages, Message("user", self._news(factory.seat))]

    def step(self, action: Action) -> Step:
        """Play the reply; the reward is TextArena's for the seat, at the end."""
        seat, state = self._factory.seat, self._game.state
        with self._own_random():
            over = self._opponents(self._act(action.text))
        if not over:
            return Step(self._news(seat), 0.0)
        infos = state.game_info if isinstance(getattr(state, "game_info", None), Mapping) else {}
        details = {player: info for player, info in infos.items() if isinstance(info, Mapping)}
        faults = [
            player
            for player, info in details.items()
            if info.get("invalid_move") and player != seat
        ]
        reward = number_of((state.rewards or {}).get(seat, 0.0)) or 0.0
        info: dict[str, Any] = {"reason": str(details.get(seat, {}).get("reason") or "")}
        info["invalid_move"] = bool(details.get(seat, {}).get("invalid_move"))
        if faults and self._factory.players == 2:
            # A win that an opponent's illegal action gave away is no success.
            return Step(None, 0.0, truncated=True, info=info | {"opponent_invalid": True})
        return Step(None, reward, terminated=True, info=info)

    def close(self) -> None:
        if self._game is not None and hasattr(self._game, "close"):
            with contextlib.suppress(Exception):
                self._game.close()

    def _opponents(self, over: bool) -> bool:
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
        done, _ = self._game.step(action=text)
        return bool(done)

    def _look(self, player: int) -> str:
        """Return what the game sent to a player since its last turn, without its own actions."""
        state = self._game.state
        state.current_player_id = player
        _, sent = self._game.get_observation()
        names = state.role_mapping or {}
        parts = (
            [sent]
            if isinstance(sent, str)
            else [
                text if sender == -1 else f"[{names.get(sender, f'Player {sender}')}] {text}"
                for sender, text, *_ in sent
                if sender != player
            ]
        )
        news = "\n".join(str(part).strip("\n") for part in parts)
        self._seen[player] += f"{news}\n"
        return news

    def _news(self, player: int) -> str:
        return self._look(player) or "Your turn."

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
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

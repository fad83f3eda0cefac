"""Frozen lake: Gymnasium's text game. Reach G over frozen fields; a hole ends the game. The ice is
not slippery.

::

    user       [S]FFF            one field a turn: left, down, right or up
               FHFH
               FFFH
               HFFG
    assistant  down
    user         (Down)
               SFFF
               [F]HFH ...

The reward is Gymnasium's: 1 at the goal, else 0. Every task has its own map. Needs the extra `gym`.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from turnwright.envs.builtin.common import MOVES, require_extra, sample_tasks
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.gym import GymEnv, gym_env
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Message, Messages, Task

_HOLES = 0.25
"""Share of fields that are drawn as holes."""


class FrozenLake(Env):
    """Gymnasium's FrozenLake-v1, not slippery, on random solvable maps.

    Args:
        size: fields per side, from 3 to 8.
        rules: open with a system message that states the rules.
    """

    max_turns: ClassVar[int] = 20
    single_turn_best: ClassVar[float] = 0.0
    rule: ClassVar[str] = (
        "Walk from S to G over F; H is a hole. You stand in brackets. Say left, down, right or up."
    )

    def __init__(self, size: int = 4, rules: bool = False) -> None:
        if not 3 <= size <= 8:
            raise ConfigError("frozen_lake: size is 3 to 8")
        require_extra("gym", "gymnasium")
        self._size = size
        self._rules = rules
        self._game: GymEnv | None = None

    def reset(self, task: Task, *, seed: int | None = None) -> Messages:
        lake = task.info.get("map")
        if not isinstance(lake, list):
            raise EnvError(f"task {task.id} is not one of frozen_lake's: it needs info['map']")
        system = self.rule if self._rules else None
        make = gym_env(
            "FrozenLake-v1",
            actions=tuple(MOVES),
            system=system,
            desc=lake,
            is_slippery=False,
            render_mode="ansi",
        )
        self._game = make()
        return self._game.reset(task)

    def step(self, action: Action) -> Step:
        assert self._game is not None
        step = self._game.step(action)
        _, *rows = str(step.observation).splitlines()  # behind the move
        return step._replace(info={**step.info, "state": rows})

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return random solvable maps; none is in both splits."""
        size = self._size

        def draw(rng: random.Random) -> tuple[str, Task]:
            while True:
                fields = ["H" if rng.random() < _HOLES else "F" for _ in range(size**2)]
                fields[0] = "S"
                fields[-1] = "G"
                starts = range(0, len(fields), size)
                rows = ["".join(fields[start : start + size]) for start in starts]
                if _way(rows, (0, 0)):
                    return " ".join(rows), Task(info={"map": rows})

        return sample_tasks("frozen_lake", split, n, seed, draw)

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: follow a shortest path from the current field."""
        lines = messages[-1].text.splitlines()
        marked = [line for line in lines if re.fullmatch(r"[SFHG\[\]]+", line)]
        row = next(number for number, line in enumerate(marked) if "[" in line)
        column = marked[row].index("[")
        rows = [line.replace("[", "").replace("]", "") for line in marked]
        return _way(rows, (row, column))[0]

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: move at random with probability 0.25."""
        if rng.random() < 0.25:
            return rng.choice(tuple(MOVES))
        return FrozenLake.solver(messages, rng)


def _way(rows: Sequence[str], start: tuple[int, int]) -> list[str]:
    """Return the moves of a shortest path to G without holes; empty if there is none."""
    ways: dict[tuple[int, int], list[str]] = {start: []}
    queue = deque([start])
    while queue:
        row, column = queue.popleft()
        way = ways[row, column]
        if rows[row][column] == "G":
            return way
        for move, (down, right) in MOVES.items():
            there = (row + down, column + right)
            is_inside = 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows[0])
            if is_inside and there not in ways and rows[there[0]][there[1]] != "H":
                ways[there] = [*way, move]
                queue.append(there)
    return []

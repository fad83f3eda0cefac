"""Sokoban: push every box onto a target. A box is pushed and never pulled, so a wrong push may lose
the game. Papers compare on rooms of 6 x 6 with one box (RAGEN, arXiv 2504.20073; VAGEN).

::

    user       # # # # # #        # wall, _ floor, . target, $ box, @ player,
               # # _ . # #        * box on a target, + player on a target
               # _ _ $ _ #
               # @ _ _ _ #
               # # _ _ _ #
               # # # # # #
    assistant  right              one move a turn: left, down, right or up
    user       # # # # # #
               # # _ . # #
               # _ _ $ _ #
               # _ @ _ _ # ...

Cells are separated by spaces, so that each is a token of its own, whatever stands beside it, in the
tokenizers of tiny models, Tekken and Mistral's SentencePiece. With ``view = "positions"`` a line
below the board says what else has to be counted out: ``you 3 1 box 2 3 target 1 3``. With ``view =
"image"`` a message is the picture of the board and nothing else; a text-only model reads the board
from its `alt`.

A move into a wall, or of a box into a wall or another box, changes nothing and takes a turn; so
does a reply that is no move (`InvalidAction`). The episode ends when all boxes are on targets, or
at the turn limit, also if the game was lost long before (see `end_stuck`).

The reward is 1 when the board is solved, else 0. With ``shaped = true`` it has RAGEN's parts: -0.1
a turn, 1 for a box that is pushed onto a target, -1 for one that is pushed off it, 10 for the
solved board; an episode that does not solve it pays for all turns, however it ended, so neither
silence nor a lost box saves any. All are divided by the same number, so that a solved board is
worth 1 or more (the sooner, the more) and any other less than 1: `eval.success` stays as it is.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from turnwright.envs.builtin.common import MOVES, require_extra, sample_tasks
from turnwright.envs.env import Action, Env, Step
from turnwright.errors import ConfigError, EnvError, InvalidAction
from turnwright.types import Image, Message, Task, Trajectory

Cell = tuple[int, int]
"""(row, column), from the upper left corner."""

WALL = "#"
SYMBOLS: Mapping[str, tuple[str, ...]] = {
    "_": (),
    ".": ("target",),
    "$": ("box",),
    "*": ("box", "target"),
    "@": ("player",),
    "+": ("player", "target"),
}
"""What stands on a cell that is no wall, by its symbol."""

MAX_BOXES = 5
"""Most boxes of a task's own board."""

TURN_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0

_SHORTEST = 3
"""Fewest moves that solve a generated board."""

_FLOOR_SHARE = (0.6, 0.9)
"""Share of a generated room's inside that is carved, from and to."""

_MAX_POSITIONS = 20_000
"""Positions that a search expands before it gives up, which takes about a second."""

_MAX_DRAWN_POSITIONS = 1000
"""The same for a board that is generated; one that takes more is drawn again."""

_SLIP = 0.4
"""Probability per turn that the demonstrator moves at random."""

COLORS = {
    "wall": (112, 112, 112),
    "floor": (24, 24, 24),
    "box": (240, 160, 48),
    "player": (64, 96, 255),
    "target": (255, 48, 48),
}


class Sokoban(Env):
    """Sokoban on generated rooms that are solvable.

    Args:
        size: cells per side of a room with its outer walls, from 5 to 10.
        boxes: boxes of a room, from 1 to 3; a small room has fewer.
        moves: most moves of a board's shortest solution, from 4 for each box to 30. An episode may
            take twice as many turns.
        view: messages are boards as text, the same with positions below, or images.
        cell: pixels per side of an image's cell, from 6 to 64.
        shaped: a reward in every turn, as RAGEN's.
        end_stuck: end the episode when a box stands where no pushes lead it to a target, whatever
            the other boxes do.
        rules: open with a system message that states the rules.
    """

    single_turn_best: ClassVar[float] = 0.0
    rule: ClassVar[str] = (
        "Push each box onto a target. # is a wall, _ is floor, . is a target, $ is a box, * is a "
        "box on a target, @ is you, + is you on a target. You push the box that you walk into; it "
        "cannot be pulled, nor pushed into a wall or another box. Say left, down, right or up, and "
        "nothing else."
    )
    positions_rule: ClassVar[str] = (
        f"{rule} Below the board stand the row and the column of you, each box and each target, "
        "counted from 0 at the top left."
    )
    image_rule: ClassVar[str] = (
        "Push each orange box onto a red target; walls are gray, and you are blue. You push the "
        "box that you walk into; it cannot be pulled, nor pushed into a wall or another box. Say "
        "left, down, right or up, and nothing else."
    )

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        moves: int = 12,
        view: Literal["text", "positions", "image"] = "text",
        cell: int = 8,
        shaped: bool = False,
        end_stuck: bool = False,
        rules: bool = False,
    ) -> None:
        if not 5 <= size <= 10:
            raise ConfigError("sokoban: size is 5 to 10")
        if not 1 <= boxes <= min(3, size - 4):
            raise ConfigError("sokoban: boxes is 1 to 3, and at most size - 4")
        if not 4 * boxes <= moves <= 30:
            raise ConfigError("sokoban: moves is 4 * boxes to 30")
        if view not in ("text", "positions", "image"):
            raise ConfigError('sokoban: view is "text", "positions" or "image"')
        if not 6 <= cell <= 64:
            raise ConfigError("sokoban: cell is 6 to 64")
        if view == "image":
            require_extra("vision", "numpy")

        self._size = size
        self._boxes = boxes
        self._longest = moves
        self._view = view
        self._cell = cell
        self._shaped = shaped
        self._end_stuck = end_stuck
        self._rules = rules
        self.max_turns = 2 * moves

        # What one box earns when it arrives one turn after the last, so that a board that is solved
        # in time is worth a little more than 1 even when the rewards of its turns are rounded.
        self._scale = SOLVED_REWARD + BOX_REWARD + TURN_REWARD * (self.max_turns + 1)
        self._board: Board | None = None
        self._paid_turns = 0
        self._unpaid_turns = 0

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        rows = task.info.get("board")
        if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
            rows = ()
        try:
            self._board = Board.read(rows)
        except ValueError as error:
            raise EnvError(
                f"task {task.id} is not one of sokoban's: info['board'] is a list of rows, and "
                f"{error}"
            ) from None
        opening = self._observe(self._board)
        if not self._rules:
            return (opening,)
        rules = {"positions": self.positions_rule, "image": self.image_rule}
        return (Message("system", rules.get(self._view, self.rule)), opening)

    async def step(self, action: Action) -> Step:
        """Move; the episode ends when the board is solved.

        Raises `InvalidAction` for a reply that is not exactly a move, in any case of letters.
        """
        assert self._board is not None
        move = action.text.strip().casefold()
        if move not in MOVES:
            self._unpaid_turns += 1
            raise InvalidAction(f"Say one of {', '.join(MOVES)}.")

        before = self._board
        after = before.moved(move)
        self._board = after
        self._paid_turns += 1
        is_stuck = self._end_stuck and after.is_stuck

        if after.is_solved or is_stuck:
            info = {"solved": after.is_solved}
            return Step(reward=self._reward(before, after), terminated=True, info=info)
        state = {"state": list(after.rows)}
        return Step(self._observe(after), self._reward(before, after), info=state)

    def reward(self, trajectory: Trajectory) -> float:
        """Return the rewards of turns that no step paid for: those without a move, and if the board
        is not solved, those that were not played."""
        if not self._shaped or self._board is None:
            return 0.0
        turns = self.max_turns
        if self._board.is_solved:
            turns = min(turns, self._paid_turns + self._unpaid_turns)
        return TURN_REWARD * (turns - self._paid_turns) / self._scale

    def _reward(self, before: Board, after: Board) -> float:
        """Return the reward of a move."""
        if not self._shaped:
            return float(after.is_solved)
        arrived = len(after.boxes & after.targets) - len(before.boxes & before.targets)
        reward = TURN_REWARD + BOX_REWARD * arrived + SOLVED_REWARD * after.is_solved
        return reward / self._scale

    def _observe(self, board: Board) -> Message:
        if self._view == "image":
            pixels = draw(board.rows, self._cell)
            return Message("user", (Image(pixels, alt=board.text),))
        if self._view == "positions":
            return Message("user", f"{board.text}\n{board.positions}")
        return Message("user", board.text)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return generated boards; no room (walls and targets) is in both splits, so no held-out
        board occurs in training, whatever the moves."""

        def draw_task(rng: random.Random) -> tuple[str, Task]:
            while True:
                board = _draw_board(rng, self._size, self._boxes)
                solution = shortest_solution(board, self._longest, _MAX_DRAWN_POSITIONS)
                # One move that is repeated would solve such a board without a look at it.
                if len(solution) >= _SHORTEST and len(set(solution)) > 1:
                    break
            info = {"board": list(board.rows), "moves": len(solution)}
            return board.room, Task(info=info)

        return sample_tasks("sokoban", split, n, seed, draw_task)

    def texts(self, n: int, seed: int) -> list[str]:
        """Return sample texts: the rules, moves, boards and positions, also for images."""
        texts = [self.positions_rule, self.image_rule]
        for task in self.tasks("train", n, seed):
            board = Board.read(task.info["board"])
            texts += [f"{board.text}\n{board.positions}", *MOVES]
        return texts

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: make the next move of a shortest solution; at random if there is none."""
        board = _last_board(messages)
        solution = _cached_solution(board) if board is not None else ()
        return solution[0] if solution else rng.choice(tuple(MOVES))

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: move at random with probability 0.4."""
        if rng.random() < _SLIP:
            return rng.choice(tuple(MOVES))
        return Sokoban.solver(messages, rng)


@dataclass(frozen=True, slots=True)
class Board:
    """State of a game."""

    height: int
    width: int
    floor: frozenset[Cell]
    """All cells without a wall."""
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @classmethod
    def read(cls, rows: Sequence[str]) -> Board:
        """Read rows of symbols without spaces; raise a ValueError for what is no board."""
        cells: dict[Cell, Sequence[str]] = {}
        for number, row in enumerate(rows):
            for column, symbol in enumerate(row):
                if symbol in SYMBOLS:
                    cells[number, column] = SYMBOLS[symbol]
                elif symbol != WALL:
                    raise ValueError(f"its cells are {_NAMES}, not {symbol!r}")

        height = len(rows)
        width = len(rows[0]) if rows else 0
        if any(len(row) != width for row in rows):
            raise ValueError("its rows are of one length")
        if any(row in (0, height - 1) or column in (0, width - 1) for row, column in cells):
            raise ValueError("its outer cells are walls")

        targets = frozenset(cell for cell, things in cells.items() if "target" in things)
        boxes = frozenset(cell for cell, things in cells.items() if "box" in things)
        players = [cell for cell, things in cells.items() if "player" in things]
        if len(players) != 1:
            raise ValueError(f"it has one player, not {len(players)}")
        if not 1 <= len(boxes) <= MAX_BOXES or len(boxes) != len(targets):
            raise ValueError(f"it has 1 to {MAX_BOXES} boxes and as many targets")
        if boxes == targets:
            raise ValueError("it is not solved yet")
        return cls(height, width, frozenset(cells), targets, boxes, players[0])

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows of symbols without spaces."""
        return tuple(
            "".join(self._symbol((row, column)) for column in range(self.width))
            for row in range(self.height)
        )

    def _symbol(self, cell: Cell) -> str:
        if cell not in self.floor:
            return WALL
        is_target = cell in self.targets
        if cell in self.boxes:
            return "*" if is_target else "$"
        if cell == self.player:
            return "+" if is_target else "@"
        return "." if is_target else "_"

    @property
    def text(self) -> str:
        """A line per row, and a space between cells."""
        return "\n".join(" ".join(row) for row in self.rows)

    @property
    def positions(self) -> str:
        """Row and column of the player, each box and each target."""
        things = [("you", self.player)]
        things += [("box", cell) for cell in sorted(self.boxes)]
        things += [("target", cell) for cell in sorted(self.targets)]
        return " ".join(f"{name} {row} {column}" for name, (row, column) in things)

    @property
    def room(self) -> str:
        """Walls and targets alone, which no move changes."""
        empty = replace(self, boxes=frozenset(), player=(0, 0))
        return " ".join(empty.rows)

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a target."""
        return self.boxes == self.targets

    @property
    def is_stuck(self) -> bool:
        """Whether a box stands where no pushes lead it to a target, such as in a corner.

        False does not mean that the board can be solved: two boxes may block each other.
        """
        return not self.boxes <= pushes_to_target(self.floor, self.targets).keys()

    def moved(self, move: str) -> Board:
        """Return the board after a move; the same board if something is in the way."""
        there = _beside(self.player, move)
        if there not in self.floor:
            return self
        if there not in self.boxes:
            return replace(self, player=there)
        beyond = _beside(there, move)
        if beyond not in self.floor or beyond in self.boxes:
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})


_NAMES = " ".join((WALL, *SYMBOLS))


def _beside(cell: Cell, move: str, steps: int = 1) -> Cell:
    down, right = MOVES[move]
    return cell[0] + steps * down, cell[1] + steps * right


def _last_board(messages: Sequence[Message]) -> Board | None:
    """Read the last board that the environment showed, as text or in an image's `alt`."""
    for message in reversed(messages):
        if message.role != "user":
            continue
        lines = message.text_with_alt.splitlines()
        rows = [line.replace(" ", "") for line in lines if line.startswith(WALL)]
        try:
            return Board.read(rows)
        except ValueError:  # another text, such as that after an invalid reply
            continue
    return None


def shortest_solution(
    board: Board, max_moves: int | None = None, max_positions: int = _MAX_POSITIONS
) -> tuple[str, ...]:
    """Return the moves of a shortest solution; empty if there is none.

    It is a search by A* (Hart, Nilsson and Raphael, 1968) over pushes: a position is the boxes and
    the player right after a push, and its cost counts also the moves that lead to where the push
    begins. The moves that remain are at least the pushes of each box to its nearest target, without
    the others. Boxes are not pushed onto cells from which none leads to a target.

    Args:
        board: any board, also one that is lost.
        max_moves: longest solution that is looked for.
        max_positions: positions that are expanded at most; after as many the result is empty.
    """
    if board.is_stuck:
        return ()
    pushes_left = pushes_to_target(board.floor, board.targets)

    # Paths differ from each other, so two entries are never compared by their boxes.
    bound = sum(pushes_left[box] for box in board.boxes)
    queue: list[tuple[int, tuple[str, ...], frozenset[Cell], Cell]]
    queue = [(bound, (), board.boxes, board.player)]
    expanded: set[tuple[frozenset[Cell], Cell]] = set()
    while queue and len(expanded) < max_positions:
        _, path, boxes, player = heapq.heappop(queue)
        if boxes == board.targets:
            return path
        if (boxes, player) in expanded:
            continue
        expanded.add((boxes, player))

        # Walk to each side of each box, and push it from there.
        free = board.floor - boxes
        walks = _walks(free, player)
        for box in sorted(boxes):
            for move in MOVES:
                behind = _beside(box, move, -1)
                beyond = _beside(box, move)
                if behind not in walks or beyond not in free or beyond not in pushes_left:
                    continue
                pushed_boxes = boxes - {box} | {beyond}
                pushed_path = (*path, *walks[behind], move)
                bound = len(pushed_path) + sum(pushes_left[other] for other in pushed_boxes)
                if max_moves is None or bound <= max_moves:
                    heapq.heappush(queue, (bound, pushed_path, pushed_boxes, box))
    return ()


_cached_solution = lru_cache(maxsize=4096)(shortest_solution)
"""For players, which meet the same boards again."""


def _walks(free: frozenset[Cell], player: Cell) -> Mapping[Cell, tuple[str, ...]]:
    """Return the moves of a shortest walk to each cell that the player reaches over free ones."""
    walks: dict[Cell, tuple[str, ...]] = {player: ()}
    queue = deque([player])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            there = _beside(cell, move)
            if there in free and there not in walks:
                walks[there] = (*walks[cell], move)
                queue.append(there)
    return walks


@lru_cache(maxsize=4096)
def pushes_to_target(floor: frozenset[Cell], targets: frozenset[Cell]) -> Mapping[Cell, int]:
    """Return the fewest pushes that bring a box to a target from each cell of a room without other
    boxes, found by pulling it from the targets; a cell without an entry is a trap."""
    pushes = dict.fromkeys(sorted(targets), 0)
    queue = deque(pushes)
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            before = _beside(cell, move, -1)
            behind = _beside(cell, move, -2)
            if before in floor and behind in floor and before not in pushes:
                pushes[before] = pushes[cell] + 1
                queue.append(before)
    return pushes


def _draw_board(rng: random.Random, size: int, box_count: int) -> Board:
    """Draw a room with boxes from where pushes lead to a target; the board may be solved, or not
    solvable."""
    while True:
        floor = _carve(rng, size)
        targets = frozenset(rng.sample(sorted(floor), box_count))
        starts = sorted(pushes_to_target(floor, targets))
        if len(starts) > box_count:
            break
    boxes = frozenset(rng.sample(starts, box_count))
    player = rng.choice(sorted(floor - boxes))
    return Board(size, size, floor, targets, boxes, player)


def _carve(rng: random.Random, size: int) -> frozenset[Cell]:
    """Draw the floor of a room, which hangs together: cell after cell beside what is carved."""
    inside = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    least, most = _FLOOR_SHARE
    cell_count = round(rng.uniform(least, most) * len(inside))

    floor: set[Cell] = set()
    edge = [rng.choice(inside)]
    while len(floor) < cell_count:
        cell = edge.pop(rng.randrange(len(edge)))
        floor.add(cell)
        for move in MOVES:
            there = _beside(cell, move)
            if there in inside and there not in floor and there not in edge:
                edge.append(there)
    return frozenset(floor)


@lru_cache(maxsize=1024)
def draw(rows: Sequence[str], cell: int) -> Any:
    """Draw rows of symbols as a read-only image, [rows * cell, columns * cell, 3] uint8: a box or
    the player leaves a pixel of floor around it, and a target is the middle of its cell, over what
    stands on it."""
    import numpy as np

    pixels = np.empty((len(rows) * cell, len(rows[0]) * cell, 3), np.uint8)
    for number, row in enumerate(rows):
        for column, symbol in enumerate(row):
            square = pixels[number * cell :, column * cell :][:cell, :cell]
            things = SYMBOLS.get(symbol)
            square[:] = COLORS["wall" if things is None else "floor"]
            for thing in things or ():
                margin = max(2, cell * 5 // 16) if thing == "target" else 1
                square[margin : cell - margin, margin : cell - margin] = COLORS[thing]
    pixels.flags.writeable = False
    return pixels

"""Radar: reach a goal using an image per turn. The environment of the image quickstart.

::

    user       (image: the player in the middle, the goal two fields to the right and one up)
    assistant  right
    user       (image: the goal one field to the right and one up)
    assistant  up
    ...

Each image is 32 x 32 pixels: the blue player in the middle, the goal in one of four warm colors at
its relative position, and a different ground each turn. Observations contain only the image. A
text-only model reads its `alt`, such as ``goal: 2 right, 1 up``.

An episode allows one move more than the initial distance, and a wrong move costs two, so nearly
every move must be right. The reward is 1 when the goal is reached, else 0. The goal is at least two
fields away, so a single reply cannot reach it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from turnwright.envs.builtin.common import require_extra
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.spec import check_split
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Image, Message, Task

MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}
"""(right, up) change of each move."""

COLOURS = ((255, 48, 48), (255, 144, 32), (240, 224, 48), (255, 64, 176))
"""Colors of the goal: red, orange, yellow, pink."""

PLAYER = (64, 96, 255)
SIDE = 32  # pixels per side of an image
GROUND = 16  # maximum brightness of the ground, of 255

GROUNDS = 4
"""Number of grounds of a split; the splits share none, so no held-out image occurs in training."""

HABIT = 0.5
"""Probability that the demonstrator moves in a fixed direction of an axis."""

SENSE = 0.4
"""Probability that it moves toward the goal; else it moves at random."""


class Radar(Env):
    """Egocentric images, one move per turn.

    Args:
        reach: maximum distance of player and goal along each axis in fields; moves beyond it have
            no effect.
        rules: open with a system message that states the rules, for models without a warm-up on
            demonstrations.
    """

    single_turn_best: ClassVar[float] = 0.0
    rule: ClassVar[str] = (
        "You are the blue square in the middle of each image; reach the red, orange, yellow or "
        "pink one. Say one move a turn: up, down, left or right."
    )

    def __init__(self, reach: int = 3, rules: bool = False) -> None:
        if not 2 <= reach <= 4:
            raise ConfigError("radar: reach is 2 to 4")
        require_extra("vision", "numpy")
        self._reach = reach
        self._rules = rules
        self.max_turns = 2 * reach + 1
        self._rng = random.Random()
        self._side = ""
        self._ground = -1
        self._goal = (0, 0)
        self._colour = 0
        self._moves = 0

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        right, up, colour = (task.info.get(name, -SIDE) for name in ("right", "up", "colour"))
        is_known = right in self._fields and up in self._fields and colour in range(len(COLOURS))
        if not is_known or abs(right) + abs(up) < 2:
            raise EnvError(
                f"task {task.id} is not one of radar's, of this reach: it needs info['right'], "
                "['up'] and ['colour']"
            )
        self._goal = (right, up)
        self._colour = colour
        self._side = str(task.info.get("side"))
        self._ground = -1
        self._rng = random.Random(f"{self._side} {task.info.get('number')}")
        self._moves = abs(right) + abs(up) + 1
        opening = self._observe()
        return (Message("system", self.rule), opening) if self._rules else (opening,)

    async def step(self, action: Action) -> Step:
        """Move; the episode ends at the goal or with the last move.

        An invalid reply uses up a move without effect.
        """
        self._moves -= 1
        right, up = MOVES.get(action.text.strip(), (0, 0))
        goal = (self._goal[0] - right, self._goal[1] - up)
        if max(map(abs, goal)) <= self._reach:  # the goal must stay within the image
            self._goal = goal
        is_reached = self._goal == (0, 0)
        if is_reached or not self._moves:
            return Step(reward=float(is_reached), terminated=True, info={"reached": is_reached})
        return Step(self._observe())

    def _observe(self) -> Message:
        """Return the image of this turn, with another ground than the last."""
        grounds = [number for number in range(GROUNDS) if number != self._ground]
        self._ground = self._rng.choice(grounds)
        pixels = draw(self._goal, self._reach, self._colour, f"{self._side} {self._ground}")
        return Message("user", (Image(pixels, alt=describe_goal(self._goal)),))

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return `n` different tasks; no initial pair of goal position and color is in both splits.

        Drawn from shuffled decks, so all positions and colors of a split are equally frequent.
        """
        check_split(split)
        rng = random.Random(f"radar/{split}/{seed}")
        openings = []
        for right in self._fields:
            for up in self._fields:
                for colour in range(len(COLOURS)):
                    is_of_split = held_out(right, up, colour) == (split == "eval")
                    if abs(right) + abs(up) >= 2 and is_of_split:
                        openings.append((right, up, colour))

        deck: list[tuple[int, int, int]] = []
        tasks = []
        for number in range(n):
            deck = deck or rng.sample(openings, len(openings))
            right, up, colour = deck.pop()
            info = {
                "right": right,
                "up": up,
                "colour": colour,
                "side": split,
                "number": f"{seed} {number}",
            }
            tasks.append(Task(info=info))
        return tasks

    @property
    def _fields(self) -> range:
        return range(-self._reach, self._reach + 1)

    def texts(self, n: int, seed: int) -> list[str]:
        """Return sample texts: the rule, moves, and alt texts."""
        texts = [self.rule]
        for right in self._fields:
            for up in self._fields:
                if right or up:
                    texts += [describe_goal((right, up)), *MOVES]
        return texts

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: make a move toward the goal."""
        return rng.choice(_nearer(messages))

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: on an axis toward the goal go up or right (`HABIT`) or toward it (`SENSE`);
        else move at random."""
        way = rng.choice(_nearer(messages))
        chance = rng.random()
        if chance < HABIT:
            return "up" if way in ("up", "down") else "right"
        return way if chance < HABIT + SENSE else rng.choice(tuple(MOVES))


def held_out(right: int, up: int, colour: int) -> bool:
    """Whether an initial goal position and color is held out: one color of each position."""
    return (right + 2 * up + colour) % len(COLOURS) == 0


@lru_cache(maxsize=8192)
def draw(goal: tuple[int, int], reach: int, colour: int, ground: str) -> Any:
    """Draw a read-only image, [32, 32, 3] uint8: dark noise seeded by `ground`, the player, and the
    goal (right, up)."""
    import numpy as np

    noise_bytes = random.Random(f"ground {ground}").randbytes(SIDE * SIDE)
    noise = np.frombuffer(noise_bytes, np.uint8).reshape(SIDE, SIDE, 1)
    pixels = np.repeat(noise // (256 // GROUND), 3, axis=2)

    field = SIDE // (2 * reach + 1)
    middle = (SIDE - field) // 2
    for (right, up), paint in (((0, 0), PLAYER), (goal, COLOURS[colour])):
        top = middle - up * field
        left = middle + right * field
        pixels[top : top + field, left : left + field] = paint
    pixels.flags.writeable = False
    return pixels


def describe_goal(goal: tuple[int, int]) -> str:
    """Describe an image as text."""
    right, up = goal
    distances = []
    if right:
        distances.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    if up:
        distances.append(f"{abs(up)} {'up' if up > 0 else 'down'}")
    return f"goal: {', '.join(distances)}"


def _nearer(messages: Sequence[Message]) -> list[str]:
    """Return the moves toward the goal described in the last message."""
    return re.findall(r"[1-9] (up|down|left|right)", messages[-1].text_with_alt) or ["up"]

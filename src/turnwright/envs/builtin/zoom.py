"""Zoom: a number too small to read, and a tool that enlarges a part of the image.

::

    user       (image, rendered at 64 x 64 pixels)  The image is 512 x 512 pixels. What number stands in the red square?
    assistant  <tool_call>{"name": "zoom", "arguments": {"box": [300, 40, 364, 104]}}</tool_call>
    tool       (image: that part at full resolution)
    assistant  47

The digits are 14 pixels high, and less than 2 in the scaled-down full image. A box is [left, top,
right, bottom] in pixels of the full image; a crop larger than the pixel limit is scaled down too.
The reward is 1 when the last reply is exactly the number. A text-only model reads the `alt` of
image and crops.
"""  # noqa: E501

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwright.envs.builtin import common
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.tools.tool_schema import tool_signature
from turnwright.errors import ConfigError, EnvError
from turnwright.types import Image, Message, Task

SIDE = 512
"""Pixels per side of the full image."""

SQUARE = 32
"""Pixels per side of a colored square."""

DIGITS = 20
"""Font size of the numbers."""

MIN_SIDE = 16
"""Minimum pixels per side of a box."""

COLOURS = {
    "red": (200, 30, 30),
    "green": (20, 130, 40),
    "blue": (40, 60, 200),
    "black": (20, 20, 20),
    "purple": (130, 30, 150),
}

LEGIBLE = 2
"""Numbers are legible in crops scaled down by less than this factor."""


def zoom(box: list[int]) -> str:
    """Show a part of the image larger.

    Args:
        box: [left, top, right, bottom] in pixels of the whole image.
    """
    raise NotImplementedError("answered by the environment, which has the image")


TOOL = tool_signature(zoom)


class Zoom(Env):
    """Numbers that can only be read in a crop.

    Args:
        shown: maximum pixels per side of the rendered image and crops.
    """

    max_turns: ClassVar[int] = 4
    single_turn_best: ClassVar[float] = 1 / 90
    tools: Sequence[Any] = (TOOL.schema,)

    def __init__(self, shown: int = 64) -> None:
        if not 48 <= shown <= 96:
            raise ConfigError(
                "zoom: shown is 48 to 96 pixels; with more the numbers could be read at once"
            )
        common.require_extra("vision", "PIL")
        self._shown = shown
        self._squares: dict[str, tuple[int, int, int]] = {}
        self._picture: Any = None
        self._answer = ""

    def reset(self, task: Task, *, seed: int | None = None) -> Message:
        squares = task.info.get("squares")
        colour = task.info.get("colour")
        if not isinstance(squares, Mapping) or not isinstance(colour, str) or colour not in squares:
            raise EnvError(
                f"task {task.id} is not one of zoom's: it needs info['squares'] and info['colour']"
            )
        self._squares = {
            name: (int(left), int(top), int(number))
            for name, (left, top, number) in squares.items()
        }
        _, _, answer = self._squares[colour]
        self._answer = str(answer)
        self._picture = draw(self._squares)
        return Message("user", (self._part((0, 0, SIDE, SIDE)), _question(colour)))

    def step(self, action: Action) -> Step:
        """Return a crop; a reply without a call is the answer."""
        if not action.tool_calls:
            is_right = action.text.strip() == self._answer
            return Step(reward=float(is_right), terminated=True, info={"right": is_right})
        try:
            box = read_box(common.read_single_call(action.tool_calls, TOOL)["box"])
        except common.CallError as mistake:
            messages, info = common.error_results(action.tool_calls, TOOL.name, mistake)
            return Step(messages, info=info)
        results = common.tool_results(action.tool_calls, TOOL.name, (self._part(box),))
        return Step(results, info={"tool_calls": 1})

    def _part(self, box: tuple[int, int, int, int]) -> Image:
        """Return a crop of the image; its `alt` has the numbers that are legible in it."""
        left, top, right, bottom = box
        scale = max(1.0, ((right - left) * (bottom - top)) ** 0.5 / self._shown)
        squares = []
        for name, (x, y, number) in self._squares.items():
            if left <= x and top <= y and x + SQUARE <= right and y + SQUARE <= bottom:
                what = str(number) if scale < LEGIBLE else "too small to read"
                squares.append(f"{name} square at [{x}, {y}, {x + SQUARE}, {y + SQUARE}]: {what}")
        alt = f"{'; '.join(squares) or 'no whole square'}. "
        return Image(self._picture.crop(box), alt=alt, max_pixels=self._shown**2)

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[Task]:
        """Return tasks with five squares each; no pair of number and color is in both splits."""
        cell_side = SIDE // 4
        free = cell_side - SQUARE

        def draw_task(rng: random.Random) -> tuple[str, Task]:
            cells = rng.sample(range(16), len(COLOURS))
            squares = {}
            for name, cell in zip(COLOURS, cells, strict=True):
                left = cell % 4 * cell_side + rng.randrange(free)
                top = cell // 4 * cell_side + rng.randrange(free)
                squares[name] = [left, top, rng.randint(10, 99)]
            colour = rng.choice(tuple(COLOURS))
            answer = str(squares[colour][2])
            task = Task(answer=answer, info={"squares": squares, "colour": colour})
            return f"{colour} {answer}", task

        return common.sample_tasks("zoom", split, n, seed, draw_task)

    @staticmethod
    def texts(n: int, seed: int) -> list[str]:
        """Return sample texts, without drawing images."""
        rng = random.Random(seed)
        texts = []
        for task in Zoom.tasks("train", n, seed):
            colour = task.info["colour"]
            x, y, number = task.info["squares"][colour]
            alt = f"{colour} square at [{x}, {y}, {x + SQUARE}, {y + SQUARE}]: "
            texts += [
                _question(colour),
                f"{alt}too small to read. ",
                f"{alt}{number}. ",
                str(number),
                _call(x, y, rng.randint(0, 16)),
            ]
        return texts

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: zoom to the square, then read the number."""
        return _played(messages, 16)

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: guess (probability 0.3), or crop off part of the square (0.2)."""
        chance = rng.random()
        if chance < 0.3:
            return str(rng.randint(10, 99))
        return _played(messages, -4 if chance < 0.5 else 16)


def _question(colour: str) -> str:
    return f"The image is {SIDE} x {SIDE} pixels. What number stands in the {colour} square?"


def read_box(box: Sequence[int]) -> tuple[int, int, int, int]:
    """Validate a box of the full image."""
    if len(box) != 4:
        raise common.CallError(
            f"box is [left, top, right, bottom], four whole numbers, not {len(box)}", "no_box"
        )
    left, top, right, bottom = box
    if not (0 <= left < right <= SIDE and 0 <= top < bottom <= SIDE):
        raise common.CallError(
            f"box: 0 <= left < right <= {SIDE} and 0 <= top < bottom <= {SIDE}", "outside"
        )
    if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
        raise common.CallError(f"box: at least {MIN_SIDE} pixels wide and high", "too_small")
    return left, top, right, bottom


def draw(squares: Mapping[str, tuple[int, int, int]]) -> Any:
    """Draw the full PIL image of 512 x 512 pixels: colored squares with white numbers, (left, top,
    number) by color."""
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFont

    picture = Pillow.new("RGB", (SIDE, SIDE), (225, 225, 215))
    pen = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=DIGITS)
    white = (255, 255, 255)
    for name, (left, top, number) in squares.items():
        pen.rectangle((left, top, left + SQUARE - 1, top + SQUARE - 1), fill=COLOURS[name])
        middle = (left + SQUARE / 2, top + SQUARE / 2)
        pen.text(middle, str(number), fill=white, font=font, anchor="mm")
    return picture


def _played(messages: Sequence[Message], around: int) -> str:
    """Return the number if the last message has it, else a call for the requested square."""
    opening = common.question_text(messages)
    asked = re.search(r"stands in the (\w+) square", opening)
    colour = asked[1] if asked else "red"
    legible = re.search(rf"{colour} square at [^:]*: (\d+)", common.visible_texts(messages)[-1])
    if legible:
        return legible[1]
    place = re.search(rf"{colour} square at \[(\d+), (\d+),", opening)
    return _call(int(place[1]), int(place[2]), around) if place else "0"


def _call(left: int, top: int, around: int) -> str:
    """Return the text of a call that zooms to a square, with so many pixels around it."""
    box = [
        max(0, left - around),
        max(0, top - around),
        min(SIDE, left + SQUARE + around),
        min(SIDE, top + SQUARE + around),
    ]
    return common.tool_call(TOOL.name, box=box)

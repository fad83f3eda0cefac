"""Figures drawn from their numbers with Pillow: shapes with labels, for environments that show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Point = tuple[float, float]

LINE_COLORS = ((0, 0, 0), (20, 60, 160), (150, 30, 30))
BACKGROUND = (255, 255, 255)


class Canvas:
    """A square sheet to draw on, in coordinates from 0 to 1, y downwards.

    Args:
        side: pixels.
        ink: colour of lines and labels.
        turned: quarter turns of the shape; labels stay upright.
    """

    def __init__(self, side: int, ink: tuple[int, int, int], turned: int = 0) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self.picture = Image.new("RGB", (side, side), BACKGROUND)
        self._draw = ImageDraw.Draw(self.picture)
        self._font = ImageFont.load_default(size=max(8.0, side / 13))
        self._side, self._ink, self._turned = side, ink, turned % 4

    def at(self, point: Point) -> Point:
        """Where a point stands, in pixels."""
        x, y = point[0] - 0.5, point[1] - 0.5
        for _ in range(self._turned):
            x, y = -y, x
        return (x + 0.5) * self._side, (y + 0.5) * self._side

    def shape(self, *points: Point) -> None:
        """A closed line."""
        placed = [self.at(point) for point in points]
        self._draw.line([*placed, placed[0]], fill=self._ink, width=self._width)

    def line(self, *points: Point) -> None:
        """An open line."""
        self._draw.line([self.at(point) for point in points], fill=self._ink, width=self._width)

    def circle(self, middle: Point, radius: float) -> None:
        """A circle."""
        x, y = self.at(middle)
        r = radius * self._side
        self._draw.ellipse((x - r, y - r, x + r, y + r), outline=self._ink, width=self._width)

    def label(self, text: str, point: Point) -> None:
        """A text around a point."""
        self._draw.text(self.at(point), text, fill=self._ink, font=self._font, anchor="mm")

    @property
    def _width(self) -> int:
        return max(1, round(self._side / 110))


def draw(kind: str, a: int, b: int, turned: int, ink: int, side: int) -> Any:
    """The figure of a kind of question of `turnwise.env.builtin.geometry`, as a PIL image of `side` x `side` pixels.

    Args:
        a, b: its numbers; the shape has their proportions, within what fits.
        turned: quarter turns.
        ink: number of the colour.
    """
    sheet = Canvas(side, LINE_COLORS[ink % len(LINE_COLORS)], turned)
    if kind in ("area", "around"):
        _rectangle(sheet, a, b)
    elif kind in ("half", "long"):
        _right_triangle(sheet, a, b, "x" if kind == "long" else "")
    elif kind == "third":
        _triangle(sheet, a, b)
    elif kind == "beside":
        _on_a_line(sheet, a)
    else:
        sheet.circle((0.5, 0.5), 0.34)
        sheet.line((0.5, 0.5), (0.84, 0.5))
        sheet.label(str(a), (0.67, 0.43))
    return sheet.picture


def _halves(a: float, b: float) -> tuple[float, float]:
    """Half of the width and of the height of a shape a wide and b high, the longer one 0.6 of the sheet."""
    longest = max(a, b)
    return max(0.1, 0.3 * a / longest), max(0.1, 0.3 * b / longest)


def _rectangle(sheet: Canvas, a: int, b: int) -> None:
    x, y = _halves(a, b)
    sheet.shape((0.5 - x, 0.5 - y), (0.5 + x, 0.5 - y), (0.5 + x, 0.5 + y), (0.5 - x, 0.5 + y))
    sheet.label(str(a), (0.5, 0.5 + y + 0.09))
    sheet.label(str(b), (0.5 - x - 0.09, 0.5))


def _right_triangle(sheet: Canvas, a: int, b: int, longest: str) -> None:
    x, y = _halves(a, b)
    sheet.shape((0.5 - x, 0.5 - y), (0.5 - x, 0.5 + y), (0.5 + x, 0.5 + y))
    sheet.line((0.5 - x, 0.5 + y - 0.05), (0.5 - x + 0.05, 0.5 + y - 0.05), (0.5 - x + 0.05, 0.5 + y))
    sheet.label(str(a), (0.5, 0.5 + y + 0.09))
    sheet.label(str(b), (0.5 - x - 0.09, 0.5))
    sheet.label(longest, (0.57, 0.43))


def _triangle(sheet: Canvas, a: int, b: int) -> None:
    """The angles a and b stand at the ends of the base, the third at the top; each is written outside of its corner."""
    one, two = math.radians(a), math.radians(b)
    height = math.sin(one) * math.sin(two) / math.sin(one + two)
    scale = min(0.64, 0.64 / height)
    left, base = 0.5 - scale / 2, 0.5 + scale * height / 2
    corners: Sequence[Point] = (
        (left, base),
        (left + scale, base),
        (left + scale * math.sin(two) * math.cos(one) / math.sin(one + two), base - scale * height),
    )
    sheet.shape(*corners)
    middle = sum(x for x, _ in corners) / 3, sum(y for _, y in corners) / 3
    for text, (x, y) in zip((f"{a}°", f"{b}°", "x"), corners, strict=True):
        away = math.dist((x, y), middle)
        sheet.label(text, (x + 0.09 * (x - middle[0]) / away, y + 0.09 * (y - middle[1]) / away))


def _on_a_line(sheet: Canvas, a: int) -> None:
    """A line, and another that leaves it at the angle a; x is the rest."""
    turn = math.radians(a)
    sheet.line((0.08, 0.68), (0.92, 0.68))
    sheet.line((0.5, 0.68), (0.5 + 0.42 * math.cos(turn), 0.68 - 0.42 * math.sin(turn)))
    for text, angle in ((f"{a}°", turn / 2), ("x", (turn + math.pi) / 2)):
        sheet.label(text, (0.5 + 0.24 * math.cos(angle), 0.68 - 0.17 * math.sin(angle) - 0.02))

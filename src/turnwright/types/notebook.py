"""HTML of what a notebook shows, drawn by a package that adds it (`turnwright.notebooks`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def html_of(value: Any) -> str | None:
    """Return a trajectory, a group, an evaluation or a run as HTML; None without a package that
    draws it, where a notebook shows its repr."""
    draw = _drawer()
    return None if draw is None else draw(value)


@cache
def _drawer() -> Callable[[Any], str | None] | None:
    """Return the first function that an installed package adds.

    These are types of the lowest layer, below `turnwright.plugins`.
    """
    # Importing it takes 37 ms, a quarter of these types, and only notebooks need it.
    from importlib.metadata import entry_points

    for point in entry_points(group="turnwright.notebooks"):
        try:
            draw: Callable[[Any], str | None] = point.load()
        except ImportError:  # an installation without the package, or without an extra of it
            continue
        return draw
    return None

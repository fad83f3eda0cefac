"""A recorder that keeps when each phase of its episode began, for whoever draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from turnwise.rollout.recorder import Recorder

Trace = Callable[[str, Sequence[tuple[str, float]], float], None]
"""Hears of an episode that is over: its session, its phases and when each began, when the last ended (`time.monotonic`)."""


class Traced(Recorder):
    """Slower by a list's entry for each phase, so it takes the place of `Recorder` only where somebody asked for it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "phase":
            self.__dict__.setdefault("began", []).append((value, time.monotonic()))
        object.__setattr__(self, name, value)

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Each phase and when it began, in order; of phases alike one behind another the first."""
        began: list[tuple[str, float]] = self.__dict__["began"]
        return [row for number, row in enumerate(began) if not number or began[number - 1][0] != row[0]]

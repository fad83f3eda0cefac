"""A recorder that keeps when each phase of its episode began, for whoever draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.rollout.recorder import Recorder

Trace = Callable[[str, Sequence[tuple[str, float]], float], None]
"""Hears of an episode that is over: its session, its phases and when each began, when the last ended (`time.monotonic`)."""


class TimedRecorder(Recorder):
    """Slower by a list's entry for each phase, so it takes the place of `Recorder` only where somebody asked for it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._began: list[tuple[str, float]] = []
        super().__init__(*args, **named)

    def enter_phase(self, name: str, since: float | None = None) -> None:
        """Begin a phase, and keep its beginning."""
        self._began.append((name, time.monotonic()))
        super().enter_phase(name, since)

    @property
    def phases(self) -> list[tuple[str, float]]:
        """Phases with their beginnings, in order; of equal consecutive phases the first."""
        began = self._began
        return [row for number, row in enumerate(began) if not number or began[number - 1][0] != row[0]]

"""A watch that says what is wrong with a run while it runs, each fault once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from turnwise.trace.watch import EpisodeListener, ProgressListener
from turnwise.view.diagnosis import LAST, diagnose


class DiagnosingListener:
    """Passes everything on to another watch, and notes a diagnosis when it is first made."""

    def __init__(self, watch: ProgressListener) -> None:
        self._watch = watch
        self.episode = watch.episode if isinstance(watch, EpisodeListener) else None
        """Receives finished episodes for the other watch; None where it is no `EpisodeListener`, and so this is none."""
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=LAST)
        self._told: set[str] = set()

    def phase(self, name: str, total: int, unit: str) -> None:
        """Passed on."""
        self._watch.phase(name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """Passed on; behind a training step the last rows are looked at."""
        self._watch.progress(done, figures)
        if figures.get("phase") == "train":
            with suppress(Exception):  # a row of an odd shape: the run is worth more than what is said of it
                self._take(figures)

    def waiting(self, what: str) -> None:
        """Passed on."""
        self._watch.waiting(what)

    def note(self, text: str) -> None:
        """Passed on."""
        self._watch.note(text)

    def close(self) -> None:
        """Passed on."""
        self._watch.close()

    def _take(self, row: Mapping[str, Any]) -> None:
        if len(self._first) < LAST:
            self._first.append(row)
        else:
            self._last.append(row)
        for one in diagnose([*self._first, *self._last]):
            if one.name not in self._told:
                self._told.add(one.name)
                self._watch.note(f"diagnosis: {one.text}")

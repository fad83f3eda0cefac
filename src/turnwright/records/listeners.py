"""Progress callbacks for displays, trackers and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class ProgressListener:
    """Receives the progress of a run; by default ignores it.

    Methods must return quickly and must not raise.
    """

    def phase(self, name: str, total: int, unit: str) -> None:
        """Start a phase (`warm-up`, `evaluate before`, `reinforce`, ...) of `total` units."""

    def progress(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Report `done` units of the phase; `metrics` as in a row of metrics.jsonl."""

    def waiting(self, what: str) -> None:
        """Report what the run waits for; empty for nothing."""

    def note(self, text: str) -> None:
        """Report one line that stays on the screen."""

    def close(self) -> None:
        """Report the end of the run."""


@runtime_checkable
class EpisodeListener(Protocol):
    """Progress listener that also receives the phases of finished episodes."""

    def episode(self, session: str, phases: Sequence[tuple[str, float]], end: float) -> None:
        """Receive a finished episode.

        `phases` are its phases with their starts; these and `end` are times of `time.monotonic`.
        """


class NullListener(ProgressListener):
    """Progress listener that does nothing."""

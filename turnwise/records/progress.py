"""What a run tells whoever watches it: a display, a tracker, a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class ProgressListener(Protocol):
    """Hears what a run does. Every method returns at once; none may raise."""

    def phase(self, name: str, total: int, unit: str) -> None:
        """A phase begins (`warm-up`, `evaluate before`, `reinforce`, ...) of so many units."""
        ...

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """So many units of the phase are done; `figures` as in a row of metrics.jsonl."""
        ...

    def waiting(self, what: str) -> None:
        """What the run is waiting for right now, in words; empty for nothing."""
        ...

    def note(self, text: str) -> None:
        """One line that should stay on the screen."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class EpisodeListener(Protocol):
    """Watch that also receives the phases of finished episodes."""

    def episode(self, session: str, phases: Sequence[tuple[str, float]], end: float) -> None:
        """Receive a finished episode: its session, its phases with their beginnings, and its end (`time.monotonic`)."""
        ...


class NullListener:
    """A watch that says nothing."""

    def phase(self, name: str, total: int, unit: str) -> None:
        """Nothing."""

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """Nothing."""

    def waiting(self, what: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

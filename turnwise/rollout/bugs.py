"""Mistakes in a person's code that break one episode after another: the run stops with the first of them."""

from __future__ import annotations

from collections import defaultdict

from turnwise.errors import RepeatedUserError
from turnwise.types import Failure, FailureKind, Trajectory

TASKS = 3
"""The same mistake in so many tasks stops the run."""
FIRST = 32
"""So many episodes are looked at for mistakes that always strike, also where there is but one task."""
REPEATED_ERROR_SHARE = 0.2
"""More than this share of them stops the run."""


class UserErrorCounter:
    """Counts mistakes by type and line as episodes end."""

    def __init__(self) -> None:
        self._episodes = 0
        self._tasks: defaultdict[tuple[str, str], list[str]] = defaultdict(list)

    def record(self, trajectory: Trajectory) -> None:
        """One more episode has ended.

        Raises:
            RepeatedUserError: when a mistake was met once too often.
        """
        self._episodes += 1
        error = trajectory.error
        if error is None or error.kind != FailureKind.USER_BUG:
            return
        seen = self._tasks[error.type, error.place or error.phase]
        seen.append(trajectory.task.id)
        tasks = list(dict.fromkeys(seen))
        if len(tasks) >= TASKS:
            shown = ", ".join(tasks[:TASKS])
            raise RepeatedUserError(self._told(error, f"in {len(tasks)} tasks ({shown})"))
        if self._episodes <= FIRST and len(seen) > REPEATED_ERROR_SHARE * FIRST:
            raise RepeatedUserError(self._told(error, f"in {len(seen)} of the first {self._episodes} episodes"))

    def _told(self, error: Failure, where: str) -> str:
        place = f" at {error.place}" if error.place else ""
        return (
            f"{error.type}{place} in {error.phase}, {where}: {error.message or 'without a message'}. It is a mistake in the "
            "code, which no retry mends: the tracebacks stand in trajectories.jsonl; mend it, then start a new run"
        )

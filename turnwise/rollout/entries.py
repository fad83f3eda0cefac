"""What an episode writes into the journal, before anything can fail on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.trace.record import key_row, outcome_row, span_row, turn_row
from turnwise.trace.run import JsonLines
from turnwise.types import Trajectory, Turn


class Entries:
    """The entries of one episode: opened, each turn, attempts that failed, closed."""

    def __init__(self, journal: JsonLines | None, trajectory: Trajectory) -> None:
        """
        Args:
            journal: None keeps no record.
            trajectory: what is written down as it grows.
        """
        self._journal = journal
        self._trajectory = trajectory
        self._key = key_row(trajectory.key)
        self._written = 0  # spans that the journal holds
        self._answers: list[tuple[int, float | None, Mapping[str, Any], float, int]] = []
        self._left_out: list[tuple[int, int, str]] = []
        if journal is not None:
            journal.append({"e": "opened", "k": self._key, "template": trajectory.template})

    def answer(self, turn: int) -> None:
        """The world's verdict on a turn stands in its record; it is written with the next entry."""
        record = self._trajectory.turns[turn]
        self._answers.append((turn, record.reward, record.info, record.env_s, record.retries))

    def left_out(self, span: int, position: int, reason: str) -> None:
        """A span is not trained from a position of its own on; written with the next entry."""
        self._left_out.append((span, position, reason))

    def turn(self, turn: Turn) -> None:
        """A turn was sampled."""
        if self._journal is not None:
            event = {"e": "turn", "k": self._key, "n": len(self._trajectory.turns) - 1} | self._news()
            self._journal.append(event | {"turn": turn_row(turn)})

    def failed_attempt(self) -> None:
        """The attempt failed beyond mending."""
        if self._journal is not None:
            self._journal.append({"e": "failed_attempt", "k": self._key, "answers": []} | self._news())
        self._answers, self._left_out = [], []

    def close(self) -> None:
        """The episode is over: everything about it is in the journal now."""
        if self._journal is not None:
            event = {"e": "closed", "k": self._key, "answers": []} | self._news()
            self._journal.append(event | outcome_row(self._trajectory))

    def _news(self) -> dict[str, Any]:
        """What is new since the last entry."""
        spans = self._trajectory.spans
        news: dict[str, Any] = {"spans": [span_row(span) for span in spans[self._written :]]}
        self._written = len(spans)
        if self._answers:
            news["answers"], self._answers = self._answers, []
        if self._left_out:
            news["rewound"], self._left_out = self._left_out, []
        return news

"""What an episode writes into the journal, before anything can fail on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.envs import InlineObservation, Scores
from turnwise.records.run_dir import JsonLines
from turnwise.records.serialization import key_row, message_row, outcome_row, span_row, turn_row
from turnwise.types import Message, Trajectory, Turn, as_messages

NOTHING: Any = object()
"""What the world said last stands in a turn already."""


class EpisodeJournal:
    """The entries of one episode: opened, each turn, attempts that failed, closed."""

    def __init__(self, journal: JsonLines | None, trajectory: Trajectory, settings: str = "") -> None:
        """
        Args:
            journal: None keeps no record.
            trajectory: what is written down as it grows.
            settings: the name under which the journal has the settings of the episode.
        """
        self._journal = journal
        self._trajectory = trajectory
        self._key = key_row(trajectory.key)
        self._written = 0  # spans that the journal holds
        self._answers: list[tuple[int, float | None, Mapping[str, Any], float, int]] = []
        self._left_out: list[tuple[int, int, str]] = []
        self.said: Any = NOTHING
        """What the world said last, as it said it; the next turn tells of it, and where there is none, the last entry does."""
        self.changed = False
        """Whether what the next turn tells of it is not all that was said: it was cut, or rewound what came before."""
        self.tools: Sequence[Any] = ()
        """What the model was told of when the conversation was opened."""
        self._told: Sequence[Any] = ()  # tools that the journal has for this attempt
        self._scores: dict[str, Any] = {}
        self._unanswered: Turn | None = None
        if journal is not None:
            event = {"e": "opened", "k": self._key, "template": trajectory.template}
            journal.append(event | {"settings": settings} if settings else event)

    def env_step(self, turn: int) -> None:
        """The world's verdict on a turn stands in its record; it is written with the next entry."""
        record, self._unanswered = self._trajectory.turns[turn], None
        self._answers.append((turn, record.reward, record.info, record.env_s, record.retries))

    def untrained(self, span: int, position: int, reason: str) -> None:
        """A span is not trained from a position of its own on; written with the next entry."""
        self._left_out.append((span, position, reason))

    def reward(self, whose: str, value: Any) -> None:
        """What a reward came to, the episode's `own` or its `group`'s, and how often one had failed before; written last."""
        if self._journal is not None:
            failed = sum(failure.phase == "reward" for failure in self._trajectory.failures)
            self._scores[whose] = [_scores_row(value), failed]

    def turn(self, turn: Turn, tools: Sequence[Any], call: int) -> None:
        """A turn was sampled; `tools` are those that its prompt tells of, `call` is the number of its first call."""
        if self._journal is not None:
            event = self._news("turn")
            event["n"], event["call"], event["turn"] = len(self._trajectory.turns) - 1, call, turn_row(turn)
            if tools is not self._told:
                event |= self._tools_row(tools)
            if self.changed:
                event["said"] = _said_row(self.said)
            self._journal.append(event)
        self.said, self.changed, self._unanswered = NOTHING, False, turn

    def failed_attempt(self) -> None:
        """The attempt failed beyond mending."""
        if self._journal is not None:
            self._journal.append({"answers": []} | self._news("failed_attempt") | self._last())
        self._answers, self._left_out, self._told, self._unanswered = [], [], (), None
        self.said, self.changed, self.tools = NOTHING, False, ()

    def close(self) -> None:
        """The episode is over: everything about it is in the journal now."""
        if self._journal is not None:
            event = {"answers": []} | self._news("closed") | self._last()
            if self._scores:
                event["scores"] = self._scores
            self._journal.append(event | outcome_row(self._trajectory))

    def _news(self, name: str) -> dict[str, Any]:
        """An entry with what is new since the last one."""
        spans = self._trajectory.spans
        news: dict[str, Any] = {"e": name, "k": self._key, "spans": list(map(span_row, spans[self._written :]))}
        self._written = len(spans)
        if self._answers:
            news["answers"], self._answers = self._answers, []
        if self._left_out:
            news["rewound"], self._left_out = self._left_out, []
        return news

    def _last(self) -> dict[str, Any]:
        """What stands in no turn: what the world said that none answered, tools that none was told of, retries of the last."""
        last = {} if self.said is NOTHING else {"said": _said_row(self.said)}
        if self._unanswered is not None and self._unanswered.retries:  # the step failed each time
            last["retries"] = self._unanswered.retries
        return last | self._tools_row(self.tools) if self.tools and self.tools is not self._told else last

    def _tools_row(self, tools: Sequence[Any]) -> dict[str, Any]:
        assert self._journal is not None
        had, self._told = self._told, tools
        return {"tools": self._journal.append_definition("tools", list(tools)) if tools else ""} if tools or had else {}


def _said_row(said: Any) -> Any:
    """What the world said as JSON; None for what cannot be: an image that was not taken in."""
    if isinstance(said, InlineObservation):
        row = {"inline": said.text, "keep_chars": said.keep_chars, "keep_tokens": said.keep_tokens, "tail": said.tail}
        return {name: value for name, value in row.items() if value is not None}
    try:
        messages: tuple[Message, ...] = as_messages(said)
    except (TypeError, ValueError):
        return None
    return None if any(message.has_raw_media for message in messages) else [message_row(message) for message in messages]


def _scores_row(value: Any) -> Any:
    if isinstance(value, Scores):
        row = {"own": value.own, "turns": value.turns, "parts": value.parts, "metrics": value.metrics}
        return {name: part for name, part in row.items() if part or name == "own"}
    return None if value is None else float(value)

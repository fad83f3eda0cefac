"""Journal entries of one episode, written before anything can fail on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.envs import InlineObservation, Scores
from turnwise.records.run_dir import JsonLines
from turnwise.records.serialization import key_row, message_row, outcome_row, span_row, turn_row
from turnwise.types import Message, Trajectory, Turn, as_messages

NO_OBSERVATION: Any = object()
"""No observation since the last turn."""


class EpisodeJournal:
    """Writes the entries of one episode: opened, each turn, failed attempts, closed."""

    def __init__(self, journal: JsonLines | None, trajectory: Trajectory, settings: str = "") -> None:
        """
        Args:
            journal: the journal file; None writes nothing.
            trajectory: the growing trajectory.
            settings: name of the episode's settings in the journal.
        """
        self._journal = journal
        self._trajectory = trajectory
        self._key = key_row(trajectory.key)
        self._written = 0  # spans that the journal holds
        self._steps: list[tuple[int, float | None, Mapping[str, Any], float, int]] = []
        self._untrained: list[tuple[int, int, str]] = []
        self.observation: Any = NO_OBSERVATION
        """Last observation as the environment returned it; written with the next turn, or with the last entry."""
        self.observation_changed = False
        """Whether the messages of the next turn differ from it: it was truncated, or rewound the reply before it."""
        self.tools: Sequence[Any] = ()
        """Tools offered when the conversation was opened."""
        self._written_tools: Sequence[Any] = ()  # tools of this attempt that the journal has
        self._scores: dict[str, Any] = {}
        self._last_turn: Turn | None = None
        if journal is not None:
            event = {"e": "opened", "k": self._key, "template": trajectory.template}
            journal.append(event | {"settings": settings} if settings else event)

    def env_step(self, turn: int) -> None:
        """Queue a turn's reward and info for the next entry."""
        record, self._last_turn = self._trajectory.turns[turn], None
        self._steps.append((turn, record.reward, record.info, record.env_s, record.retries))

    def untrained(self, span: int, position: int, reason: str) -> None:
        """Queue for the next entry that a span is untrained from one of its positions on."""
        self._untrained.append((span, position, reason))

    def reward(self, whose: str, value: Any) -> None:
        """Store a reward, the episode's `own` or its `group`'s, and its failures so far; written with the last entry."""
        if self._journal is not None:
            failed = sum(failure.phase == "reward" for failure in self._trajectory.failures)
            self._scores[whose] = [_scores_row(value), failed]

    def turn(self, turn: Turn, tools: Sequence[Any], call: int) -> None:
        """Write a sampled turn with the tools of its prompt and the number of its first call."""
        if self._journal is not None:
            event = self._entry("turn")
            event["n"], event["call"], event["turn"] = len(self._trajectory.turns) - 1, call, turn_row(turn)
            if tools is not self._written_tools:
                event |= self._tools_row(tools)
            if self.observation_changed:
                event["said"] = _observation_row(self.observation)
            self._journal.append(event)
        self.observation, self.observation_changed, self._last_turn = NO_OBSERVATION, False, turn

    def failed_attempt(self) -> None:
        """Write the end of an attempt that failed for good."""
        if self._journal is not None:
            self._journal.append({"answers": []} | self._entry("failed_attempt") | self._closing_fields())
        self._steps, self._untrained, self._written_tools, self._last_turn = [], [], (), None
        self.observation, self.observation_changed, self.tools = NO_OBSERVATION, False, ()

    def close(self) -> None:
        """Write the end of the episode."""
        if self._journal is not None:
            event = {"answers": []} | self._entry("closed") | self._closing_fields()
            if self._scores:
                event["scores"] = self._scores
            self._journal.append(event | outcome_row(self._trajectory))

    def _entry(self, name: str) -> dict[str, Any]:
        """Return an entry with what is new since the last one."""
        spans = self._trajectory.spans
        entry: dict[str, Any] = {"e": name, "k": self._key, "spans": list(map(span_row, spans[self._written :]))}
        self._written = len(spans)
        if self._steps:
            entry["answers"], self._steps = self._steps, []
        if self._untrained:
            entry["rewound"], self._untrained = self._untrained, []
        return entry

    def _closing_fields(self) -> dict[str, Any]:
        """Return fields that no turn holds: an observation without a reply, tools without a turn, retries of the last step."""
        fields = {} if self.observation is NO_OBSERVATION else {"said": _observation_row(self.observation)}
        if self._last_turn is not None and self._last_turn.retries:  # the step failed each time
            fields["retries"] = self._last_turn.retries
        return fields | self._tools_row(self.tools) if self.tools and self.tools is not self._written_tools else fields

    def _tools_row(self, tools: Sequence[Any]) -> dict[str, Any]:
        assert self._journal is not None
        previous, self._written_tools = self._written_tools, tools
        return {"tools": self._journal.append_definition("tools", list(tools)) if tools else ""} if tools or previous else {}


def _observation_row(observation: Any) -> Any:
    """Return an observation as JSON; None if it holds media that were not stored."""
    if isinstance(observation, InlineObservation):
        row = {
            "inline": observation.text,
            "keep_chars": observation.keep_chars,
            "keep_tokens": observation.keep_tokens,
            "tail": observation.tail,
        }
        return {name: value for name, value in row.items() if value is not None}
    try:
        messages: tuple[Message, ...] = as_messages(observation)
    except (TypeError, ValueError):
        return None
    return None if any(message.has_raw_media for message in messages) else [message_row(message) for message in messages]


def _scores_row(value: Any) -> Any:
    if isinstance(value, Scores):
        row = {"own": value.own, "turns": value.turns, "parts": value.parts, "metrics": value.metrics}
        return {name: part for name, part in row.items() if part or name == "own"}
    return None if value is None else float(value)

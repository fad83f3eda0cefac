"""The journal of one episode: what happened, on the disk before anything can fail on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnwright.envs import Scores
from turnwright.records.run_dir import EventLog
from turnwright.records.serialization import (
    REWOUND,
    Event,
    apply_event,
    key_row,
    outcome_row,
    span_row,
    turn_row,
)
from turnwright.rollouts.resume import observation_row
from turnwright.types import Trajectory, Turn

NO_OBSERVATION: Any = object()
"""No observation since the last turn."""


class EpisodeJournal:
    """Writes the entries of one episode: opened, each turn, failed attempts, closed."""

    def __init__(
        self, journal: EventLog | None, trajectory: Trajectory, settings: str = ""
    ) -> None:
        """`settings` is the name of the episode's settings in the journal; without a
        journal nothing is written."""
        self._journal = journal
        self._trajectory = trajectory
        self._key = key_row(trajectory.key)
        self._written = 0  # spans that the journal holds
        self._steps: list[tuple[int, float | None, Mapping[str, Any], float, int]] = []
        self._untrained: list[tuple[int, int, str]] = []
        self._weights: list[tuple[int, tuple[float, ...]]] = []
        self.observation: Any = NO_OBSERVATION
        """Last observation as the environment returned it; written with the next turn,
        or with the last entry."""
        self.observation_changed = False
        """Whether the messages of the next turn differ from it: it was truncated, or
        rewound the reply before it."""
        self.tools: Sequence[Any] = ()
        """Tools offered when the conversation was opened."""
        self._written_tools: Sequence[Any] = ()  # tools of this attempt that the journal has
        self._scores: dict[str, Any] = {}
        self._last_turn: Turn | None = None
        self._settings = settings

    def open(self) -> None:
        """Write the beginning of the episode."""
        if self._journal is None:
            return
        event = {"e": "opened", "k": self._key, "template": self._trajectory.template}
        if self._settings:
            event["settings"] = self._settings
        self._journal.append(event)

    def offer(self, tools: Sequence[Any]) -> None:
        """Take note of the tools that a conversation is opened with."""
        self.tools = tools

    def mark_changed(self) -> None:
        """Take note that the next turn's messages are not the observation as it was returned."""
        self.observation_changed = True

    def env_step(self, turn: int) -> None:
        """Queue a turn's reward and info for the next entry."""
        record, self._last_turn = self._trajectory.turns[turn], None
        self._steps.append((turn, record.reward, record.info, record.env_s, record.retries))

    def mark_untrained(self, spans: Iterable[int], position: int, reason: str = REWOUND) -> None:
        """Exclude ids of a reply's spans from training, from a path position on."""
        for index in spans:
            span = self._trajectory.spans[index]
            if not span.trained or span.end <= position:
                continue
            span.untrained_from = min(span.trained, max(0, position - span.start))
            span.untrained = reason
            if index < self._written:  # else the row of the span will have it
                self._untrained.append((index, span.untrained_from, reason))

    def weigh(self, number: int, weights: tuple[float, ...]) -> None:
        """Set the training weights of a turn's sampled ids."""
        turn = self._trajectory.turns[number]
        if weights != (turn.weights or (1.0,) * len(weights)):
            turn.weights = weights
            self._weights.append((number, weights))

    def reward(self, whose: str, value: Any) -> None:
        """Store a reward, the episode's `own` or its `group`'s, and its failures so far;
        written with the last entry."""
        if self._journal is not None:
            failed = sum(failure.phase == "reward" for failure in self._trajectory.failures)
            self._scores[whose] = [_scores_row(value), failed]

    def repeat(self, event: Event) -> None:
        """Write an event of an earlier process again, and apply it to the trajectory."""
        if self._journal is not None:
            self._journal.append(event | {"resumed": True})
        apply_event(self._trajectory, event)
        self._written = len(self._trajectory.spans)

    async def durable(self) -> None:
        """Return when every entry so far is on the disk."""
        if self._journal is not None:
            await self._journal.durable()

    def step(self, turn: int, row: Mapping[str, Any]) -> None:
        """Write the result of a step in an environment with effects, -1 for its reset,
        with the state after it."""
        if self._journal is not None:
            self._journal.append({**row, "e": "step", "k": self._key, "n": turn})

    def turn(self, turn: Turn, tools: Sequence[Any], call: Mapping[str, Any]) -> None:
        """Write a turn with the tools of its prompt.

        `call` has the number and seed of its first call, its drafted and accepted ids, and
        `resumed` if an earlier process sampled it.
        """
        if self._journal is not None:
            event = self._entry("turn")
            event |= {"n": len(self._trajectory.turns) - 1, **call, "turn": turn_row(turn)}
            if tools is not self._written_tools:
                event |= self._tools_row(tools)
            if self.observation_changed:
                event["said"] = observation_row(self.observation)
            self._journal.append(event)
        self.observation, self.observation_changed, self._last_turn = NO_OBSERVATION, False, turn

    def failed_attempt(self) -> None:
        """Write the end of an attempt that failed for good."""
        if self._journal is not None:
            self._journal.append(
                {"answers": []} | self._entry("failed_attempt") | self._closing_fields()
            )
        self._steps, self._untrained, self._weights, self._written_tools, self._last_turn = (
            [],
            [],
            [],
            (),
            None,
        )
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
        entry: dict[str, Any] = {
            "e": name,
            "k": self._key,
            "spans": list(map(span_row, spans[self._written :])),
        }
        self._written = len(spans)
        if self._steps:
            entry["answers"], self._steps = self._steps, []
        if self._untrained:
            entry["rewound"], self._untrained = self._untrained, []
        if self._weights:
            entry["weights"], self._weights = self._weights, []
        return entry

    def _closing_fields(self) -> dict[str, Any]:
        """Return fields that no turn holds: an observation without a reply, tools without a turn,
        retries of the last step."""
        fields = (
            {}
            if self.observation is NO_OBSERVATION
            else {"said": observation_row(self.observation)}
        )
        if self._last_turn is not None and self._last_turn.retries:  # the step failed each time
            fields["retries"] = self._last_turn.retries
        return (
            fields | self._tools_row(self.tools)
            if self.tools and self.tools is not self._written_tools
            else fields
        )

    def _tools_row(self, tools: Sequence[Any]) -> dict[str, Any]:
        assert self._journal is not None
        previous, self._written_tools = self._written_tools, tools
        return (
            {"tools": self._journal.append_definition("tools", list(tools)) if tools else ""}
            if tools or previous
            else {}
        )


def _scores_row(value: Any) -> Any:
    if isinstance(value, Scores):
        row = {
            "own": value.own,
            "turns": value.turns,
            "parts": value.parts,
            "metrics": value.metrics,
            "agents": value.agents,
        }
        return {name: part for name, part in row.items() if part or name == "own"}
    return None if value is None else float(value)

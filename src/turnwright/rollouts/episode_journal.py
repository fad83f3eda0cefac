"""The journal of one episode: each reply is written before anything uses it, the rest with the next
entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class ReplyCalls(NamedTuple):
    """The engine calls that a turn's reply took."""

    first: int
    """Number of the first one, among the calls of the episode."""
    seed: int
    """Seed of each of them."""
    drafted: int
    """Ids that a draft model proposed."""
    accepted: int
    """Drafted ids that were sampled."""
    resumed: bool
    """Whether an earlier process sampled the reply."""


class EpisodeJournal:
    """Writes the entries of one episode: opened, each turn, failed attempts, closed.

    What has no entry of its own waits for the next one: steps, ids that lose their training, and
    weights. Without a journal nothing is written.
    """

    def __init__(
        self, journal: EventLog | None, trajectory: Trajectory, settings: str = ""
    ) -> None:
        """`settings` is the name of the episode's settings in the journal."""
        self._journal = journal
        self._trajectory = trajectory
        self._key = key_row(trajectory.key)
        self._settings = settings

        # What the journal has, and what waits for the next entry.
        self._written_spans = 0
        self._written_tools: Sequence[Any] = ()  # of this attempt
        self._answers: list[tuple[int, float | None, Mapping[str, Any], float, int]] = []
        self._untrained: list[tuple[int, int, str]] = []
        self._weights: list[tuple[int, tuple[float, ...]]] = []
        self._scores: dict[str, Any] = {}
        self._last_turn: Turn | None = None  # while its step has not returned

        self.observation: Any = NO_OBSERVATION
        """Last observation as the environment returned it; written with the next turn, or with the
        last entry."""
        self.observation_changed = False
        """Whether the messages of the next turn differ from it: it was truncated, or rewound the
        reply before it."""
        self.tools: Sequence[Any] = ()
        """Tools offered when the conversation was opened."""

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

    def env_step(self, number: int) -> None:
        """Queue a turn's reward, info, seconds and retries for the next entry."""
        turn = self._trajectory.turns[number]
        # A plain tuple: orjson writes a named one as its repr.
        self._answers.append((number, turn.reward, turn.info, turn.env_s, turn.retries))
        self._last_turn = None

    def mark_untrained(self, spans: Iterable[int], position: int, reason: str = REWOUND) -> None:
        """Exclude ids of a reply's spans from training, from a path position on."""
        for index in spans:
            span = self._trajectory.spans[index]
            if not span.trained or span.end <= position:
                continue

            span.untrained_from = min(span.trained, max(0, position - span.start))
            span.untrained = reason
            # The row of a span that is not written yet will have it.
            if index < self._written_spans:
                self._untrained.append((index, span.untrained_from, reason))

    def weigh(self, number: int, weights: tuple[float, ...]) -> None:
        """Set the training weights of a turn's sampled ids."""
        turn = self._trajectory.turns[number]
        if weights != (turn.weights or (1.0,) * len(weights)):
            turn.weights = weights
            self._weights.append((number, weights))

    def reward(self, whose: str, value: Any) -> None:
        """Store a reward, the episode's `own` or its `group`'s, with its failures so far.

        It is written with the last entry.
        """
        if self._journal is not None:
            failures = sum(failure.phase == "reward" for failure in self._trajectory.failures)
            self._scores[whose] = [_scores_row(value), failures]

    def repeat(self, event: Event) -> None:
        """Write an event of an earlier process again, and apply it to the trajectory."""
        if self._journal is not None:
            self._journal.append(event | {"resumed": True})
        apply_event(self._trajectory, event)
        self._written_spans = len(self._trajectory.spans)

    async def durable(self) -> None:
        """Return when every entry so far is on the disk."""
        if self._journal is not None:
            await self._journal.durable()

    def step(self, turn: int, row: Mapping[str, Any]) -> None:
        """Write the result of a step in an environment with effects, and the state after it.

        The step of its reset is -1.
        """
        if self._journal is not None:
            self._journal.append({**row, "e": "step", "k": self._key, "n": turn})

    def turn(self, turn: Turn, tools: Sequence[Any], calls: ReplyCalls) -> None:
        """Write a turn, with the tools of its prompt and the calls that its reply took."""
        if self._journal is not None:
            event = self._entry("turn")
            event["n"] = len(self._trajectory.turns) - 1
            event["call"] = calls.first
            event["seed"] = calls.seed
            if calls.drafted:
                event["drafts"] = calls.drafted, calls.accepted
            if calls.resumed:
                event["resumed"] = True
            event["turn"] = turn_row(turn)
            if tools is not self._written_tools:
                self._add_tools(event, tools)
            if self.observation_changed:
                event["said"] = observation_row(self.observation)
            self._journal.append(event)

        self.observation = NO_OBSERVATION
        self.observation_changed = False
        self._last_turn = turn

    def failed_attempt(self) -> None:
        """Write the end of an attempt that failed for good."""
        if self._journal is not None:
            self._journal.append(self._closing_entry("failed_attempt"))
        self._answers = []
        self._untrained = []
        self._weights = []
        self._written_tools = ()
        self._last_turn = None
        self.observation = NO_OBSERVATION
        self.observation_changed = False
        self.tools = ()

    def close(self) -> None:
        """Write the end of the episode."""
        if self._journal is None:
            return
        event = self._closing_entry("closed")
        if self._scores:
            event["scores"] = self._scores
        self._journal.append(event | outcome_row(self._trajectory))

    def _entry(self, name: str) -> dict[str, Any]:
        """Return an entry with what is new since the last one."""
        spans = self._trajectory.spans
        entry: dict[str, Any] = {
            "e": name,
            "k": self._key,
            "spans": list(map(span_row, spans[self._written_spans :])),
        }
        self._written_spans = len(spans)

        # A new list each time: the entry keeps the one that it has.
        if self._answers:
            entry["answers"] = self._answers
            self._answers = []
        if self._untrained:
            entry["rewound"] = self._untrained
            self._untrained = []
        if self._weights:
            entry["weights"] = self._weights
            self._weights = []
        return entry

    def _closing_entry(self, name: str) -> dict[str, Any]:
        """Return an entry with what no turn holds.

        That is an observation without a reply, tools without a turn, and retries of the last step.
        """
        entry = {"answers": []} | self._entry(name)
        if self.observation is not NO_OBSERVATION:
            entry["said"] = observation_row(self.observation)
        if self._last_turn is not None and self._last_turn.retries:  # the step failed each time
            entry["retries"] = self._last_turn.retries
        if self.tools and self.tools is not self._written_tools:
            self._add_tools(entry, self.tools)
        return entry

    def _add_tools(self, entry: dict[str, Any], tools: Sequence[Any]) -> None:
        """Add the tools' definition to an entry; an empty name where a turn has none after one that
        had some."""
        assert self._journal is not None
        if tools:
            entry["tools"] = self._journal.append_definition("tools", list(tools))
        elif self._written_tools:
            entry["tools"] = ""
        self._written_tools = tools


def _scores_row(value: Any) -> Any:
    """Return a reward as JSON, without the empty parts of `Scores`."""
    if value is None:
        return None
    if not isinstance(value, Scores):
        return float(value)
    row = {
        "own": value.own,
        "turns": value.turns,
        "parts": value.parts,
        "metrics": value.metrics,
        "agents": value.agents,
    }
    return {name: part for name, part in row.items() if part or name == "own"}

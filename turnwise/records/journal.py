"""Episodes as a journal tells of them: every call and every answer, for whoever plays them again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import TraceError
from turnwise.records.serialization import Event, apply_event, read_message
from turnwise.types import EpisodeKey, Message, Task, Trajectory, Turn


@dataclass(slots=True)
class RecordedTurn:
    """One turn as it happened: what was sampled, and how the world answered."""

    turn: Turn
    tries: int
    """How many calls of the engine failed before it answered."""
    number: int
    """Within the attempt, from 0."""
    call: int
    """Number of its first call: calls that ran at the same time become turns in the order of their answers."""
    tools: list[Any]
    """Schemas of the tools that the model was told of."""
    observation: Any = None
    """What the world had said before it, where the turn's messages are not all of it; as JSON."""
    has_observation: bool = False
    reward: float | None = None
    """What the step paid, without what a reward function added later."""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RecordedAttempt:
    """One attempt at an episode; all but the last failed beyond mending."""

    turns: list[RecordedTurn] = field(default_factory=list)
    unanswered: bool = False
    """Whether the world said something at its end that no turn answered; `said` has it."""
    said: Any = None
    """As JSON; None where it could not be written down."""
    tools: list[Any] = field(default_factory=list)
    first_span: int = 0
    """The first span of the trajectory that is of this attempt."""


@dataclass(slots=True)
class RecordedEpisode:
    """One episode of a journal."""

    trajectory: Trajectory
    settings: Mapping[str, Any]
    """What it was played by; empty in journals of releases that did not write it."""
    attempts: list[RecordedAttempt]
    scores: Mapping[str, Any] = field(default_factory=dict)
    """What the rewards came to, by `own` and `group`: (value, how many rewards had failed before)."""

    @property
    def key(self) -> EpisodeKey:
        """Of the episode."""
        return self.trajectory.key


class _Reader:
    """Goes through the events of a journal."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._named: dict[str, Any] = {}
        self.running: dict[EpisodeKey, RecordedEpisode] = {}

    def opened(self, key: EpisodeKey, event: Event) -> None:
        task = self._tasks.get(key.task) or Task(id=key.task)
        trajectory = Trajectory(task, key, template=event.get("template", ""))
        self.running[key] = RecordedEpisode(trajectory, self._named.get(event.get("settings", ""), {}), [RecordedAttempt()])

    def name(self, event: Event) -> None:
        self._named[event["name"]] = event["value"]

    def take(self, key: EpisodeKey, event: Event) -> RecordedEpisode | None:
        """The episode where this event was its last."""
        told = self.running.get(key)
        if told is None:
            return None
        trajectory, attempt = told.trajectory, told.attempts[-1]
        for number, reward, info, *_ in event.get("answers", ()):
            turn = attempt.turns[number]
            if not turn.has_observation:  # a later one has what a reward function added
                turn.has_observation, turn.reward, turn.info = True, reward, info
        if "tools" in event:
            attempt.tools = self._named[event["tools"]] if event["tools"] else []
        if event["e"] == "turn" and event["n"] != len(trajectory.turns):
            raise TraceError(f"the journal of episode {event['k']} misses turn {len(trajectory.turns)}: the file was edited")
        apply_event(trajectory, event)
        if event["e"] == "turn":
            turn, number = trajectory.turns[-1], len(attempt.turns)
            attempt.turns.append(
                RecordedTurn(turn, turn.retries, number, event.get("call", number), attempt.tools, event.get("said"))
            )
            return None
        attempt.unanswered, attempt.said = "said" in event, event.get("said")
        if event["e"] == "failed_attempt":
            told.attempts.append(RecordedAttempt(first_span=len(trajectory.spans)))
            return None
        told.scores = event.get("scores", {})
        del self.running[key]
        return told


def read_recorded_steps(events: Iterable[Event], tasks: Mapping[str, Task]) -> Iterator[list[RecordedEpisode]]:
    """The finished episodes of a journal, those of a phase and step together, in order.

    Of an episode that stands there twice (it was cut off, and played again) the last within its step.

    Args:
        events: in the order in which they were written.
        tasks: by id; of one that is not there only its id is known.

    Raises:
        TraceError: when an event does not fit those before it.
    """
    reader = _Reader(tasks)
    done: dict[EpisodeKey, RecordedEpisode] = {}
    for event in events:
        kind = event.get("e")
        if kind in ("settings", "tools"):
            reader.name(event)
        if kind == "resumed":
            reader.running.clear()  # what was cut off never ends
        if kind not in ("opened", "turn", "failed_attempt", "closed"):
            continue
        key = EpisodeKey(*event["k"])
        if kind == "opened":
            if done and not {_step(other) for other in (key, *reader.running)} & {_step(other) for other in done}:
                yield list(done.values())
                done = {}
            reader.opened(key, event)
            continue
        try:
            told = reader.take(key, event)
        except (IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise TraceError(f"the journal of episode {event['k']} has an event that does not fit ({error!r})") from error
        if told is not None:
            done[key] = told
    if done:
        yield list(done.values())


def _step(key: EpisodeKey) -> tuple[str, int]:
    return key.phase, key.step


def read_messages(row: Any) -> tuple[Message, ...]:
    """Messages that the world said, as the journal has them."""
    return tuple(read_message(message) for message in row)

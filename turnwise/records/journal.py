"""Recorded episodes of a journal with every call and every observation, for replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.records.serialization import Event, apply_event, read_message, reading
from turnwise.types import EpisodeKey, Message, Task, Trajectory, Turn


@dataclass(slots=True)
class RecordedTurn:
    """One recorded turn: the sampled reply and the environment's response."""

    turn: Turn
    tries: int
    """Number of failed engine calls before the answer."""
    number: int
    """Index within the attempt."""
    call: int
    """Number of its first call. Concurrent calls become turns in the order of their answers."""
    tools: list[Any]
    """Schemas of the tools offered to the model."""
    observation: Any = None
    """Observation before the turn as JSON, if it differs from the turn's messages."""
    has_observation: bool = False
    """Whether the environment responded to the turn."""
    reward: float | None = None
    """Reward of the step, without later additions of a reward function."""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RecordedAttempt:
    """One attempt at an episode; all but the last failed for good."""

    turns: list[RecordedTurn] = field(default_factory=list)
    has_observation: bool = False
    """Whether its last observation has no reply; `observation` has it."""
    observation: Any = None
    """The last observation as JSON; None if it could not be recorded."""
    tools: list[Any] = field(default_factory=list)
    first_span: int = 0
    """Index of the attempt's first span in the trajectory."""


@dataclass(slots=True)
class RecordedEpisode:
    """One episode of a journal."""

    trajectory: Trajectory
    settings: Mapping[str, Any]
    """Settings of the episode; empty in journals of releases that did not write them."""
    attempts: list[RecordedAttempt]
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Rewards by `own` and `group`: (value, number of reward failures before)."""

    @property
    def key(self) -> EpisodeKey:
        """Key of the episode."""
        return self.trajectory.key


class _Reader:
    """Collects episodes from the events of a journal."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self.definitions: dict[str, Any] = {}
        self.running: dict[EpisodeKey, RecordedEpisode] = {}

    def opened(self, key: EpisodeKey, event: Event) -> None:
        task = self._tasks.get(key.task) or Task(id=key.task)
        trajectory = Trajectory(task, key, template=event.get("template", ""))
        settings = self.definitions.get(event.get("settings", ""), {})
        self.running[key] = RecordedEpisode(trajectory, settings, [RecordedAttempt()])

    def take(self, key: EpisodeKey, event: Event) -> RecordedEpisode | None:
        """Apply an event; return the episode if it was its last."""
        episode = self.running.get(key)
        if episode is None:
            return None
        trajectory, attempt = episode.trajectory, episode.attempts[-1]
        for number, reward, info, *_ in event.get("answers", ()):
            turn = attempt.turns[number]
            if not turn.has_observation:  # later entries include what a reward function added
                turn.has_observation, turn.reward, turn.info = True, reward, info
        if "tools" in event:
            attempt.tools = self.definitions[event["tools"]] if event["tools"] else []
        apply_event(trajectory, event)
        if event["e"] == "turn":
            turn, number = trajectory.turns[-1], len(attempt.turns)
            call, said = event.get("call", number), event.get("said")
            attempt.turns.append(RecordedTurn(turn, turn.retries, number, call, attempt.tools, said))
            return None
        attempt.has_observation, attempt.observation = "said" in event, event.get("said")
        if event["e"] == "failed_attempt":
            episode.attempts.append(RecordedAttempt(first_span=len(trajectory.spans)))
            return None
        episode.scores = event.get("scores", {})
        del self.running[key]
        return episode


def read_recorded_steps(events: Iterable[Event], tasks: Mapping[str, Task]) -> Iterator[list[RecordedEpisode]]:
    """Yield the finished episodes of a journal, those of one phase and step together, in order.

    Of an episode recorded twice (interrupted, then played again), only the last within its step is returned. A task missing in
    `tasks` is replaced by one that has only the id.

    Raises `TraceError` when an event does not fit those before it.
    """
    reader = _Reader(tasks)
    done: dict[EpisodeKey, RecordedEpisode] = {}
    for event in events:
        kind = event.get("e")
        if kind in ("settings", "tools"):
            reader.definitions[event["name"]] = event["value"]
        if kind == "resumed":
            reader.running.clear()  # interrupted episodes never end
        if kind not in ("opened", "turn", "failed_attempt", "closed"):
            continue
        key = EpisodeKey(*event["k"])
        if kind == "opened":
            current = {(other.phase, other.step) for other in (key, *reader.running)}
            if done and not current & {(other.phase, other.step) for other in done}:
                yield list(done.values())
                done = {}
            reader.opened(key, event)
            continue
        with reading(event):
            episode = reader.take(key, event)
        if episode is not None:
            done[key] = episode
    if done:
        yield list(done.values())


def read_messages(row: Any) -> tuple[Message, ...]:
    """Return the messages of an observation as recorded in the journal."""
    return tuple(read_message(message) for message in row)

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
    tries: int  # number of failed engine calls before the answer
    number: int  # index within the attempt
    call: int  # number of its first call. Concurrent calls become turns in the order of their answers.
    tools: list[Any]  # schemas of the tools offered to the model
    observation: Any = None  # observation before the turn as JSON, if it differs from the turn's messages
    has_observation: bool = False  # whether the environment responded to the turn
    reward: float | None = None  # reward of the step, without later additions of a reward function
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RecordedAttempt:
    """One attempt at an episode; all but the last failed for good."""

    turns: list[RecordedTurn] = field(default_factory=list)
    has_observation: bool = False  # whether its last observation has no reply; `observation` has it
    observation: Any = None  # the last observation as JSON; None if it could not be recorded
    tools: list[Any] = field(default_factory=list)
    first_span: int = 0  # index of the attempt's first span in the trajectory


@dataclass(slots=True)
class RecordedEpisode:
    """One episode of a journal."""

    trajectory: Trajectory
    settings: Mapping[str, Any]  # settings of the episode; empty in journals of releases that did not write them
    attempts: list[RecordedAttempt]
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Rewards by `own` and `group`: (value, number of reward failures before)."""

    @property
    def key(self) -> EpisodeKey:
        """Key of the episode."""
        return self.trajectory.key


def _apply(episode: RecordedEpisode, event: Event, definitions: Mapping[str, Any]) -> bool:
    """Apply an event to its episode; return whether it was its last."""
    trajectory, attempt = episode.trajectory, episode.attempts[-1]
    for number, reward, info, *_ in event.get("answers", ()):
        turn = attempt.turns[number]
        if not turn.has_observation:  # later entries include what a reward function added
            turn.has_observation, turn.reward, turn.info = True, reward, info
    if "tools" in event:
        attempt.tools = definitions[event["tools"]] if event["tools"] else []
    apply_event(trajectory, event)
    if event["e"] == "turn":
        turn, number = trajectory.turns[-1], len(attempt.turns)
        call, said = event.get("call", number), event.get("said")
        attempt.turns.append(RecordedTurn(turn, turn.retries, number, call, attempt.tools, said))
        return False
    attempt.has_observation, attempt.observation = "said" in event, event.get("said")
    if event["e"] == "failed_attempt":
        episode.attempts.append(RecordedAttempt(first_span=len(trajectory.spans)))
        return False
    episode.scores = event.get("scores", {})
    return True


def read_recorded_steps(events: Iterable[Event], tasks: Mapping[str, Task]) -> Iterator[list[RecordedEpisode]]:
    """Yield the finished episodes of a journal, those of one phase and step together, in order.

    Of an episode recorded twice (interrupted, then played again), only the last within its step is returned. A task missing in
    `tasks` is replaced by one that has only the id. Raises `TraceError` when an event does not fit those before it.
    """
    definitions: dict[str, Any] = {}
    running: dict[EpisodeKey, RecordedEpisode] = {}
    done: dict[EpisodeKey, RecordedEpisode] = {}
    for event in events:
        kind = event.get("e")
        if kind in ("settings", "tools"):
            definitions[event["name"]] = event["value"]
        if kind == "resumed":
            running.clear()  # interrupted episodes never end
        if kind not in ("opened", "turn", "failed_attempt", "closed"):
            continue
        key = EpisodeKey(*event["k"])
        if kind == "opened":
            current = {(other.phase, other.step) for other in (key, *running)}
            if done and not current & {(other.phase, other.step) for other in done}:
                yield list(done.values())
                done = {}
            task = tasks.get(key.task) or Task(id=key.task)
            trajectory = Trajectory(task, key, template=event.get("template", ""))
            running[key] = RecordedEpisode(trajectory, definitions.get(event.get("settings", ""), {}), [RecordedAttempt()])
        elif key in running:
            with reading(event):
                if _apply(running[key], event, definitions):
                    done[key] = running.pop(key)
    if done:
        yield list(done.values())


def read_messages(row: Any) -> tuple[Message, ...]:
    """Return the messages of an observation as recorded in the journal."""
    return tuple(read_message(message) for message in row)

"""Recorded episodes of a journal with every call and every observation, for replay and for
resuming interrupted ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwright.records.serialization import Event, apply_event, read_message, reading
from turnwright.types import EpisodeKey, Message, Span, Task, Trajectory, Turn


@dataclass(slots=True)
class RecordedTurn:
    """One recorded turn: the sampled reply and the environment's response."""

    turn: Turn
    tries: int  # number of failed engine calls before the answer
    number: int  # index within the attempt
    # number of its first call. Concurrent calls become turns in the order of their answers.
    call: int
    tools: list[Any]  # schemas of the tools offered to the model
    observation: Any = (
        None  # observation before the turn as JSON, if it differs from the turn's messages
    )
    has_observation: bool = False  # whether the environment responded to the turn
    reward: float | None = None  # reward of the step, without later additions of a reward function
    info: Mapping[str, Any] = field(default_factory=dict)
    sampled: tuple[
        Span, ...
    ] = ()  # its spans as they were sampled, before the environment untrained any of their ids
    drafts: tuple[int, int] = (0, 0)  # drafted ids, and how many of them were sampled
    seed: int | None = None  # seed of its calls


@dataclass(slots=True)
class RecordedAttempt:
    """One attempt at an episode; all but the last failed for good."""

    turns: list[RecordedTurn] = field(default_factory=list)
    has_observation: bool = False  # whether its last observation has no reply; `observation` has it
    observation: Any = None  # the last observation as JSON; None if it could not be recorded
    tools: list[Any] = field(default_factory=list)
    first_span: int = 0  # index of the attempt's first span in the trajectory
    steps: dict[int, Event] = field(default_factory=dict)
    """Of an environment with effects: results of its steps by turn, -1 for its reset; `state` is
    that of the environment."""


@dataclass(slots=True)
class RecordedEpisode:
    """One episode of a journal."""

    trajectory: Trajectory
    settings: Mapping[str, Any]  # settings of the episode
    attempts: list[RecordedAttempt]
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Rewards by `own` and `group`: (value, number of reward failures before)."""
    failed_events: list[Event] = field(default_factory=list)
    """Of an interrupted episode: the events of its failed attempts."""
    other_plays: list[RecordedEpisode] = field(default_factory=list)
    """Of an interrupted episode: its other interrupted plays.

    With concurrent calls each may have turns that no other has.
    """
    events: Sequence[Event] = ()
    """Of an interrupted episode: all events of the play but its first, to
    read it again elsewhere."""
    definitions: Mapping[str, Any] = field(default_factory=dict)
    """Values that these events refer to, by name."""

    @property
    def key(self) -> EpisodeKey:
        """Key of the episode."""
        return self.trajectory.key


def _apply(episode: RecordedEpisode, event: Event, definitions: Mapping[str, Any]) -> bool:
    """Apply an event to its episode; return whether it was its last."""
    trajectory, attempt = episode.trajectory, episode.attempts[-1]
    if event["e"] == "step":
        attempt.steps[event["n"]] = event
        return False
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
        sampled = tuple(replace(trajectory.spans[index]) for index in turn.spans)
        drafted, accepted = event.get("drafts", (0, 0))
        row = RecordedTurn(
            turn,
            turn.retries,
            number,
            call,
            attempt.tools,
            said,
            sampled=sampled,
            seed=event.get("seed"),
        )
        attempt.turns.append(replace(row, drafts=(drafted, accepted)))
        return False
    attempt.has_observation, attempt.observation = "said" in event, event.get("said")
    if event["e"] == "failed_attempt":
        episode.attempts.append(RecordedAttempt(first_span=len(trajectory.spans)))
        return False
    episode.scores = event.get("scores", {})
    return True


def read_recorded_steps(
    events: Iterable[Event], tasks: Mapping[str, Task]
) -> Iterator[list[RecordedEpisode]]:
    """Yield the finished episodes of a journal, those of one phase and step together, in order.

    Of an episode recorded twice (interrupted, then played again), only the last within its step is
    returned. A task missing in `tasks` is replaced by one that has only the id. Raises `TraceError`
    when an event does not fit those before it.
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
            running[key] = RecordedEpisode(
                trajectory, definitions.get(event.get("settings", ""), {}), [RecordedAttempt()]
            )
        elif key in running:
            with reading(event):
                if _apply(running[key], event, definitions):
                    done[key] = running.pop(key)
    if done:
        yield list(done.values())


class InterruptedEpisodes:
    """Episodes that a journal opens and does not close, collected while its events are read.

    An episode may be interrupted again while its turns are played from the record. The earlier play
    then counts, until the later one has as many turns or differs. Closed episodes are kept until
    those of their group are closed, since a group may be interrupted between them.
    """

    def __init__(self) -> None:
        self._groups: defaultdict[tuple[str, int, str], dict[EpisodeKey, list[list[Event]]]] = (
            defaultdict(dict)
        )
        self._definitions: dict[str, Any] = {}

    def read(self, event: Event) -> None:
        """Add an event of the journal."""
        kind = event.get("e")
        if kind == "tools":
            self._definitions[event["name"]] = event["value"]
        if kind not in ("opened", "turn", "step", "failed_attempt", "closed"):
            return
        key = EpisodeKey(*event["k"])
        group = self._groups[key.group]
        if kind == "opened":
            group.setdefault(key, []).append([])
        elif key in group:
            group[key][-1].append(event)
        if all(plays[-1] and plays[-1][-1]["e"] == "closed" for plays in group.values()):
            del self._groups[key.group]

    def episodes(self, tasks: Callable[[str], Task | None]) -> dict[EpisodeKey, RecordedEpisode]:
        """Return the interrupted episodes, of tasks that `tasks` finds by id.

        Raises `TraceError` when an event does not fit those before it.
        """
        found: dict[EpisodeKey, RecordedEpisode] = {}
        for group in self._groups.values():
            for key, plays in group.items():
                task, events = tasks(key.task), _longest(plays)
                if task is None or not events:
                    continue
                others = [
                    self._episode(Trajectory(task, key), play)
                    for play in plays
                    if play is not events
                ]
                found[key] = replace(
                    self._episode(Trajectory(task, key), events), other_plays=others
                )
        return found

    def _episode(self, trajectory: Trajectory, events: list[Event]) -> RecordedEpisode:
        last = max(
            (number for number, event in enumerate(events, 1) if event["e"] == "failed_attempt"),
            default=0,
        )
        known: dict[str, Any] = {"events": events, "definitions": self._definitions}
        episode = RecordedEpisode(
            trajectory, {}, [RecordedAttempt()], failed_events=events[:last], **known
        )
        for event in events:
            if event["e"] != "closed":
                with reading(event):
                    _apply(episode, event, self._definitions)
        return episode


def _longest(plays: list[list[Event]]) -> list[Event]:
    """Return the events of the last play of an episode, or of an earlier one that the last
    only began to repeat."""
    longest: list[Event] = []
    for events in plays:
        known, now = _sampled(longest), _sampled(events)
        if len(now) >= len(known) or known[: len(now)] != now:
            longest = events
    return longest


def _sampled(events: list[Event]) -> list[list[Any]]:
    """Return the sampled ids of each turn and failed attempt."""
    return [
        [event["e"], *(span["ids"] for span in event["spans"] if "logprobs" in span)]
        for event in events
        if event["e"] in ("turn", "failed_attempt")
    ]


def read_messages(row: Any) -> tuple[Message, ...]:
    """Return the messages of an observation as recorded in the journal."""
    return tuple(read_message(message) for message in row)

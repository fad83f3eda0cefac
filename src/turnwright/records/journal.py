"""Recorded episodes: a journal read back, with every call and every observation.

A journal is a list of events, which `rollouts/episode_journal.py` writes: an episode is `opened`,
has a `turn` for each reply and a `failed_attempt` where it starts over, and is `closed`. An event
holds what is new since the one before: spans, and the environment's answers to earlier turns.
`_apply` adds one event to a `RecordedEpisode`. Two readers return different episodes:

- `read_recorded_steps`: the finished ones, for replay;
- `InterruptedEpisodes`: those that a killed process left open, for resuming.

Not here: trajectories alone, without calls and observations (`rebuild_trajectories` and
`apply_event` in `serialization.py`); the file and its checksums (`read_json_lines` in
`run_dir.py`); how a resumed episode uses its record (`ResumedTurns` in `rollouts/resume.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwright.records.serialization import Event, apply_event, read_message, reading
from turnwright.types import EpisodeKey, GroupKey, Message, Span, Task, Trajectory, Turn

Play = list[Event]
"""Events of one play of an episode, without `opened`. An interrupted episode is played again."""


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
    sampled: tuple[Span, ...] = ()
    """Its spans as they were sampled, before the environment untrained any of their ids."""
    drafts: tuple[int, int] = (0, 0)
    """Drafted ids, and how many of them were sampled."""
    seed: int | None = None
    """Seed of its calls."""


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
    steps: dict[int, Event] = field(default_factory=dict)
    """Of an environment with effects: results of its steps by turn, -1 for its reset; `state` is
    that of the environment."""


@dataclass(slots=True)
class RecordedEpisode:
    """One episode of a journal."""

    trajectory: Trajectory
    settings: Mapping[str, Any]
    """Settings of the episode."""
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
    """Of an interrupted episode: all events of the play but its first, to read it again
    elsewhere."""
    definitions: Mapping[str, Any] = field(default_factory=dict)
    """Values that these events refer to, by name."""

    @property
    def key(self) -> EpisodeKey:
        """Key of the episode."""
        return self.trajectory.key


def read_recorded_steps(
    events: Iterable[Event], tasks: Mapping[str, Task]
) -> Iterator[list[RecordedEpisode]]:
    """Yield the finished episodes of a journal, those of one phase and step together, in order.

    Of an episode recorded twice (interrupted, then played again), only the last within its step is
    returned. A task missing in `tasks` is replaced by one that has only the id.

    Raises `TraceError` when an event does not fit those before it.

    Example::

        for episodes in read_recorded_steps(read_json_lines(run / "journal.jsonl"), tasks):
            print(episodes[0].key.step, [episode.trajectory.reward for episode in episodes])
    """
    definitions: dict[str, Any] = {}
    running: dict[EpisodeKey, RecordedEpisode] = {}
    finished: dict[EpisodeKey, RecordedEpisode] = {}

    for event in events:
        kind = event.get("e")
        if kind in ("settings", "tools"):
            definitions[event["name"]] = event["value"]
        if kind == "resumed":
            running.clear()  # what the killed process left open never ends
        if kind not in ("opened", "turn", "failed_attempt", "closed"):
            continue

        key = EpisodeKey(*event["k"])
        if kind == "opened":
            # Episodes of one step overlap, so a step is over when one opens and none of it runs.
            active_steps = {(active.phase, active.step) for active in (key, *running)}
            finished_steps = {(done.phase, done.step) for done in finished}
            if finished and active_steps.isdisjoint(finished_steps):
                yield list(finished.values())
                finished = {}

            task = tasks.get(key.task) or Task(id=key.task)
            trajectory = Trajectory(task, key, template=event.get("template", ""))
            settings = definitions.get(event.get("settings", ""), {})
            running[key] = RecordedEpisode(trajectory, settings, [RecordedAttempt()])
        elif key in running:
            with reading(event):
                is_last = _apply(running[key], event, definitions)
            if is_last:
                finished[key] = running.pop(key)

    if finished:
        yield list(finished.values())


class InterruptedEpisodes:
    """Episodes that a journal opens and does not close, collected while its events are read.

    An episode may be interrupted again while its turns are played from the record. The earlier play
    then counts, until the later one has as many turns or differs. Closed episodes are kept until
    those of their group are closed, since a group may be interrupted between them.

    Example::

        interrupted = InterruptedEpisodes()
        for event in read_json_lines(run / "journal.jsonl"):
            interrupted.read(event)
        episodes = interrupted.episodes(tasks.get)
    """

    def __init__(self) -> None:
        self._groups: defaultdict[GroupKey, dict[EpisodeKey, list[Play]]] = defaultdict(dict)
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
        interrupted: dict[EpisodeKey, RecordedEpisode] = {}
        for group in self._groups.values():
            for key, plays in group.items():
                task = tasks(key.task)
                longest_play = _longest(plays)
                if task is None or not longest_play:
                    continue

                episode = self._episode(Trajectory(task, key), longest_play)
                for play in plays:
                    if play is not longest_play:
                        episode.other_plays.append(self._episode(Trajectory(task, key), play))
                interrupted[key] = episode
        return interrupted

    def _episode(self, trajectory: Trajectory, play: Play) -> RecordedEpisode:
        end_of_failures = 0
        for number, event in enumerate(play, 1):
            if event["e"] == "failed_attempt":
                end_of_failures = number

        episode = RecordedEpisode(
            trajectory,
            settings={},
            attempts=[RecordedAttempt()],
            failed_events=play[:end_of_failures],
            events=play,
            definitions=self._definitions,
        )
        for event in play:
            # The group of a closed episode is interrupted: it is closed again, with its turns.
            if event["e"] != "closed":
                with reading(event):
                    _apply(episode, event, self._definitions)
        return episode


def read_messages(row: Any) -> tuple[Message, ...]:
    """Return the messages of an observation as recorded in the journal."""
    return tuple(read_message(message) for message in row)


def _apply(episode: RecordedEpisode, event: Event, definitions: Mapping[str, Any]) -> bool:
    """Apply an event to its episode; return whether it was its last."""
    attempt = episode.attempts[-1]
    if event["e"] == "step":
        attempt.steps[event["n"]] = event
        return False

    for number, reward, info, *_ in event.get("answers", ()):
        turn = attempt.turns[number]
        if not turn.has_observation:  # later entries include what a reward function added
            turn.has_observation = True
            turn.reward = reward
            turn.info = info

    if "tools" in event:
        attempt.tools = definitions[event["tools"]] if event["tools"] else []

    apply_event(episode.trajectory, event)

    if event["e"] == "turn":
        attempt.turns.append(_recorded_turn(episode.trajectory, attempt, event))
        return False

    # The attempt is over: an observation of its last entry has no reply.
    attempt.has_observation = "said" in event
    attempt.observation = event.get("said")
    if event["e"] == "failed_attempt":
        episode.attempts.append(RecordedAttempt(first_span=len(episode.trajectory.spans)))
        return False
    episode.scores = event.get("scores", {})
    return True


def _recorded_turn(trajectory: Trajectory, attempt: RecordedAttempt, event: Event) -> RecordedTurn:
    """Return the turn that the event has just added to the trajectory."""
    turn = trajectory.turns[-1]
    number = len(attempt.turns)
    drafted, accepted = event.get("drafts", (0, 0))
    return RecordedTurn(
        turn,
        tries=turn.retries,
        number=number,
        call=event.get("call", number),
        tools=attempt.tools,
        observation=event.get("said"),
        # Copies: later events mark ids of the trajectory's own spans as untrained.
        sampled=tuple(replace(trajectory.spans[index]) for index in turn.spans),
        drafts=(drafted, accepted),
        seed=event.get("seed"),
    )


def _longest(plays: list[Play]) -> Play:
    """Return the last play of an episode, or an earlier one that the last only began to repeat."""
    longest: Play = []
    for play in plays:
        replies = _sampled(play)
        longest_replies = _sampled(longest)
        repeats_only = (
            len(replies) < len(longest_replies) and longest_replies[: len(replies)] == replies
        )
        if not repeats_only:
            longest = play
    return longest


def _sampled(play: Play) -> list[list[Any]]:
    """Return the sampled ids of each turn and failed attempt."""
    return [
        [event["e"], *(span["ids"] for span in event["spans"] if "logprobs" in span)]
        for event in play
        if event["e"] in ("turn", "failed_attempt")
    ]

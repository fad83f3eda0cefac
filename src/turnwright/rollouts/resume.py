"""Resuming an interrupted episode: recorded turns answer its next play, then the engine goes on.

`ResumedTurns.take` finds the recorded turn that answers a call, by context, seed and sampling. An
episode that does not come along the recorded way raises `ResumeDiffers`, and starts over.

`ReplySampler.repeat` puts the turn onto the path; `records.journal` reads the record. The rows of
observations and steps at the end of this module are what an environment with effects is resumed
from, and what replays read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwright.engines import Generation
from turnwright.envs import InlineObservation, NewHistory, Step
from turnwright.envs.env import as_step
from turnwright.errors import TurnwrightError
from turnwright.records.journal import RecordedAttempt, RecordedEpisode, RecordedTurn, read_messages
from turnwright.records.serialization import NO_LOGPROB, Event, message_row
from turnwright.rollouts.conversation import ConversationPath
from turnwright.rollouts.counts import add_counts
from turnwright.types import (
    EpisodeKey,
    Message,
    SamplingDistribution,
    Trajectory,
    as_messages,
    ids_with_media_keys,
    placements_between,
)
from turnwright.types.seeds import call_seed

DELAY_S, DELAY_CHECKS = 0.05, 20
"""Interval and number of checks for which an answer waits for answers recorded before it."""


@dataclass(frozen=True, slots=True)
class EarlierEpisodes:
    """Episodes of an earlier process, which are not played again as far as they went."""

    finished: Mapping[EpisodeKey, Trajectory] = field(default_factory=dict)
    """Returned as they are."""
    interrupted: Mapping[EpisodeKey, RecordedEpisode] = field(default_factory=dict)
    """Their recorded turns are not sampled again."""


class RestartEpisode(TurnwrightError):
    """The environment could not be restored to its last state; the episode starts over."""


class ResumeDiffers(RestartEpisode):
    """An interrupted episode cannot go on from its record; it starts over."""


class ResumedTurns:
    """Turns of the last recorded attempt of an interrupted episode; none for an episode that is
    played for the first time.

    An environment's calls must be the recorded ones, in order. Calls of an agent function may be
    concurrent, and some were in flight when the run was killed: each is answered by the recorded
    turn with its context and seed, others are sampled.
    """

    def __init__(self, record: RecordedEpisode | None = None, *, in_order: bool = True) -> None:
        self._in_order = in_order
        self._attempt = RecordedAttempt() if record is None else record.attempts[-1]
        self.failed_events = [] if record is None else record.failed_events
        self.active = record is not None
        """Whether there is a record."""
        self.answered = 0
        """Number of calls that recorded turns answered."""
        self.left: list[tuple[RecordedTurn, Trajectory]] = []
        """Recorded turns that did not answer a call yet, with their trajectories."""
        plays: list[RecordedEpisode] = []
        if record is not None:
            plays.append(record)
            if not in_order:
                plays += record.other_plays
        for play in plays:
            seeds = {turn.seed for turn, _ in self.left}
            for turn in play.attempts[-1].turns:
                if turn.seed not in seeds:
                    self.left.append((turn, play.trajectory))
        self._waiting: set[int] = set()
        """Turns that answer a call and wait for earlier ones, by identity."""

    @property
    def state(self) -> Event | None:
        """The last step entry, if it has the environment's state."""
        steps = self._attempt.steps
        if not steps:
            return None
        last_step = steps[max(steps)]
        return last_step if "state" in last_step else None

    def has(self, turn: int) -> bool:
        """Return whether a turn is recorded."""
        return turn < len(self._attempt.turns)

    @property
    def steps(self) -> Mapping[int, Event]:
        """Recorded results of steps in an environment with effects, by turn; -1 is the reset."""
        return self._attempt.steps

    async def take(
        self, path: ConversationPath, distribution: SamplingDistribution, budget: int
    ) -> RecordedTurn | None:
        """Return the recorded turn that answers the next call of a path.

        None when the engine has to. Raises `ResumeDiffers` when an environment's call is not the
        recorded one.
        """
        context = ids_with_media_keys(path.ids, path.placed)
        seed = call_seed(path.seed, path.calls)
        for turn, trajectory in self.left:
            same_call = (
                id(turn) not in self._waiting
                and turn.turn.agent == path.agent
                and turn.seed in (None, seed)
                and _context(turn, trajectory) == context
            )
            if same_call and _could_be_sampled(turn, distribution, budget):
                self._waiting.add(id(turn))
                await self._wait_for_earlier(turn)
                self.left = [entry for entry in self.left if entry[0] is not turn]
                self.answered += 1
                return turn
            if self._in_order:
                raise ResumeDiffers(
                    f"the context of turn {turn.number + 1} is not the recorded one"
                )
        return None

    async def _wait_for_earlier(self, turn: RecordedTurn) -> None:
        """Wait until the turns recorded before this one have answered.

        The wait is bounded, since they may never be asked for.
        """
        for _ in range(DELAY_CHECKS):
            if not self.left or self.left[0][0] is turn:
                return
            await asyncio.sleep(DELAY_S)

    def check_step(self, number: int, reward: float | None) -> None:
        """Raise `ResumeDiffers` if the step of a recorded turn had another reward."""
        turn = self._attempt.turns[number] if self.has(number) else None
        if turn is not None and turn.has_observation and turn.reward != reward:
            raise ResumeDiffers(
                f"the reward of turn {number + 1} is {reward}, and {turn.reward} was recorded"
            )

    def check_end(self) -> None:
        """Raise `ResumeDiffers` if recorded turns are left at the end of the episode."""
        if self.left:
            first_left, _ = self.left[0]
            raise ResumeDiffers(
                f"the episode ended before turn {first_left.number + 1}, which was recorded"
            )

    def drop(self, trajectory: Trajectory) -> None:
        """Forget the record; count the turns that answered no call."""
        if self.left:
            tokens = sum(len(span.ids) for turn, _ in self.left for span in turn.sampled)
            add_counts(trajectory, "resume_lost_turns", by=len(self.left))
            add_counts(trajectory, "resume_lost_tokens", by=tokens)
        self.left = []
        self._attempt = RecordedAttempt()
        self.active = False


def _could_be_sampled(turn: RecordedTurn, distribution: SamplingDistribution, budget: int) -> bool:
    """Return whether the ids of a turn fit into a budget and are of a distribution."""
    if sum(len(span.ids) for span in turn.sampled) > budget:
        return False
    return all(span.sampling in (None, distribution) for span in turn.sampled)


def _context(recorded: RecordedTurn, trajectory: Trajectory) -> list[int]:
    """Return the recorded context of a turn, with media keys."""
    turn = recorded.turn
    placed = placements_between(trajectory.media_placements(turn.prompt), 0, turn.context)
    return ids_with_media_keys(trajectory.path(turn.prompt)[: turn.context], placed)


def recorded_generation(
    trajectory: Trajectory, recorded: RecordedTurn, ids: list[int]
) -> Generation:
    """Return the last generation of a recorded turn; count in the metrics what sampling counted."""
    for span in recorded.sampled:
        missing = (span.logprobs or ()).count(None)
        if missing:
            is_masked = span.untrained == NO_LOGPROB
            name = "logprobs_masked" if is_masked else "logprobs_recomputed"
            add_counts(trajectory, name, by=missing)

    drafted, accepted = recorded.drafts
    if drafted:
        add_counts(trajectory, "draft_ids", by=drafted)
        add_counts(trajectory, "draft_ids_accepted", by=accepted)
    if recorded.tries:
        add_counts(trajectory, "engine_retries", by=recorded.tries)

    # The spans have the logprobs and the version already.
    finish: Any = recorded.turn.finish
    return Generation(
        ids=ids,
        logprobs=(),
        finish=finish,
        version=0,
        cached_tokens=recorded.turn.cached,
        extras=recorded.turn.extras,
        drafted=drafted,
        accepted=accepted,
    )


def observation_row(observation: Any) -> Any:
    """Return an observation as JSON; None if it holds media that were not stored."""
    if isinstance(observation, InlineObservation):
        if observation.message.has_raw_media:
            return None
        row = {
            "inline": message_row(observation.message)["content"],
            "keep_chars": observation.keep_chars,
            "keep_tokens": observation.keep_tokens,
            "tail": observation.tail,
        }
        return {name: value for name, value in row.items() if value is not None}

    if isinstance(observation, NewHistory):
        if any(message.has_raw_media for message in observation.new):
            return None
        history: list[Any] = []
        for item in observation.messages:
            history.append(item if isinstance(item, int) else message_row(item))
        return {"history": history}

    try:
        messages: tuple[Message, ...] = as_messages(observation)
    except (TypeError, ValueError):
        return None
    if any(message.has_raw_media for message in messages):
        return None
    return [message_row(message) for message in messages]


def read_observation(row: Any) -> tuple[Message, ...] | InlineObservation | NewHistory:
    """Return the observation that `observation_row` wrote."""
    if not isinstance(row, Mapping):
        return read_messages(row or ())

    if "history" in row:
        history: list[int | Message] = []
        for item in row["history"]:
            history.append(item if isinstance(item, int) else read_messages([item])[0])
        return NewHistory(history)

    (inserted,) = read_messages([{"role": "user", "content": row["inline"]}])
    return InlineObservation(
        inserted.content, row.get("keep_chars"), row.get("keep_tokens"), row["tail"]
    )


def step_row(step: Step) -> dict[str, Any]:
    """Return the result of a step as JSON."""
    return {
        "observation": observation_row(step.observation),
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": dict(step.info),
    }


def read_step(row: Mapping[str, Any]) -> Step:
    """Return the step that `step_row` wrote."""
    observation = read_observation(row["observation"])
    return as_step((observation, *(row[name] for name in Step._fields[1:])))

"""Recorded environment: repeats the observations of a run, whatever the model does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from turnwright.envs import Action, Env, InlineObservation, Scores, Step
from turnwright.envs.user_code import RemoteException
from turnwright.errors import InvalidAction
from turnwright.records.journal import RecordedAttempt, RecordedEpisode, read_messages
from turnwright.rollouts.resume import RestartEpisode, read_observation
from turnwright.types import EpisodeKey, Failure, FailureKind, Message, StopReason, Task, Trajectory

Reward = Callable[[Trajectory], Any]
_REFUSED = ({"invalid_action"}, {"invalid_action", "asked_again"})
"""Keys in a turn's info for an action that the environment rejected."""


class RecordedEnvTimeout(RemoteException):
    """A recorded environment failure at the deadline of the episode."""

    over = True


class RecordedEpisodeEnvs:
    """Environments of one recorded episode; `make` is a factory for `EpisodeSpec`.

    All instances of an episode (after failures) share the replayed state.
    """

    def __init__(self, episode: RecordedEpisode, reward: Reward | None = None) -> None:
        """`reward` replaces the recorded reward of the episode."""
        self.episode, self.reward_override = episode, reward
        trajectory = episode.trajectory
        chain = [
            *trajectory.failures,
            *([trajectory.error] if trajectory.error is not None else []),
        ]
        self.env_failures = [
            failure for failure in chain if failure.phase in ("reset", "step", "close")
        ]
        self.reward_failures = [failure for failure in chain if failure.phase == "reward"]
        self.reward_calls = 0
        """Number of reward failures so far, plus later calls."""
        self.attempt_index = 0
        self.steps_taken = 0
        """Steps taken in the current attempt."""
        self.opened = False
        """Whether the current attempt was reset."""
        self.recovering_from: Failure | None = None

    @property
    def attempt(self) -> RecordedAttempt:
        """The current attempt."""
        return self.episode.attempts[self.attempt_index]

    def make(self) -> Env:
        """Return another instance."""
        return RecordedEnv(self)

    def fails(self, phase: str, turn: int | None = None) -> None:
        """Raise the next recorded environment failure if it belongs here."""
        failure = self.env_failures[0] if self.env_failures else None
        if failure is None or failure.phase != phase or (turn is not None and failure.turn != turn):
            return
        if (
            phase == "close"
            and failure is self.episode.trajectory.error
            and (self.recovering_from or not self.opened)
        ):
            return  # the last close failed, and this is an earlier one
        del self.env_failures[0]
        if phase != "close":
            self.recovering_from = failure
        raise self.error(failure)

    def error(self, failure: Failure) -> RemoteException:
        """Return a recorded failure as an exception."""
        timed_out = (
            failure is self.episode.trajectory.error
            and self.episode.trajectory.stop is StopReason.WALL_CLOCK
        )
        return (RecordedEnvTimeout if timed_out else RemoteException)(failure)

    def recover(self) -> None:
        """Raise `RestartEpisode` if the record has another attempt after the failure."""
        if self.recovering_from is not None and self.recovering_from.recovery == "attempt":
            self.recovering_from, self.attempt_index, self.steps_taken, self.opened = (
                None,
                self.attempt_index + 1,
                0,
                False,
            )
            raise RestartEpisode("the record has a new attempt")

    def opening(self) -> tuple[Message, ...]:
        """Return the opening messages of the attempt."""
        turns = self.attempt.turns
        if not turns:
            return read_messages(self.attempt.observation or ())
        return (
            read_messages(turns[0].observation)
            if turns[0].observation is not None
            else turns[0].turn.messages
        )

    def step(self, number: int) -> Step:
        """Return the recorded step after a turn of the attempt, or raise its
        `InvalidAction` or failure."""
        turns = self.attempt.turns
        if number >= len(turns) or not turns[number].has_observation:
            at = f"the record has no answer to turn {number + 1}: the episode ended with its reply"
            raise RemoteException(Failure("NotRecorded", at, "step", kind=FailureKind.USER_BUG))
        turn = turns[number]
        if set(turn.info) in _REFUSED:
            raise InvalidAction(turn.info["invalid_action"])
        if number + 1 < len(turns):
            after = turns[number + 1]
            inserted = after.turn.inserted
            seen = after.turn.messages if inserted is None else InlineObservation(inserted)
            return Step(
                seen if after.observation is None else read_observation(after.observation),
                turn.reward,
                info=turn.info,
            )
        if self.attempt.has_observation:
            return Step(read_observation(self.attempt.observation), turn.reward, info=turn.info)
        error = self.episode.trajectory.error
        if error is not None and error.phase == "step":
            # The step returned, but its observation could not be read.
            return Step(_UnreadableObservation(self.error(error)), turn.reward, info=turn.info)  # type: ignore[arg-type]
        trajectory = self.episode.trajectory
        truncated = trajectory.stop is StopReason.ENV_TRUNCATED
        return Step(trajectory.final, turn.reward, not truncated, truncated, turn.info)

    async def reward(self, trajectory: Trajectory) -> Any:
        """Return the episode's own reward, or raise its recorded failure."""
        if self.reward_override is not None:
            value = self.reward_override(trajectory)
            return await value if isawaitable(value) else value
        if "own" not in self.episode.scores:
            raise self._next_reward_failure() or RemoteException(
                Failure("NotRecorded", "the record has no reward", "reward")
            )
        value, failed = self.episode.scores["own"]
        if self.reward_calls < failed and (failure := self._next_reward_failure()):
            raise failure
        return _scores(value)

    def _next_reward_failure(self) -> RemoteException | None:
        """Return the next recorded reward failure."""
        self.reward_calls += 1
        return self.error(self.reward_failures.pop(0)) if self.reward_failures else None

    def group_failure(self) -> RemoteException | None:
        """Return the next recorded failure of the group's reward."""
        _, failed = self.episode.scores.get("group", (None, self.reward_calls + 1))
        single = self.reward_failures and self.reward_failures[0].message.startswith(
            "the group's reward is "
        )
        return None if single or self.reward_calls >= failed else self._next_reward_failure()

    @property
    def group_value(self) -> Any:
        """Value of the group's reward for this episode."""
        return (
            _scores(self.episode.scores["group"][0]) if "group" in self.episode.scores else math.nan
        )


def group_reward(
    recorded: Mapping[EpisodeKey, RecordedEpisodeEnvs], trajectories: Sequence[Trajectory]
) -> list[Any]:
    """Return the recorded reward of a group, or raise its failure."""
    envs = [recorded[trajectory.key] for trajectory in trajectories]
    if failures := list(filter(None, [one.group_failure() for one in envs])):
        raise failures[0]
    return [one.group_value for one in envs]


class RecordedEnv(Env):
    """One instance of a recorded environment; it ignores actions, so the replies must
    be compared separately."""

    def __init__(self, episode: RecordedEpisodeEnvs) -> None:
        self._episode = episode
        self._count = 0  # steps that this instance took

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """Tools offered to the model."""
        attempt = self._episode.attempt
        return attempt.turns[0].tools if attempt.turns else attempt.tools

    @property
    def snapshots(self) -> bool:
        """Whether the next recorded failure was recovered from a snapshot, or
        occurred in such a recovery."""
        here = [
            one.phase == "step" and one.turn == self._count
            for one in self._episode.env_failures[:2]
        ]
        if not here or not here[0]:
            return False
        recovery = self._episode.env_failures[0].recovery
        return recovery == "restored" or (not recovery and here[1:] == [True])

    async def reset(self, task: Task, *, seed: int | None = None) -> Any:
        """Return the opening messages of the attempt."""
        self._recover("reset")
        self._set_step(0)
        return self._episode.opening()

    async def step(self, action: Action) -> Step:
        """Return the recorded step after the next turn."""
        episode, number = self._episode, self._count
        if number < episode.steps_taken:
            self._recover("step")
        else:
            episode.recovering_from = None
            episode.fails("step", number)
        episode.steps_taken = max(episode.steps_taken, number + 1)
        self._set_step(number + 1)
        return episode.step(number)

    async def reward(self, trajectory: Trajectory) -> Any:
        """Return the recorded reward."""
        return await self._episode.reward(trajectory)

    async def close(self) -> None:
        """Do nothing, or raise the recorded failure."""
        self._episode.fails("close")

    def snapshot(self) -> int:
        """Return the number of steps taken."""
        return self._count

    async def restore(self, state: int) -> None:
        """Return to a snapshot."""
        self._recover("step")
        self._set_step(state)

    def _set_step(self, count: int) -> None:
        """Set the number of steps taken; recovery ends where it equals that of the episode."""
        self._count, self._episode.opened = count, True
        if count == self._episode.steps_taken:
            self._episode.recovering_from = None

    def _recover(self, phase: str) -> None:
        """Recover as recorded, or fail."""
        self._episode.recover()
        if self._episode.recovering_from is None or not self._episode.recovering_from.recovery:
            self._episode.fails(phase)


class _UnreadableObservation:
    """An observation whose reading raises the recorded failure."""

    def __init__(self, error: RemoteException) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        raise self._error


def _scores(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    named = {name: row.get(name, {}) for name in ("parts", "metrics", "agents")}
    return Scores(row["own"], tuple(row.get("turns", ())), **named)


def unreplayable_reason(episode: RecordedEpisode) -> str:
    """Return why an episode cannot be replayed in its recorded environment; empty if it can."""
    if not episode.settings:
        return "recorded by a release without the necessary settings: pass the environment (--env)"
    if episode.settings["play"]:
        return "an agent function, whose observations are not recorded: pass it as the environment"
    if any(attempt.has_observation and attempt.observation is None for attempt in episode.attempts):
        return "its last observation could not be recorded (an invalid image)"
    return ""

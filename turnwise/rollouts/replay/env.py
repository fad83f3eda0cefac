"""A recorded world: what an environment said in a run, said again whatever the model does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from turnwise.envs import Action, Env, InlineObservation, Scores, Step
from turnwise.envs.user_code import RemoteException
from turnwise.errors import InvalidAction
from turnwise.records.journal import RecordedAttempt, RecordedEpisode, RecordedTurn, read_messages
from turnwise.rollouts.env_session import RestartEpisode
from turnwise.types import EpisodeKey, Failure, FailureKind, Message, StopReason, Task, Trajectory

Reward = Callable[[Trajectory], Any]
_REFUSED = ({"invalid_action"}, {"invalid_action", "asked_again"})
"""What the loop writes into a turn's info for an action that the environment refused."""


class RecordedEnvTimeout(RemoteException):
    """A failure of a world in an episode whose time was over."""

    over = True


class RecordedEpisodeEnvs:
    """The world of one recorded episode; `make` is a factory of environments for `Episode`.

    All instances that an episode makes (after failures) share what was played so far.
    """

    def __init__(self, told: RecordedEpisode, reward: Reward | None = None) -> None:
        """
        Args:
            told: the episode.
            reward: a reward function to take the place of the recorded reward of the episode.
        """
        self.told, self.own_reward = told, reward
        trajectory = told.trajectory
        chain = [*trajectory.failures, *([trajectory.error] if trajectory.error is not None else [])]
        self.broken = [failure for failure in chain if failure.phase in ("reset", "step", "close")]
        self.unscored = [failure for failure in chain if failure.phase == "reward"]
        self.scored = 0
        """How often a reward failed so far."""
        self.number = 0
        """The attempt that is played."""
        self.answered = 0
        """Steps of it that were taken."""
        self.stands = False
        """Whether the attempt was opened."""
        self.back: Failure | None = None
        """The failure that the environment is being brought back behind."""

    @property
    def attempt(self) -> RecordedAttempt:
        """The attempt that is played."""
        return self.told.attempts[self.number]

    def make(self) -> Env:
        """One more instance."""
        return RecordedEnv(self)

    def fails(self, phase: str, turn: int | None = None) -> None:
        """Fail where the record says that the world failed next.

        Raises:
            Remote: the recorded failure.
        """
        if not self.broken or self.broken[0].phase != phase or (turn is not None and self.broken[0].turn != turn):
            return
        if phase == "close" and self.broken[0] is self.told.trajectory.error and (self.back or not self.stands):
            return  # the last close failed, and this is an earlier one
        failure = self.broken.pop(0)
        if phase != "close":
            self.back = failure
        raise self.error(failure)

    def error(self, failure: Failure) -> RemoteException:
        """A recorded failure as an exception."""
        over = failure is self.told.trajectory.error and self.told.trajectory.stop is StopReason.WALL_CLOCK
        return (RecordedEnvTimeout if over else RemoteException)(failure)

    def recover(self) -> None:
        """Come back as the record says, or not.

        Raises:
            Afresh: where the episode began anew.
            Remote: where bringing it back failed.
        """
        if self.back is None:
            return
        if self.back.recovery == "attempt":
            self.back, self.number, self.answered, self.stands = None, self.number + 1, 0, False
            raise RestartEpisode("so it was recorded")

    def opening(self) -> tuple[Message, ...]:
        """What opens the attempt."""
        turns = self.attempt.turns
        if not turns:
            return read_messages(self.attempt.said or ())
        return read_messages(turns[0].observation) if turns[0].observation is not None else turns[0].turn.messages

    def step(self, number: int) -> Step:
        """The answer to a turn of the attempt.

        Raises:
            InvalidAction: where the action was refused.
            Remote: where the record has no answer, or the loop failed on it.
        """
        turns = self.attempt.turns
        if number >= len(turns) or not turns[number].has_observation:
            at = f"the record has no answer to turn {number + 1}: the episode ended with its reply"
            raise RemoteException(Failure("NotRecorded", at, "step", kind=FailureKind.USER_BUG))
        told = turns[number]
        if set(told.info) in _REFUSED:
            raise InvalidAction(told.info["invalid_action"])
        if number + 1 < len(turns):
            return Step(_observations(turns[number + 1]), told.reward, info=told.info)
        if self.attempt.unanswered:
            return Step(_said(self.attempt.said), told.reward, info=told.info)
        error = self.told.trajectory.error
        if error is not None and error.phase == "step":  # raised by what it said, behind the step
            return Step(_Broken(self.error(error)), told.reward, info=told.info)  # type: ignore[arg-type]
        cut = self.told.trajectory.stop is StopReason.ENV_TRUNCATED
        return Step(self.told.trajectory.final, told.reward, not cut, cut, told.info)

    async def reward(self, trajectory: Trajectory) -> Any:
        """The episode's own reward, or why there was none."""
        if self.own_reward is not None:
            value = self.own_reward(trajectory)
            return await value if isawaitable(value) else value
        if "own" not in self.told.scores:
            raise self._unscored() or RemoteException(Failure("NotRecorded", "the record has no reward", "reward"))
        value, failed = self.told.scores["own"]
        if self.scored < failed and (failure := self._unscored()):
            raise failure
        return _scores(value)

    def _unscored(self) -> RemoteException | None:
        """The next time that a reward failed."""
        self.scored += 1
        return self.error(self.unscored.pop(0)) if self.unscored else None

    def group_failure(self) -> RemoteException | None:
        """The next time that the reward of the group failed."""
        _, failed = self.told.scores.get("group", (None, self.scored + 1))
        single = self.unscored and self.unscored[0].message.startswith("the group's reward is ")
        return None if single or self.scored >= failed else self._unscored()

    @property
    def group_value(self) -> Any:
        """What the reward of its group gave for this episode."""
        return _scores(self.told.scores["group"][0]) if "group" in self.told.scores else math.nan


def group_reward(worlds: Mapping[EpisodeKey, RecordedEpisodeEnvs], trajectories: Sequence[Trajectory]) -> list[Any]:
    """The recorded reward of a group.

    Raises:
        Remote: where it failed.
    """
    mine = [worlds[trajectory.key] for trajectory in trajectories]
    failures = [world.group_failure() for world in mine]
    for failure in failures:
        if failure is not None:
            raise failure
    return [world.group_value for world in mine]


class RecordedEnv(Env):
    """One instance of a recorded world; it pays no heed to what the model does, which whoever compares episodes has to."""

    def __init__(self, world: RecordedEpisodeEnvs) -> None:
        self._world = world
        self._count = 0  # steps that this instance took

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """The tools that the model was told of."""
        attempt = self._world.attempt
        return attempt.turns[0].tools if attempt.turns else attempt.tools

    @property
    def snapshots(self) -> bool:
        """Whether the record says that the next failure was mended by going back to a snapshot, or was one in doing so."""
        broken = self._world.broken
        if not broken or broken[0].phase != "step" or broken[0].turn != self._count:
            return False
        return broken[0].recovery == "restored" or (
            not broken[0].recovery and len(broken) > 1 and broken[1].phase == "step" and broken[1].turn == self._count
        )

    async def reset(self, task: Task, *, seed: int | None = None) -> Any:
        """What opened the attempt."""
        self._back("reset")
        self._set_step(0)
        return self._world.opening()

    async def step(self, action: Action) -> Step:
        """The recorded answer to the next turn."""
        world, number = self._world, self._count
        if number < world.answered:
            self._back("step")
        else:
            world.back = None
            world.fails("step", number)
        world.answered = max(world.answered, number + 1)
        self._set_step(number + 1)
        return world.step(number)

    async def reward(self, trajectory: Trajectory) -> Any:
        """The recorded reward."""
        return await self._world.reward(trajectory)

    async def close(self) -> None:
        """Nothing, or the recorded failure."""
        self._world.fails("close")

    def snapshot(self) -> int:
        """How many steps were taken."""
        return self._count

    async def restore(self, state: int) -> None:
        """Go back there."""
        self._back("step")
        self._set_step(state)

    def _set_step(self, count: int) -> None:
        """So many steps were taken; where those are all that were, nothing is left to be brought back."""
        self._count, self._world.stands = count, True
        if count == self._world.answered:
            self._world.back = None

    def _back(self, phase: str) -> None:
        """Be brought back as the record says."""
        self._world.recover()
        if self._world.back is None or not self._world.back.recovery:
            self._world.fails(phase)


class _Broken:
    """What a world said that no loop can read."""

    def __init__(self, error: RemoteException) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        raise self._error


def _observations(told: RecordedTurn) -> tuple[Message, ...] | InlineObservation:
    """What a turn was told by the world."""
    if told.observation is not None:
        return _said(told.observation)
    return told.turn.messages if told.turn.inserted is None else InlineObservation(told.turn.inserted)


def _said(row: Any) -> tuple[Message, ...] | InlineObservation:
    if isinstance(row, Mapping):
        return InlineObservation(row["inline"], row.get("keep_chars"), row.get("keep_tokens"), row["tail"])
    return read_messages(row or ())


def _scores(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    return Scores(row["own"], tuple(row.get("turns", ())), row.get("parts", {}), row.get("metrics", {}))


def unreplayable_reason(told: RecordedEpisode) -> str:
    """Why an episode cannot be played again in its recorded world; empty where it can."""
    if not told.settings:
        return "recorded by a release that did not write down what this takes: name the environment (--env)"
    if told.settings["play"]:
        return "of a play function, which has no world to be recorded"
    if any(attempt.unanswered and attempt.said is None for attempt in told.attempts):
        return "the world said at the end what could not be written down (an image that could not be shown)"
    return ""

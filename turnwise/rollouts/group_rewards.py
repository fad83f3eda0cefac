"""Rewards that compare the episodes of a task: they wait until the last of them is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

from turnwise.envs.rewards.workers import track_running
from turnwise.envs.user_code import failure_of
from turnwise.errors import RewardError, words
from turnwise.rollouts.episode import reward_timeout_message, reward_value
from turnwise.rollouts.recorder import Recorder
from turnwise.rollouts.timeouts import AbandonableThreads, Deadline, Stop
from turnwise.types import EpisodeKey, FailureKind, StopReason, Trajectory

GroupReward = Callable[[Sequence[Trajectory]], Any]
"""Of the rewarded trajectories of a task, sync or async: a number, `Scores` or None for each."""

T = TypeVar("T")
_Name = tuple[str, int, str]


class GroupRewards:
    """Holds finished episodes back until their group is complete; only then are they in the journal as closed."""

    def __init__(
        self, keys: Sequence[EpisodeKey], threads: AbandonableThreads, seconds: float, stop: Stop | None = None
    ) -> None:
        """
        Args:
            keys: of the episodes that will be played and have a group reward.
            threads: where sync rewards run.
            seconds: deadline of a group's reward.
            stop: of the rollout.
        """
        self._missing = Counter(_name(key) for key in keys)
        self._held: dict[_Name, list[Recorder]] = {}
        self._threads = threads
        self._seconds = seconds
        self._stop = stop

    async def episode_done(self, recorder: Recorder, reward: GroupReward | None) -> list[Recorder]:
        """One more episode is over; gives those that are done with: none until the last of a group is there, then all."""
        if reward is None:
            return [recorder]
        name = _name(recorder.trajectory.key)
        held = self._held.setdefault(name, [])
        held.append(recorder)
        self._missing[name] -= 1
        if self._missing[name]:
            return []
        del self._held[name]
        held.sort(key=lambda one: one.trajectory.key.sample)
        await self._score([one for one in held if one.trajectory.reward is not None], reward)
        return held

    async def _score(self, recorders: Sequence[Recorder], reward: GroupReward) -> None:
        if not recorders:
            return
        trajectories = [one.trajectory for one in recorders]
        try:
            values = await recorders[0].again.reward(partial(self._values, reward, trajectories), _wait, trajectories)
        except Exception as error:
            for one in recorders:
                _fail(one.trajectory, error)
            return
        for one, value in zip(recorders, values, strict=True):
            trajectory = one.trajectory
            try:
                added = reward_value(value, one, "the group's reward")
                one.entries.reward("group", value)
                trajectory.reward = None if added is None or trajectory.reward is None else trajectory.reward + added
            except RewardError as error:
                _fail(trajectory, error)

    async def _values(self, reward: GroupReward, trajectories: list[Trajectory]) -> list[Any]:
        deadline = Deadline(self._seconds, self._stop)
        with track_running() as names:
            try:
                given = await self._given(reward, trajectories, deadline)
            except TimeoutError as late:
                raise TimeoutError(reward_timeout_message(names, words(late))) from None
            finally:
                deadline.close()
        try:
            values = list(given)
        except TypeError:
            values = []
        if len(values) != len(trajectories):
            raise RewardError(
                f"the group's reward gave {given!r:.80} for {len(trajectories)} trajectories; give a value for each of them"
            )
        return values

    async def _given(self, reward: GroupReward, trajectories: list[Trajectory], deadline: Deadline) -> Any:
        if iscoroutinefunction(reward):
            return await deadline.wait(reward(trajectories), self._seconds)
        given = await deadline.wait(self._threads.call(reward, trajectories), self._seconds)
        return await deadline.wait(given, self._seconds) if isawaitable(given) else given


async def _wait(awaitable: Awaitable[Any], seconds: float) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


def complete_groups(keys: Sequence[EpisodeKey], found: Sequence[T | None], grouped: Sequence[bool]) -> list[T | None]:
    """What was recorded, without groups of which only a part is there: their rewards need all of them, played anew."""
    broken = {_name(key) for key, one, is_grouped in zip(keys, found, grouped, strict=True) if is_grouped and one is None}
    return [None if _name(key) in broken else one for key, one in zip(keys, found, strict=True)]


def _fail(trajectory: Trajectory, error: Exception) -> None:
    failure = failure_of(error, "reward", len(trajectory.turns) - 1)
    trajectory.error = trajectory.error or failure
    trajectory.reward = None
    trajectory.stop = StopReason.TIMEOUT if failure.kind == FailureKind.TIMEOUT else StopReason.REWARD_ERROR


def _name(key: EpisodeKey) -> _Name:
    return key.phase, key.step, key.task

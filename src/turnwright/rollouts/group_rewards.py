"""Group rewards: compare the episodes of a task after the last of them has finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

from turnwright.envs.rewards.workers import track_running
from turnwright.envs.threads import AbandonableThreads
from turnwright.envs.user_code import failure_of
from turnwright.errors import RewardError, words
from turnwright.rollouts.episode import reward_timeout_message, reward_value
from turnwright.rollouts.recorder import Recorder
from turnwright.rollouts.timeouts import Deadline, Stop
from turnwright.types import EpisodeKey, FailureKind, GroupKey, StopReason, Trajectory

GroupReward = Callable[[Sequence[Trajectory]], Any]
"""Takes the rewarded trajectories of a task; returns a number, `Scores` or None
for each. Sync or async."""

T = TypeVar("T")


class GroupRewards:
    """Holds finished episodes until their group is complete; only then are they
    closed in the journal."""

    def __init__(
        self,
        keys: Sequence[EpisodeKey],
        threads: AbandonableThreads,
        seconds: float,
        stop: Stop | None = None,
    ) -> None:
        """`keys` are those of the episodes to be played that have a group reward, whose
        deadline is in `seconds`."""
        self._remaining = Counter(key.group for key in keys)
        self._finished: dict[GroupKey, list[Recorder]] = {}
        self._threads = threads
        self._seconds = seconds
        self._stop = stop

    async def episode_done(self, recorder: Recorder, reward: GroupReward | None) -> list[Recorder]:
        """Add a finished episode; return the episodes to close: none before the last of a
        group, then all of them."""
        if reward is None:
            return [recorder]
        group = recorder.trajectory.key.group
        finished = self._finished.setdefault(group, [])
        finished.append(recorder)
        self._remaining[group] -= 1
        if self._remaining[group]:
            return []
        del self._finished[group]
        finished.sort(key=lambda one: one.trajectory.key.sample)
        await self._apply([one for one in finished if one.trajectory.reward is not None], reward)
        return finished

    async def _apply(self, recorders: Sequence[Recorder], reward: GroupReward) -> None:
        if not recorders:
            return
        trajectories = [recorder.trajectory for recorder in recorders]
        try:
            values = await recorders[0].retries.reward(
                partial(self._values, reward, trajectories), asyncio.wait_for, trajectories
            )
        except Exception as error:
            for recorder in recorders:
                _fail(recorder.trajectory, error)
            return
        for recorder, value in zip(recorders, values, strict=True):
            trajectory = recorder.trajectory
            try:
                added = reward_value(value, recorder, "the group's reward")
                recorder.journal.reward("group", value)
                trajectory.reward = (
                    None
                    if added is None or trajectory.reward is None
                    else trajectory.reward + added
                )
            except RewardError as error:
                _fail(trajectory, error)

    async def _values(self, reward: GroupReward, trajectories: list[Trajectory]) -> list[Any]:
        deadline = Deadline(self._seconds, self._stop)
        with track_running() as names:
            try:
                result = await self._call(reward, trajectories, deadline)
            except TimeoutError as late:
                raise TimeoutError(reward_timeout_message(names, words(late))) from None
            finally:
                deadline.close()
        values: list[Any] = []
        with suppress(TypeError):
            values = list(result)
        if len(values) != len(trajectories):
            raise RewardError(
                f"the group's reward returned {result!r:.80} for {len(trajectories)} trajectories; "
                "return one value for each"
            )
        return values

    async def _call(
        self, reward: GroupReward, trajectories: list[Trajectory], deadline: Deadline
    ) -> Any:
        if iscoroutinefunction(reward):
            return await deadline.wait(reward(trajectories), self._seconds)
        result = await deadline.wait(self._threads.call(reward, trajectories), self._seconds)
        return await deadline.wait(result, self._seconds) if isawaitable(result) else result


def complete_groups(
    keys: Sequence[EpisodeKey], recorded: Sequence[T | None], grouped: Sequence[bool]
) -> list[T | None]:
    """Return recorded episodes without those of incomplete groups, which have to be
    played again as a group."""
    incomplete = {
        key.group
        for key, value, is_grouped in zip(keys, recorded, grouped, strict=True)
        if is_grouped and value is None
    }
    return [
        None if key.group in incomplete else value
        for key, value in zip(keys, recorded, strict=True)
    ]


def _fail(trajectory: Trajectory, error: Exception) -> None:
    failure = failure_of(error, "reward", len(trajectory.turns) - 1, trajectory.task.env)
    trajectory.error = trajectory.error or failure
    trajectory.reward = None
    trajectory.stop = (
        StopReason.TIMEOUT if failure.kind == FailureKind.TIMEOUT else StopReason.REWARD_ERROR
    )

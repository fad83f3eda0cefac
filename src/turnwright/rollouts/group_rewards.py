"""Group rewards: compare the episodes of a task after the last of them has finished.

`GroupRewards.episode_done` takes each episode as it ends. With the last of a group it calls the
group's reward, adds its values to the episodes' own, and returns all of them to be closed.
Rewards of single episodes are in `episode.compute_reward`, advantages in `training.advantages`.
"""

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
"""Takes the rewarded trajectories of a task; returns a number, `Scores` or None for each. Sync or
async."""

T = TypeVar("T")


class GroupRewards:
    """Holds finished episodes until their group is complete; only then are they closed in the
    journal."""

    def __init__(
        self,
        keys: Sequence[EpisodeKey],
        threads: AbandonableThreads,
        seconds: float,
        stop: Stop | None = None,
    ) -> None:
        """`keys` are those of the episodes to be played that have a group reward.

        The deadline of the reward is in `seconds`.
        """
        self._remaining = Counter(key.group for key in keys)
        self._finished: dict[GroupKey, list[Recorder]] = {}
        self._threads = threads
        self._seconds = seconds
        self._stop = stop

    async def episode_done(self, recorder: Recorder, reward: GroupReward | None) -> list[Recorder]:
        """Add a finished episode; return the episodes to close.

        They are none before the last of a group, then all of them.
        """
        if reward is None:
            return [recorder]

        group = recorder.trajectory.key.group
        finished = self._finished.setdefault(group, [])
        finished.append(recorder)
        self._remaining[group] -= 1
        if self._remaining[group]:
            return []

        # The group is complete. Its reward compares the episodes that have one of their own.
        del self._finished[group]
        finished.sort(key=lambda recorder: recorder.trajectory.key.sample)
        rewarded = [recorder for recorder in finished if recorder.trajectory.reward is not None]
        if rewarded:
            await self._apply(rewarded, reward)
        return finished

    async def _apply(self, recorders: Sequence[Recorder], reward: GroupReward) -> None:
        """Add the values of a group's reward to the rewards of its episodes.

        Where it fails, they have none.
        """
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
                if added is None or trajectory.reward is None:
                    trajectory.reward = None
                else:
                    trajectory.reward += added
            except RewardError as error:
                _fail(trajectory, error)

    async def _values(self, reward: GroupReward, trajectories: list[Trajectory]) -> list[Any]:
        """Return what a group's reward says of each trajectory."""
        deadline = Deadline(self._seconds, self._stop)
        with track_running() as running_rewards:
            try:
                result = await self._call(reward, trajectories, deadline)
            except TimeoutError as late:
                message = reward_timeout_message(running_rewards, words(late))
                raise TimeoutError(message) from None
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
        if isawaitable(result):
            return await deadline.wait(result, self._seconds)
        return result


def complete_groups(
    keys: Sequence[EpisodeKey], recorded: Sequence[T | None], grouped: Sequence[bool]
) -> list[T | None]:
    """Return recorded episodes without those of incomplete groups.

    These have to be played again as a group.
    """
    incomplete_groups: set[GroupKey] = set()
    for key, episode, is_grouped in zip(keys, recorded, grouped, strict=True):
        if is_grouped and episode is None:
            incomplete_groups.add(key.group)

    complete: list[T | None] = []
    for key, episode in zip(keys, recorded, strict=True):
        complete.append(None if key.group in incomplete_groups else episode)
    return complete


def _fail(trajectory: Trajectory, error: Exception) -> None:
    """Record that the reward of a trajectory's group failed; an earlier error takes precedence."""
    failure = failure_of(error, "reward", len(trajectory.turns) - 1, trajectory.task.env)
    trajectory.error = trajectory.error or failure
    trajectory.reward = None
    trajectory.stop = (
        StopReason.TIMEOUT if failure.kind == FailureKind.TIMEOUT else StopReason.REWARD_ERROR
    )

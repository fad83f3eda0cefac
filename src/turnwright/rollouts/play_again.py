"""Playing episodes again that something outside of them failed.

That is a killed process, an outage, a missed deadline.

Whatever plays the episodes of a run (demonstrations, gates, evaluations, training, on this machine
or by workers) plays them through `play_again`, so that neither an outage nor the death of a child
process changes what a run is made of.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

from turnwright.envs.user_code import passing
from turnwright.errors import ProcessDied
from turnwright.rollouts.retries import backoff_s
from turnwright.types import EpisodeKey, Failure, Trajectory

if TYPE_CHECKING:
    from turnwright.rollouts.episode_spec import EpisodeSpec

MAX_DEATHS = 5
"""Maximum plays of one episode that are repeated because a process of it died.

It bounds how long an environment can keep a run that crashes at the same action each time: with the
default waits, 15 seconds.
"""


def may_pass(trajectory: Trajectory) -> bool:
    """Return whether the environment, the engine or a deadline failed an episode, so that a retry
    may succeed."""
    error = trajectory.error
    if error is None or trajectory.stop is None:
        return False
    return trajectory.stop.failed and passing(error)


def is_death(failure: Failure) -> bool:
    """Return whether a process of the episode died, which is no failure of the episode itself."""
    return failure.type == ProcessDied.__name__


class Plays:
    """Counts the failed plays of each episode, against how often it may be played again."""

    def __init__(self, max_retries: int) -> None:
        """`max_retries` is the maximum after failures other than the death of a process."""
        self._max_retries = max_retries
        self._deaths: Counter[EpisodeKey] = Counter()
        self._failures: Counter[EpisodeKey] = Counter()

    def may_repeat(self, key: EpisodeKey, failure: Failure) -> bool:
        """Return whether an episode may be played again after a failure."""
        if is_death(failure):
            return self._deaths[key] < MAX_DEATHS
        return self._failures[key] < self._max_retries

    def count(self, key: EpisodeKey, failure: Failure) -> int:
        """Count a failed play; return how many of the episode failed so far."""
        counts = self._deaths if is_death(failure) else self._failures
        counts[key] += 1
        return self._deaths[key] + self._failures[key]


async def play_again(
    episodes: Sequence[EpisodeSpec],
    playing: Awaitable[list[Trajectory]],
    play: Callable[[Sequence[EpisodeSpec]], Awaitable[list[Trajectory]]],
    *,
    max_retries: int,
    accepted: Collection[EpisodeKey] = (),
    on_failed_play: Callable[[Trajectory], None] = lambda _: None,
) -> list[Trajectory]:
    """Return the trajectories of episodes, playing those again that failed and may pass.

    Args:
        episodes: the episodes, of which `playing` is the first play.
        playing: the first play, which may have begun already.
        play: plays some of the episodes again.
        max_retries: maximum repetitions of an episode that its environment, its engine or a
            deadline failed. The death of a process counts apart, `MAX_DEATHS` for each episode.
        accepted: episodes whose failure is final, since the run went on without them.
        on_failed_play: receives each play that another one replaces.
    """
    trajectories = await playing
    plays = Plays(max_retries)
    while True:
        repeated = _repeated(episodes, trajectories, plays, accepted)
        if not repeated:
            return trajectories

        # The wait grows with the tries of the episode that failed most often.
        tries = 1
        for number in repeated:
            trajectory = trajectories[number]
            on_failed_play(trajectory)
            if trajectory.error is not None and may_pass(trajectory):
                tries = max(tries, plays.count(trajectory.key, trajectory.error))

        await asyncio.sleep(backoff_s(episodes[repeated[0]].rules, tries, tries))
        played = await play([episodes[number] for number in repeated])
        for number, trajectory in zip(repeated, played, strict=True):
            trajectories[number] = trajectory


def _repeated(
    episodes: Sequence[EpisodeSpec],
    trajectories: Sequence[Trajectory],
    plays: Plays,
    accepted: Collection[EpisodeKey],
) -> list[int]:
    """Return the indices of the episodes to play again; of a group with a group reward, all."""
    failed: set[EpisodeKey] = set()
    for trajectory in trajectories:
        key = trajectory.key
        error = trajectory.error
        if error is None or key in accepted or not may_pass(trajectory):
            continue
        if plays.may_repeat(key, error):
            failed.add(key)

    failed_groups = {key.group for key in failed}
    repeated: list[int] = []
    for number, episode in enumerate(episodes):
        is_compared = episode.group_reward is not None and episode.key.group in failed_groups
        if episode.key in failed or is_compared:
            repeated.append(number)
    return repeated

"""Retries of failed engine and reward calls, within a budget and with backoff."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from turnwright.config import EnvRules
from turnwright.envs.user_code import failure_of
from turnwright.errors import BackendContractError, EngineError, RewardError
from turnwright.rollouts.counts import add_counts
from turnwright.types import Failure, FailureKind, Trajectory

T = TypeVar("T")
Wait = Callable[[Awaitable[Any], float], Awaitable[Any]]
"""Waits under a deadline, `wait(awaitable, seconds)`."""

LONGEST_WAIT_S = 30.0
"""Maximum seconds between two tries, before the jitter."""
_RETRYABLE_KINDS = (FailureKind.REWARD, FailureKind.TIMEOUT, FailureKind.TOOL, FailureKind.ENGINE)


def backoff_s(rules: EnvRules, tries: int, seed: int) -> float:
    """Return the seconds to wait before try `tries`, from 1.

    They double each time, with a jitter of 0.5 to 1.5.
    """
    longest: float = min(LONGEST_WAIT_S, rules.retries.wait_s * 2 ** (tries - 1))
    return longest * random.Random(seed).uniform(0.5, 1.5)


class Retries:
    """Retries engine and reward calls of one episode; failures stay in `trajectory.failures`."""

    def __init__(self, rules: EnvRules, trajectory: Trajectory, seed: int) -> None:
        self._rules = rules
        self._trajectory = trajectory
        self._seed = seed
        self._engine_left = rules.retries.episode
        self._rewards_left = rules.retries.reward

    async def engine(
        self, error: Exception, call: Callable[[], Awaitable[T]], wait: Wait, turn: int
    ) -> tuple[T, int]:
        """Retry a failed engine call with the same request, seed included.

        Return its result and the number of tries. Raises the last failure.
        """
        tries = 0
        while True:
            tries += 1
            exhausted = tries > self._rules.retries.engine or self._engine_left <= 0
            if exhausted or isinstance(error, BackendContractError):
                raise error

            self._engine_left -= 1
            add_counts(self._trajectory, "engine_retries")
            failure = failure_of(error, "generate", turn)
            await self._pause(failure, tries, wait, [self._trajectory])
            try:
                return await call(), tries
            except (EngineError, TimeoutError) as retry_error:
                error = retry_error

    async def reward(
        self, call: Callable[[], Awaitable[T]], wait: Wait, trajectories: Sequence[Trajectory] = ()
    ) -> T:
        """Compute a reward, with retries after failures and timeouts.

        It is that of `trajectories`, by default of this episode. An invalid value (NaN, outside its
        range) is final, and so is a bug in the reward's code.
        """
        trajectories = trajectories or [self._trajectory]
        tries = 0
        while True:
            try:
                return await call()
            except Exception as error:
                failure = failure_of(error, "reward", len(self._trajectory.turns) - 1)
                final = failure.kind not in _RETRYABLE_KINDS or failure.type == RewardError.__name__
                if final or self._rewards_left <= 0:
                    raise
                tries += 1
                self._rewards_left -= 1
                for trajectory in trajectories:
                    add_counts(trajectory, "reward_retries")
                await self._pause(failure, tries, wait, trajectories)

    async def _pause(
        self, failure: Failure, tries: int, wait: Wait, trajectories: Sequence[Trajectory]
    ) -> None:
        """Wait before the next try; the failure is on record meanwhile, and says then how it was
        recovered from."""
        numbers = [len(trajectory.failures) for trajectory in trajectories]
        for trajectory in trajectories:
            trajectory.failures.append(failure)

        seconds = backoff_s(self._rules, tries, self._seed + tries)
        await wait(asyncio.sleep(seconds), 2 * LONGEST_WAIT_S)
        for trajectory, number in zip(trajectories, numbers, strict=True):
            trajectory.failures[number] = replace(failure, recovery="asked again")

"""Asking again: engines and rewards that failed, within a budget and after a wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from turnwise.config import EnvRules
from turnwise.engines import Engine, Generation, Request
from turnwise.engines.base import check_generation
from turnwise.envs.user_code import failure_of
from turnwise.errors import BackendContractError, EngineError, RewardError, class_name, words
from turnwise.rollouts.observations import add_counts
from turnwise.types import Failure, FailureKind, Message, Trajectory

T = TypeVar("T")
Wait = Callable[[Awaitable[Any], float], Awaitable[Any]]
"""Waits under a deadline, `wait(awaitable, seconds)`."""

LONGEST_WAIT_S = 30.0
_PASSING = (FailureKind.REWARD, FailureKind.TIMEOUT, FailureKind.TOOL, FailureKind.ENGINE)


def backoff_s(rules: EnvRules, tries: int, seed: int) -> float:
    """Seconds before a try, from 1: twice as many each time, give or take a half, so that not all come at once."""
    longest: float = min(LONGEST_WAIT_S, rules.retry_wait_s * 2 ** (tries - 1))
    return longest * random.Random(seed).uniform(0.5, 1.5)


async def call_engine(
    engine: Engine,
    request: Request,
    before: Sequence[int],
    read: Callable[[Sequence[int]], Message],
    wait: Wait,
    seconds: float,
) -> tuple[Generation, Sequence[int], Message]:
    """One call of an engine: its answer, the reply's ids so far (those `before` it too), and what they say.

    Raises:
        EngineError: whatever the engine raised, or a broken contract.
        TimeoutError: when it does not answer in so many seconds.
    """
    try:
        generation = await wait(engine.generate(request), seconds)
        check_generation(generation, request, type(engine).__name__)
        ids = [*before, *generation.ids] if before else generation.ids
        return generation, ids, read(ids)  # before anything is written: it fails on ids that are none
    except (EngineError, TimeoutError):
        raise
    except Exception as error:  # whatever it is, it is the engine's
        raise EngineError(f"{type(engine).__name__}: {class_name(error)}: {words(error)}") from error


class Retries:
    """What of an episode is asked again, and how often; what failed stays in `trajectory.failures`."""

    def __init__(self, rules: EnvRules, trajectory: Trajectory, seed: int) -> None:
        self._rules = rules
        self._trajectory = trajectory
        self._seed = seed
        self._engine_left = rules.max_engine_retries
        self._rewards_left = rules.max_reward_retries

    async def engine(self, error: Exception, call: Callable[[], Awaitable[T]], wait: Wait, turn: int) -> tuple[T, int]:
        """What an engine answers that has failed once, and how many more tries it took: the same request, seed included.

        Args:
            error: how it failed.
            call: asks it again.
            wait: for the pauses.
            turn: the turn that is sampled.

        Raises:
            EngineError, TimeoutError: of the last try; a broken contract is never asked about again.
        """
        tries = 0
        while True:
            tries += 1
            over = tries > self._rules.max_engine_retries_per_turn or self._engine_left <= 0
            if over or isinstance(error, BackendContractError):
                raise error
            self._engine_left -= 1
            add_counts(self._trajectory, "engine_retries")
            await self._pause(failure_of(error, "generate", turn), tries, wait, [self._trajectory])
            try:
                return await call(), tries
            except (EngineError, TimeoutError) as again:
                error = again

    async def reward(self, call: Callable[[], Awaitable[T]], wait: Wait, whose: Sequence[Trajectory] = ()) -> T:
        """What a reward is, asked again where computing it failed or took too long.

        A value that is none (NaN, outside its range) is final, and so is a mistake in the reward's code.

        Args:
            call: computes it.
            wait: for the pauses.
            whose: the trajectories that it is for; this episode's own when not given.

        Raises:
            Exception: of the last try.
        """
        whose, tries = whose or [self._trajectory], 0
        while True:
            try:
                return await call()
            except Exception as error:
                failure = failure_of(error, "reward", len(self._trajectory.turns) - 1)
                if not self._passing(failure):
                    raise
                tries += 1
                self._rewards_left -= 1
                for one in whose:
                    add_counts(one, "reward_retries")
                await self._pause(failure, tries, wait, whose)

    def _passing(self, failure: Failure) -> bool:
        """Whether it may go well the next time, and there is one."""
        return self._rewards_left > 0 and failure.kind in _PASSING and failure.type != RewardError.__name__

    async def _pause(self, failure: Failure, tries: int, wait: Wait, whose: Sequence[Trajectory]) -> None:
        places = [(one, len(one.failures)) for one in whose]
        for one, _ in places:
            one.failures.append(failure)
        await wait(asyncio.sleep(backoff_s(self._rules, tries, self._seed + tries)), 2 * LONGEST_WAIT_S)
        for one, number in places:
            one.failures[number] = replace(failure, recovery="asked again")

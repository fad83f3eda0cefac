"""Where rewards are computed: what of them runs right now, and the processes for those that may not run here."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from turnwise.env.calling import call_user
from turnwise.env.process.inside import in_isolated_process

if TYPE_CHECKING:
    from turnwise.env.reward.scorers import RewardWorker, RewardWorkers

Isolation = Literal["thread", "process"]

_POOL: ContextVar[RewardProcesses | None] = ContextVar("turnwise_scorers", default=None)
_RESERVED: ContextVar[list[RewardWorker] | None] = ContextVar("turnwise_scorers_reserved", default=None)
_RUNNING: ContextVar[list[str] | None] = ContextVar("turnwise_rewards_running", default=None)


class RewardProcesses:
    """The processes of rewards in one rollout; none before the first is asked for."""

    def __init__(self) -> None:
        self._scorers: RewardWorkers | None = None

    def scorers(self, *functions: Callable[..., Any]) -> RewardWorkers:
        """What gives the processes; they begin with the files that the functions are of, as far as those can be found."""
        if self._scorers is None:
            from turnwise.env.reward.scorers import RewardWorkers  # which few runs need

            self._scorers = RewardWorkers(functions=[function for function in functions if _can_be_sent(function)])
        return self._scorers

    async def close(self) -> None:
        """End them all."""
        if self._scorers is not None:
            await self._scorers.close()


@asynccontextmanager
async def reward_processes() -> AsyncIterator[RewardProcesses]:
    """Rewards that are computed within share processes, which end with the block."""
    pool = RewardProcesses()
    token = _POOL.set(pool)
    try:
        yield pool
    finally:
        _POOL.reset(token)
        await pool.close()


async def reserve_worker(*functions: Callable[..., Any]) -> list[RewardWorker]:
    """A process for one of the functions, so that neither its start nor a queue is part of that reward's time.

    Returns:
        For `use_worker`; empty where no process is needed.
    """
    pool = _POOL.get()
    return [] if pool is None or in_isolated_process() else [await pool.scorers(*functions).take()]


@contextmanager
def use_worker(scorers: list[RewardWorker]) -> Iterator[None]:
    """What `run_isolated` is called with first within has the process; it is given back where nothing was."""
    pool, token = _POOL.get(), _RESERVED.set(scorers)
    try:
        yield
    finally:
        _RESERVED.reset(token)
        while scorers and pool is not None:
            pool.scorers().release(scorers.pop())


async def run_isolated(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a reward function gives, computed in a process that is killed with whatever it started if nobody waits any more.

    Raises:
        UsageError: when function or arguments cannot be sent to another process.
        ProcessDied: when the process ended by itself.
        Remote: what the function raised.
    """
    with mark_running(name):
        if in_isolated_process():  # in a process of its own already
            return await call_user(partial(function, *args), {})
        pool = _POOL.get()
        if pool is not None:
            kept = _RESERVED.get()
            scorer = kept.pop() if kept else None
            return await pool.scorers(function).call(name, function, *args, scorer=scorer)
        async with reward_processes() as alone:
            return await alone.scorers(function).call(name, function, *args)


def _can_be_sent(function: Callable[..., Any]) -> bool:
    try:
        pickle.dumps(function)
    except Exception:  # the call will say so
        return False
    return True


@contextmanager
def track_running() -> Iterator[list[str]]:
    """Gives the names of the rewards that run within; those that were cut off stay in it."""
    names: list[str] = []
    token = _RUNNING.set(names)
    try:
        yield names
    finally:
        _RUNNING.reset(token)


@contextmanager
def mark_running(name: str) -> Iterator[None]:
    """A reward runs; it is no longer named once it has answered or raised."""
    names = _RUNNING.get()
    if names is None:
        yield
        return
    names.append(name)
    try:
        yield
    except Exception:
        names.remove(name)
        raise
    else:
        names.remove(name)

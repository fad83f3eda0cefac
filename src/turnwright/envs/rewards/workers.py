"""Rewards in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeVar

from turnwright.envs.isolation.fork_server import ForkedProcess, in_isolated_process
from turnwright.envs.isolation.process_pool import ProcessPool
from turnwright.envs.user_code import call_user

T = TypeVar("T")

Isolation = Literal["thread", "process"]

_POOL: ContextVar[ProcessPool | None] = ContextVar("turnwright_scorers", default=None)
_RESERVED: ContextVar[list[ForkedProcess] | None] = ContextVar(
    "turnwright_scorers_reserved", default=None
)
_RUNNING: ContextVar[list[str] | None] = ContextVar("turnwright_rewards_running", default=None)


@asynccontextmanager
async def reward_processes() -> AsyncIterator[ProcessPool]:
    """Share one worker pool among all rewards computed within the block."""
    pool = ProcessPool()
    try:
        with _set(_POOL, pool):
            yield pool
    finally:
        await pool.close()


def use_pool(pool: ProcessPool) -> AbstractContextManager[Any]:
    """Compute the rewards within the block in the workers of a pool."""
    return _set(_POOL, pool)


@contextmanager
def _set(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


async def reserve_worker(*functions: Callable[..., Any]) -> list[ForkedProcess]:
    """Reserve a worker for `use_worker`, so that its start does not count toward the reward's time;
    empty if none is needed."""
    pool = _POOL.get()
    if pool is None or in_isolated_process():
        return []
    return [await pool.take(*functions)]


@contextmanager
def use_worker(workers: list[ForkedProcess]) -> Iterator[None]:
    """Give the reserved worker to the first `run_isolated` within the block; release it if
    unused."""
    pool = _POOL.get()
    try:
        with _set(_RESERVED, workers):
            yield
    finally:
        while workers and pool is not None:
            pool.release(workers.pop())


async def run_isolated(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a reward function in a process, which is killed with its descendants if the call is
    cancelled.

    Its exceptions are raised as `RemoteException`; `ProcessDied` when the process ended by itself.
    """
    what = f"the reward {name!r}"
    with mark_running(name):
        if in_isolated_process():  # already isolated
            return await call_user(partial(function, *args), {})
        pool = _POOL.get()
        if pool is not None:
            reserved = _RESERVED.get()
            worker = reserved.pop() if reserved else None
            return await pool.call(what, function, *args, worker=worker)
        async with reward_processes() as own_pool:
            return await own_pool.call(what, function, *args)


def track_running() -> AbstractContextManager[list[str]]:
    """Collect the names of running rewards within the block; interrupted ones stay in the list."""
    return _set(_RUNNING, [])


@contextmanager
def mark_running(name: str) -> Iterator[None]:
    """List a reward as running until it returns or raises an exception."""
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
    names.remove(name)

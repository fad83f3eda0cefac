"""Worker processes for rewards."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from turnwright.envs.env import Env
from turnwright.envs.isolation.process_env import ForkServer, ProcessEnv, in_isolated_process
from turnwright.envs.user_code import RemoteException, call_user
from turnwright.errors import UsageError

T = TypeVar("T")

_STALL_S = 0.5  # seconds without a finished reward, while others queue, before more workers may start


class RewardWorkers:
    """Process pool for reward functions: `limit` workers (one per core), more while running rewards do not return."""

    def __init__(self, limit: int | None = None) -> None:
        self._fork_server: ForkServer | None = None
        self._limit = limit or os.cpu_count() or 1
        self._extra = 0
        self._idle: list[RewardWorker] = []
        self._busy = self._starting = self._answered = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watching = False

    @property
    def processes_started(self) -> int:
        """Number of processes started so far."""
        return 0 if self._fork_server is None else self._fork_server.forks

    async def take(self, *functions: Callable[..., Any]) -> RewardWorker:
        """Wait for an exclusive worker; return it with `release`. The first call loads the functions' files before forking."""
        if self._fork_server is None:
            loaded = []
            for function in functions:
                with suppress(Exception):  # the call reports the error
                    pickle.dumps(function)
                    loaded.append(function)
            self._fork_server = ForkServer(partial(_no_env, loaded))
        while self._busy >= self._limit + self._extra:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._watch()
            await waiter
        self._busy += 1
        while self._idle:
            idle = self._idle.pop()
            if not idle.ended:  # it may have been killed while idle
                return idle
            idle.drop()
        worker = RewardWorker(self._fork_server)
        self._starting += 1
        try:
            await worker.start()
        except BaseException:
            self._free()
            raise
        finally:
            self._starting -= 1
        return worker

    def release(self, worker: RewardWorker) -> None:
        """Return a worker that has answered or was not used."""
        if len(self._idle) < self._limit:
            self._idle.append(worker)
        else:
            worker.drop()
        self._free()

    async def call(self, name: str, function: Callable[..., Any], *args: Any, worker: RewardWorker | None = None) -> Any:
        """Call `function(*args)`, pickled, in a worker (from `take`, released after the call), awaiting the result if needed.

        It is a number, `Scores`, None, or a list of these.
        """
        worker = worker or await self.take(function)
        try:
            data = pickle.dumps((function, args))
        except Exception as error:
            self.release(worker)
            raise UsageError(
                f"the reward {name!r} cannot be sent to a separate process ({error}): define the function at the top level of "
                "a file, and pass its inputs in the trajectory and in plain data"
            ) from error
        worker.what = f"the process of the reward {name!r}"
        try:
            value = await worker.score(data)
        except RemoteException as error:
            self.release(worker)
            failure = error.failure
            raise RemoteException(replace(failure, traceback=f"{failure.traceback}in the reward {name!r}\n")) from None
        except BaseException:
            worker.drop()
            self._free()
            raise
        self.release(worker)
        return value

    async def close(self) -> None:
        """End every process."""
        for worker in self._idle:
            worker.drop()
        self._idle.clear()
        if self._fork_server is not None:
            await self._fork_server.close()

    def _free(self) -> None:
        self._busy -= 1
        self._answered += 1
        self._wake()

    def _wake(self) -> None:
        """Wake as many waiters as there are free slots, skipping cancelled ones."""
        free = self._limit + self._extra - self._busy
        while self._waiting and free > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(_STALL_S, self._check_progress, self._answered)

    def _check_progress(self, answered: int) -> None:
        self._watching = False
        if not any(not waiter.done() for waiter in self._waiting):
            self._extra = 0
            return
        if answered == self._answered and not self._starting:
            self._extra += self._limit
        self._wake()
        self._watch()


class RewardWorker(ProcessEnv):
    """Process that computes rewards."""

    @property
    def ended(self) -> bool:
        """Whether the process ended by itself."""
        return self._end is None or self._end.done()

    async def score(self, data: bytes) -> Any:
        """Call a pickled (function, arguments) pair and return its result."""
        return await self._ask("score", data)

    def drop(self) -> None:
        """Disconnect and kill the process immediately, since a reward has nothing to close."""
        self._disconnect()
        self._fork_server.kill(self._pid, self._end, at_once=True)
        if self._end is not None:
            self._end.add_done_callback(lambda end: self._fork_server.discard_status(self._pid, end))


Isolation = Literal["thread", "process"]

_POOL: ContextVar[RewardWorkers | None] = ContextVar("turnwright_scorers", default=None)
_RESERVED: ContextVar[list[RewardWorker] | None] = ContextVar("turnwright_scorers_reserved", default=None)
_RUNNING: ContextVar[list[str] | None] = ContextVar("turnwright_rewards_running", default=None)


@asynccontextmanager
async def reward_processes() -> AsyncIterator[RewardWorkers]:
    """Share one worker pool among all rewards computed within the block."""
    pool = RewardWorkers()
    try:
        with _set(_POOL, pool):
            yield pool
    finally:
        await pool.close()


def use_pool(pool: RewardWorkers) -> AbstractContextManager[Any]:
    """Compute the rewards within the block in the workers of a pool."""
    return _set(_POOL, pool)


@contextmanager
def _set(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


async def reserve_worker(*functions: Callable[..., Any]) -> list[RewardWorker]:
    """Reserve a worker for `use_worker`, so that its start does not count toward the reward's time; empty if none is needed."""
    pool = _POOL.get()
    return [] if pool is None or in_isolated_process() else [await pool.take(*functions)]


@contextmanager
def use_worker(workers: list[RewardWorker]) -> Iterator[None]:
    """Give the reserved worker to the first `run_isolated` within the block; release it if unused."""
    pool = _POOL.get()
    try:
        with _set(_RESERVED, workers):
            yield
    finally:
        while workers and pool is not None:
            pool.release(workers.pop())


async def run_isolated(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a reward function in a process, which is killed with its descendants if the call is cancelled.

    Its exceptions are raised as `RemoteException`; `ProcessDied` when the process ended by itself.
    """
    with mark_running(name):
        if in_isolated_process():  # already isolated
            return await call_user(partial(function, *args), {})
        pool = _POOL.get()
        if pool is not None:
            kept = _RESERVED.get()
            worker = kept.pop() if kept else None
            return await pool.call(name, function, *args, worker=worker)
        async with reward_processes() as alone:
            return await alone.call(name, function, *args)


def _no_env(loaded: Sequence[Callable[..., Any]]) -> Env:
    """Stand in for a factory: pickling a call loads the functions, and workers have no environment."""
    raise NotImplementedError


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

"""Worker processes for rewards."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from turnwise.envs.base import Env
from turnwise.envs.isolation.process_env import ForkServer, ProcessEnv, in_isolated_process
from turnwise.envs.user_code import RemoteException, call_user
from turnwise.errors import UsageError

_PATIENCE_S = 0.5
"""Where rewards queue and none of those that compute has come back for so long, more may compute."""


class RewardWorkers:
    """Calls functions in processes: as many at once as there are cores, more where those do not come back."""

    def __init__(self, most: int | None = None, functions: Sequence[Callable[..., Any]] = ()) -> None:
        """
        Args:
            most: processes that compute at once, before any has to be waited for.
            functions: some of those that will be called; the files that they are of are loaded once for all processes.
        """
        self._nursery = ForkServer(_Functions(functions))
        self._most = most or os.cpu_count() or 1
        self._extra = 0
        self._idle: list[RewardWorker] = []
        self._busy = self._starting = self._answered = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watching = False

    @property
    def processes_started(self) -> int:
        """How many processes were begun so far."""
        return self._nursery.births

    async def take(self) -> RewardWorker:
        """A process that nobody else has, as soon as one more may compute; `release` it back."""
        while self._busy >= self._most + self._extra:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._watch()
            await waiter
        self._busy += 1
        while self._idle:
            idle = self._idle.pop()
            if not idle.ended:  # one may have been killed while it waited
                return idle
            idle.drop()
        scorer = RewardWorker(self._nursery)
        self._starting += 1
        try:
            await scorer.start()
        except BaseException:
            self._free()
            raise
        finally:
            self._starting -= 1
        return scorer

    def release(self, scorer: RewardWorker) -> None:
        """The process has answered, or was not used."""
        if len(self._idle) < self._most:
            self._idle.append(scorer)
        else:
            scorer.drop()
        self._free()

    async def call(self, name: str, function: Callable[..., Any], *args: Any, scorer: RewardWorker | None = None) -> Any:
        """What `function(*args)` gives, awaited where it is awaitable: a number, `Scores`, None, or a list of such.

        Args:
            name: of the reward, for errors.
            function: what is called; it and its arguments are pickled.
            args: of the function.
            scorer: a process that was taken; given back behind the call.

        Raises:
            UsageError: when it cannot be sent to another process.
            ProcessDied: when the process ended by itself.
            Remote: what the function raised.
        """
        scorer = scorer or await self.take()
        try:
            data = pickle.dumps((function, args))
        except Exception as error:
            self.release(scorer)
            raise UsageError(
                f"the reward {name!r} cannot be sent to a process of its own ({error}): define the function at the top of a "
                "file, and keep what it needs in the trajectory and in plain data"
            ) from error
        scorer.what = f"the process of the reward {name!r}"
        try:
            value = await scorer.score(data)
        except RemoteException as error:
            self.release(scorer)
            told = error.failure
            raise RemoteException(replace(told, traceback=f"{told.traceback}in the reward {name!r}\n")) from None
        except BaseException:
            scorer.drop()
            self._free()
            raise
        self.release(scorer)
        return value

    async def close(self) -> None:
        """End every process."""
        for scorer in self._idle:
            scorer.drop()
        self._idle.clear()
        await self._nursery.close()

    def _free(self) -> None:
        self._busy -= 1
        self._answered += 1
        self._wake()

    def _wake(self) -> None:
        """Let as many go on as there are places; whose wait was cancelled needs none."""
        free = self._most + self._extra - self._busy
        while self._waiting and free > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._look, self._answered)

    def _look(self, answered: int) -> None:
        self._watching = False
        if not any(not waiter.done() for waiter in self._waiting):
            self._extra = 0
            return
        if answered == self._answered and not self._starting:
            self._extra += self._most
        self._wake()
        self._watch()


@dataclass(frozen=True, slots=True)
class _Functions:
    """What the processes begin with."""

    loaded: Sequence[Callable[..., Any]]

    def __call__(self) -> Env:
        """Never called: no environment lives there."""
        raise NotImplementedError


class RewardWorker(ProcessEnv):
    """One such process."""

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._end is None or self._end.done()

    async def score(self, data: bytes) -> Any:
        """What the pickled (function, arguments) give."""
        return await self._ask("score", data)

    def drop(self) -> None:
        """End the process."""
        self._disconnect()
        self._kill()

    def _kill(self) -> None:
        """At once: a reward has nothing to close."""
        self._nursery.kill(self._pid, self._end, at_once=True)
        if self._end is not None:
            self._end.add_done_callback(lambda end: self._nursery.discard_status(self._pid, end))


if TYPE_CHECKING:
    pass

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
            # which few runs need

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

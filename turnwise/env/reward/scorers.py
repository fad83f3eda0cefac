"""Processes for rewards that compute for long: used again and again, killed where one does not answer in time."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.env.base import Env
from turnwise.env.blame import RemoteException
from turnwise.env.process.process import ForkServer, ProcessEnv
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

"""A pool of forked processes that call functions: rewards of users, and functions of this package
with bounds."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from turnwright.envs.isolation.fork_server import ForkedProcess, ForkServer
from turnwright.envs.user_code import RemoteException
from turnwright.errors import UsageError

_STALL_S = 0.5
"""Seconds without a finished call, while others queue, before more workers may start."""


class ProcessPool:
    """Processes that call functions, each one at a time, and are kept for further calls.

    There are `limit` of them (one per core), and more while running calls do not return.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        modules: Sequence[str] = (),
        for_user_code: bool = True,
    ) -> None:
        """`modules` are imported once for all processes, if they are installed.

        Without `for_user_code` the functions are this package's: no file of the user is loaded for
        them, nothing that they print is shown, and there are never more than `limit`, as each call
        has bounds.
        """
        self._limit = limit or os.cpu_count() or 1
        self._modules = modules
        self._for_user_code = for_user_code
        self._fork_server: ForkServer | None = None

        self._extra = 0
        """Workers beyond the limit, while running calls do not return."""
        self._idle: list[ForkedProcess] = []
        self._busy = 0
        self._starting = 0
        self._answered = 0
        """Calls that have ended."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Done when there may be a worker."""
        self._is_watching = False

    @property
    def processes_started(self) -> int:
        """Number of processes started so far."""
        return 0 if self._fork_server is None else self._fork_server.forks

    async def take(self, *functions: Callable[..., Any]) -> ForkedProcess:
        """Wait for an exclusive worker; return it with `release`.

        The first call loads the functions' files before forking.
        """
        if self._fork_server is None:
            self._fork_server = self._start(functions)

        while self._busy >= self._limit + self._extra:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._watch()
            await waiter
        self._busy += 1

        while self._idle:
            idle = self._idle.pop()
            if not idle.has_ended:  # it may have been killed while idle
                return idle
            idle.drop(at_once=True)

        self._starting += 1
        try:
            return await self._fork_server.fork()
        except BaseException:
            self._free()
            raise
        finally:
            self._starting -= 1

    def _start(self, functions: Sequence[Callable[..., Any]]) -> ForkServer:
        """Return a fork server that loads the files of functions once for all workers."""
        sent = []
        for function in functions:
            with suppress(Exception):  # the call reports the error
                pickle.dumps(function)
                sent.append(function)
        return ForkServer(
            partial(_load, sent), modules=self._modules, for_user_code=self._for_user_code
        )

    def release(self, worker: ForkedProcess) -> None:
        """Return a worker that has answered or was not used."""
        if len(self._idle) < self._limit:
            self._idle.append(worker)
        else:
            worker.drop(at_once=True)
        self._free()

    async def call(
        self,
        what: str,
        function: Callable[..., Any],
        *args: Any,
        worker: ForkedProcess | None = None,
    ) -> Any:
        """Call `function(*args)`, pickled, in a worker (from `take`, released after the call),
        awaiting the result if needed.

        `what` names the function in errors. The result of user code is a number, `Scores`, None, or
        a list of these; that of a function of this package is plain data.

        Raises:
            UsageError: for a function or arguments that cannot be pickled.
            RemoteException: for an exception of the function.
            ProcessDied: when the process ended.
        """
        worker = worker or await self.take(function)
        try:
            call = pickle.dumps((function, args))
        except Exception as error:
            self.release(worker)
            raise UsageError(
                f"{what} cannot be sent to a separate process ({error}): define the function at "
                "the top level of a file, and pass its inputs in the trajectory and in plain data"
            ) from error

        worker.what = f"the process of {what}"
        try:
            value = await worker.ask("score" if self._for_user_code else "call", call)
        except RemoteException as error:
            self.release(worker)
            located = f"{error.failure.traceback}in {what}\n"
            raise RemoteException(replace(error.failure, traceback=located)) from None
        except BaseException:
            worker.drop(at_once=True)
            self._free()
            raise
        self.release(worker)
        return value

    async def close(self) -> None:
        """End every process."""
        for worker in self._idle:
            worker.drop(at_once=True)
        self._idle.clear()
        if self._fork_server is not None:
            await self._fork_server.close()

    def _free(self) -> None:
        """Count a worker that is no longer taken."""
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
        """Check soon whether calls return while others wait."""
        if not self._is_watching and self._for_user_code:
            self._is_watching = True
            asyncio.get_running_loop().call_later(_STALL_S, self._check_progress, self._answered)

    def _check_progress(self, answered: int) -> None:
        """Allow more workers where no call has returned since there were `answered`."""
        self._is_watching = False
        if all(waiter.done() for waiter in self._waiting):
            self._extra = 0
            return
        if answered == self._answered and not self._starting:
            self._extra += self._limit
        self._wake()
        self._watch()


def _load(functions: Sequence[Callable[..., Any]]) -> None:
    """Stand for a factory of environments, which workers do not have: that it is unpickled loads
    the functions' files."""

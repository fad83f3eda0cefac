"""Calls of functions of this package on untrusted text, bounded in processor time and memory, from
any thread.

An expression such as `9**9**9**9` has no bound, and a time limit by a signal holds in the main
thread alone. `call_bounded` therefore runs the function in a process of a pool, which is kept for
further calls and ends when a call exceeds a bound. Processor time is limited instead of time on the
clock, so a busy machine does not change a verdict.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnwright.envs.isolation.process_pool import ProcessPool
from turnwright.envs.user_code import RemoteException
from turnwright.errors import ProcessDied, TurnwrightError

SECONDS = 3
"""Processor time of a call, which takes milliseconds unless it does not end."""

MEMORY = 768 * 2**20
"""Bytes that a call may allocate beyond what its imports take."""

WALL_S = 90.0
"""Time on the clock for a call, for a process that sleeps or gets no processor."""

MAX_DEATHS = 3
"""Maximum processes that one call may lose to something outside of it, before the call fails."""

MAX_PROCESSES = 4
"""Most processes; there are no more than cores."""

MODULES = ("math_verify", "pylatexenc")
"""What functions import: a process that takes the place of one that a call ended has them from its
first moment."""

CLOSE_S = 10.0
"""Seconds that the end of this program waits for the processes to end."""

_OWN_DEATHS = {
    signal.SIGXCPU,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
}
"""Signals that a call brings upon its process.

Others come from outside, and say nothing about the call.
"""


class BoundExceeded(TurnwrightError, RuntimeError):
    """The call used more processor time or memory than it may."""


class CallFailed(TurnwrightError, RuntimeError):
    """The function raised an exception, whose type and message this has."""


def call_bounded(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of a module returns, called in a process with plain data, which it
    also returns.

    Raises:
        BoundExceeded: when the call used too much processor time or memory, or ended the process.
        ProcessDied: when something else ended the process, `MAX_DEATHS` times, or it got no
            processor time for `WALL_S` seconds: there is no verdict.
        CallFailed: for an exception of the function, with its type and message.
    """
    return _calls.call(function, args)


class _BoundedCalls:
    """A pool of processes on an event loop in a thread: callers may have a loop of their own, or
    none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ProcessPool

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = self._start()
        answer = asyncio.run_coroutine_threadsafe(self._call(function, args), self._loop)
        try:
            return answer.result()
        except BaseException:  # such as Ctrl-C, while it waits
            answer.cancel()
            raise

    def _start(self) -> asyncio.AbstractEventLoop:
        """Start the thread; the processes start with the first call."""
        loop = asyncio.new_event_loop()
        limit = max(1, min(MAX_PROCESSES, os.cpu_count() or 1))
        self._pool = ProcessPool(limit, modules=MODULES, for_user_code=False)
        threading.Thread(target=loop.run_forever, name="turnwright-bounded", daemon=True).start()
        return loop

    async def _call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a function, again where something else ends its process."""
        deaths = 0
        while True:
            worker = await self._pool.take(function)
            try:
                async with asyncio.timeout(WALL_S):
                    return await self._pool.call(
                        "a bounded call", _within_bounds, function, args, worker=worker
                    )
            except TimeoutError:
                raise ProcessDied(
                    f"the process of a bounded call had no answer ready within {WALL_S:g} s"
                ) from None
            except RemoteException as error:
                raise CallFailed(f"{error.failure.type}: {error.failure.message}"[:500]) from error
            except ProcessDied as error:
                status = error.status
                if status is None or status >= 0 or -status in _OWN_DEATHS:
                    raise BoundExceeded(
                        f"the call ended its process; it may use {SECONDS} s of processor time"
                    ) from error
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise ProcessDied(f"{error}, {deaths} times") from error

    def close(self) -> None:
        """End every process."""
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._pool.close(), loop).result(CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)


def _within_bounds(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call the function in its process, which has imported its module: the first call has as much
    as the others."""
    _set_bounds()
    try:
        return function(*args)
    except (MemoryError, RecursionError):  # these may leave a process in a bad state
        os.abort()


def _set_bounds() -> None:
    """Allow this process `SECONDS` and `MEMORY` more than it has used."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))

    with contextlib.suppress(OSError, ValueError):  # no /proc: processor time alone is limited
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))


def _renew() -> None:
    """Give a forked process calls of its own; the processes that it inherited answer its parent."""
    global _calls
    _calls = _BoundedCalls()


_calls = _BoundedCalls()
os.register_at_fork(after_in_child=_renew)
atexit.register(lambda: _calls.close())

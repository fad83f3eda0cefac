"""Blocking calls of user code off the event loop, in threads that can be abandoned."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TypeVar

from turnwright.envs import thread_alarm
from turnwright.errors import class_name, words

T = TypeVar("T")

BUSY_S = 0.001
"""Seconds that queued calls wait for a busy thread before they get threads of their own."""
MOSTLY_IDLE = 0.5
"""Share of one core below which a process leaves its queued calls waiting for something else than
the interpreter lock."""
IDLE_S = 10.0
"""Seconds without a call after which a thread ends."""

ABANDONED_CALLS: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "abandoned", default=None
)
"""Names of abandoned calls that still hold a thread, per environment of the current task."""


def carried(error: BaseException) -> Exception:
    """Convert an exception of a thread to one that a future accepts, such as SystemExit
    from `exit()` in a tool."""
    kind = type(error)  # `__class__` may be user code
    if issubclass(kind, StopIteration):
        return RuntimeError("StopIteration")
    if issubclass(kind, Exception):
        return error  # type: ignore[return-value]
    return RuntimeError(f"{class_name(error)}: {words(error)}")


@dataclass(slots=True, eq=False)
class _Job:
    """One call in a thread; its flags change only under the lock of `AbandonableThreads`."""

    future: asyncio.Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    owner: str
    name: str
    names: list[str]
    """Gets the call's full name if it is abandoned."""
    thread: threading.Thread | None = None
    running: bool = False
    abandoned: bool = False

    @property
    def full_name(self) -> str:
        """Owner and name of the call; its function's name if it has none."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return (
            f"{self.owner} {self.name or getattr(function, '__qualname__', repr(function))}".strip()
        )


class AbandonableThreads:
    """Runs blocking calls off the event loop, and abandons calls that were cancelled.

    One thread serves calls that compute: with more, they would contend for the interpreter lock,
    which costs more than short calls. If for two milliseconds no call returns, or the process
    hardly computes, every queued call gets its own thread. Results that arrive together are
    delivered in one wake-up of the loop.
    """

    _of_loops: ClassVar[dict[asyncio.AbstractEventLoop, AbandonableThreads]] = {}

    def __init__(
        self, max_threads: int = 64, name: str = "turnwright-env", *, run_all: bool = False
    ) -> None:
        """Call all threads `name`; `max_threads` does not count abandoned ones. With `run_all`,
        calls run also if they are cancelled before their turn."""
        self._max_threads, self._name, self._run_all = max_threads, name, run_all
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._delivery_scheduled = False
        self._threads = 0
        self._pending = 0
        self._served = 0
        self._check_scheduled = False
        self._closed = False
        self.abandoned = 0
        """Calls still running at their deadline."""
        self.names: list[str] = []
        """Names of these calls; the threads that still run them have the same names."""

    @classmethod
    def of_loop(cls) -> AbandonableThreads:
        """Return the threads that all calls of tools and rewards on the running loop
        share, as many as block."""
        loop = asyncio.get_running_loop()
        found = cls._of_loops.get(loop)
        if found is None:
            for closed in [other for other in cls._of_loops if other.is_closed()]:
                if gone := cls._of_loops.pop(closed, None):
                    gone.close()
            # All calls run, since a release must.
            found = cls._of_loops[loop] = cls(sys.maxsize, "turnwright-tool", run_all=True)
        return found

    def call(
        self,
        function: Callable[..., T],
        *args: Any,
        owner: str = "",
        name: str = "",
        names: list[str] | None = None,
    ) -> asyncio.Future[T]:
        """Run `function(*args)` in a thread; cancelling the future abandons the thread, or removes
        the call from the queue.

        `name` replaces the function's own. `names` gets the name of an abandoned call
        in place of the attribute.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(future, function, args, owner, name, self.names if names is None else names)
        self._pending += 1
        self._jobs.put(job)
        with self._lock:  # a thread may be about to end
            if self._threads == 0:
                self._start()
        self._schedule_check()
        future.add_done_callback(lambda _: self._finished(job))
        return future

    def close(self) -> None:
        """End all threads that wait for a call; one that never returns is a daemon and
        ends with the process."""
        self._closed = True
        self._jobs.put(None)

    def _schedule_check(self) -> None:
        """Schedule a check of whether queued calls progress."""
        if not self._check_scheduled and self._pending > self._threads:
            self._check_scheduled = True
            self._check_later(is_second=False)

    def _check_later(self, *, is_second: bool) -> None:
        self._loop.call_later(
            BUSY_S,
            self._check_queue,
            self._served,
            time.perf_counter(),
            time.process_time(),
            is_second,
        )

    def _check_queue(self, served: int, clock: float, computed: float, is_second: bool) -> None:
        """Start threads if two checks find queued calls that wait for no computation; at one, the
        loop may have been busy."""
        idle = time.process_time() - computed < MOSTLY_IDLE * (time.perf_counter() - clock)
        blocked = idle or served == self._served
        if blocked and not is_second:
            self._check_later(is_second=True)
            return
        self._check_scheduled = False
        if blocked and not self._closed:
            with self._lock:
                for _ in range(min(self._jobs.qsize(), self._max_threads - self._threads)):
                    self._start()
        self._schedule_check()

    def _start(self) -> None:
        """Start a thread; the caller holds the lock."""
        self._threads += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _finished(self, job: _Job) -> None:
        self._pending -= 1
        if job.future.cancelled():
            with self._lock:
                running = job.running
                job.abandoned = running or not self._run_all
                if running:
                    # The thread may never return: it no longer counts, and another takes its
                    # place for queued calls.
                    self._threads -= 1
                    if self._pending > self._threads and not self._closed:
                        self._start()
            if running:
                self.abandoned += 1
                job.names.append(job.full_name)
                if job.thread is not None:
                    job.thread.name = f"{self._name} abandoned in {job.full_name}"

    def _work(self) -> None:
        thread = threading.current_thread()
        while (job := self._next()) is not None:
            with self._lock:
                if job.abandoned:
                    continue
                job.running, job.thread = True, thread
            try:
                result, error = job.function(*job.args), None
            except BaseException as raised:  # delivered to the waiting task
                result, error = None, raised
            thread_alarm.clear_late()
            with self._lock:
                job.running = False
                abandoned = job.abandoned
                self._served += 1
            if abandoned:
                return
            self._done.append((job.future, result, error))
            del job, result, error
            if not self._delivery_scheduled:
                self._delivery_scheduled = True
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._deliver)

    def _next(self) -> _Job | None:
        """Wait for a call; return None if the thread must end."""
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._jobs.empty():  # one that is queued after this finds one thread less
                        self._threads -= 1
                        return None
            else:
                if job is None:
                    self._jobs.put(None)  # pass the end marker on to the next thread
                return job

    def _deliver(self) -> None:
        self._delivery_scheduled = False
        while self._done:
            future, result, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(carried(error))


async def run_in_thread(
    function: Callable[..., Any], arguments: Mapping[str, Any], name: str = ""
) -> Any:
    """Run a function in a thread of the loop, with the caller's context; one that hangs delays no
    other call and does not keep the process from exiting."""
    called = partial(contextvars.copy_context().run, function, **arguments)
    name = name or getattr(function, "__name__", "")
    return await AbandonableThreads.of_loop().call(called, name=name, names=ABANDONED_CALLS.get())

"""Blocking calls of user code off the event loop, in threads that can be abandoned.

`run_in_thread` is what tools, rewards and environments are called by; `AbandonableThreads` says how
many threads there are, and what becomes of one whose call never returns.
"""

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
    """Convert an exception of a thread to one that a future accepts, such as SystemExit from
    `exit()` in a tool."""
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
        name = self.name
        if not name:
            function = self.function.func if isinstance(self.function, partial) else self.function
            name = getattr(function, "__qualname__", repr(function))
        return f"{self.owner} {name}".strip()


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
        self._max_threads = max_threads
        self._name = name
        self._run_all = run_all
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        """Future, result and exception of calls that have returned."""
        self._delivery_scheduled = False

        self._lock = threading.Lock()
        self._threads = 0
        """Threads that run, abandoned ones excepted."""
        self._pending = 0
        """Calls whose future is not done."""
        self._served = 0
        """Calls that have returned."""
        self._check_scheduled = False
        self._closed = False

        self.abandoned = 0
        """Calls still running at their deadline."""
        self.names: list[str] = []
        """Names of these calls; the threads that still run them have the same names."""

    @classmethod
    def of_loop(cls) -> AbandonableThreads:
        """Return the threads that all calls of tools and rewards on the running loop share, as many
        as block."""
        loop = asyncio.get_running_loop()
        threads = cls._of_loops.get(loop)
        if threads is not None:
            return threads

        # The first call on a loop ends the threads of closed ones.
        closed_loops = [other for other in cls._of_loops if other.is_closed()]
        for closed_loop in closed_loops:
            unused = cls._of_loops.pop(closed_loop, None)
            if unused is not None:
                unused.close()

        # All calls run, since a release must.
        threads = cls(sys.maxsize, "turnwright-tool", run_all=True)
        cls._of_loops[loop] = threads
        return threads

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

        `name` replaces the function's own. `names` gets the name of an abandoned call in place of
        the attribute.
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
        """End all threads that wait for a call; one that never returns is a daemon and ends with
        the process."""
        self._closed = True
        self._jobs.put(None)

    def _schedule_check(self) -> None:
        """Schedule a check of whether queued calls progress."""
        if not self._check_scheduled and self._pending > self._threads:
            self._check_scheduled = True
            self._check_later(is_second=False)

    def _check_later(self, *, is_second: bool) -> None:
        served = self._served
        clock = time.perf_counter()
        computed = time.process_time()
        self._loop.call_later(BUSY_S, self._check_queue, served, clock, computed, is_second)

    def _check_queue(self, served: int, clock: float, computed: float, is_second: bool) -> None:
        """Start threads if two checks find queued calls that wait for no computation; at one, the
        loop may have been busy.

        `served`, `clock` and `computed` are calls that had returned, the time and the processor
        time when the check was scheduled.
        """
        is_idle = time.process_time() - computed < MOSTLY_IDLE * (time.perf_counter() - clock)
        is_blocked = is_idle or served == self._served
        if is_blocked and not is_second:
            self._check_later(is_second=True)
            return

        self._check_scheduled = False
        if is_blocked and not self._closed:
            with self._lock:
                for _ in range(min(self._jobs.qsize(), self._max_threads - self._threads)):
                    self._start()
        self._schedule_check()

    def _start(self) -> None:
        """Start a thread; the caller holds the lock."""
        self._threads += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _finished(self, job: _Job) -> None:
        """Count a call whose future is done; abandon its thread where it was cancelled."""
        self._pending -= 1
        if not job.future.cancelled():
            return

        with self._lock:
            is_running = job.running
            job.abandoned = is_running or not self._run_all
            if is_running:
                # The thread may never return: it no longer counts, and another takes its place for
                # queued calls.
                self._threads -= 1
                if self._pending > self._threads and not self._closed:
                    self._start()
        if is_running:
            self.abandoned += 1
            job.names.append(job.full_name)
            if job.thread is not None:
                job.thread.name = f"{self._name} abandoned in {job.full_name}"

    def _work(self) -> None:
        """Run calls until there are none, or until one is abandoned; the body of a thread."""
        thread = threading.current_thread()
        while (job := self._next()) is not None:
            with self._lock:
                if job.abandoned:
                    continue
                job.running = True
                job.thread = thread

            result = None
            error = None
            try:
                result = job.function(*job.args)
            except BaseException as raised:  # delivered to the waiting task
                error = raised
            thread_alarm.clear_late()

            with self._lock:
                job.running = False
                is_abandoned = job.abandoned
                self._served += 1
            if is_abandoned:
                return
            self._done.append((job.future, result, error))
            # While the thread waits, it must not keep alive what it has delivered.
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
        """Give all results that have arrived to the tasks that wait for them."""
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
    """Run a function in a thread of the loop, with the caller's context.

    One that hangs delays no other call and does not keep the process from exiting.
    """
    call = partial(contextvars.copy_context().run, function, **arguments)
    name = name or getattr(function, "__name__", "")
    return await AbandonableThreads.of_loop().call(call, name=name, names=ABANDONED_CALLS.get())

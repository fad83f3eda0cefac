"""Deadlines, abandonable threads and the stall watchdog."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from turnwise.envs.user_code import carried
from turnwise.errors import words

T = TypeVar("T")

_BUSY_S = 0.001
"""Seconds that queued calls wait for a busy thread before they get threads of their own."""


class Stop:
    """Flag of an ending rollout. Only then does a cancellation of an episode's task count; others come from user code."""

    asked = False


class Deadline:
    """One timer for all waits of one task.

    The timer is set once; if it fires before the current deadline, it is set again. A wait that ends in time costs two
    assignments. (`asyncio.timeout` sets and removes a timer each time, which costs about 8 us a wait.)
    """

    __slots__ = ("_at", "_fired", "_loop", "_stop", "_task", "_timer", "end")

    def __init__(self, wall_clock: float, stop: Stop | None = None) -> None:
        """Create the deadline of the running task: every wait ends `wall_clock` seconds from now.

        `stop` is the flag of the rollout that owns the task. None for a task of user code, which that code may cancel.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        self._task = task
        self._stop = stop
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0  # 0: no wait is active
        self._fired = False
        self.end = self._loop.time() + wall_clock

    async def wait(self, awaitable: Awaitable[T], seconds: float) -> T:
        """Wait for an awaitable for at most `seconds`.

        Raises `TimeoutError` when it takes longer; it is cancelled then; `RuntimeError` when it cancels the task, exits the
        process, or raises another `BaseException`, which would end other episodes too.
        """
        at = min(self._loop.time() + seconds, self.end)
        self._at = at
        if self._timer is None or self._timer.when() > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._on_timer)
        try:
            result = await awaitable
            if self._stop is not None and self._task.cancelling() and not self._fired:
                await asyncio.sleep(0)  # delivers a requested cancellation that is still pending
                if not self._stop.asked:
                    self.clear()
        except BaseException as error:
            if issubclass(type(error), Exception):
                raise
            self._raise(error)
        else:
            return result
        finally:
            self._at = 0.0
            if self._fired:  # the awaitable swallowed the cancellation
                self._fired = False
                self._task.uncancel()

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise the substitute of an exception that is not an `Exception`."""
        fired, self._fired = self._fired, False
        if fired:
            self._task.uncancel()
        if self.passes(error):
            raise error
        self.clear()
        if type(error) is not asyncio.CancelledError:
            raise RuntimeError(f"raised {words(error, repr)}") from error
        raise (TimeoutError() if fired else RuntimeError("it was cancelled from within")) from None

    def passes(self, error: BaseException) -> bool:
        """Return whether an exception ends the rollout: Ctrl-C, its cancellation, a discarded coroutine."""
        kind = type(error)
        if issubclass(kind, asyncio.CancelledError):
            return bool(self._task.cancelling()) if self._stop is None else self._stop.asked
        if issubclass(kind, GeneratorExit):
            return not self._runs()
        return issubclass(kind, KeyboardInterrupt)

    def clear(self) -> None:
        """Clear cancellations requested by user code."""
        while self._stop is not None and self._task.cancelling():
            self._task.uncancel()

    def _runs(self) -> bool:
        try:
            return asyncio.current_task() is self._task
        except RuntimeError:
            return False

    @property
    def expired(self) -> bool:
        """Whether the wall clock has run out."""
        return self._loop.time() >= self.end

    def extend(self, seconds: float) -> None:
        """Set the end of all waits to `seconds` from now."""
        self.end = self._loop.time() + seconds

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._at == 0.0:
            return
        if self._loop.time() >= self._at:
            self._fired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(self._at, self._on_timer)


@dataclass(slots=True, eq=False)
class _Job:
    """One call in a thread; its flags change only under the lock of `AbandonableThreads`."""

    future: asyncio.Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    owner: str = ""
    thread: threading.Thread | None = None
    running: bool = False
    abandoned: bool = False

    @property
    def name(self) -> str:
        """Name of the call: its owner and function."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return f"{self.owner} {getattr(function, '__qualname__', repr(function))}".strip()


class AbandonableThreads:
    """Runs blocking calls off the event loop, and abandons calls that were cancelled.

    One thread serves calls that return quickly: with more, they would contend for the interpreter lock, which costs more than
    such calls. If no call returns for two milliseconds, every queued call gets its own thread. Results that arrive together
    are delivered in one wake-up of the loop.
    """

    def __init__(self, max_threads: int = 64) -> None:
        """`max_threads` does not count abandoned ones."""
        self._max_threads = max_threads
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

    def call(self, function: Callable[..., T], *args: Any, owner: str = "") -> asyncio.Future[T]:
        """Run `function(*args)` in a thread; cancelling the future abandons the thread, or removes the call from the queue."""
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(future, function, args, owner)
        self._pending += 1
        if self._threads == 0:
            self._start()
        self._jobs.put(job)
        self._schedule_check()
        future.add_done_callback(lambda _: self._finished(job))
        return future

    def close(self) -> None:
        """End all idle threads; one that never returns is a daemon and ends with the process."""
        self._closed = True
        self._jobs.put(None)

    def _schedule_check(self) -> None:
        """Schedule a check of whether queued calls progress."""
        if not self._check_scheduled and self._pending > self._threads:
            self._check_scheduled = True
            self._loop.call_later(_BUSY_S, self._check_queue, self._served, False)

    def _check_queue(self, served: int, is_second: bool) -> None:
        """Start threads if nothing returned between two checks; at the first, the loop itself may have been busy."""
        stuck = served == self._served
        if stuck and not is_second:
            self._loop.call_later(_BUSY_S, self._check_queue, served, True)
            return
        self._check_scheduled = False
        if stuck and not self._closed:
            for _ in range(min(self._jobs.qsize(), self._max_threads - self._threads)):
                self._start()
        self._schedule_check()

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="turnwise-env", daemon=True).start()

    def _finished(self, job: _Job) -> None:
        self._pending -= 1
        if job.future.cancelled():
            with self._lock:
                job.abandoned = True
                running = job.running
            if running:
                # The thread may never return: it no longer counts, and another takes its place for queued calls.
                self.abandoned += 1
                self.names.append(job.name)
                if job.thread is not None:
                    job.thread.name = f"turnwise-env abandoned in {job.name}"
                self._threads -= 1
                if self._pending > self._threads and not self._closed:
                    self._start()

    def _work(self) -> None:
        thread = threading.current_thread()
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.abandoned:
                    continue
                job.running, job.thread = True, thread
            try:
                result, error = job.function(*job.args), None
            except BaseException as raised:  # delivered to the waiting task
                result, error = None, raised
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
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed
                    return
        self._jobs.put(None)  # pass the end marker on to the next thread

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


MAX_LISTED = 20
"""Episodes listed individually."""


class PendingEpisode(NamedTuple):
    """One running episode."""

    session: str
    """phase/step/task/sample/attempt"""
    turn: int
    phase: str
    seconds: float
    """Seconds since the start of its phase."""
    since: float
    """Start of its phase, by `time.monotonic()`."""


class Watchdog:
    """Thread that monitors a running rollout, and handler of SIGUSR1 unless that signal has another handler.

    Progress is an episode that finishes or enters another phase of a turn. After `seconds` without progress, and each time
    after twice as long, it prints the pending episodes, and where the event loop is blocked if it is.
    """

    def __init__(self, pending: Callable[[], list[PendingEpisode]], finished: Callable[[], int], seconds: float) -> None:
        """Create the watchdog of the running event loop; `pending` returns the running episodes, oldest first."""
        self._pending = pending
        self._finished = finished
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turnwise-watchdog", daemon=True)
        self._handles = False

    def __enter__(self) -> Self:
        self._thread.start()
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            self._handles = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
            if self._handles:
                signal.signal(signal.SIGUSR1, self._print_stacks)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        count, last_progress, interval = self._finished(), time.monotonic(), self._seconds
        while not self._stopped.wait(min(1.0, self._seconds / 4)):
            now, rows = time.monotonic(), self._pending()
            latest = rows[-1].since if rows else now
            if self._finished() != count:
                count, latest = self._finished(), now
            if latest > last_progress:
                last_progress, interval = latest, self._seconds
            if now - last_progress >= interval:
                interval *= 2
                lines = [f"no progress for {now - last_progress:.0f} s; {describe_pending(rows)}", *self._blocked()]
                if self._handles:
                    lines.append(f"(kill -USR1 {os.getpid()} shows stacks)")
                _print(lines)

    def _blocked(self) -> Iterator[str]:
        """Yield the stack of the event loop if it is blocked."""
        alive = threading.Event()
        try:
            self._loop.call_soon_threadsafe(alive.set)
        except RuntimeError:  # it is closed
            return
        if not alive.wait(min(0.5, self._seconds)):
            yield "the event loop is blocked:"
            yield from _stack(sys._current_frames().get(self._ident))

    def _print_stacks(self, *_: object) -> None:
        rows = self._pending()
        lines = [describe_pending(rows)]
        for task in asyncio.all_tasks(self._loop):
            lines += [f"task {task.get_name()}:", *_awaiting(task.get_coro())]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [f"thread {names.get(ident, ident)}:", *_stack(frame)]
        _print(lines)


def describe_pending(rows: list[PendingEpisode]) -> str:
    """Describe pending episodes, the oldest individually."""
    if not rows:
        return "no episode is pending"
    lines = [f"{len(rows)} episode{'s' if len(rows) > 1 else ''} pending, oldest first (episode, turn, phase, age):"]
    lines += [f"  {row.session}  turn {row.turn + 1}  {row.phase}  {row.seconds:.1f} s" for row in rows[:MAX_LISTED]]
    if rest := Counter(row.phase for row in rows[MAX_LISTED:]):
        lines.append("  and " + ", ".join(f"{count} in {phase}" for phase, count in rest.most_common()))
    return "\n".join(lines)


def _stack(frame: FrameType | None) -> list[str]:
    return [f"  {entry.filename}:{entry.lineno} in {entry.name}" for entry in traceback.extract_stack(frame, limit=12)]


def _awaiting(coroutine: Any) -> Iterator[str]:
    """Yield the lines at which a coroutine waits, outermost first."""
    while coroutine is not None:
        frame, code = getattr(coroutine, "cr_frame", None), getattr(coroutine, "cr_code", None)
        if frame is None or not isinstance(code, CodeType):
            return
        yield f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        coroutine = getattr(coroutine, "cr_await", None)


def _print(lines: list[str]) -> None:
    """Write all lines at once; ignore a closed terminal."""
    with suppress(OSError, ValueError):
        sys.stderr.write("turnwise: " + "\n".join(lines) + "\n")
        sys.stderr.flush()

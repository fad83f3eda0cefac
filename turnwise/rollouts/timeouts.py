"""Deadlines, threads and the stall watchdog."""

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
from functools import partial
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from turnwise.envs.user_code import carried
from turnwise.errors import words

T = TypeVar("T")

_PATIENCE_S = 0.001
"""How long queued calls wait for a thread that is busy before they get threads of their own."""


class Stop:
    """Whether a rollout is ending: cancellation of an episode's task is only believed then. Any other is user code's."""

    asked = False


class Deadline:
    """One timer for all the waits of one task.

    The timer is set once and, when it rings before the current deadline, set again; a wait that ends in time costs two
    assignments. (`asyncio.timeout` sets and removes a timer each time, which costs about 8 us a wait.)
    """

    __slots__ = ("_at", "_fired", "_loop", "_stop", "_task", "_timer", "end")

    def __init__(self, wall_clock: float, stop: Stop | None = None) -> None:
        """For the running task.

        Args:
            wall_clock: seconds from now that no wait may outlast.
            stop: of the rollout whose own task this is. None for a task of user code, which may be cancelled by that code.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        self._task = task
        self._stop = stop
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0  # 0: nothing is being waited for
        self._fired = False
        self.end = self._loop.time() + wall_clock

    async def wait(self, awaitable: Awaitable[T], seconds: float) -> T:
        """Wait for it for so long at most.

        Raises:
            TimeoutError: when it took longer; it was cancelled then.
            RuntimeError: when it cancelled the task, asked the process to end, or raised what is no `Exception`: it may not
                take the others with it.
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
                await asyncio.sleep(0)  # a cancellation that is asked for and not delivered yet is delivered here
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
            if self._fired:  # what was waited for kept the cancellation to itself
                self._fired = False
                self._task.uncancel()

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise in place of what is no `Exception`."""
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
        """Whether an exception ends the rollout: Ctrl-C, its cancellation, a coroutine that is thrown away."""
        kind = type(error)
        if issubclass(kind, asyncio.CancelledError):
            return bool(self._task.cancelling()) if self._stop is None else self._stop.asked
        if issubclass(kind, GeneratorExit):
            return not self._runs()
        return issubclass(kind, KeyboardInterrupt)

    def clear(self) -> None:
        """Forget cancellations that user code asked for."""
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
        """Let no wait outlast so many seconds from now, whatever was said before."""
        self.end = self._loop.time() + seconds

    def close(self) -> None:
        """Put the timer away."""
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


class _Job:
    """One call on its way through a thread; its flags change under the lock of `AbandonableThreads` alone."""

    __slots__ = ("args", "function", "future", "given_up", "owner", "running", "thread")

    def __init__(
        self, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...], owner: str = ""
    ) -> None:
        self.future = future
        self.function = function
        self.args = args
        self.owner = owner
        self.thread: threading.Thread | None = None
        self.running = False
        self.given_up = False

    @property
    def name(self) -> str:
        """Whose call it is, and of what."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return f"{self.owner} {getattr(function, '__qualname__', repr(function))}".strip()


class AbandonableThreads:
    """Runs blocking calls off the event loop, and abandons those that nobody waits for any more.

    One thread serves calls that return at once, which is cheapest for them: threads that take turns at the interpreter's lock
    cost more than such calls. Where two milliseconds go by and none returned, every queued call gets a thread of its own.
    Results that arrive together are handed over together: one wake-up of the loop for all of them.
    """

    def __init__(self, most: int = 64) -> None:
        """
        Args:
            most: threads at once, abandoned ones not counted.
        """
        self._most = most
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._awake = False
        self._threads = 0
        self._pending = 0
        self._served = 0
        self._watching = False
        self._closed = False
        self.abandoned = 0
        """Calls that were still running when their deadline came."""
        self.names: list[str] = []
        """What those are called; the threads that still run them are named so too."""

    def call(self, function: Callable[..., T], *args: Any, owner: str = "") -> asyncio.Future[T]:
        """Run `function(*args)` in a thread; cancelling the future abandons the thread, or takes the call off the queue."""
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(future, function, args, owner)
        self._pending += 1
        if self._threads == 0:
            self._start()
        self._jobs.put(job)
        self._expect()
        future.add_done_callback(lambda _: self._finished(job))
        return future

    def close(self) -> None:
        """Let every idle thread end; one that never returns is a daemon and ends with the process."""
        self._closed = True
        self._jobs.put(None)

    def _expect(self) -> None:
        """Look in a moment whether the queue moves."""
        if not self._watching and self._pending > self._threads:
            self._watching = True
            self._loop.call_later(_PATIENCE_S, self._look, self._served, False)

    def _look(self, served: int, again: bool) -> None:
        """Start threads where nothing returned between two looks: at the first, the loop itself may have been what was busy."""
        stuck = served == self._served
        if stuck and not again:
            self._loop.call_later(_PATIENCE_S, self._look, served, True)
            return
        self._watching = False
        if stuck and not self._closed:
            for _ in range(min(self._jobs.qsize(), self._most - self._threads)):
                self._start()
        self._expect()

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="turnwise-env", daemon=True).start()

    def _finished(self, job: _Job) -> None:
        self._pending -= 1
        if job.future.cancelled():
            with self._lock:
                job.given_up = True
                running = job.running
            if running:
                # The thread may never come back: it no longer counts, and another takes its place for whoever queues.
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
                if job.given_up:
                    continue
                job.running, job.thread = True, thread
            try:
                result, error = job.function(*job.args), None
            except BaseException as raised:  # it belongs to whoever waits for the result
                result, error = None, raised
            with self._lock:
                job.running = False
                given_up = job.given_up
                self._served += 1
            if given_up:
                return
            self._done.append((job.future, result, error))
            del job, result, error
            if not self._awake:
                self._awake = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_over)
                except RuntimeError:  # the loop is closed: nobody waits
                    return
        self._jobs.put(None)  # one mark ends them all, however many there are: each hands it on

    def _hand_over(self) -> None:
        self._awake = False
        while self._done:
            future, result, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(carried(error))


SHOWN = 20
"""Episodes that are listed one by one."""


class PendingEpisode(NamedTuple):
    """One running episode."""

    session: str
    """phase/step/task/sample/attempt"""
    turn: int
    phase: str
    seconds: float
    """How long it has been in that phase."""
    since: float
    """When that began, by `time.monotonic()`."""


class Watchdog:
    """A thread that watches a rollout while it plays, and a handler of SIGUSR1 where that is nobody else's.

    Progress is an episode that ends or goes from one phase of a turn to the next. After `seconds` without, and each time after
    twice as long, it prints what is pending; where the event loop itself is blocked, also in which line.
    """

    def __init__(self, pending: Callable[[], list[PendingEpisode]], finished: Callable[[], int], seconds: float) -> None:
        """For the running event loop.

        Args:
            pending: what runs, oldest first.
            finished: how many episodes have ended.
            seconds: without progress, until it is told.
        """
        self._pending = pending
        self._finished = finished
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turnwise-watchdog", daemon=True)
        self._handles = False

    def __enter__(self) -> Self:
        self._thread.start()
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            self._handles = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
            if self._handles:
                signal.signal(signal.SIGUSR1, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        count, moved, patience = self._finished(), time.monotonic(), self._seconds
        while not self._over.wait(min(1.0, self._seconds / 4)):
            now, rows = time.monotonic(), self._pending()
            latest = rows[-1].since if rows else now
            if self._finished() != count:
                count, latest = self._finished(), now
            if latest > moved:
                moved, patience = latest, self._seconds
            if now - moved >= patience:
                patience *= 2
                lines = [f"no progress for {now - moved:.0f} s; {describe_pending(rows)}", *self._blocked()]
                if self._handles:
                    lines.append(f"(kill -USR1 {os.getpid()} shows stacks)")
                _say(lines)

    def _blocked(self) -> Iterator[str]:
        """Where the event loop is stuck, if it is."""
        alive = threading.Event()
        try:
            self._loop.call_soon_threadsafe(alive.set)
        except RuntimeError:  # it is closed
            return
        if not alive.wait(min(0.5, self._seconds)):
            yield "the event loop is blocked:"
            yield from _stack(sys._current_frames().get(self._ident))

    def _asked(self, *_: object) -> None:
        rows = self._pending()
        lines = [describe_pending(rows)]
        for task in asyncio.all_tasks(self._loop):
            lines += [f"task {task.get_name()}:", *_awaiting(task.get_coro())]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [f"thread {names.get(ident, ident)}:", *_stack(frame)]
        _say(lines)


def describe_pending(rows: list[PendingEpisode]) -> str:
    """What is pending, in words; the oldest one by one."""
    if not rows:
        return "no episode is pending"
    lines = [f"{len(rows)} episode{'s' if len(rows) > 1 else ''} pending, oldest first (episode, turn, phase, age):"]
    lines += [f"  {row.session}  turn {row.turn + 1}  {row.phase}  {row.seconds:.1f} s" for row in rows[:SHOWN]]
    if rest := Counter(row.phase for row in rows[SHOWN:]):
        lines.append("  and " + ", ".join(f"{count} in {phase}" for phase, count in rest.most_common()))
    return "\n".join(lines)


def _stack(frame: FrameType | None) -> list[str]:
    return [f"  {entry.filename}:{entry.lineno} in {entry.name}" for entry in traceback.extract_stack(frame, limit=12)]


def _awaiting(coroutine: Any) -> Iterator[str]:
    """The lines where a coroutine waits, from the outermost to what it waits for."""
    while coroutine is not None:
        frame, code = getattr(coroutine, "cr_frame", None), getattr(coroutine, "cr_code", None)
        if frame is None or not isinstance(code, CodeType):
            return
        yield f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        coroutine = getattr(coroutine, "cr_await", None)


def _say(lines: list[str]) -> None:
    """One write, so that it stays together; a terminal that is gone harms nobody."""
    try:
        sys.stderr.write("turnwise: " + "\n".join(lines) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass

"""Says what a rollout is waiting for when nothing moves, and on SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

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

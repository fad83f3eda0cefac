"""Stall watchdog: prints pending episodes when nothing progresses."""

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
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

MAX_LISTED = 20
"""Episodes listed individually."""


class PendingEpisode(NamedTuple):
    """One running episode."""

    label: str
    """`EpisodeKey.label`."""
    turn: int
    phase: str
    seconds: float
    """Seconds since the start of its phase."""
    since: float
    """Start of its phase, by `time.monotonic()`."""


class Watchdog:
    """Thread that monitors a running rollout, and handler of SIGUSR1 unless that signal has
    another handler.

    Progress is an episode that finishes or enters another phase of a turn. After `seconds` without
    progress, and each time after twice as long, it prints the pending episodes, and where the event
    loop is blocked if it is.
    """

    def __init__(
        self,
        pending: Callable[[], list[PendingEpisode]],
        finished: Callable[[], int],
        seconds: float,
    ) -> None:
        """Create the watchdog of the running event loop.

        `pending` returns the running episodes, oldest first.
        """
        self._pending = pending
        self._finished = finished
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turnwright-watchdog", daemon=True)
        self._handles_signal = False

    def __enter__(self) -> Self:
        self._thread.start()
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            self._handles_signal = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
            if self._handles_signal:
                signal.signal(signal.SIGUSR1, self._print_stacks)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles_signal:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        finished = self._finished()
        last_progress = time.monotonic()
        interval = self._seconds
        while not self._stopped.wait(min(1.0, self._seconds / 4)):
            # The last that entered a phase, or an episode that finished.
            now = time.monotonic()
            episodes = self._pending()
            latest = episodes[-1].since if episodes else now
            finished_now = self._finished()
            if finished_now != finished:
                finished = finished_now
                latest = now
            if latest > last_progress:
                last_progress = latest
                interval = self._seconds

            stalled_s = now - last_progress
            if stalled_s >= interval:
                interval *= 2
                lines = [f"no progress for {stalled_s:.0f} s; {describe_pending(episodes)}"]
                lines += self._blocked()
                if self._handles_signal:
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
            yield from _stack(sys._current_frames().get(self._loop_thread))

    def _print_stacks(self, *_: object) -> None:
        lines = [describe_pending(self._pending())]
        for task in asyncio.all_tasks(self._loop):
            lines += [f"task {task.get_name()}:", *_awaiting(task.get_coro())]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += [f"thread {names.get(ident, ident)}:", *_stack(frame)]
        _print(lines)


def describe_pending(episodes: list[PendingEpisode]) -> str:
    """Describe pending episodes, the oldest individually."""
    if not episodes:
        return "no episode is pending"

    plural = "s" if len(episodes) > 1 else ""
    lines = [f"{len(episodes)} episode{plural} pending, oldest first (episode, turn, phase, age):"]
    for episode in episodes[:MAX_LISTED]:
        lines.append(
            f"  {episode.label}  turn {episode.turn + 1}  {episode.phase}  {episode.seconds:.1f} s"
        )
    phases = Counter(episode.phase for episode in episodes[MAX_LISTED:])
    if phases:
        counts = [f"{count} in {phase}" for phase, count in phases.most_common()]
        lines.append("  and " + ", ".join(counts))
    return "\n".join(lines)


def _stack(frame: FrameType | None) -> list[str]:
    return [
        f"  {entry.filename}:{entry.lineno} in {entry.name}"
        for entry in traceback.extract_stack(frame, limit=12)
    ]


def _awaiting(coroutine: Any) -> Iterator[str]:
    """Yield the lines at which a coroutine waits, outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        code = getattr(coroutine, "cr_code", None)
        if frame is None or not isinstance(code, CodeType):
            return
        yield f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        coroutine = getattr(coroutine, "cr_await", None)


def _print(lines: list[str]) -> None:
    """Write all lines at once; ignore a closed terminal."""
    with suppress(OSError, ValueError):
        sys.stderr.write("turnwright: " + "\n".join(lines) + "\n")
        sys.stderr.flush()

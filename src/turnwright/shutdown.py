"""One way to shut down, whatever the signal: SIGTERM and SIGHUP end a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that are handled as Ctrl-C is: those of a supervisor, and of a terminal that closes."""


class StopSignals:
    """Handler of `STOP_SIGNALS`.

    The first signal cancels the main task of a running event loop, so that what the command holds
    is written. The next one, or one without a loop, raises `KeyboardInterrupt` wherever the main
    thread is.

    asyncio does this for SIGINT, except in a process that ignores it, as every process does that a
    script starts in the background. There this class does it: a `KeyboardInterrupt` inside the loop
    would cancel all tasks at once, so that none could wait for another one to end.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the last signal; 0 before the first."""
        self._process = os.getpid()
        self._main_task: asyncio.Task[None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:  # a child that user code forked: it has nothing to write
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = number

        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)
        elif self._main_task is not None and not self._main_task.done():
            task = self._main_task
            self._main_task = None
            task.cancel()
            # Wakes a loop that waits for its sockets.
            task.get_loop().call_soon_threadsafe(lambda: None)
        else:
            raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in the body, except those that the process ignores.

        Under nohup, that is SIGHUP.
        """
        # A thread of Ray blocks SIGINT for all that it starts.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, *STOP_SIGNALS])
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, or to its cancellation by a signal.

        Such a cancellation becomes a `KeyboardInterrupt`.
        """
        import asyncio  # not at the top: `turnwright --help` needs no event loop

        before = self.received

        async def main() -> None:
            self._main_task = asyncio.current_task()
            await work

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            if self.received == before:
                raise
            raise KeyboardInterrupt from None
        finally:
            self._main_task = None


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as `asyncio.run` does, under the signals that the command handles, if any."""
    import asyncio

    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    if isinstance(handler, StopSignals):
        handler.run(work)
    else:
        asyncio.run(work)

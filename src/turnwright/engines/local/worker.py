"""Runs a scheduler on the event loops that wait for its replies, or on a thread where steps are
long.

`Worker.post` queues a command for the scheduler, `Worker._step` runs the queue and one step, and
`Worker.deliver` passes what ended back to the callers' loops. What a step does is
`Scheduler.step`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from turnwright.engines.local.scheduler import Scheduler
from turnwright.engines.local.step_rows import Outcome, caused_error
from turnwright.errors import EngineError

_log = logging.getLogger(__name__)
Command = Callable[[], Any]

SHORT_STEP_S = 0.01
"""Seconds of CPU of a mean step below which steps run on an event loop; its other callbacks
wait that long for one."""
MEAN_OF_STEPS = 8
"""Number of steps over which their time is averaged."""


class Worker:
    """Runs a scheduler, one step at a time.

    Steps run on the callers' event loops while they are short, else on a thread of its own. A
    thread and an event loop that both compute Python pass the interpreter lock from core to core,
    which costs a tiny model about a fifth of its CPU and gains nothing. A long step, or one on a
    GPU, leaves the lock to the loop for most of its time.
    """

    def __init__(self, scheduler: Scheduler, short_step_s: float) -> None:
        self.scheduler = scheduler
        self._short_step_s = short_step_s
        self._mean_step_s = math.inf
        self._stepping = threading.Lock()
        """Held during a step, which a loop or the thread computes."""
        self._lock = threading.Condition()
        """Held for what follows; the thread waits on it."""
        self._commands: list[Command] = []
        self._loops: set[asyncio.AbstractEventLoop] = set()
        """Loops with a scheduled turn."""
        self._thread: threading.Thread | None = None
        self._thread_asked = False
        self._closing = False
        self._failure: BaseException | None = None

    def post(self, command: Command) -> None:
        """Queue a command, to run in sequence before the next step.

        Those of one iteration of an event loop run together, so that their calls are computed
        together. Raises as `check`.
        """
        loop = _running_loop()
        with self._lock:
            self.check()
            self._commands.append(command)
            if loop is None:
                self._ask_thread()
            else:
                self._schedule(loop)

    def ask(self, command: Command) -> Future[Any]:
        """Queue a command; return a future of its result or exception."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                result = command()
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    answer.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):  # cancelled with its caller
                    answer.set_result(result)

        self.post(run)
        return answer

    def check(self) -> None:
        """Check that commands are accepted.

        Raises `EngineError` when the engine is closed, or has failed.
        """
        with self._lock:
            if self._failure is not None:
                raise EngineError(
                    f"the local engine failed earlier: {self._failure!r}; make a new one"
                ) from self._failure
            if self._closing:
                raise EngineError("the local engine is closed; make a new one")

    def stop(self) -> None:
        """Refuse later commands, and end the thread and every call as aborted, soon."""
        with self._lock:
            self._closing = True
            self._lock.notify()

    def join(self) -> None:
        """Wait until the thread and every call have ended after `stop`."""
        if self._thread is not None:
            self._thread.join()
        self._end()

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Pass results to the event loops that wait for them, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        for call, result in outcomes:
            by_loop.setdefault(call.future.get_loop(), []).append((call, result))
        for loop, loop_outcomes in by_loop.items():
            _call_on(loop, _settle, loop_outcomes)

    @property
    def _short(self) -> bool:
        return self._mean_step_s < self._short_step_s

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule a turn of a loop if none is scheduled; the caller holds the lock."""
        if loop in self._loops:
            return
        open_loops = {other for other in self._loops if not other.is_closed()}
        self._loops = open_loops | {loop}
        if loop is _running_loop():
            # In its next iteration: `_call_on` would take the turn at once.
            loop.call_soon(self._turn, loop)
        else:
            _call_on(loop, self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Compute a step on a loop, or have the thread compute it."""
        with self._lock:
            self._loops.discard(loop)
            if not self._short:
                self._ask_thread()
                return
        if self._closing:
            self._end()
        else:
            self._step()

    def _ask_thread(self) -> None:
        """Have the thread compute a step; the caller holds the lock."""
        self._thread_asked = True
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="turnwright-local-engine", daemon=True
            )
            self._thread.start()
        self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._thread_asked and not self._closing:
                    self._lock.wait()
                self._thread_asked = False
            if self._closing:
                break
            self._step()
        self._end()

    def _step(self) -> None:
        """Run queued commands, compute a step, and provide for the next one."""
        with self._stepping:
            if self._failure is not None:
                return
            try:
                self._run_commands()
                if self.scheduler.busy:
                    start = time.thread_time()
                    outcomes = self.scheduler.step()
                    self._add_to_mean(time.thread_time() - start)
                    self.deliver(outcomes)
                with self._lock:
                    if self.scheduler.busy:
                        self._schedule_next_step()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):  # Ctrl-C during a step on the loop
                    raise

    def _schedule_next_step(self) -> None:
        """Ask the thread for a step, or the loops that wait for one; the caller holds the lock."""
        if not self._short:
            self._ask_thread()
            return
        calls = (*self.scheduler.running, *self.scheduler.waiting)
        for loop in {call.future.get_loop() for call in calls}:
            self._schedule(loop)

    def _add_to_mean(self, seconds: float) -> None:
        if self._mean_step_s == math.inf:
            self._mean_step_s = seconds
        self._mean_step_s += (seconds - self._mean_step_s) / MEAN_OF_STEPS

    def _run_commands(self) -> None:
        with self._lock:
            commands = self._commands
            self._commands = []
        for command in commands:
            try:
                command()
            except Exception:  # concerns one call only
                _log.exception("a command to the local engine failed")

    def _end(self) -> None:
        with self._stepping:
            self._run_commands()
            self.deliver(self.scheduler.abort())

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error

        self._run_commands()  # calls being submitted fail with the others
        text = f"the local engine failed in a step: {error!r}"
        calls = (*self.scheduler.running, *self.scheduler.waiting)
        self.deliver([(call, caused_error(text, error)) for call in calls])


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _call_on(
    loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any
) -> None:
    """Call a function on a loop, at once if it runs here; nothing waits on a closed loop."""
    if loop is _running_loop():
        function(argument)
    elif not loop.is_closed():
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function, argument)


def _settle(outcomes: list[Outcome]) -> None:
    for call, result in outcomes:
        if call.future.done():  # its caller is gone
            continue
        if isinstance(result, BaseException):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)

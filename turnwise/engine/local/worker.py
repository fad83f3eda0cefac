"""The one thread that computes: a mailbox in front of the scheduler, and results posted back a step at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from turnwise.engine.base import Generation
from turnwise.engine.local.batch import ActiveCall, Outcome
from turnwise.engine.local.scheduler import Scheduler
from turnwise.errors import EngineError

_log = logging.getLogger(__name__)
Order = Callable[[], Any]


class Worker:
    """Runs a scheduler on a thread of its own, which starts with the first order and sleeps when there is nothing to do."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._lock = threading.Condition()
        self._orders: list[Order] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: BaseException | None = None

    def post(self, orders: list[Order]) -> None:
        """Have these called on the thread before its next step, in order.

        Raises:
            EngineError: when the engine is closed, or has failed.
        """
        with self._lock:
            self._check()
            self._orders += orders
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="turnwise-local-engine", daemon=True)
                self._thread.start()
            self._lock.notify()

    def ask(self, order: Order) -> Future[Any]:
        """Have this called on the thread, with its result or exception to wait for; an exception of it is the asker's alone."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                result = order()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.post([run])
        return answer

    def check(self) -> None:
        """See that the thread can take orders.

        Raises:
            EngineError: when the engine is closed, or has failed.
        """
        with self._lock:
            self._check()

    def stop(self) -> None:
        """End every call as aborted and the thread with them; further orders are refused."""
        with self._lock:
            self._closing = True
            thread = self._thread
            self._lock.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def deliver(self, outcomes: list[Outcome]) -> None:
        """Hand results to the event loops that wait for them, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].future.get_loop(), []).append(outcome)
        for loop, theirs in by_loop.items():
            # A loop that was closed has nobody left who waits.
            if not loop.is_closed():
                try:
                    loop.call_soon_threadsafe(_settle, theirs)
                except RuntimeError:
                    continue

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the local engine failed earlier: {self._failure!r}; make a new one") from self._failure
        if self._closing:
            raise EngineError("the local engine is closed; make a new one")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            with self._lock:
                self._failure = error
                orders, self._orders = self._orders, []
            for order in orders:  # calls that were just coming in fail with the others
                order()
            self.deliver([(call, _failed(error)) for call in (*self.scheduler.running, *self.scheduler.waiting)])
        else:
            self.deliver(self.scheduler.abort())

    def _turn(self) -> bool:
        """Take orders, then compute a step; False at the end."""
        with self._lock:
            while not self._orders and not self._closing and not self.scheduler.busy:
                self._lock.wait()
            orders, self._orders = self._orders, []
            closing = self._closing
        for order in orders:
            try:
                order()
            except Exception:  # of one call alone, which is over for it
                _log.exception("an order to the local engine failed")
        if closing:
            return False
        self.deliver(self.scheduler.step())
        return True


def _failed(error: BaseException) -> EngineError:
    failure = EngineError(f"the local engine failed in a step: {error!r}")
    failure.__cause__ = error
    return failure


def _settle(outcomes: list[tuple[ActiveCall, Generation | EngineError]]) -> None:
    for call, result in outcomes:
        if call.future.done():  # its caller is gone
            continue
        if isinstance(result, BaseException):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)

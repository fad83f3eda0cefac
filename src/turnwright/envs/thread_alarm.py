"""Alarms of user code in threads: `signal.alarm` works in the main thread alone, and tools and
rewards run in others.

User code that bounds a call by `SIGALRM` gets an alarm of its own thread: a timer calls the handler
when the time is over, and what the handler raises is raised in the thread. As with a real signal, a
call of C code is not interrupted before it returns.
"""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

Handler = Callable[[int, Any], Any] | int | None

_lock = threading.RLock()
"""Held while a handler runs, which may set the alarm again."""


class _Alarm:
    """Handler and timer of one thread."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._timer: threading.Timer | None = None
        self._ends = 0.0
        """Time of the next alarm, by `time.monotonic`."""
        self.handler: Handler = signal.SIG_DFL
        self.interval = 0.0
        """Seconds between further alarms; 0 for one alarm."""

    @property
    def left(self) -> float:
        """Seconds to the next alarm; 0 without one."""
        if self._timer is None:
            return 0.0
        return max(0.0, self._ends - time.monotonic())

    def handle_by(self, handler: Handler) -> Handler:
        """Set the handler; return the last one."""
        last = self.handler
        self.handler = handler
        return last

    def set(self, seconds: float, interval: float) -> tuple[float, float]:
        """Set the alarm, 0 for none; return what was left of the last one, and its interval."""
        with _lock:
            last = (self.left, self.interval)
            self._stop()
            if seconds > 0:
                self._start(seconds, interval)
        return last

    def _start(self, seconds: float, interval: float) -> None:
        self._ends = time.monotonic() + seconds
        self.interval = interval
        timer = threading.Timer(seconds, self._ring)
        self._timer = timer
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        """Stop the timer. What it raised already is met here, by a call, if the thread has not met
        it yet.

        Taking it back is no way: CPython 3.11 then keeps asking all threads whether they have an
        exception to raise. That is slow, and never ends in a thread whose profiler is on.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self.interval = 0.0
        _meet()

    def _ring(self) -> None:
        """Call the handler; raise in the thread what it raises."""
        with _lock:
            if self._timer is not threading.current_thread():
                return  # another alarm was set, or none
            self._timer = None
            if self.interval > 0:
                self._start(self.interval, self.interval)
            if not callable(self.handler):
                return  # ignored; by default it would end the process
            ringing = _ringing.set(self)
            try:
                self.handler(signal.SIGALRM, None)
            except BaseException as error:
                _raise_in(self._thread, type(error))
            finally:
                _ringing.reset(ringing)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _meet() -> None:
    """Raise what another thread raised in this one: Python looks for it where a function begins."""


_alarms: dict[int, _Alarm] = {}
"""By the number of the thread."""

_ringing: ContextVar[_Alarm | None] = ContextVar("ringing", default=None)
"""The alarm whose handler runs in this thread, a timer's; what the handler sets is that alarm."""


def clear() -> None:
    """Forget the alarm of this thread, whose call of user code is over."""
    alarm = _alarms.pop(threading.get_ident(), None)
    if alarm is not None:
        alarm.set(0.0, 0.0)


def clear_late() -> None:
    """Forget the alarm of this thread; what it raises until it is forgotten meets no user code, and
    is dropped."""
    while True:
        try:
            clear()
        except BaseException:  # of the handler: any
            continue
        return


class SignalOfUserCode(ModuleType):
    """`signal` as user code sees it: in a thread, SIGALRM is the thread's own."""

    def __init__(self) -> None:
        super().__init__("signal", signal.__doc__)

    def __getattr__(self, key: str) -> Any:
        return _OURS.get(key) or getattr(signal, key)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _current_alarm() -> _Alarm:
    """Return the alarm of this thread; in a handler, that which rings."""
    ringing = _ringing.get()
    if ringing is not None:
        return ringing
    thread = threading.get_ident()
    return _alarms.setdefault(thread, _Alarm(thread))


def _signal(signalnum: int, handler: Handler) -> Any:
    if _in_main_thread() or signalnum != signal.SIGALRM:
        return signal.signal(signalnum, handler)
    return _current_alarm().handle_by(handler)


def _getsignal(signalnum: int) -> Any:
    if _in_main_thread() or signalnum != signal.SIGALRM:
        return signal.getsignal(signalnum)
    return _current_alarm().handler


def _alarm(seconds: int) -> int:
    if _in_main_thread():
        return signal.alarm(seconds)
    left, _ = _current_alarm().set(float(int(seconds)), 0.0)
    return math.ceil(left)


def _setitimer(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
    if _in_main_thread() or which != signal.ITIMER_REAL:
        return signal.setitimer(which, seconds, interval)
    return _current_alarm().set(float(seconds), float(interval))


def _getitimer(which: int) -> tuple[float, float]:
    if _in_main_thread() or which != signal.ITIMER_REAL:
        return signal.getitimer(which)
    alarm = _current_alarm()
    return alarm.left, alarm.interval


_OURS = {
    "signal": _signal,
    "getsignal": _getsignal,
    "alarm": _alarm,
    "setitimer": _setitimer,
    "getitimer": _getitimer,
}

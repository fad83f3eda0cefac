"""Calls of functions of this package on untrusted text, bounded in processor time and memory, from any thread.

An expression such as `9**9**9**9` has no bound, and a time limit by a signal holds in the main thread alone. `call_bounded`
therefore runs the function in a helper process, which is kept for further calls and killed when it exceeds a bound. Processor
time is limited instead of time on the clock, so a busy machine does not change a verdict.

The helper, ``python -m turnwright.envs.isolation.bounded``, reads one request and writes one answer a line, as JSON: requests
come from this package alone and name a function, `module:name`; what it is called with is data.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from turnwright.envs.isolation.child_path import python_path
from turnwright.errors import ProcessDied, TurnwrightError

SECONDS = 3
"""Processor time of a call, which takes milliseconds unless it does not end."""
MEMORY = 768 * 2**20
"""Bytes that a call may allocate beyond what its imports take."""
WALL_S = 90.0
"""Time on the clock for a call, imports included, for a helper that sleeps or gets no processor."""
MAX_DEATHS = 3
"""Maximum helpers that one call may lose to something outside of it, before the call fails."""
_FRESH = (MemoryError, RecursionError)
"""Errors that may leave a process in a bad state, so that the next call gets another one."""


_OWN_DEATHS = {
    signal.SIGXCPU,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
}
"""Signals that a call brings upon its helper. Others come from outside, and say nothing about the call."""


class BoundExceeded(TurnwrightError, RuntimeError):
    """The call used more processor time or memory than it may."""


def call_bounded(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of a module returns, called in a helper process with arguments and a result that JSON can hold.

    Raises:
        BoundExceeded: when the call used too much processor time or memory, or ended the process.
        ProcessDied: when something else ended the process, `MAX_DEATHS` times, or it got no processor
            time for `WALL_S` seconds: there is no verdict.
        CallFailed: for an exception of the function, with its type and message.
    """
    request = orjson.dumps({"function": f"{function.__module__}:{function.__qualname__}", "args": args})
    return _HELPERS.call(request)


class _Helpers:
    """Helper processes: as many as there are cores, at most four, each with one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(max(1, min(4, os.cpu_count() or 1)))
        self._idle: list[_Helper] = []

    def call(self, request: bytes) -> Any:
        with self._slots:
            answer, helper = self._ask(request)

            if answer.get("fresh"):
                helper.kill()
            else:
                with self._lock:
                    self._idle.append(helper)

        if answer.get("fresh"):
            raise BoundExceeded(answer["error"])
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["value"]

    def _ask(self, request: bytes) -> tuple[dict[str, Any], _Helper]:
        """Return the answer and the helper that gave it; one that was killed meanwhile is replaced."""
        deaths = 0
        while True:
            with self._lock:
                helper = self._idle.pop() if self._idle else None
            if helper is None or not helper.alive:
                helper = _Helper()

            try:
                return helper.ask(request), helper
            except _HelperKilled as error:
                helper.kill()
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise ProcessDied(f"{error}, {deaths} times") from error
            except BaseException:
                helper.kill()
                raise

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.kill()


class CallFailed(TurnwrightError, RuntimeError):
    """The function raised an exception, whose type and message this has."""


class _HelperKilled(Exception):
    """Something outside of the call ended the helper."""


class _Helper:
    """One helper process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone
            env=os.environ | {"PYTHONPATH": python_path()},
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._death() from error
        answer: dict[str, Any] = orjson.loads(self._read_line())
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        until = time.monotonic() + WALL_S
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)

        line = bytearray()
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not ready.poll(1000 * left):
                raise ProcessDied(f"the helper process of a call got no answer ready within {WALL_S:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._death()
            line += piece
        return bytes(line)

    def _death(self) -> Exception:
        """Return why the helper closed its end: by what it was asked, or by something else."""
        try:
            status = self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:  # it closed its end and goes on
            self._process.kill()
            status = self._process.wait()
        if status < 0 and -status not in _OWN_DEATHS:
            return _HelperKilled(f"a helper process died by signal {-status} ({signal.Signals(-status).name})")
        return BoundExceeded(f"the call ended its process; it may use {SECONDS} s of processor time")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def serve() -> None:
    """Answer requests until standard input closes. What libraries print goes nowhere."""
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    for line in sys.stdin.buffer:
        answers.write(orjson.dumps(_answer(orjson.loads(line))) + b"\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["function"].partition(":")
    try:
        # Imports count toward neither bound: the first call would otherwise have less than the others.
        function = getattr(importlib.import_module(module), name)
        _set_bounds()
        return {"value": function(*request["args"])}
    except Exception as error:
        answer: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:500]}
        return answer | ({"fresh": True} if isinstance(error, _FRESH) else {})


def _set_bounds() -> None:
    """Allow this process `SECONDS` and `MEMORY` more than it has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    with contextlib.suppress(OSError, ValueError):  # no /proc: processor time alone is limited
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))


def _renew() -> None:
    """Give a forked process helpers of its own; those that it inherited answer its parent."""
    global _HELPERS
    _HELPERS = _Helpers()


_HELPERS = _Helpers()
os.register_at_fork(after_in_child=_renew)
atexit.register(lambda: _HELPERS.close())

if __name__ == "__main__":
    serve()

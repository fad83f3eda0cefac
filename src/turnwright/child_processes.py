"""Processes that this one starts.

Each leads a session of its own, so Ctrl-C in a terminal reaches it through this process alone, and
everything that it started in turn is killed with it. Fork servers, trackers, sandboxes and engine
servers are all `ChildProcess`; what is said to them is theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

Stream = int | IO[Any] | None

_STARTED_IN = os.getcwd()
"""The working directory, before any code of a user could change it."""

_PR_SET_PDEATHSIG = 1
_EXEC_AND_END_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, 15) if sys.platform == 'linux' "
    "else None; signal.pthread_sigmask(signal.SIG_SETMASK, ()); os.execvpe(sys.argv[1], "
    "sys.argv[1:], os.environ)"
)
"""Program that asks for SIGTERM at its parent's end, then becomes another one.

It needs no module of this package. Signals that the starting thread blocks reach the other program
again.
"""


def python_path() -> str:
    """Return a `PYTHONPATH` by which a child process finds the modules that this process finds.

    Its entries are absolute, so the child may have any working directory.
    """
    entries = [os.path.join(_STARTED_IN, entry) for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entries))


def end_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when the thread that started it ends.

    Other systems are not asked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def exit_words(status: int) -> str:
    """Say how a process ended, by its exit status as `subprocess` has it: negative for a signal."""
    if status < 0:
        return f"died by signal {-status} ({signal.Signals(-status).name})"
    return f"left with status {status}"


class ChildProcess:
    """A process that leads a session of its own.

    When its end is noticed, what is left of the session is killed.

    Example::

        env = os.environ | {"PYTHONPATH": python_path()}
        child = ChildProcess([sys.executable, "-m", "my_module"], env=env)
        child.end(patience_s=5.0)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | str | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        pass_fds: Sequence[int] = (),
        ends_with_parent: bool = False,
    ) -> None:
        """Start it; pipes are unbuffered.

        With `ends_with_parent` a program of others gets SIGTERM when this process ends.

        Raises:
            OSError: where the command cannot be started.
        """
        if ends_with_parent:
            command = [sys.executable, "-c", _EXEC_AND_END_WITH_PARENT, *command]
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            bufsize=0,
            start_new_session=True,
        )
        self._session_killed = False

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its session."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._kill_session()
        return status

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input, if it was started with one."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its standard output, if it was started with one."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, so long at most; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(None if seconds is None else max(0.0, seconds))
        return self.status is not None

    def end(self, patience_s: float) -> None:
        """Ask it to end by SIGTERM; kill it and its session after so many seconds."""
        if self.status is None:
            self._process.terminate()
            self.wait(patience_s)
        self.kill()

    def kill(self) -> None:
        """Kill it and all processes of its session, and close the pipes to it."""
        self._kill_session()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _kill_session(self) -> None:
        """Kill the session, once: some time after its leader's end, its id may be another's."""
        if self._session_killed:
            return
        self._session_killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

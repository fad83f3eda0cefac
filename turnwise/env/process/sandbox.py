"""Code of a model's, run where it can do no harm: a fresh interpreter behind the walls that the system has.

What holds where is found out once (`isolation`) and stands in every result. See `jail.py` for the other side.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.env.calling import in_thread
from turnwise.env.tools.tools import Tool, tool
from turnwise.errors import ConfigError, ToolFailure

MIB = 1 << 20
WALLS = ("uid", "user", "pid", "network", "ipc", "mount")
"""What can be around the code: a uid of its own, and the namespaces."""

_JAIL = Path(__file__).with_name("jail.py")
_GRACE = 60.0
"""Seconds beyond the deadline until the other side is given up; it ends by itself long before."""
_PLACES = threading.BoundedSemaphore(max(16, 4 * (os.cpu_count() or 1)))
"""Most sandboxes at once in this process: with more on few cores the clock would judge the machine, not the code."""
_LAST_WORDS = (
    (r"MemoryError\b", "memory"),
    (r"\[Errno 27\]", "file_size"),
    (r"\[Errno 28\]", "disk"),
    (r"\[Errno 24\]", "open_files"),
    (r"\[Errno 11\]|can't start new thread", "processes"),
)


class SandboxError(ToolFailure):
    """A sandbox could not be had: nothing that the code did."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of running code."""

    stdout: str
    stderr: str
    """Both as text, bytes that are none replaced, cut in the middle with a mark where they were too long."""
    exit_status: int | None
    """What the program left with; None when a signal ended it."""
    signal: str | None
    """The signal that ended it, such as `SIGKILL`."""
    timed_out: bool
    """It was killed at its deadline, with everything that it had started."""
    cut: bool
    """Something of its output is missing."""
    limit: str | None
    """The limit that it met, as far as is known: `deadline` and `cpu` are measured; `memory`, `file_size`, `disk`,
    `open_files` and `processes` are read from the last line of a traceback, which is the program's own word."""
    channel: str = ""
    """What it wrote to descriptor 3, where that was asked for."""
    seconds: float = 0.0
    isolation: tuple[str, ...] = ()
    """The walls that stood around it, of `WALLS`."""

    @property
    def ok(self) -> bool:
        """It ended by itself with status 0. It says so itself: `os._exit(0)` is enough."""
        return self.exit_status == 0

    @property
    def text(self) -> str:
        """What a model is shown: the output, the errors, and how it ended where that was not well."""
        parts = [part.rstrip("\n") for part in (self.stdout, self.stderr) if part.strip()]
        if self.timed_out:
            parts.append("[killed: out of time]")
        elif self.signal is not None:
            parts.append(f"[killed by {self.signal}{': out of CPU time' if self.limit == 'cpu' else ''}]")
        elif self.exit_status:
            parts.append(f"[exit status {self.exit_status}]")
        return "\n".join(parts) or "[no output]"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How code is run, and what it may use.

    Example::

        ran = Sandbox(seconds=2).run("print(6 * 7)")
        assert ran.stdout == "42\\n" and ran.ok

    Raises:
        ConfigError: for a limit under its least, a wall that does not exist, or an interpreter that cannot be run.
    """

    seconds: float = 5.0
    """Until it is killed, with all that it started."""
    cpu_seconds: int | None = None
    """CPU time of each process; None takes `seconds`, rounded up."""
    memory: int = 512 * MIB
    """Bytes of address space of each process."""
    disk: int = 32 * MIB
    """Bytes of one file, and with a mount namespace of the scratch directory."""
    processes: int = 32
    """Processes and threads at once."""
    open_files: int = 64
    output: int = 16_384
    """Bytes of standard output that are kept, and as many of standard error."""
    needs: tuple[str, ...] | None = None
    """Walls of `WALLS` without which nothing is run. None asks for `uid` or `user`, without which the code could reach whatever
    its caller can; an empty tuple asks for nothing."""
    python: str = field(default_factory=lambda: os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))
    """The interpreter; of packages it sees those of its own directory, not of a virtual environment."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.01), ("memory", 32 * MIB), ("disk", 4096), ("processes", 1), ("open_files", 8)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"Sandbox({name}={getattr(self, name)!r}): at least {least}")
        if self.output < 64 or (self.cpu_seconds is not None and self.cpu_seconds < 1):
            raise ConfigError("Sandbox: output is at least 64 bytes, cpu_seconds at least 1")
        if not os.access(self.python, os.X_OK):
            raise ConfigError(f"Sandbox(python={self.python!r}): no program that can be run")
        if unknown := set(self.needs or ()) - set(WALLS):
            raise ConfigError(f"Sandbox(needs={self.needs!r}): {sorted(unknown)[0]!r} is none of {', '.join(WALLS)}")

    def run(self, source: str, files: Mapping[str, str] | None = None, *, channel: int = 0) -> Ran:
        """Run a program, and return when nothing of it is left.

        Args:
            source: Python, put into the scratch directory as `main.py`.
            files: more files by name, put beside it.
            channel: how many bytes written to descriptor 3 are wanted; 0 leaves it closed.

        Raises:
            SandboxError: when it could not be run, or a wall of `needs` does not stand here.
        """
        return _Run(self, source, files or {}, channel).to_end(isolation(self.python))

    async def arun(self, source: str, files: Mapping[str, str] | None = None, *, channel: int = 0) -> Ran:
        """`run` without blocking the event loop; cancelled, it kills the program."""
        run = _Run(self, source, files or {}, channel)
        try:
            ran: Ran = await in_thread(lambda: run.to_end(isolation(self.python)), {})
            return ran
        finally:
            run.stop()


def python_tool(sandbox: Sandbox | None = None) -> Tool:
    """A tool that runs a program in a sandbox and says what it printed.

    Example::

        env = tw.tool_env(tools=[python_tool(Sandbox(seconds=2))], reward=correct)
    """
    box = sandbox or Sandbox()

    async def python(code: str) -> tuple[str, float, dict[str, float]]:
        """Run a Python program; only what it prints is seen.

        Args:
            code: the program.
        """
        ran = await box.arun(code)
        counts = {"python/timed_out": float(ran.timed_out), "python/cut": float(ran.cut), "python/failed": float(not ran.ok)}
        return ran.text, 0.0, counts

    return tool(python)


def isolation(python: str | None = None) -> tuple[str, ...]:
    """The walls that stand here, found out by running a program behind them, once per process and interpreter."""
    with _PROBE:
        return _isolation(python or Sandbox().python)


_PROBE = threading.Lock()


@functools.cache
def _isolation(python: str) -> tuple[str, ...]:
    """The greatest set that works: all of them, else those that work alone and together, else none."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    first = "uid" if root else "user"
    every = (first, "pid", "network", "ipc", "mount")
    if _holds(python, every):
        return every
    if not _holds(python, (first,)):
        if not root:
            return ()  # without a user namespace an ordinary person has no other
        single = [wall for wall in every[1:] if _holds(python, (wall,))]
    else:
        single = [wall for wall in every if wall == first or _holds(python, (first, wall))]
    for found in (tuple(single), tuple(wall for wall in single if wall != "mount")):
        if found and _holds(python, found):
            return found
    return ()


def _holds(python: str, walls: tuple[str, ...]) -> bool:
    try:
        return _Run(Sandbox(seconds=20, python=python, needs=()), "print(1)", {}, 0).to_end(walls).stdout == "1\n"
    except SandboxError:
        return False


class _Run:
    """One program on its way; `stop` may be called from another thread."""

    def __init__(self, box: Sandbox, source: str, files: Mapping[str, str], channel: int) -> None:
        self._box, self._channel = box, channel
        self._files = {**files, "main.py": source}
        for name in self._files:
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ConfigError(f"Sandbox: a file is given by a plain name, not {name!r}")
        self._lock = threading.Lock()
        self._lifeline: Any = None
        self._stopped = False

    def stop(self) -> None:
        """Kill the program, if it runs; the thread that runs it then ends by itself."""
        with self._lock:
            self._stopped = True
            if self._lifeline is not None:
                with contextlib.suppress(OSError):
                    self._lifeline.close()

    def to_end(self, walls: tuple[str, ...]) -> Ran:
        box = self._box
        lacking = [wall for wall in box.needs or () if wall not in walls]
        if box.needs is None and not {"uid", "user"} & set(walls):
            lacking = ["uid or user"]
        if lacking:
            raise SandboxError(
                f"no sandbox here has the wall {lacking[0]}; there is {', '.join(walls) or 'none'}. Start as root or allow "
                "user namespaces, or say needs=() and run the code unguarded"
            )
        scratch = None if "mount" in walls else tempfile.mkdtemp(prefix="turnwise-")
        uid = _fresh_uid() if "uid" in walls else None
        try:
            if scratch is not None and uid is not None:
                os.chown(scratch, uid, uid)
            with _PLACES:
                said = self._ask({**self._order(walls), "scratch": scratch, "uid": uid})
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        return _ran(said, walls, box)

    def _order(self, walls: tuple[str, ...]) -> dict[str, Any]:
        box = self._box
        order = {
            name: getattr(box, name) for name in ("seconds", "memory", "disk", "processes", "open_files", "output", "python")
        }
        order |= {"cpu": box.cpu_seconds or math.ceil(box.seconds), "channel": self._channel, "files": self._files}
        return order | {"isolation": walls, "hide": [str(Path(__file__).resolve().parents[2])]}

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        words = json.dumps(order).encode()
        command = [self._box.python, "-I", "-S", "-B", str(_JAIL)]
        with self._lock:
            if self._stopped:
                raise SandboxError("the sandbox was stopped before it ran")
            try:
                warden = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={},
                    cwd="/",
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"no sandbox can be started: {error}") from error
            self._lifeline = warden.stdin
        try:
            answer = self._converse(warden, len(words).to_bytes(8, "big") + words)
        finally:
            self.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                warden.wait(10.0)
            if warden.poll() is None:
                warden.kill()
                warden.wait()
            warden.stdout.close()  # type: ignore[union-attr]
        try:
            said: dict[str, Any] = json.loads(answer)
        except ValueError:
            last = answer.decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing"]
            raise SandboxError(f"the sandbox died with status {warden.returncode}; it said {last[0][:200]}") from None
        return said

    def _converse(self, warden: subprocess.Popen[bytes], words: bytes) -> bytes:
        """Say all of the order, then listen to the end, under a clock of our own."""
        until = time.monotonic() + self._box.seconds + _GRACE
        assert warden.stdin is not None
        assert warden.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it died or was stopped: what it said tells
            warden.stdin.write(words) if len(words) < 4096 else _write_all(warden.stdin, words)
        answer = bytearray()
        poll = select.poll()
        poll.register(warden.stdout, select.POLLIN | select.POLLHUP)
        while (left := until - time.monotonic()) > 0:
            if not poll.poll(left * 1000):
                break
            chunk = os.read(warden.stdout.fileno(), 65536)
            if not chunk:
                return bytes(answer)
            answer += chunk
        raise SandboxError(f"the sandbox did not end {_GRACE:g} s after its deadline")


def _write_all(pipe: Any, words: bytes) -> None:
    left = memoryview(words)
    while left:
        left = left[pipe.write(left) :]


def _fresh_uid() -> int:
    """A uid that nobody has, of those that exist here: limits count by uid, and nobody else's processes can be reached."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        start, _, count = max((tuple(map(int, line.split())) for line in file), key=lambda row: row[2])
    least, most = start + min(1 << 20, count // 2), start + min(1 << 30, count) - 2
    return random.SystemRandom().randint(least, max(least, most))


def _ran(said: dict[str, Any], walls: tuple[str, ...], box: Sandbox) -> Ran:
    if said.get("why") == "abandoned":
        raise SandboxError("the program was stopped from outside")
    if "error" in said:
        raise SandboxError(f"the program could not be run behind the walls {', '.join(walls) or 'none'}: {said['error']}")
    timed_out = said.get("why") == "deadline"
    status = said.get("status")
    if status is None and not timed_out:
        if {"uid", "user", "pid"} & set(walls):
            raise SandboxError("the sandbox was killed from outside")
        status = -signal.SIGKILL  # nothing kept the code from killing its keeper
    stdout, stderr = _joined(said["out"]), _joined(said["err"])
    channel = said["channel"]
    number = -status if status is not None and status < 0 else None
    return Ran(
        stdout=stdout,
        stderr=stderr,
        exit_status=status if status is not None and status >= 0 else None,
        signal="SIGKILL" if timed_out else None if number is None else _signal_name(number),
        timed_out=timed_out,
        cut=bool(said["out"]["missing"] or said["err"]["missing"]),
        limit="deadline" if timed_out else _limit(number, said.get("cpu", 0.0), stderr if status else "", box),
        channel="" if channel["missing"] else channel["head"],
        seconds=said["seconds"],
        isolation=walls,
    )


def _joined(said: Mapping[str, Any]) -> str:
    mark = f"\n[... {said['missing']} bytes cut ...]\n" if said["missing"] else ""
    return f"{said['head']}{mark}{said['tail']}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _limit(number: int | None, cpu: float, stderr: str, box: Sandbox) -> str | None:
    allowed = box.cpu_seconds or math.ceil(box.seconds)
    # The kernel counts what it limits by ticks, so on a busy machine it may see more than was used.
    if (number == signal.SIGXCPU and cpu >= allowed * 0.5) or (number == signal.SIGKILL and cpu >= allowed * 0.9):
        return "cpu"
    if number == signal.SIGXFSZ:
        return "file_size"
    last = (stderr.strip().splitlines() or [""])[-1]
    return next((limit for pattern, limit in _LAST_WORDS if re.search(pattern, last)), None)

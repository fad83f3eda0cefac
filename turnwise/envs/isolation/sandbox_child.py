"""First process inside the sandbox: starts the program, captures its output, and ends everything at the deadline.

It needs the standard library alone. Bubblewrap runs it as ``python -I -S -c SOURCE``, as process 1 of the sandbox: no signal
from inside reaches it, and whatever the program started ends with it. The order arrives as JSON on standard input, after its
length in eight bytes; the report leaves as JSON on standard output. When standard input closes, the caller is gone, and the
sandbox ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes a tenth of the time that a program takes to start
    from typing import Any, NoReturn

_PR_SET_DUMPABLE = 4
_HOME = "/tmp"


def main() -> None:
    """Carry out one order."""
    order = json.loads(_read(int.from_bytes(_read(8), "big")))
    for number in (signal.SIGINT, signal.SIGPIPE):  # process 1 gets no signal from inside unless it has a handler for it
        signal.signal(number, signal.SIG_DFL)
    _libc_prctl(_PR_SET_DUMPABLE, 0)  # a program of the same uid can neither read nor write this process
    try:
        report = SandboxMonitor(order).run()
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    left = memoryview(json.dumps(report).encode())
    while left:
        left = left[os.write(1, left) :]


class Capture:
    """First and last bytes written into a pipe, and how many there were. Holds at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.total = 0
        self._head, self._tail, self._most = bytearray(), bytearray(), most

    def drain(self) -> bool:
        """Read what is available, at most a mebibyte at a time; return False at the end of the file."""
        for _ in range(16):
            try:
                chunk = os.read(self.read_end, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.total += len(chunk)
            room = self._most - self._most // 2 - len(self._head)
            self._head += chunk[:room]
            self._tail += chunk[room:] if room > 0 else chunk
            if len(self._tail) > self._most // 2:
                del self._tail[: len(self._tail) - self._most // 2]
        return True

    def report(self) -> dict[str, Any]:
        """Return head and tail as text, and the number of bytes missing between them."""
        missing = self.total - len(self._head) - len(self._tail)
        parts = [self._head, self._tail] if missing else [self._head + self._tail, b""]
        head, tail = (bytes(part).decode("utf-8", "replace") for part in parts)
        return {"head": head, "tail": tail, "missing": missing}


class SandboxMonitor:
    """Starts one program and watches it to its end."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.captures = [Capture(order["output"]), Capture(order["output"]), Capture(order["channel"])]
        self.error_read, self.error_write = os.pipe()

    def run(self) -> dict[str, Any]:
        """Run the program, end everything, and report."""
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        began = time.monotonic()
        program = os.fork()
        if program == 0:
            self._exec_program()
        for end in (self.error_write, *(capture.write_end for capture in self.captures)):
            os.close(end)
        found = self._watch(program, wake_read, began + self.order["seconds"])
        _kill_all()
        for capture in self.captures:
            while capture.drain():  # every writer is dead, so this ends
                pass
        error = os.read(self.error_read, 65536)
        found |= {"error": error.decode()} if error else {}
        out, err, channel = (capture.report() for capture in self.captures)
        return {"out": out, "err": err, "channel": channel, "seconds": time.monotonic() - began, **found}

    def _watch(self, program: int, wake: int, deadline: float) -> dict[str, Any]:
        by_end = {capture.read_end: capture for capture in self.captures}
        poll = select.poll()
        for end in (0, wake, *by_end):
            poll.register(end, select.POLLIN | select.POLLHUP)
        while (left := deadline - time.monotonic()) > 0:
            for end, _ in poll.poll(left * 1000):
                if end in by_end:
                    if not by_end[end].drain():
                        poll.unregister(end)
                elif not os.read(end, 4096):
                    return {"why": "abandoned"}  # standard input alone can end
            if ended := _reap(program):
                return ended
        return {"why": "deadline"}

    def _exec_program(self) -> NoReturn:
        """Drop every privilege and exec a fresh interpreter with the program."""
        try:
            order = self.order
            os.setsid()
            with open("/dev/null", "rb") as null:
                os.dup2(null.fileno(), 0)
            out, err, channel = (capture.write_end for capture in self.captures)
            os.dup2(out, 1)
            os.dup2(err, 2)
            keep = 3
            if order["channel"]:
                os.dup2(channel, 3)
                os.set_inheritable(3, True)
                keep = 4
            for end in range(keep, 64):
                if end != self.error_write:
                    _close(end)
            _limit(order)
            if order["uid"] is not None:
                os.setgroups([])
                os.setresgid(order["uid"], order["uid"], order["uid"])
                os.setresuid(order["uid"], order["uid"], order["uid"])
            for number in (signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(_HOME)
            for name, content in order["files"].items():
                with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                    file.write(content)
            env = {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": _HOME,
                "TMPDIR": _HOME,
                "LANG": "C.UTF-8",
                "LC_ALL": "C.UTF-8",
            }
            os.execve(order["python"], [order["python"], "-I", "-B", "-u", "-X", "utf8", "main.py"], env)
        except BaseException as error:
            os.write(self.error_write, f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(127)


def _limit(order: dict[str, Any]) -> None:
    for which, soft, hard in (
        (resource.RLIMIT_CPU, order["cpu"], order["cpu"] + 1),
        (resource.RLIMIT_AS, order["memory"], order["memory"]),
        (resource.RLIMIT_FSIZE, order["disk"], order["disk"]),
        (resource.RLIMIT_NOFILE, order["open_files"], order["open_files"]),
        (resource.RLIMIT_NPROC, order["processes"], order["processes"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(which)[1]
        bound = [value if ceiling == resource.RLIM_INFINITY else min(value, ceiling) for value in (soft, hard)]
        resource.setrlimit(which, (bound[0], bound[1]))


def _reap(program: int) -> dict[str, Any]:
    """Collect every process that ended; return how the program did if it is among them."""
    found: dict[str, Any] = {}
    try:
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            if pid == program:
                found = {"status": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime}
    except ChildProcessError:
        pass
    return found


def _kill_all() -> None:
    """Kill every other process of the sandbox, and wait until none is left."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this one, which is process 1
        try:
            os.wait()
        except ChildProcessError:
            return


def _close(end: int) -> None:
    with contextlib.suppress(OSError):
        os.close(end)


def _libc_prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _read(size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        chunk = os.read(0, min(size - len(got), 1 << 20))
        if not chunk:
            os._exit(1)  # the caller is gone
        got += chunk
    return bytes(got)


if __name__ == "__main__":
    main()

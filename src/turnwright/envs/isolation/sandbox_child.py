"""First process inside the sandbox: starts the program, captures its output, and ends all processes
at a limit.

Uses only the standard library. Bubblewrap runs it as ``python -I -S -c SOURCE``, as process 1 of
the sandbox: it receives no signal from inside, and all processes end with it. It reads the order
from standard input as JSON after an eight-byte length, and writes the report to standard output as
JSON. A further byte ends the program early, `m` because of its memory. When standard input closes,
the caller has ended, and so does the sandbox.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes a tenth of a program's start time
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, NoReturn

_PR_SET_DUMPABLE = 4
_HOME = "/tmp"

_MAX_KEPT = 10_000
"""Maximum number of files that a report returns."""

_MEASURE_S = 0.02
"""Seconds between two measurements of the program's memory."""

_MEASURE_NEAR_S = 0.005
"""The same where it has more than half of what it may have."""

_MEASURE_SHARE = 4
"""Minimum of the pause after a measurement, in durations of the measurement."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_REASONS = {b"x": "ended", b"m": "memory", b"": "abandoned"}
_LIBC = ctypes.CDLL(None, use_errno=True)
_FORKED_AND_NOT_EXECUTED = 0x40  # PF_FORKNOEXEC among the flags of /proc/PID/stat


def main() -> None:
    """Execute one order."""
    order = json.loads(_read(int.from_bytes(_read(8), "big")))
    # Without a handler, process 1 receives no signal from inside.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A program of the same uid can neither read nor write this process.
    if _LIBC.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl")

    try:
        report = SandboxMonitor(order).run()
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    unsent = memoryview(json.dumps(report).encode())
    while unsent:
        unsent = unsent[os.write(1, unsent) :]


class Capture:
    """First and last bytes written to a pipe, at most `limit` bytes together, and the total
    count."""

    def __init__(self, limit: int) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.total = 0
        self._tail_size = limit // 2
        self._head_size = limit - self._tail_size
        self._head = bytearray()
        self._tail = bytearray()

    def drain(self) -> bool:
        """Read available bytes, at most one MiB; return False at end of file."""
        for _ in range(16):
            try:
                chunk = os.read(self.read_end, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.total += len(chunk)
            free = self._head_size - len(self._head)
            self._head += chunk[:free]
            self._tail += chunk[free:]
            if len(self._tail) > self._tail_size:
                del self._tail[: len(self._tail) - self._tail_size]
        return True

    def report(self) -> dict[str, Any]:
        """Return head and tail as text, and the number of missing bytes between them."""
        missing = self.total - len(self._head) - len(self._tail)
        head = self._head
        tail = self._tail
        if not missing:  # decoded together: a character may lie across their border
            head = head + tail
            tail = bytearray()
        return {
            "head": head.decode("utf-8", "replace"),
            "tail": tail.decode("utf-8", "replace"),
            "missing": missing,
        }


class ProgramMemory:
    """Measures what the processes of a program hold together: their anonymous pages, in memory and
    swapped out.

    Those are all that a program can hold outside its scratch directory: the filter denies shared
    anonymous mappings and the like. Pages that processes share since a fork count once. Each step
    costs more than the one before, and runs only where that one allows no answer.
    """

    def __init__(self, limit: int, processes: Callable[[], Iterable[str]]) -> None:
        """`processes` returns the directories in /proc of the program's processes, which may have
        ended meanwhile."""
        self._limit = limit
        self._processes = processes
        self._pause = _MEASURE_S
        self.next_at = 0.0
        """Time of the next measurement, by `time.monotonic`."""

    def exceeded(self) -> bool:
        """Return whether the processes hold more than the limit.

        Two measurements must say so: reading takes time, in which memory moves between processes.
        """
        began = time.monotonic()
        exceeded = self._exceeds() and self._exceeds()
        now = time.monotonic()
        self.next_at = now + max(self._pause, _MEASURE_SHARE * (now - began))
        return exceeded

    def _exceeds(self) -> bool:
        processes = list(self._processes())
        self._pause = _MEASURE_S

        # Address space bounds all else. One process alone is bounded by its own limit on it.
        if sum(map(_address_space, processes)) <= self._limit:
            return False

        # Pages of each process; those shared since a fork count in each.
        pages = {process: _own_pages(process) for process in processes}
        total = sum(pages.values())
        if total > self._limit // 2:
            self._pause = _MEASURE_NEAR_S
        if total <= self._limit:
            return False

        # A child may enter or leave its parent's memory while shares are read.
        before = _children_without_a_program(processes)
        shares = {process: _share_of_pages(process, pages[process]) for process in processes}
        total = sum(shares.values())
        if total <= self._limit:
            return False
        after = _children_without_a_program(processes)
        return total - max(_borrowed(shares, before), _borrowed(shares, after)) > self._limit


def _address_space(process: str) -> int:
    """Return the bytes of a process's address space; 0 where it has ended."""
    pages = _content(f"{process}/statm").split() or [b"0"]
    return int(pages[0]) * _PAGE


def _own_pages(process: str) -> int:
    """Return the bytes of a process's anonymous pages; everyone may read them."""
    rows = _kilobytes(f"{process}/status")
    return rows.get(b"RssAnon", 0) + rows.get(b"VmSwap", 0)


def _share_of_pages(process: str, pages: int) -> int:
    """Return `pages` with those shared by n processes as an nth; as they are where the kernel does
    not tell."""
    rows = _kilobytes(f"{process}/smaps_rollup")
    if b"Pss_Anon" not in rows:
        return pages
    return rows[b"Pss_Anon"] + rows.get(b"SwapPss", 0)


def _children_without_a_program(
    processes: Iterable[str],
) -> dict[str, tuple[int, list[str]]]:
    """Return for each parent how many of its threads are held up, and its children that have not
    executed another program yet."""
    children: dict[str, list[str]] = {}
    for process in processes:
        row = _stat(process)
        if len(row) > 6 and int(row[6]) & _FORKED_AND_NOT_EXECUTED:
            parent = f"{os.path.dirname(process)}/{row[1].decode()}"
            children.setdefault(parent, []).append(process)

    found = {}
    for parent, its_children in children.items():
        threads = [_stat(f"{parent}/task/{thread}") for thread in _names(f"{parent}/task")]
        held_up = sum(row[:1] == [b"D"] for row in threads)
        found[parent] = (held_up, its_children)
    return found


def _borrowed(shares: dict[str, int], children: dict[str, tuple[int, list[str]]]) -> int:
    """Return what is counted twice since a child runs in its parent's memory (vfork) until it
    executes another program.

    The kernel does not tell which do. Each such child holds up a thread of its parent, so no more
    are left out than there are such threads, and only children with as many pages as their parent,
    up to what another process gives back while both are read.
    """
    total = 0
    for parent in children.keys() & shares.keys():
        held_up, its_children = children[parent]
        pages = shares[parent]
        alike = [child for child in its_children if abs(shares[child] - pages) <= pages // 8]
        total += min(held_up, len(alike)) * pages
    return total


def _stat(process: str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may hold
    anything."""
    return _content(f"{process}/stat").rpartition(b")")[2].split()


def _kilobytes(path: str) -> dict[bytes, int]:
    """Return the rows of a file that are in kB, in bytes by name."""
    rows = {}
    for line in _content(path).splitlines():
        name, _, value = line.partition(b":")
        if value.endswith(b" kB"):
            rows[name] = int(value[:-3]) * 1024
    return rows


def _content(path: str) -> bytes:
    """Return a file's content; none of a process that has ended, or whose file may not be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def processes_inside() -> list[str]:
    """Return all processes of this namespace but the first."""
    return [f"/proc/{name}" for name in _names("/proc") if name.isdigit() and name != "1"]


def processes_below(process: int) -> Iterator[str]:
    """Yield the descendants of a process, without its children; those are process 1 of a
    sandbox."""
    level = _children(f"/proc/{process}")
    while level:
        level = [child for parent in level for child in _children(parent)]
        yield from level


def _children(process: str) -> list[str]:
    lists = [_content(f"{process}/task/{thread}/children") for thread in _names(f"{process}/task")]
    return [f"/proc/{child.decode()}" for child in b" ".join(lists).split()]


class SandboxMonitor:
    """Starts one program and monitors it until it ends."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.memory = ProgramMemory(order["memory"], processes_inside) if order["proc"] else None
        self.out = Capture(order["output"])
        self.err = Capture(order["output"])
        self.channel = Capture(order["channel"])
        self.captures = [self.out, self.err, self.channel]
        self.error_read, self.error_write = os.pipe()

    def run(self) -> dict[str, Any]:
        """Run the program, end all processes, and return the report."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        began = time.monotonic()
        program = os.fork()
        if program == 0:
            self._exec_program()
        os.close(self.error_write)
        for capture in self.captures:
            os.close(capture.write_end)
        end = self._watch(program, wake_read, began + self.order["seconds"])

        # Kill all processes except this one, which is process 1, and wait for them.
        with contextlib.suppress(ChildProcessError):
            while True:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                os.wait()
        for capture in self.captures:
            while capture.drain():  # all writers have ended, so this terminates
                pass

        error = os.read(self.error_read, 65536)
        if error:
            end["error"] = error.decode()
        reports = {
            "out": self.out.report(),
            "err": self.err.report(),
            "channel": self.channel.report(),
        }
        kept = _kept_files(self.order) if self.order["keep"] else {}
        return {**reports, "seconds": time.monotonic() - began, "kept": kept, **end}

    def _watch(self, program: int, wake: int, deadline: float) -> dict[str, Any]:
        """Wait until the program ends or reaches a limit; return how it ended."""
        captures = {capture.read_end: capture for capture in self.captures}
        poll = select.poll()
        for descriptor in (0, wake, *captures):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)

        while (seconds := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(self._until_next(seconds) * 1000):
                if descriptor in captures:
                    if not captures[descriptor].drain():
                        poll.unregister(descriptor)
                elif descriptor == wake:
                    os.read(wake, 4096)
                else:  # standard input
                    return {"why": _REASONS[os.read(descriptor, 1)]}
            end = _reap(program)
            if end:
                return end
            if self._memory_exceeded():
                return {"why": "memory"}
        return {"why": "deadline"}

    def _until_next(self, seconds: float) -> float:
        """Return the seconds to wait for events, of those that are left."""
        if self.memory is None:
            return seconds
        return min(seconds, max(0.0, self.memory.next_at - time.monotonic()))

    def _memory_exceeded(self) -> bool:
        if self.memory is None or time.monotonic() < self.memory.next_at:
            return False
        with _as_user(self.order["uid"]):
            return self.memory.exceeded()

    def _exec_program(self) -> NoReturn:
        """Drop all privileges and exec a new interpreter with the program."""
        try:
            order = self.order
            os.setsid()
            self._set_descriptors()
            _limit(order)
            _drop_privileges(order)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

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
            python = order["python"]
            os.execve(python, [python, "-I", "-B", "-u", "-X", "utf8", "main.py"], env)
        except BaseException as error:
            os.write(self.error_write, f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(127)

    def _set_descriptors(self) -> None:
        """Give the program its streams and nothing else, but for what `exec` closes."""
        with open("/dev/null", "rb") as null:
            os.dup2(null.fileno(), 0)
        os.dup2(self.out.write_end, 1)
        os.dup2(self.err.write_end, 2)
        first_closed = 3
        if self.order["channel"]:
            os.dup2(self.channel.write_end, 3)
            os.set_inheritable(3, True)
            first_closed = 4
        for descriptor in range(first_closed, 64):
            if descriptor != self.error_write:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


@contextlib.contextmanager
def _as_user(uid: int | None) -> Iterator[None]:
    """Open files with the rights of a uid: the shares of a process's pages may be read by its own
    user only."""
    if uid is None:
        yield
        return
    _LIBC.setfsgid(uid)
    _LIBC.setfsuid(uid)
    try:
        yield
    finally:
        _LIBC.setfsuid(0)
        _LIBC.setfsgid(0)


def _drop_privileges(order: dict[str, Any]) -> None:
    """Become the user of the program; without a uid this process has none to drop."""
    uid = order["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _kept_files(order: dict[str, Any]) -> dict[str, str]:
    """Return the regular files below `keep` by relative path, in base64, up to the size of the disk
    together.

    All other processes have ended. They are read with the program's uid, since files may be
    readable for it only.
    """
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            os.close(read_end)
            _drop_privileges(order)
            with open(write_end, "wb") as pipe:
                files = dict(_read_files(f"{_HOME}/{order['keep']}", order["disk"]))
                pipe.write(json.dumps(files).encode())
        finally:
            os._exit(0)

    os.close(write_end)
    with open(read_end, "rb") as pipe:
        content = pipe.read()
    with contextlib.suppress(ChildProcessError):
        os.wait()
    kept: dict[str, str] = json.loads(content or b"{}")
    return kept


def _read_files(top: str, most_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield the regular files below a directory, as far as they fit."""
    free = most_bytes
    count = 0
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
                if not stat.S_ISREG(status.st_mode) or status.st_size > free or count == _MAX_KEPT:
                    continue
                with open(path, "rb") as file:
                    content = file.read(free)
            except OSError:
                continue
            free -= len(content)
            count += 1
            yield os.path.relpath(path, top), base64.b64encode(content).decode()


def _limit(order: dict[str, Any]) -> None:
    """Set the limits of this process, as far as those that it has allow."""
    limits = (
        (resource.RLIMIT_CPU, order["cpu"], order["cpu"] + 1),
        (resource.RLIMIT_AS, order["memory"], order["memory"]),
        (resource.RLIMIT_FSIZE, order["disk"], order["disk"]),
        (resource.RLIMIT_NOFILE, order["open_files"], order["open_files"]),
        (resource.RLIMIT_NPROC, order["processes"], order["processes"]),
        (resource.RLIMIT_CORE, 0, 0),
    )
    for which, soft, hard in limits:
        _, ceiling = resource.getrlimit(which)
        if ceiling != resource.RLIM_INFINITY:
            soft = min(soft, ceiling)
            hard = min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


def _reap(program: int) -> dict[str, Any]:
    """Reap ended processes; return the program's status and CPU time if it is among them."""
    end: dict[str, Any] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            if pid == program:
                cpu = usage.ru_utime + usage.ru_stime
                end = {"status": os.waitstatus_to_exitcode(status), "cpu": cpu}
    return end


def _read(size: int) -> bytes:
    """Read so many bytes of the order."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(1)  # the caller has ended
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main()

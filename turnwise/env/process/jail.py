"""The sandbox's other side: a program of its own, run as ``python -I -S jail.py``, of the standard library alone.

Three processes. The *warden* (this program) reads the output, keeps the time and reports. The *keeper* is the first process of
the new pid namespace: it waits for the *inmate*, a fresh interpreter with the code, and when it ends all that is left ends with
it. The warden ends everything at the deadline, and when its own standard input closes: so when whoever asked is gone.

The order comes as JSON on standard input behind its length in eight bytes; the report leaves as JSON on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from typing import Any, NoReturn

UNSHARE = {"user": 0x10000000, "pid": 0x20000000, "network": 0x40000000, "ipc": 0x08000000, "mount": 0x00020000}
"""The namespaces that can be asked for, by the flag of unshare(2)."""
INNER_ID = 1000
"""The uid and gid inside a user namespace; not 0, so that a new program has no capabilities."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_MOUNT_POINTS = ("/mnt", "/srv", "/media", "/opt", "/var/tmp", "/tmp")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Carry out one order."""
    size = int.from_bytes(_read(0, 8), "big")
    order = json.loads(_read(0, size))
    os.umask(0o022)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whoever loses its parent becomes ours, and is found at the end
    try:
        report = Warden(order).watch()
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    left = memoryview(json.dumps(report).encode())
    while left:
        left = left[os.write(1, left) :]


class Capture:
    """What was written into a pipe: its first and its last bytes, and how many there were. Never more than `most` are held."""

    def __init__(self, most: int) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.total = 0
        self._head, self._tail, self._most = bytearray(), bytearray(), most

    def drain(self) -> bool:
        """Read what is there, at most a mebibyte at a time; False at the end of the file."""
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

    def said(self) -> dict[str, Any]:
        """For the report."""
        head, tail = (bytes(part).decode("utf-8", "replace") for part in (self._head, self._tail))
        missing = self.total - len(self._head) - len(self._tail)
        if not missing:
            head = bytes(self._head + self._tail).decode("utf-8", "replace")
            tail = ""
        return {"head": head, "tail": tail, "missing": missing}


class Warden:
    """Watches over one inmate."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.out, self.err, self.channel = Capture(order["output"]), Capture(order["output"]), Capture(order["channel"])
        self.status_read, self.status_write = os.pipe()
        self.why: str | None = None

    def watch(self) -> dict[str, Any]:
        """Start it, watch it to its end, and see that nothing of it is left."""
        _unshare(self.order["isolation"])
        _prctl(_PR_SET_DUMPABLE, 0)  # nobody of the same uid reads or writes this process, nor the keeper
        began = time.monotonic()
        keeper = os.fork()
        if keeper == 0:
            _keep(self)
        captures = (self.out, self.err, self.channel)
        for end in (self.status_write, *(capture.write_end for capture in captures)):
            os.close(end)
        try:
            status = self._watch(captures, began + self.order["seconds"])
        finally:
            _end_all(keeper, self.order)
            if "mount" not in self.order["isolation"]:
                shutil.rmtree(self.order["scratch"], ignore_errors=True)
        for capture in captures:
            while capture.drain() and select.select([capture.read_end], [], [], 0)[0]:
                pass
        found = {"out": self.out.said(), "err": self.err.said(), "channel": self.channel.said()}
        return {**status, **found, "why": self.why, "seconds": time.monotonic() - began}

    def _watch(self, captures: tuple[Capture, ...], deadline: float) -> dict[str, Any]:
        by_end = {capture.read_end: capture for capture in captures}
        poll = select.poll()
        for end in (0, self.status_read, *by_end):
            poll.register(end, select.POLLIN | select.POLLHUP)
        status = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.why = "deadline"
                return {}
            for end, _ in poll.poll(left * 1000):
                if end in by_end:
                    if not by_end[end].drain():
                        poll.unregister(end)
                    continue
                chunk = os.read(end, 65536)
                if end == 0 and not chunk:
                    self.why = "abandoned"
                    return {}
                if end == self.status_read and not chunk:
                    return _status(status)
                status += chunk if end == self.status_read else b""


def _status(said: bytes) -> dict[str, Any]:
    """What keeper and inmate said last; an error of the preparations before all."""
    lines = [json.loads(line) for line in said.splitlines()]
    found: dict[str, Any] = next((line for line in lines if "error" in line), lines[-1] if lines else {})
    return found


def _keep(warden: Warden) -> NoReturn:
    """The keeper: prepare, start the inmate, wait for it."""
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        order = warden.order
        home = _build_root(order) if "mount" in order["isolation"] else order["scratch"]
        for name, content in order["files"].items():
            with open(os.path.join(home, name), "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(content)
        inmate = os.fork()
        if inmate == 0:
            _be(warden, home)
        null = os.open("/dev/null", os.O_RDWR)
        for end in (0, 1, 2, warden.out.write_end, warden.err.write_end, warden.channel.write_end):
            os.dup2(null, end)
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == inmate:
                break
        _say(warden, {"status": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime})
    except BaseException as error:
        _say(warden, {"error": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _be(warden: Warden, home: str) -> NoReturn:
    """The inmate: give everything up, and become a fresh interpreter."""
    try:
        order = warden.order
        os.setsid()
        with open("/dev/null", "rb") as null:
            os.dup2(null.fileno(), 0)
        os.dup2(warden.out.write_end, 1)
        os.dup2(warden.err.write_end, 2)
        if order["channel"]:
            os.dup2(warden.channel.write_end, 3)
            os.set_inheritable(3, True)
        _limit(order)
        if "uid" in order["isolation"]:
            os.setgroups([])
            os.setresgid(order["uid"], order["uid"], order["uid"])
            os.setresuid(order["uid"], order["uid"], order["uid"])
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(home)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        os.execve(order["python"], [order["python"], "-I", "-B", "-u", "-X", "utf8", "main.py"], env)
    except BaseException as error:
        _say(warden, {"error": f"{type(error).__name__}: {error}"})
    os._exit(127)


def _limit(order: dict[str, Any]) -> None:
    processes = order["processes"]
    if not {"uid", "user"} & set(order["isolation"]):  # the count is of all processes of this person
        processes += _own_threads()
    for which, most, hard in (
        (resource.RLIMIT_CPU, order["cpu"], order["cpu"] + 1),
        (resource.RLIMIT_AS, order["memory"], order["memory"]),
        (resource.RLIMIT_FSIZE, order["disk"], order["disk"]),
        (resource.RLIMIT_NOFILE, order["open_files"], order["open_files"]),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(which)[1]
        bound = [value if ceiling == resource.RLIM_INFINITY else min(value, ceiling) for value in (most, hard)]
        resource.setrlimit(which, (bound[0], bound[1]))


def _own_threads() -> int:
    count = 0
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
    return count


def _end_all(keeper: int, order: dict[str, Any]) -> None:
    """Kill the keeper, and whoever is left, until there is nobody."""
    _kill(keeper)
    if "pid" in order["isolation"]:  # the kernel ends a namespace with its first process; that is waited for
        os.waitpid(keeper, 0)
        return
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        if "uid" in order["isolation"]:
            _kill_all_of(order["uid"])
        for child in _children():
            _kill(child)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _kill_all_of(uid: int) -> None:
    """Kill every process of a uid that only one inmate has."""
    if os.fork() == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)


def _children() -> list[int]:
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if entry.isdigit() and parent == os.getpid():
            found.append(int(entry))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _unshare(isolation: list[str]) -> None:
    flags = sum(UNSHARE[name] for name in isolation if name in UNSHARE)
    uid, gid = os.geteuid(), os.getegid()
    if flags:
        _check(_libc.unshare(flags), "unshare")
    if "user" in isolation:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{INNER_ID} {uid} 1"), ("gid_map", f"{INNER_ID} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def _build_root(order: dict[str, Any]) -> str:
    """A root of its own: the system and the interpreter to read, a few devices, and an empty scratch directory to write in."""
    prefixes = [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__))]
    sources = [path for path in _SYSTEM if os.path.lexists(path)]
    for path in [*prefixes, os.path.dirname(order["python"])]:
        if path != "/" and not any(_within(path, source) for source in sources):
            sources.append(path)
    base = next(path for path in _MOUNT_POINTS if os.path.isdir(path) and not any(_within(s, path) for s in sources))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for source in [*sources, *_DEVICES]:
        target = base + source
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(source) and source in _SYSTEM[1:6]:
            os.symlink(os.readlink(source), target)
            continue
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        _mount(source, target, None, _MS_BIND | _MS_REC)
        _read_only(target, _MS_NOSUID if source in _DEVICES else _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for path in order["hide"]:
        if os.path.isdir(base + path):
            _mount("tmpfs", base + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k,mode=000")
    os.mkdir(base + "/proc")
    if "pid" in order["isolation"]:
        with contextlib.suppress(OSError):  # where parts of /proc are masked the kernel refuses another; the code does without
            _mount("proc", base + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.mkdir(base + "/tmp")
    owner = order["uid"] if "uid" in order["isolation"] else os.geteuid()
    size = (
        f"size={order['disk']},nr_inodes=4096,mode=700,uid={owner},gid={owner if 'uid' in order['isolation'] else os.getegid()}"
    )
    _mount("tmpfs", base + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    _read_only(base, _MS_RDONLY | _MS_NOSUID, recursive=False)
    os.chroot(base)
    os.chdir("/tmp")
    return "/tmp"


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _read_only(path: str, flags: int, recursive: bool = True) -> None:
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # the first three MOUNT_ATTR_ are as MS_
    at = _AT_RECURSIVE if recursive else 0
    name = path.encode()
    _check(_libc.syscall(_MOUNT_SETATTR, -100, name, at, ctypes.byref(attributes), ctypes.sizeof(attributes)), "mount_setattr")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    done = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(done, f"mount {target}")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _say(warden: Warden, what: dict[str, Any]) -> None:
    os.write(warden.status_write, json.dumps(what).encode() + b"\n")


def _read(end: int, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        chunk = os.read(end, min(size - len(got), 1 << 20))
        if not chunk:
            os._exit(1)  # whoever asked is gone
        got += chunk
    return bytes(got)


if __name__ == "__main__":
    main()

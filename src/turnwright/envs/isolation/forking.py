"""The process that forks: small and single-threaded, with what user code needs in memory, forked
for each environment.

`fork_server.py` starts it and connects over a socket. It first sends what to load, then requests of
nine bytes: `s`, with a socket attached, forks a process for an environment or a reward, `k` ends a
process, `x` kills it. The server reports the id and status of each ended process, after killing its
descendants and removing its temporary directory. When the socket closes, all processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

from turnwright.child_processes import end_with_parent
from turnwright.envs.env import Env
from turnwright.envs.isolation.env_server import EnvServer
from turnwright.envs.isolation.wire import ENDED, REQUEST, SETUP
from turnwright.errors import words


@dataclass(frozen=True, slots=True)
class ForkSetup:
    """What the process that forks receives first."""

    preparation: dict[str, Any]
    """Search path and main module, as `multiprocessing` hands them on."""
    files: dict[str, str]
    """Modules of users that were loaded from files, by name."""
    modules: tuple[str, ...]
    """Modules to import once for all; one that is not installed is left out."""
    factory: bytes
    """The pickled factory of environments."""
    folder: str
    """Directory of the temporary directories of its processes."""
    grace_s: float
    """Seconds that a process may take to close its environment before it is killed."""


class _Forker:
    """Forks, kills and reaps environment processes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._folder = ""
        self._grace_s = 0.0
        self._living: dict[int, str] = {}
        """Temporary directories of processes that run, by process id."""
        self._kill_at: dict[int, float] = {}
        """Deadlines of processes that received SIGTERM."""

    def serve(self) -> None:
        """Serve requests until the socket closes."""
        wake_end = self._watch_children()
        make = self._receive_setup()

        # select() rejects descriptors above 1023, which the parent may have open.
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_end, select.POLLIN)
        while True:
            wait_ms = None
            if self._kill_at:
                wait_ms = math.ceil(1000 * max(0.0, min(self._kill_at.values()) - time.monotonic()))
            ready = [descriptor for descriptor, _ in poll.poll(wait_ms)]
            if wake_end in ready:
                os.read(wake_end, 4096)
            self._reap()

            for pid, deadline in list(self._kill_at.items()):
                if time.monotonic() >= deadline:
                    self._signal(pid, signal.SIGKILL)
                    del self._kill_at[pid]

            if self._control.fileno() in ready and not self._serve_one(make):
                return

    def _watch_children(self) -> int:
        """Become the parent of all that is left of processes; return the descriptor that can be
        read when one has ended."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _become_subreaper()
        return wake_read

    def _receive_setup(self) -> Callable[[], Env]:
        """Receive what comes first, and load the factory of environments."""
        head = self._control.recv(SETUP.size, socket.MSG_WAITALL)
        data = self._control.recv(SETUP.unpack(head)[0], socket.MSG_WAITALL)
        setup: ForkSetup = pickle.loads(data)  # sent by the parent process, hence trusted
        self._folder = setup.folder
        self._grace_s = setup.grace_s
        return _load(setup)

    def _serve_one(self, make: Callable[[], Env]) -> bool:
        """Serve one request; return False after the last."""
        try:
            data, sockets, _, _ = socket.recv_fds(self._control, REQUEST.size, 1)
        except ConnectionResetError:  # killed before it read which processes had ended
            data = b""
            sockets = []
        if len(data) < REQUEST.size:
            self._end_all()
            return False

        kind, pid = REQUEST.unpack(data)
        if kind == b"s":
            folder = tempfile.mkdtemp(dir=self._folder)
            child = os.fork()
            if child == 0:
                _serve_env(sockets[0], folder, make, self._grace_s)
            os.close(sockets[0])
            self._living[child] = folder
        elif kind == b"x":
            if pid in self._living:
                self._signal(pid, signal.SIGKILL)
        elif pid in self._living and pid not in self._kill_at:
            self._signal(pid, signal.SIGTERM)
            self._kill_at[pid] = time.monotonic() + self._grace_s
        return True

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _reap(self) -> None:
        """Kill the process group of an ended process while its id is still reserved, then reap
        it."""
        while self._living:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            folder = self._living.pop(ended.si_pid, None)
            self._kill_at.pop(ended.si_pid, None)
            if folder is None:
                continue
            self._kill_orphans()
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._control.sendall(ENDED.pack(ended.si_pid, status))

    def _kill_orphans(self) -> None:
        """Kill descendants of ended processes in other sessions (MCP servers, daemons), which were
        reparented to this one."""
        deadline = time.monotonic() + self._grace_s
        while True:
            orphans = child_processes() - self._living.keys()
            if not orphans or time.monotonic() >= deadline:
                return
            for pid in orphans:
                self._signal(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)  # its children are then reparented to this process

    def _end_all(self) -> None:
        """End all processes after the socket closed; kill those that miss the grace period."""
        for number, grace_s in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, math.inf)):
            for pid in self._living:
                self._signal(pid, number)
            until = time.monotonic() + grace_s
            while self._living and time.monotonic() < until:
                self._reap()
                time.sleep(0.002)
        shutil.rmtree(self._folder, ignore_errors=True)


def child_processes() -> set[int]:
    """Return the ids of child processes; empty on systems without /proc."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            pids.update(map(int, (thread / "children").read_text().split()))
    return pids


def open_resources() -> dict[str, int]:
    """Count live child processes (no zombies) and open files; empty on systems without /proc."""
    gc.collect()
    try:
        files = len(os.listdir("/proc/self/fd"))
    except OSError:
        return {}
    living = 0
    for pid in child_processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
            living += state != "Z"
    return {"processes": living, "open files": files}


def _become_subreaper() -> None:
    """Become the parent of orphaned descendants, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _load(setup: ForkSetup) -> Callable[[], Env]:
    """Load the factory; on failure return one that raises in each process, where the error is
    reported."""
    try:
        spawn.prepare(setup.preparation)
        from turnwright.envs.user_code import UserModules

        sys.meta_path.append(UserModules(setup.files))
        for module in setup.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        factory: Callable[[], Env] = pickle.loads(setup.factory)
        return factory
    except Exception as error:
        failure: Exception = error
    except BaseException as error:
        failure = RuntimeError(f"raised {words(error, repr)}")

    def fail() -> Env:
        raise failure

    return fail


def _serve_env(sock: int, folder: str, make: Callable[[], Env], grace_s: float) -> NoReturn:
    """Be the process of an environment, and end with it."""
    status = 1
    try:
        os.setsid()
        end_with_parent(signal.SIGKILL)
        # Daemons stay below this process while it lives, and pass to the fork server when it ends.
        _become_subreaper()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

        # Nothing of the fork server stays open here: a socket that a grandchild kept would outlive
        # its owner.
        os.dup2(sock, 3)
        if sys.platform == "linux":
            descriptors = max(map(int, os.listdir("/proc/self/fd"))) + 1
        else:
            descriptors = os.sysconf("SC_OPEN_MAX")
        os.closerange(4, descriptors)

        os.environ["TMPDIR"] = folder
        tempfile.tempdir = folder
        EnvServer(socket.socket(fileno=3), make, grace_s).serve()
        status = 0
    except BrokenPipeError:  # the caller disconnected
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def serve_forks(control: int) -> None:
    """Be the process that forks environments, for the requests of a socket, given by its
    descriptor."""
    _Forker(socket.socket(fileno=control)).serve()

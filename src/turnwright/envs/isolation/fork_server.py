"""Fork server: a small, single-threaded process with the environment factory in memory, forked for each environment.

`process_env.py` starts it as `python -m turnwright.envs.isolation.fork_server FD` and connects over the socket FD. It first
sends what to load, then requests of nine bytes: `s`, with a socket attached, forks a process for an environment or a reward,
`k` ends a process, `x` kills it. The server reports the id and status of each ended process, after killing its descendants and
removing its temporary directory. When the socket closes, all processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import io
import math
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from inspect import isawaitable
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

import orjson

from turnwright.config import Limits
from turnwright.envs.env import Env, InlineObservation, NeedsLimits, NewHistory, Scores, as_step
from turnwright.envs.user_code import as_number, failure_of
from turnwright.errors import InvalidAction, UsageError, words
from turnwright.media import media_as_bytes
from turnwright.records.run_dir import to_json
from turnwright.types import Task, as_messages

REQUEST = struct.Struct("<cq")
ENDED = struct.Struct("<qi")
SIZE = struct.Struct("<Q")
HEAD = struct.Struct("<4sQQ")  # header of each message: `MARK`, request number, message size in bytes
MARK = b"twn1"
EXIT_GRACE_S = 1.0  # seconds a process may take to close its environment before it is killed

_PLAIN = {
    "builtins": "bytearray complex frozenset range set slice",
    "collections": "OrderedDict",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler of messages from environment processes: Turnwright data classes and plain values, no code."""

    def find_class(self, module: str, name: str) -> Any:
        ours = module.startswith("turnwright.types.") or module == "turnwright.envs.env"
        if "." not in name and (ours or name in _PLAIN.get(module, "").split()):
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} cannot leave the environment's process")


def restricted_loads(data: bytes) -> Any:
    """Unpickle a message from an environment process. Raises `pickle.UnpicklingError` for anything but plain data."""
    return RestrictedUnpickler(io.BytesIO(data)).load()


def picklable_value(value: Any) -> Any:
    """Return the value unchanged if `restricted_loads` accepts it, else converted to JSON types as in the record."""
    try:
        restricted_loads(pickle.dumps(value))
    except Exception:
        return orjson.loads(to_json(value))
    return value


class _Stop(BaseException):
    """Raised by SIGTERM: the process is to end."""


class _EnvServer:
    """Serves requests to one environment in its process, until `close`."""

    def __init__(self, sock: socket.socket, make: Callable[[], Env], grace_s: float) -> None:
        """`grace_s` is the time in which it has ended after SIGTERM."""
        self._sock, self._stream = sock, sock.makefile("rb")
        self._make, self._grace_s = make, grace_s
        self._env: Env | None = None
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None  # of the last call that ran on the loop
        self._stopping = False
        self._pid = os.getpid()

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        self._send(0, self._pid)
        try:
            try:
                while (request := self._receive()) is not None:
                    self._answer(*request)
                    if request[1] == "close":
                        self._env = None
                    if request[1] == "close" or self._stopping:  # the call ended by itself before it was cancelled
                        return
            finally:
                self._ignore_signals()
        except _Stop:  # it may arrive as late as in the line above
            pass
        finally:
            self._ignore_signals()
            if self._env is not None:
                self._settle(self._quiet())
                with contextlib.suppress(Exception):
                    self._settle(self._env.close())

    def _ignore_signals(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)

    async def _quiet(self) -> None:
        """Cancel the tasks that an interrupted call left on the loop, without reporting their exceptions."""
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=self._grace_s / 4)

    def _stop(self, *_: Any) -> None:
        """End the current call: cancel it where asyncio runs, which would report an exception and go on; else interrupt it."""
        self._stopping = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise _Stop from None
        if self._task is not None:
            loop.call_soon_threadsafe(self._task.cancel)
        signal.signal(signal.SIGALRM, self._interrupt)  # for a call that blocks the loop, or ignores its cancellation
        signal.setitimer(signal.ITIMER_REAL, self._grace_s / 4)

    def _interrupt(self, *_: Any) -> None:
        raise _Stop

    def _answer(self, number: int, method: str, arguments: bytes) -> None:
        try:
            answer = "ok", self._call(method, *pickle.loads(arguments))  # sent by the parent process, hence trusted
        except InvalidAction as mistake:
            answer = "invalid", words(mistake)
        except BaseException as error:
            if self._stopping:
                raise _Stop from error
            if not issubclass(type(error), Exception):
                error = RuntimeError(f"raised {words(error, repr)}")
            answer = "error", failure_of(error, "reward" if method == "score" else method)
        self._send(number, answer)

    def _call(self, method: str, *args: Any) -> Any:
        if method == "reset":
            return self._reset(*args)
        if method == "score":
            return self._score(*args)
        if method == "restore":
            args = (pickle.loads(args[0]),)
        env = self._env
        assert env is not None
        result = self._settle(getattr(env, method)(*args))
        if method == "step":
            step = as_step(result)
            observation = step.observation
            if isinstance(observation, InlineObservation):
                (inserted,) = media_as_bytes((observation.message,))
                observation = replace(observation, text=inserted.content)
            elif isinstance(observation, NewHistory):
                observation = observation.with_new(media_as_bytes(observation.new))
            else:
                observation = media_as_bytes(as_messages(observation))
            return step._replace(observation=observation, info=picklable_value(dict(step.info)))
        if method == "snapshot":
            return pickle.dumps(result)
        return _number(result) if method == "reward" else None

    def _reset(self, task: Task, seed: int | None, limits: Limits | None) -> Any:
        self._env = env = self._make()
        if limits is not None and isinstance(env, NeedsLimits):
            env.set_limits(limits)
        opening = self._settle(env.reset(task, seed=seed))
        messages = None if opening is None else media_as_bytes(as_messages(opening))
        tools = picklable_value([dict(tool) for tool in env.tools])
        max_turns = getattr(env, "max_turns", None)
        own_reward, snapshots = type(env).reward is not Env.reward, type(env).snapshot is not Env.snapshot
        return messages, tools, own_reward, snapshots, max_turns, env.on_turn_length

    def _score(self, data: bytes) -> Any:
        try:
            function, args = pickle.loads(data)  # sent by the parent process, hence trusted
        except AttributeError as error:
            raise UsageError(f"the process cannot find the reward: {error}; define it at the top level of a file") from error
        found = self._settle(function(*args))
        return [_number(one) for one in found] if isinstance(found, (list, tuple)) else _number(found)

    def _settle(self, value: Any) -> Any:
        return self._runner.run(self._await(value)) if isawaitable(value) else value

    async def _await(self, value: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        return await value

    def _send(self, number: int, value: Any) -> None:
        if os.getpid() != self._pid:  # a fork made by the environment also returned from the call
            os._exit(1)
        data = pickle.dumps(value)
        self._sock.sendall(HEAD.pack(MARK, number, len(data)) + data)

    def _receive(self) -> tuple[int, str, bytes] | None:
        """Return number, method and pickled arguments of the next request; None at the end."""
        head = self._stream.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        _, number, size = HEAD.unpack(head)
        data = io.BytesIO(self._stream.read(size))
        if len(data.getbuffer()) < size:
            return None
        return number, pickle.load(data), data.read()


def _number(value: Any) -> Any:
    """Convert a reward to plain floats, which can leave the process."""
    return value.checked("the reward") if isinstance(value, Scores) else as_number(value, "the reward")


class _ForkServer:
    """Forks, kills and reaps environment processes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._folder, self._grace_s = "", EXIT_GRACE_S
        self._living: dict[int, str] = {}
        self._kill_at: dict[int, float] = {}  # deadline of processes that received SIGTERM

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _become_subreaper()
        head = self._control.recv(SIZE.size, socket.MSG_WAITALL)
        data = self._control.recv(SIZE.unpack(head)[0], socket.MSG_WAITALL)
        setup = pickle.loads(data)  # sent by the parent process, hence trusted
        self._folder, self._grace_s = setup["folder"], setup["grace_s"]
        make = _load(setup)
        watched = select.poll()  # select() rejects descriptors above 1023, which the parent may have open
        for one in (self._control.fileno(), wake_read):
            watched.register(one, select.POLLIN)
        while True:
            wait = max(0.0, min(self._kill_at.values()) - time.monotonic()) if self._kill_at else None
            ready = [one for one, _ in watched.poll(None if wait is None else math.ceil(wait * 1000))]
            if wake_read in ready:
                os.read(wake_read, 4096)
            self._reap()
            for pid, when in list(self._kill_at.items()):
                if time.monotonic() >= when:
                    self._signal(pid, signal.SIGKILL)
                    del self._kill_at[pid]
            if self._control.fileno() in ready and not self._serve_one(make):
                return

    def _serve_one(self, make: Callable[[], Env]) -> bool:
        try:
            data, sockets, _, _ = socket.recv_fds(self._control, REQUEST.size, 1)
        except ConnectionResetError:  # killed before it read which processes had ended
            data, sockets = b"", []
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
        """Kill the process group of an ended process while its id is still reserved, then reap it."""
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
        """Kill descendants of ended processes in other sessions (MCP servers, daemons), which were reparented to this one."""
        until = time.monotonic() + self._grace_s
        while (orphans := child_processes() - self._living.keys()) and time.monotonic() < until:
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
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return found


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
            living += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return {"processes": living, "open files": files}


def _become_subreaper() -> None:
    """Become the parent of orphaned descendants, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _load(setup: dict[str, Any]) -> Callable[[], Env]:
    """Load the factory; on failure return one that raises in each process, where the error is reported."""
    try:
        spawn.prepare(setup["preparation"])
        from turnwright.envs.user_code import UserModules

        sys.meta_path.append(UserModules(setup["files"]))
        found: Callable[[], Env] = pickle.loads(setup["factory"])
        return found
    except BaseException as error:
        failure = error if isinstance(error, Exception) else RuntimeError(f"raised {words(error, repr)}")

        def fail() -> Env:
            raise failure

        return fail


def _serve_env(sock: int, folder: str, make: Callable[[], Env], grace_s: float) -> NoReturn:
    status = 1
    try:
        os.setsid()
        if sys.platform == "linux":  # PR_SET_PDEATHSIG: end when the fork server is killed
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        _become_subreaper()  # daemons stay below this process while it lives, and pass to the fork server when it ends
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(sock, 3)
        end = os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else max(map(int, os.listdir("/proc/self/fd"))) + 1
        os.closerange(4, end)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        _EnvServer(socket.socket(fileno=3), make, grace_s).serve()
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
    """Be the process that forks environments, for the requests of a socket, given by its descriptor."""
    _ForkServer(socket.socket(fileno=control)).serve()

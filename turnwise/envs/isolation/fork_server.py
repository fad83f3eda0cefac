"""The process that environments are forked from: small, with one thread, and the factory of the environments in its memory.

Started as `python -m turnwise.envs.isolation.fork_server FD` by `process.py` beside it, which speaks to it over the socket FD:
first what to load, then requests of nine bytes. `s` comes with a socket and gives an environment (or a reward) a process, `k`
ends one, `x` kills it. For each process that has ended it says its id and status; whatever that process started is killed
first, and its temporary directory is removed. When the socket closes all of them end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
from collections.abc import Callable
from inspect import isawaitable
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

import orjson

from turnwise.envs.base import Env, InlineObservation, Scores, Step, as_step
from turnwise.envs.user_code import as_number, failure_of
from turnwise.errors import InvalidAction, UsageError, words
from turnwise.media import media_as_bytes
from turnwise.records.run_dir import to_json
from turnwise.types import Task, as_messages

REQUEST = struct.Struct("<cq")
ENDED = struct.Struct("<qi")
SIZE = struct.Struct("<Q")
HEAD = struct.Struct("<4sQQ")
"""Before each message of an environment's process: `MARK`, the number of the request, the size of the message."""
MARK = b"twn1"
EXIT_GRACE_S = 1.0
"""How long a process that is told to end may take to close its environment before it is killed."""

_PLAIN = {
    "builtins": "bytearray complex frozenset range set slice",
    "collections": "OrderedDict",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
}


class RestrictedUnpickler(pickle.Unpickler):
    """Reads what an environment's process sends: our own nouns and plain values, no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Only classes that are data."""
        ours = module.startswith("turnwise.types.") or module == "turnwise.envs.base"
        if "." not in name and (ours or name in _PLAIN.get(module, "").split()):
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} cannot leave the environment's process")


def restricted_loads(data: bytes) -> Any:
    """The value of a message from an environment's process.

    Raises:
        pickle.UnpicklingError: for anything but plain data.
    """
    return RestrictedUnpickler(io.BytesIO(data)).load()


def picklable_value(value: Any) -> Any:
    """A value as it is where it can leave the process, else as the record would show it."""
    try:
        restricted_loads(pickle.dumps(value))
    except Exception:
        return orjson.loads(to_json(value))
    return value


class _Stop(BaseException):
    """The process was told to end."""


class _EnvServer:
    """One environment in its process: answers requests until it is told to close."""

    def __init__(self, sock: socket.socket, make: Callable[[], Env]) -> None:
        self._sock = sock
        self._make = make
        self._env: Env | None = None
        self._runner = asyncio.Runner()
        self._stopping = False
        self._pid = os.getpid()

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        self._send(0, self._pid)
        try:
            while (request := self._receive()) is not None:
                self._answer(*request)
                if request[1] == "close":
                    self._env = None
                    return
        except _Stop:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self._env is not None:
                self._settle(self._quiet())
                with contextlib.suppress(Exception):
                    self._settle(self._env.close())

    async def _quiet(self) -> None:
        """Whatever the call that was cut off left on the loop is cancelled, and nobody needs to hear how it ends."""
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=EXIT_GRACE_S / 4)

    def _stop(self, *_: Any) -> None:
        raise _Stop

    def _answer(self, number: int, method: str, *args: Any) -> None:
        try:
            answer = "ok", self._call(method, *args)
        except InvalidAction as mistake:
            answer = "invalid", words(mistake)
        except BaseException as error:
            if isinstance(error, _Stop):
                raise
            if not issubclass(type(error), Exception):
                error = RuntimeError(f"raised {words(error, repr)}")
            answer = "error", failure_of(error, "reward" if method == "score" else method)
        self._send(number, answer)

    def _call(self, method: str, *args: Any) -> Any:
        if method == "reset":
            return self._reset(*args)
        if method == "score":
            return self._score(*args)
        env = self._env
        assert env is not None
        result = self._settle(getattr(env, method)(*args))
        if method == "step":
            step = as_step(result)
            said = step.observation
            return Step(
                said if isinstance(said, InlineObservation) else media_as_bytes(as_messages(said)),
                step.reward,
                step.terminated,
                step.truncated,
                picklable_value(dict(step.info)),
            )
        if method == "snapshot":
            return pickle.dumps(result)
        return _number(result) if method == "reward" else None

    def _reset(self, task: Task, seed: int | None) -> Any:
        self._env = env = self._make()
        opening = self._settle(env.reset(task, seed=seed))
        said = None if opening is None else media_as_bytes(as_messages(opening))
        tools = picklable_value([dict(tool) for tool in env.tools])
        most = getattr(env, "max_turns", None)
        return said, tools, type(env).reward is not Env.reward, type(env).snapshot is not Env.snapshot, most

    def _score(self, data: bytes) -> Any:
        try:
            function, args = pickle.loads(data)  # from the process that started us
        except AttributeError as error:
            raise UsageError(f"the reward cannot be found by its process: {error}; define it at the top of a file") from error
        found = self._settle(function(*args))
        return [_number(one) for one in found] if isinstance(found, (list, tuple)) else _number(found)

    def _settle(self, value: Any) -> Any:
        async def wait() -> Any:
            return await value

        return self._runner.run(wait()) if isawaitable(value) else value

    def _send(self, number: int, value: Any) -> None:
        if os.getpid() != self._pid:  # a fork that the environment made came back from its call, too
            os._exit(1)
        data = pickle.dumps(value)
        self._sock.sendall(HEAD.pack(MARK, number, len(data)) + data)

    def _receive(self) -> tuple[Any, ...] | None:
        head = self._exactly(HEAD.size)
        if head is None:
            return None
        _, number, size = HEAD.unpack(head)
        data = self._exactly(size)
        if data is None:
            return None
        method, *args = pickle.loads(data)  # from the process that started us
        return (number, method, pickle.loads(args[0])) if method == "restore" else (number, method, *args)

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)


def _number(value: Any) -> Any:
    """A reward that can leave the process: numbers as floats, whatever library they are of."""
    return value.checked("the reward") if isinstance(value, Scores) else as_number(value, "the reward")


class _ForkServer:
    """Forks, kills and reaps."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._folder = ""
        self._living: dict[int, str] = {}
        self._told: dict[int, float] = {}  # when those that were told to end are killed

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _become_subreaper()
        setup = self._setup()
        make = _load(setup)
        watched = select.poll()  # select() takes no descriptor over 1023, and who started us may have had more open
        for one in (self._control.fileno(), wake_read):
            watched.register(one, select.POLLIN)
        while True:
            wait = max(0.0, min(self._told.values()) - time.monotonic()) if self._told else None
            ready = [one for one, _ in watched.poll(None if wait is None else math.ceil(wait * 1000))]
            if wake_read in ready:
                os.read(wake_read, 4096)
            self._reap()
            for pid, when in list(self._told.items()):
                if time.monotonic() >= when:
                    self._signal(pid, signal.SIGKILL)
                    del self._told[pid]
            if self._control.fileno() in ready and not self._serve_one(make):
                return

    def _setup(self) -> dict[str, Any]:
        head = self._control.recv(SIZE.size, socket.MSG_WAITALL)
        data = self._control.recv(SIZE.unpack(head)[0], socket.MSG_WAITALL)
        found: dict[str, Any] = pickle.loads(data)  # from the process that started us
        self._folder = found["folder"]
        return found

    def _serve_one(self, make: Callable[[], Env]) -> bool:
        data, sockets, _, _ = socket.recv_fds(self._control, REQUEST.size, 1)
        if len(data) < REQUEST.size:
            self._end_all()
            return False
        kind, pid = REQUEST.unpack(data)
        if kind == b"s":
            self._fork(sockets[0], make)
        elif kind == b"x":
            if pid in self._living:
                self._signal(pid, signal.SIGKILL)
        elif pid in self._living and pid not in self._told:
            self._signal(pid, signal.SIGTERM)
            self._told[pid] = time.monotonic() + EXIT_GRACE_S
        return True

    def _fork(self, sock: int, make: Callable[[], Env]) -> None:
        folder = tempfile.mkdtemp(dir=self._folder)
        pid = os.fork()
        if pid == 0:
            _serve_env(sock, folder, make)
        os.close(sock)
        self._living[pid] = folder

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _reap(self) -> None:
        """Kill what an ended process started, while its id is still taken, then let go of it."""
        while self._living:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            folder = self._living.pop(ended.si_pid, None)
            self._told.pop(ended.si_pid, None)
            if folder is None:
                continue
            self._kill_orphans()
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._control.sendall(ENDED.pack(ended.si_pid, status))

    def _kill_orphans(self) -> None:
        """Kill what ended processes started in sessions of its own (an MCP server, a daemon): it has become our child."""
        until = time.monotonic() + EXIT_GRACE_S
        while (orphans := _children() - self._living.keys()) and time.monotonic() < until:
            for pid in orphans:
                self._signal(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)  # its own children are ours then

    def _end_all(self) -> None:
        """The other side is gone: close what can be closed in time, kill the rest."""
        for pid in self._living:
            self._signal(pid, signal.SIGTERM)
        until = time.monotonic() + EXIT_GRACE_S
        while self._living and time.monotonic() < until:
            self._reap()
            time.sleep(0.002)
        for pid in self._living:
            self._signal(pid, signal.SIGKILL)
        while self._living:
            self._reap()
            time.sleep(0.002)
        shutil.rmtree(self._folder, ignore_errors=True)


def _children() -> set[int]:
    """Ids of the processes below this one; none where the system does not say."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def _become_subreaper() -> None:
    """Become the parent of what this process's descendants leave behind, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _load(setup: dict[str, Any]) -> Callable[[], Env]:
    """The factory; one that cannot be loaded fails in each process that wants it, where somebody hears of it."""
    try:
        spawn.prepare(setup["preparation"])
        from turnwise.envs.user_code import load_user_module

        for file in setup["files"]:
            load_user_module(Path(file), file)
        found: Callable[[], Env] = pickle.loads(setup["factory"])
        return found
    except BaseException as error:
        broken = error if isinstance(error, Exception) else RuntimeError(f"raised {words(error, repr)}")

        def fail() -> Env:
            raise broken

        return fail


def _serve_env(sock: int, folder: str, make: Callable[[], Env]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        if sys.platform == "linux":  # where the nursery itself is killed
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        _become_subreaper()  # a daemon of ours stays below us while we live, and is the nursery's when we die
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(sock, 3)
        os.closerange(
            4, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else max(map(int, os.listdir("/proc/self/fd"))) + 1
        )
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        _EnvServer(socket.socket(fileno=3), make).serve()
        status = 0
    except BrokenPipeError:  # whoever wanted it has given up
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()

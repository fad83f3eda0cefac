"""Environments in separate processes, forked by a fork server."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import spawn
from typing import Any

from turnwright.config import Limits
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.isolation.child_path import python_path
from turnwright.envs.isolation.fork_server import ENDED, EXIT_GRACE_S, HEAD, MARK, REQUEST, SIZE, restricted_loads
from turnwright.envs.user_code import USER_MODULE, RemoteException
from turnwright.errors import EnvError, InvalidAction, ProcessDied, UsageError
from turnwright.types import Message, Task, Trajectory

ISOLATED_ENV_VAR = "TURNWRIGHT_NURSERY"  # environment variable set in isolated processes


def in_isolated_process() -> bool:
    """Whether this process is isolated."""
    return bool(os.environ.get(ISOLATED_ENV_VAR))


_RETRY_S = 0.005
MAX_STARTS = 9  # maximum starts of the fork server process in one rollout, restarts after it is killed included


class ForkServer:
    """Factory that runs each environment of another factory in its own process.

    Example::

        fork_server = ForkServer(Guess)
        trajectories = await rollout.play(episodes(fork_server, tasks, ...))
        await fork_server.close()
    """

    def __init__(self, factory: Callable[[], Env]) -> None:
        if in_isolated_process():
            raise UsageError(
                "an environment's process cannot start a rollout: importing the file that defines the environment does so; "
                'put that code under `if __name__ == "__main__":`'
            )
        try:
            self._factory = pickle.dumps(factory)
        except Exception as error:
            name = getattr(factory, "__name__", None) or type(factory).__name__
            raise UsageError(
                f'isolation = "process": {name} cannot be found by another process ({error}); define it and the functions it '
                "uses at the top level of a file"
            ) from error
        self.forks = 0  # number of forked processes
        self.starts = 0  # number of starts of the fork server process
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._dead: list[tuple[subprocess.Popen[bytes], str]] = []

    def __call__(self) -> ProcessEnv:
        """Make an environment; its process starts with `reset`."""
        return ProcessEnv(self)

    async def reset(self) -> None:
        """Mark the factory as async, so that environments are made on the event loop."""
        raise NotImplementedError

    async def fork(self) -> tuple[socket.socket, int, asyncio.Future[int]]:
        """Fork a process, restarting a dead fork server; return its socket, its id and a future of its exit status."""
        loop = asyncio.get_running_loop()
        while True:
            if self._server is not None and self._server.poll() is not None:
                self._on_server_exit()
            if self._server is None:
                if self.starts >= MAX_STARTS:
                    raise ProcessDied(
                        f"the fork server of environments died {self.starts} times; find what kills it (the system log "
                        "reports out-of-memory kills), then continue with --resume"
                    )
                self._start(loop)
            server = self._server
            try:
                return await self._fork_once(loop)
            except BlockingIOError:  # earlier requests are still queued
                await asyncio.sleep(_RETRY_S)
            except (ConnectionError, EOFError) as error:
                await asyncio.sleep(_RETRY_S)
                if self._server is server and server is not None and server.poll() is None:
                    raise ProcessDied("the environment's process ended during its start") from error

    async def _fork_once(self, loop: asyncio.AbstractEventLoop) -> tuple[socket.socket, int, asyncio.Future[int]]:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            socket.send_fds(self._control, [REQUEST.pack(b"s", 0)], [theirs.fileno()])
            theirs.close()
            pid = await receive(loop, ours)
        except BaseException:
            theirs.close()
            ours.close()  # the process reads end of file and ends
            raise
        self.forks += 1
        return ours, pid, self._ends.setdefault(pid, loop.create_future())

    def kill(self, pid: int, end: asyncio.Future[int] | None, *, at_once: bool = False) -> None:
        """End a process; kill it after one second, or `at_once`. `end`, of `fork`, identifies it even if `pid` was reused."""
        if self._control is None or end is None or self._ends.get(pid) is not end:
            return
        try:
            self._control.send(REQUEST.pack(b"x" if at_once else b"k", pid))
        except BlockingIOError:  # earlier requests are still queued
            asyncio.get_running_loop().call_later(_RETRY_S, partial(self.kill, pid, end, at_once=at_once))
        except OSError:
            self._on_server_exit()

    async def close(self) -> None:
        """End every process."""
        if self._server is not None:
            self._dead.append((self._server, self._folder))
            self._server = None
        self._disconnect_server()
        until = time.monotonic() + 3 * EXIT_GRACE_S + 5.0
        for server, folder in self._dead:
            while server.poll() is None:
                if time.monotonic() > until:
                    server.kill()
                await asyncio.sleep(0.005)
            shutil.rmtree(folder, ignore_errors=True)
        self._dead.clear()
        self._end_all()

    def _disconnect_server(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = tempfile.mkdtemp(prefix="turnwright-env-")
        ours, theirs = socket.socketpair()
        preparation = spawn.get_preparation_data("turnwright-env")
        preparation.pop("authkey", None)
        files = {name: str(m.__file__) for name, m in list(sys.modules.items()) if name.startswith(USER_MODULE)}
        self.starts += 1
        setup: dict[str, Any] = {"preparation": preparation, "files": files, "factory": self._factory, "folder": self._folder}
        setup["grace_s"] = EXIT_GRACE_S
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process, which closes the fork server
                env=os.environ | {ISOLATED_ENV_VAR: "1", "PYTHONPATH": python_path()},
            )
        data = pickle.dumps(setup)
        with suppress(OSError):  # if it died already, the next request fails
            ours.sendall(SIZE.pack(len(data)) + data)
        ours.setblocking(False)
        self._control = ours
        loop.add_reader(ours, self._read_exits)

    def _read_exits(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(ENDED.size * 256)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_server_exit()
            return
        for pid, status in ENDED.iter_unpack(data):
            future = self._ends.setdefault(pid, asyncio.get_running_loop().create_future())
            if not future.done():
                future.set_result(status)

    def _on_server_exit(self) -> None:
        """Clean up after the fork server died, on Linux with its children; the next fork starts a new one."""
        self._disconnect_server()
        if self._server is not None:
            self._server.kill()  # it may be alive without its socket
            self._dead.append((self._server, self._folder))
            self._server = None
        for pid, end in self._ends.items():
            if not end.done():  # only this process is left to end its process group
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._end_all()

    def _end_all(self) -> None:
        for future in self._ends.values():
            if not future.done():
                future.set_result(signal.SIGKILL)
        self._ends.clear()

    def discard_status(self, pid: int, end: asyncio.Future[int]) -> None:
        """Forget the exit status of a process."""
        if self._ends.get(pid) is end:
            del self._ends[pid]


_MAIN = "import sys; from turnwright.envs.isolation.fork_server import serve_forks; serve_forks(int(sys.argv[1]))"


class ProcessEnv(Env):
    """Async proxy of an environment in a process; cancelling a call ends it: `close` for a second, then its group is killed."""

    snapshots = False
    max_turns: int | None = None
    what = "the environment's process"  # name in errors

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._sock: socket.socket | None = None
        self._pid = 0
        self._end: asyncio.Future[int] | None = None
        self._rewards = True
        self._asked = 0  # number of the last request
        self._limits: Limits | None = None

    @property
    def exited(self) -> bool:
        """Whether the process ended or is being ended."""
        return self._sock is None and self._pid > 0

    async def start(self) -> None:
        """Start the process. Separate from `reset`, with its own deadline, since concurrent starts wait for each other."""
        self._sock, self._pid, self._end = await self._fork_server.fork()

    def set_limits(self, limits: Limits) -> None:
        """Keep the limits for the environment, which receives them with `reset`."""
        self._limits = limits

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...] | None:
        """Begin the episode; start the process if `start` was not called."""
        if self._end is None:
            await self.start()
        messages: tuple[Message, ...] | None
        opened = await self._ask("reset", task, seed, self._limits)
        messages, self.tools, self._rewards, self.snapshots, self.max_turns, self.on_turn_length = opened
        return messages

    async def step(self, action: Action) -> Step:
        step: Step = await self._ask("step", replace(action, raw_source=partial(str, action.raw)))
        return step

    async def reward(self, trajectory: Trajectory) -> float | None:
        """Call `reward` of the environment; 0.0 without a call if it is not overridden."""
        found: float | None = await self._ask("reward", trajectory) if self._rewards else 0.0
        return found

    async def isolated_reward(self, trajectory: Trajectory) -> float | None:
        """Call `reward`, which already runs in a separate process."""
        return await self.reward(trajectory)

    async def snapshot(self) -> Any:
        return await self._ask("snapshot")

    async def restore(self, state: Any) -> None:
        await self._ask("restore", state)

    async def close(self) -> None:
        """Close the environment if its process is connected, and end the process."""
        if self._end is None:
            return
        try:
            if self._sock is not None and not self._end.done():
                await self._ask("close")
        finally:
            self._disconnect()
            end, self._end = self._end, None
            self._fork_server.kill(self._pid, end)
            await end
            self._fork_server.discard_status(self._pid, end)

    async def _ask(self, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        if self._sock is None:
            raise ProcessDied(f"{self.what} has ended; {method} cannot be called")
        try:
            data = pickle.dumps(method) + pickle.dumps(args)
            self._asked += 1
        except Exception as error:
            raise EnvError(f"the arguments of {method} cannot be sent to {self.what}: {error}") from error
        try:
            await loop.sock_sendall(self._sock, HEAD.pack(MARK, self._asked, len(data)) + data)
            kind, value = await receive(loop, self._sock, self._asked)
        except (OSError, EOFError) as error:
            raise ProcessDied(await self._exit_description(method)) from error
        except pickle.UnpicklingError as error:
            raise EnvError(f"{method}: {error}") from error
        except BaseException:  # the caller was cancelled, so the result has no receiver
            self.drop()
            raise
        if kind == "invalid":
            raise InvalidAction(value)
        if kind == "error":
            raise RemoteException(value)
        return value

    async def _exit_description(self, method: str) -> str:
        self.drop()  # it may have closed its socket and still run
        assert self._end is not None
        status = await asyncio.shield(self._end)
        where = "" if method == "score" else f" in {method}"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"{self.what} died by signal {number} ({signal.Signals(number).name}){where}"
        return f"{self.what} left with status {os.waitstatus_to_exitcode(status)}{where}"

    def drop(self) -> None:
        """Disconnect and end the process."""
        self._disconnect()
        self._fork_server.kill(self._pid, self._end)

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


async def receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, number: int = 0) -> Any:
    """Receive the answer to a request; drop answers to earlier ones. Raises `EOFError` when the process has ended."""
    while True:
        mark, found, size = HEAD.unpack(await _exactly(loop, sock, HEAD.size))
        if mark != MARK or found > number:
            raise pickle.UnpicklingError("user code wrote to the socket of the environment's process; leave descriptor 3 alone")
        data = await _exactly(loop, sock, size)
        if found == number:
            return restricted_loads(data)


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(sock, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


class ForkServers:
    """Fork servers by the factory of their environments."""

    def __init__(self) -> None:
        self._servers: dict[int, tuple[ForkServer, Callable[[], Env]]] = {}

    def of(self, factory: Callable[[], Env]) -> ForkServer:
        """Return the fork server of a factory, made at the first request."""
        if id(factory) not in self._servers:
            self._servers[id(factory)] = ForkServer(factory), factory  # the reference keeps the id unique
        return self._servers[id(factory)][0]

    async def close(self) -> None:
        """Close all fork servers."""
        servers, self._servers = self._servers, {}
        for server, _ in servers.values():
            await server.close()

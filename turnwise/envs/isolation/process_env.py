"""ProcessEnv: an environment in its own process."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from turnwise.envs.base import Action, Env, Step
from turnwise.envs.isolation.fork_server import ENDED, EXIT_GRACE_S, HEAD, MARK, REQUEST, SIZE, restricted_loads
from turnwise.envs.user_code import RemoteException
from turnwise.errors import EnvError, InvalidAction, ProcessDied, UsageError
from turnwise.types import Message, Task, Trajectory

ISOLATED_ENV_VAR = "TURNWISE_NURSERY"
"""Set in the environment of such processes."""


def in_isolated_process() -> bool:
    """Whether it is."""
    return bool(os.environ.get(ISOLATED_ENV_VAR))


def open_resources() -> dict[str, int]:
    """How many child processes live and how many files are open; empty where the system does not say (it has no /proc)."""
    gc.collect()
    own = Path("/proc/self")
    try:
        return {"processes": _children(own), "open files": len(os.listdir(own / "fd"))}
    except OSError:
        return {}


def _children(own: Path) -> int:
    """Children of all threads; those that ended and were not waited for do not count."""
    pids = {pid for task in (own / "task").iterdir() for pid in (task / "children").read_text().split()}
    return sum(_lives(pid) for pid in pids)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_PAUSE_S = 0.005
STARTS = 9
"""How often the process that forks may be started in one rollout: once, and again each time that it is killed."""


class ForkServer:
    """Gives environments of one factory a process each; a factory of environments itself.

    Example::

        nursery = Nursery(Guess)
        trajectories = await rollout.play(episodes(nursery, tasks, ...))
        await nursery.close()
    """

    def __init__(self, factory: Callable[[], Env]) -> None:
        """
        Raises:
            UsageError: for a factory that another process cannot find, or inside such a process.
        """
        if in_isolated_process():
            raise UsageError(
                "an environment's process cannot begin a rollout: the file that defines the environment does so when it is "
                'imported; put that under `if __name__ == "__main__":`'
            )
        try:
            self._factory = pickle.dumps(factory)
        except Exception as error:
            name = getattr(factory, "__name__", None) or type(factory).__name__
            raise UsageError(
                f'isolation = "process": {name} cannot be found by another process ({error}); define it, and the functions '
                "that it is made from, at the top of a file"
            ) from error
        self.births = 0
        self.starts = 0
        """How often the process that forks was started."""
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._dead: list[tuple[subprocess.Popen[bytes], str]] = []

    def __call__(self) -> ProcessEnv:
        """A fresh environment; its process begins with `reset`."""
        return ProcessEnv(self)

    async def reset(self) -> None:
        """Marks the factory as one whose environments are async, so that they are made on the loop."""
        raise NotImplementedError

    async def fork(self) -> tuple[socket.socket, int, asyncio.Future[int]]:
        """A process: the socket to it, its id, and what will be its status.

        The process that forks is started again where it has died, at most `STARTS` times in all.

        Raises:
            ProcessDied: when it died more often.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._server is not None and self._server.poll() is not None:
                self._on_server_exit()
            if self._server is None:
                if self.starts >= STARTS:
                    raise ProcessDied(
                        f"the process that forks environments died {self.starts} times; look for what kills it (the "
                        "system log names it where memory ran out), then go on with --resume"
                    )
                self._start(loop)
            server = self._server
            try:
                return await self._birth(loop)
            except BlockingIOError:  # it is behind with the requests before
                await asyncio.sleep(_PAUSE_S)
            except (ConnectionError, EOFError) as error:
                await asyncio.sleep(_PAUSE_S)
                if self._server is server and server is not None and server.poll() is None:
                    raise ProcessDied("the environment's process ended before it began") from error

    async def _birth(self, loop: asyncio.AbstractEventLoop) -> tuple[socket.socket, int, asyncio.Future[int]]:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            socket.send_fds(self._control, [REQUEST.pack(b"s", 0)], [theirs.fileno()])
            theirs.close()
            pid = await receive(loop, ours)
        except BaseException:
            theirs.close()
            ours.close()  # the process reads the end of it, and ends too
            raise
        self.births += 1
        return ours, pid, self._ends.setdefault(pid, loop.create_future())

    def kill(self, pid: int, end: asyncio.Future[int] | None, *, at_once: bool = False) -> None:
        """Have a process closed and ended, killed where that takes longer than a second, or at once.

        Args:
            pid: its id.
            end: what `fork` gave with it: the id may be another process' by now.
        """
        if self._control is None or end is None or self._ends.get(pid) is not end:
            return
        try:
            self._control.send(REQUEST.pack(b"x" if at_once else b"k", pid))
        except BlockingIOError:  # it is behind with the requests before
            asyncio.get_running_loop().call_later(_PAUSE_S, partial(self.kill, pid, end, at_once=at_once))
        except OSError:
            self._on_server_exit()

    async def close(self) -> None:
        """End every process."""
        if self._server is not None:
            self._dead.append((self._server, self._folder))
            self._server = None
        self._hang_up()
        until = time.monotonic() + 3 * EXIT_GRACE_S + 5.0
        for server, folder in self._dead:
            while server.poll() is None:
                if time.monotonic() > until:
                    server.kill()
                await asyncio.sleep(0.005)
            shutil.rmtree(folder, ignore_errors=True)
        self._dead.clear()
        self._end_all()

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = tempfile.mkdtemp(prefix="turnwise-env-")
        ours, theirs = socket.socketpair()
        preparation = spawn.get_preparation_data("turnwise-env")
        preparation.pop("authkey", None)
        loaded = [m for name, m in list(sys.modules.items()) if name.startswith("turnwise_user_")]
        self.starts += 1
        setup = {
            "preparation": preparation,
            "files": [str(m.__file__) for m in loaded],
            "factory": self._factory,
            "folder": self._folder,
        }
        with theirs:
            path = os.pathsep.join(dict.fromkeys([entry or os.getcwd() for entry in sys.path]))
            self._server = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us, who close it
                env=os.environ | {ISOLATED_ENV_VAR: "1", "PYTHONPATH": path},
            )
        data = pickle.dumps(setup)
        with suppress(OSError):  # it died at once: whoever asks it hears of that
            ours.sendall(SIZE.pack(len(data)) + data)
        ours.setblocking(False)
        self._control = ours
        loop.add_reader(ours, self._read_exits)

    def _read_exits(self) -> None:
        """Processes that have ended."""
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
        """The process that forks has died, and on Linux its children with it; the next environment starts another one."""
        self._hang_up()
        if self._server is not None:
            self._server.kill()  # where it lives on without its socket
            self._dead.append((self._server, self._folder))
            self._server = None
        for pid, end in self._ends.items():
            if not end.done():  # what it started in its own group has nobody else left to end it
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._end_all()

    def _end_all(self) -> None:
        for future in self._ends.values():
            if not future.done():
                future.set_result(signal.SIGKILL)
        self._ends.clear()

    def discard_status(self, pid: int, end: asyncio.Future[int]) -> None:
        """Nobody asks for the status of a process any more."""
        if self._ends.get(pid) is end:
            del self._ends[pid]


_MAIN = "import runpy; runpy.run_module('turnwise.envs.isolation.fork_server', run_name='__main__', alter_sys=True)"


class ProcessEnv(Env):
    """An environment in a process of its own, as one that is async.

    Its calls are cancelled by ending the process: it may run `close` for a second, then it is killed with its process group.
    """

    snapshots = False
    max_turns: int | None = None
    what = "the environment's process"
    """What errors call it."""

    def __init__(self, nursery: ForkServer) -> None:
        self._nursery = nursery
        self._sock: socket.socket | None = None
        self._pid = 0
        self._end: asyncio.Future[int] | None = None
        self._rewards = True
        self._asked = 0  # the number of the last request

    @property
    def exited(self) -> bool:
        """Whether its process ended, or was told to."""
        return self._sock is None and self._pid > 0

    async def start(self) -> None:
        """Begin the process. It has a deadline of its own: many that begin at once wait for one another."""
        self._sock, self._pid, self._end = await self._nursery.fork()

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...] | None:
        """Begin the episode, and the process where `start` was not called."""
        if self._end is None:
            await self.start()
        said, tools, self._rewards, self.snapshots, self.max_turns = await self._ask("reset", task, seed)
        self.tools = tools
        messages: tuple[Message, ...] | None = said
        return messages

    async def step(self, action: Action) -> Step:
        """As the environment's own."""
        step: Step = await self._ask("step", replace(action, raw_source=partial(str, action.raw)))
        return step

    async def reward(self, trajectory: Trajectory) -> float | None:
        """As the environment's own, which is not asked where it has none."""
        found: float | None = await self._ask("reward", trajectory) if self._rewards else 0.0
        return found

    async def isolated_reward(self, trajectory: Trajectory) -> float | None:
        """The same: it is in a process already."""
        return await self.reward(trajectory)

    async def snapshot(self) -> Any:
        """As the environment's own."""
        return await self._ask("snapshot")

    async def restore(self, state: Any) -> None:
        """As the environment's own."""
        await self._ask("restore", state)

    async def close(self) -> None:
        """Close the environment where its process still listens, and end the process."""
        if self._end is None:
            return
        try:
            if self._sock is not None and not self._end.done():
                await self._ask("close")
        finally:
            self._disconnect()
            end, self._end = self._end, None
            self._nursery.kill(self._pid, end)
            await end
            self._nursery.discard_status(self._pid, end)

    async def _ask(self, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        if self._sock is None:
            raise ProcessDied(f"{self.what} is gone, {method} cannot be called")
        try:
            data = pickle.dumps((method, *args))
            self._asked += 1
        except Exception as error:
            raise EnvError(f"what {method} is given cannot be sent to {self.what}: {error}") from error
        try:
            await loop.sock_sendall(self._sock, HEAD.pack(MARK, self._asked, len(data)) + data)
            kind, value = await receive(loop, self._sock, self._asked)
        except (OSError, EOFError) as error:
            raise ProcessDied(await self._exit_description(method)) from error
        except pickle.UnpicklingError as error:
            raise EnvError(f"{method}: {error}") from error
        except BaseException:  # whoever waited has given up: what it does now, nobody hears
            self._disconnect()
            self._kill()
            raise
        if kind == "invalid":
            raise InvalidAction(value)
        if kind == "error":
            raise RemoteException(value)
        return value

    async def _exit_description(self, method: str) -> str:
        self._disconnect()
        self._kill()  # where it closed its socket and lives on
        assert self._end is not None
        status = await asyncio.shield(self._end)
        where = "" if method == "score" else f" in {method}"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"{self.what} died by signal {number} ({signal.Signals(number).name}){where}"
        return f"{self.what} left with status {os.waitstatus_to_exitcode(status)}{where}"

    def _kill(self) -> None:
        self._nursery.kill(self._pid, self._end)

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


async def receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, number: int = 0) -> Any:
    """The answer of an environment's process to the request of this number; answers to earlier ones are left out.

    Raises:
        EOFError: when it has ended.
        pickle.UnpicklingError: for a message that is more than data, or none that our code in the process wrote.
    """
    while True:
        mark, found, size = HEAD.unpack(await _exactly(loop, sock, HEAD.size))
        if mark != MARK or found > number:
            raise pickle.UnpicklingError("its process wrote into the channel that its answers take")
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


@asynccontextmanager
async def fork_servers(factories: Iterable[Callable[[], Env]]) -> AsyncIterator[dict[int, ForkServer]]:
    """A nursery for each factory, by its `id`; what they hold ends with the block."""
    homes = {id(factory): ForkServer(factory) for factory in {id(f): f for f in factories}.values()}
    try:
        yield homes
    finally:
        for home in homes.values():
            await home.close()

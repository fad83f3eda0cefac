"""Processes that start as forks of one that has what they need in memory, and calls in them.

A process that imports torch or a simulator takes seconds to start, and a fork of it milliseconds.
`forking.py` is the process that forks, `env_server.py` what a fork does, `wire.py` how they talk.
"""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import spawn
from typing import Any

from turnwright.child_processes import ChildProcess, exit_words, python_path
from turnwright.envs.isolation.forking import ForkSetup
from turnwright.envs.isolation.wire import ENDED, REQUEST, SETUP, frame, receive
from turnwright.envs.user_code import USER_MODULE, RemoteException
from turnwright.errors import EnvError, InvalidAction, ProcessDied, UsageError

ISOLATED_ENV_VAR = "TURNWRIGHT_NURSERY"
"""Environment variable that is set in isolated processes."""


MAX_STARTS = 9
"""Maximum starts of the process that forks in one rollout, restarts after it is killed included."""

EXIT_GRACE_S = 1.0
"""Seconds that a process may take to close its environment before it is killed."""

_RETRY_S = 0.005
"""Seconds until a request is sent again for which the socket had no room."""

_MAIN = (
    "import sys; from turnwright.envs.isolation.forking import serve_forks; "
    "serve_forks(int(sys.argv[1]))"
)


def in_isolated_process() -> bool:
    """Whether this process is isolated."""
    return bool(os.environ.get(ISOLATED_ENV_VAR))


class ForkServer:
    """Starts processes as forks of one that has loaded an object, such as a factory of
    environments.

    That one starts with the first `fork`, and again if it dies.

    Example::

        fork_server = ForkServer(Guess)
        process = await fork_server.fork()
        opening = await process.ask("reset", task, seed, limits)
        process.drop()
        await fork_server.close()
    """

    def __init__(
        self, load: Callable[..., Any], *, modules: Sequence[str] = (), for_user_code: bool = True
    ) -> None:
        """`load` is sent pickled; `modules` are imported before the first fork, if they are
        installed.

        For code of users the file that this program was started with is run there as well, since
        `load` may be defined in it. Else nothing that the processes print is shown.

        Raises:
            UsageError: where `load` cannot be pickled, or a rollout is begun in an environment's
                own process.
        """
        if for_user_code and in_isolated_process():
            raise UsageError(
                "an environment's process cannot start a rollout: importing the file that defines "
                'the environment does so; put that code under `if __name__ == "__main__":`'
            )
        try:
            self._load = pickle.dumps(load)
        except Exception as error:
            name = getattr(load, "__name__", None) or type(load).__name__
            raise UsageError(
                f'isolation = "process": {name} cannot be found by another process ({error}); '
                "define it and the functions it uses at the top level of a file"
            ) from error

        self.forks = 0
        """Number of forked processes."""
        self.starts = 0
        """Number of starts of the process that forks."""
        self._modules = tuple(modules)
        self._for_user_code = for_user_code
        self._forker: ChildProcess | None = None
        """The process that forks."""
        self._control: socket.socket | None = None
        """The socket of its requests."""
        self._folder = ""
        """Its temporary directory."""
        self._ends: dict[int, asyncio.Future[int]] = {}
        """Exit statuses of forked processes, by process id."""
        self._dead: list[tuple[ChildProcess, str]] = []
        """Earlier processes that forked, with their directories."""

    async def fork(self) -> ForkedProcess:
        """Start a process; where the one that forks has died, start that again.

        Raises:
            ProcessDied: when it ended during its start, or the process that forks has died too
                often.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._forker is not None and self._forker.status is not None:
                self._on_forker_exit()
            if self._forker is None:
                if self.starts >= MAX_STARTS:
                    raise ProcessDied(
                        f"the fork server of environments died {self.starts} times; find what "
                        "kills it (the system log reports out-of-memory kills), then continue "
                        "with --resume"
                    )
                self._start(loop)

            forker = self._forker
            try:
                return await self._fork_once(loop)
            except BlockingIOError:  # earlier requests are still queued
                await asyncio.sleep(_RETRY_S)
            except (ConnectionError, EOFError) as error:
                await asyncio.sleep(_RETRY_S)
                if self._forker is forker and forker is not None and forker.status is None:
                    raise ProcessDied("the environment's process ended during its start") from error

    async def _fork_once(self, loop: asyncio.AbstractEventLoop) -> ForkedProcess:
        """Ask for a fork, and wait until it says its process id."""
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
        end = self._ends.setdefault(pid, loop.create_future())
        return ForkedProcess(self, ours, pid, end)

    def kill(self, pid: int, end: asyncio.Future[int], *, at_once: bool = False) -> None:
        """End a process; kill it after one second, or `at_once`.

        `end` identifies it even if `pid` was reused.
        """
        if self._control is None or self._ends.get(pid) is not end:
            return
        try:
            self._control.send(REQUEST.pack(b"x" if at_once else b"k", pid))
        except BlockingIOError:  # earlier requests are still queued
            retry = partial(self.kill, pid, end, at_once=at_once)
            asyncio.get_running_loop().call_later(_RETRY_S, retry)
        except OSError:
            self._on_forker_exit()

    def forget(self, pid: int, end: asyncio.Future[int]) -> None:
        """Forget the exit status of a process."""
        if self._ends.get(pid) is end:
            del self._ends[pid]

    async def close(self) -> None:
        """End every process."""
        if self._forker is not None:
            self._dead.append((self._forker, self._folder))
            self._forker = None
        self._disconnect()

        until = time.monotonic() + 3 * EXIT_GRACE_S + 5.0
        for forker, folder in self._dead:
            while forker.status is None and time.monotonic() < until:
                await asyncio.sleep(0.005)
            forker.kill()
            shutil.rmtree(folder, ignore_errors=True)
        self._dead.clear()
        self._end_all()

    def _disconnect(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the process that forks, and send it what to load."""
        self.starts += 1
        self._folder = tempfile.mkdtemp(prefix="turnwright-env-")
        ours, theirs = socket.socketpair()
        output = None if self._for_user_code else subprocess.DEVNULL
        with theirs:
            self._forker = ChildProcess(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=output,
                env=os.environ | {ISOLATED_ENV_VAR: "1", "PYTHONPATH": python_path()},
            )

        setup = pickle.dumps(
            ForkSetup(
                preparation=self._preparation(),
                files=_files_of_users(),
                modules=self._modules,
                factory=self._load,
                folder=self._folder,
                grace_s=EXIT_GRACE_S,
            )
        )
        with suppress(OSError):  # if it died already, the next request fails
            ours.sendall(SETUP.pack(len(setup)) + setup)
        ours.setblocking(False)
        self._control = ours
        loop.add_reader(ours, self._read_exits)

    def _preparation(self) -> dict[str, Any]:
        """Return what `multiprocessing` tells a spawned process, as far as it is wanted."""
        left_out = ["authkey"]
        if not self._for_user_code:
            left_out += ["init_main_from_name", "init_main_from_path"]
        preparation = spawn.get_preparation_data("turnwright-env")
        return {name: value for name, value in preparation.items() if name not in left_out}

    def _read_exits(self) -> None:
        """Read which processes have ended, where the process that forks has said so."""
        assert self._control is not None
        try:
            data = self._control.recv(ENDED.size * 256)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_forker_exit()
            return

        for pid, status in ENDED.iter_unpack(data):
            end = self._ends.setdefault(pid, asyncio.get_running_loop().create_future())
            if not end.done():
                end.set_result(status)

    def _on_forker_exit(self) -> None:
        """Clean up after the process that forks died, on Linux with its children; the next fork
        starts a new one."""
        self._disconnect()
        if self._forker is not None:
            self._forker.kill()  # it may be alive without its socket
            self._dead.append((self._forker, self._folder))
            self._forker = None

        for pid, end in self._ends.items():
            if not end.done():  # only this process is left to end its process group
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._end_all()

    def _end_all(self) -> None:
        """Count all processes as killed."""
        for end in self._ends.values():
            if not end.done():
                end.set_result(signal.SIGKILL)
        self._ends.clear()


def _files_of_users() -> dict[str, str]:
    """Return the files of modules that were loaded from a file of a user, by the module's name."""
    files = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULE):
            files[name] = str(module.__file__)
    return files


class ForkedProcess:
    """A process of a fork server, which serves one call at a time."""

    def __init__(
        self, fork_server: ForkServer, sock: socket.socket, pid: int, end: asyncio.Future[int]
    ) -> None:
        """`end` gets its status, as `os.waitpid` has it."""
        self._fork_server = fork_server
        self._sock: socket.socket | None = sock
        self._pid = pid
        self._end = end
        self._asked = 0
        """Number of the last request."""
        self.what = "the environment's process"
        """Its name in errors."""

    @property
    def is_connected(self) -> bool:
        """Whether it can be asked: it neither ended a call by its death, nor is being ended."""
        return self._sock is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, by itself or not."""
        return self._end.done()

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method there and return its result. Cancelling this ends the process, since the
        result has no receiver.

        Raises:
            EnvError: for arguments that cannot be pickled, and for results that are no plain data.
            InvalidAction: as the environment raises it.
            RemoteException: for any other exception there.
            ProcessDied: when the process has ended; `status` is its exit status, negative for a
                signal.
        """
        if self._sock is None:
            raise ProcessDied(f"{self.what} has ended; {method} cannot be called")
        loop = asyncio.get_running_loop()
        try:
            request = pickle.dumps(method) + pickle.dumps(args)
        except Exception as error:
            raise EnvError(
                f"the arguments of {method} cannot be sent to {self.what}: {error}"
            ) from error

        self._asked += 1
        try:
            await loop.sock_sendall(self._sock, frame(self._asked, request))
            kind, value = await receive(loop, self._sock, self._asked)
        except (OSError, EOFError) as error:
            raise await self._death(method) from error
        except pickle.UnpicklingError as error:
            raise EnvError(f"{method}: {error}") from error
        except BaseException:
            self.drop()
            raise

        if kind == "invalid":
            raise InvalidAction(value)
        if kind == "error":
            raise RemoteException(value)
        return value

    async def _death(self, method: str) -> ProcessDied:
        """Return the error of a process that has ended in a call."""
        self.drop()  # it may have closed its socket and still run
        status = os.waitstatus_to_exitcode(await asyncio.shield(self._end))
        where = "" if method in ("score", "call") else f" in {method}"
        return ProcessDied(f"{self.what} {exit_words(status)}{where}", status)

    def drop(self, *, at_once: bool = False) -> None:
        """Disconnect, which lets it close its environment; kill it after one second, or
        `at_once`."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._fork_server.kill(self._pid, self._end, at_once=at_once)
        if at_once:
            self._end.add_done_callback(lambda _: self._fork_server.forget(self._pid, self._end))

    async def end(self) -> None:
        """Drop it and wait until it has ended."""
        self.drop()
        await self._end
        self._fork_server.forget(self._pid, self._end)

"""Servers that a run starts itself: one process each, started again when it dies, and ended with the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from turnwise.engine.remote import recipes
from turnwise.engine.remote.base import RemoteEngine
from turnwise.engine.remote.fleet import Fleet
from turnwise.engine.remote.member import Replica
from turnwise.engine.remote.ways import DiskWeights, WeightsSource
from turnwise.errors import EngineError, SyncError, TurnwiseError, UsageError

_log = logging.getLogger(__name__)

TAIL = 2000
"""Characters of a server's log that an error repeats."""
END_S = 10.0
"""For a server to end by itself."""
ENDING_S = 2.0
"""For a process that was killed to be gone."""
MAX_RESTARTS = 8
"""Times that one server is started in a run."""
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15) if sys.platform == 'linux' else None; "
    "os.execvpe(sys.argv[1], sys.argv[1:], os.environ)"
)
"""Becomes the server, after asking Linux to end it when this process is killed."""


class ServerProcess:
    """One server process on a port of this machine."""

    def __init__(self, kind: str, home: Path, log: Path, *, context: int | None, gpu: bool, **settings: int) -> None:
        """
        Args:
            kind: `vllm` or `sglang`.
            home: where its environment stands.
            log: the file that takes what it prints.
            settings: more of `recipes.start_command`: `lora`, `group`, `sleep`, `speculate`.
        """
        self.kind, self.home, self.log = kind, home, log
        self._settings: dict[str, Any] = {"context": context, "gpu": gpu} | settings
        self.port = _free_port()
        self.starts = 0
        self.up = False
        """Whether it has answered since it was started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None else None

    @property
    def ended(self) -> bool:
        """Whether it was started and runs no more."""
        return self._process is not None and self._process.poll() is not None

    def start(self, directory: Path) -> None:
        """Start it with a model directory.

        Raises:
            UsageError: when its environment is not installed.
            EngineError: when it cannot be run, or was started too often.
        """
        if self.starts >= MAX_RESTARTS:
            raise EngineError(f"{self.kind} at {self.url} ended {self.starts} times and is not started again; see {self.log}")
        self.stop()
        plan = recipes.start_command(self.kind, self.home, directory, host="127.0.0.1", port=self.port, **self._settings)
        plan.prepare()
        self.starts, self.up = self.starts + 1, False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            out.write(("\n".join(plan.describe()) + "\n").encode())
            out.flush()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _TIED, *plan.commands[0]],
                    env=os.environ | plan.env,
                    cwd=self.log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{plan.commands[0][0]} cannot be run: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)

    def stop(self) -> None:
        """End it and all that it started."""
        if self._end is not None:
            self._end()

    def output_tail(self) -> str:
        """The end of what it printed."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""


class ManagedFleet(Fleet):
    """A fleet whose servers are processes of this run.

    They are started with the first weights that `update` writes, or with a model that those are adapters of; one whose process
    ended is started again, and `close` ends them. They listen on loopback alone.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        started: Sequence[ServerProcess],
        *,
        start_s: float,
        base: Path | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            engines: one per server, of its URL.
            started: the servers, in the same order.
            start_s: how long one may take to answer.
            base: the model directory that they start with, where what `update` is given are adapters of it.
            options: as of `Fleet`; `shelf` is needed.
        """
        super().__init__(engines, **options)
        self.started = list(started)
        self.start_s = start_s
        self._directory = base

    async def sleep(self) -> None:
        """As `Fleet.sleep`; servers that were not started yet have nothing to give back."""
        if self._directory is not None:
            await super().sleep()

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """As `Fleet.update`; servers start with the first weights, which are written to the shelf whatever way others go."""
        if self.courier is not None and self.shelf is not None and self._directory is None:
            weights = list(weights)
            self._directory, _ = await asyncio.to_thread(self.shelf.write, weights, version)
        return await super().update(weights, version)

    async def update_from(self, parcel: WeightsSource, *, changed: bool = True) -> None:
        """As `Fleet.update_from`; servers that do not run are started, with these weights where they are on the disk."""
        if isinstance(parcel, DiskWeights):
            self._directory = parcel.directory
        if self._loop is asyncio.get_running_loop():  # some may have ended while they slept, or since the last look at them
            await self._all_up()
        await self.open()
        try:
            try:
                await super().update_from(parcel, changed=changed)
            except SyncError:
                await asyncio.sleep(ENDING_S)  # a process that was killed just now answers no more, and has not ended yet
                if not await self._all_up():
                    raise
                await super().update_from(parcel, changed=changed)
        except SyncError as error:
            ended = [str(server.log) for server in self.started if server.ended]
            if not ended:
                raise
            raise SyncError(f"{error}; a server ended meanwhile, see {' and '.join(ended)}") from error

    async def _all_up(self) -> bool:
        """Start servers that ended, and wait for all that have not answered since they were started, here or by a check.

        Returns:
            Whether there is any. One that does not come up is found out when it is asked.
        """
        for server, member in zip(self.started, self.members, strict=True):
            if server.ended:
                await self._revive(member)
        fresh = [server for server in self.started if not server.up]
        await asyncio.gather(*map(self._until_up, fresh), return_exceptions=True)
        return bool(fresh)

    async def close(self) -> None:
        """Close the connections and end the servers."""
        await super().close()
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self.started))

    async def _prepare(self) -> None:
        if self._directory is None:
            raise EngineError("servers of a run's own start with its first weights: call update before generate")
        try:
            for server in self.started:
                if server.pid is None or server.ended:
                    server.start(self._directory)
            await asyncio.gather(*(self._until_up(server) for server in self.started))
        except BaseException:
            for server in self.started:
                server.stop()
            raise

    async def _until_up(self, server: ServerProcess) -> None:
        engine = self.members[self.started.index(server)].engine
        try:
            async with asyncio.timeout(self.start_s):
                while True:
                    with contextlib.suppress(EngineError):
                        await engine.check_health(5.0)
                        server.up = True
                        return
                    if server.ended:
                        raise UsageError(f"{server.kind} did not start; the end of {server.log}:\n{server.output_tail()}")
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise EngineError(
                f"{server.kind} did not answer within {self.start_s:g} s (engine.start_s); the end of {server.log}:\n"
                f"{server.output_tail()}"
            ) from None

    async def _revive(self, member: Replica) -> None:
        server = self.started[self.members.index(member)]
        if not server.ended or self._directory is None:
            return
        _log.warning("%s ended; it is started again", member.engine.display_name)
        try:
            server.start(self._latest.directory if isinstance(self._latest, DiskWeights) else self._directory)
            member.counts["restarted"] += 1
        except TurnwiseError as error:
            member.fault = str(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session: politely, then at once."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it leads a session of its own
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

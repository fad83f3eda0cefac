"""Commands of `turnwright`, each a process that was forked from one with torch
and transformers imported.

A new interpreter takes about four seconds of CPU to import them, which was most of what tests with
many processes cost. Everything else is as in one started by `subprocess`: its memory, files,
signals and exit status are its own.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any

MAIN = "turnwright.cli.main"
CONTEXT = multiprocessing.get_context("forkserver")
multiprocessing.util.get_temp_dir()  # before a test's own folder becomes the one of temporary files
CONTEXT.set_forkserver_preload([MAIN, "kit.forks", "kit.fork_preload"])


def run_command(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    outputs: list[Connection | str | None],
) -> None:
    """Run a command of `turnwright` in the child."""
    from turnwright.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # as the new environment names it
    for number, output in enumerate(outputs, 1):
        if output is not None:
            target = (
                os.open(output, os.O_WRONLY | os.O_APPEND)
                if isinstance(output, str)
                else output.fileno()
            )
            os.dup2(target, number)
    sys.argv = [MAIN, *words]
    try:
        sys.exit(main(words))
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them


def rank_environments(size: int) -> list[dict[str, str]]:
    """Return what torchrun sets for each of `size` processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        {name: str(value) for name, value in (common | {"RANK": n, "LOCAL_RANK": n}).items()}
        for n in range(size)
    ]


def run_ranks(
    work: Callable[..., None], size: int, *arguments: object, timeout: float = 280
) -> None:
    """Call a function in `size` processes that find each other as those of torchrun
    do; raise if one fails."""
    start_server()
    made = [
        CONTEXT.Process(target=_run_rank, args=(work, places, arguments))
        for places in rank_environments(size)
    ]
    for process in made:
        process.start()
    try:
        for process in made:
            process.join(timeout)
        assert [process.exitcode for process in made] == [0] * size
    finally:
        for process in made:
            process.kill()


def _run_rank(
    work: Callable[..., None], places: dict[str, str], arguments: tuple[object, ...]
) -> None:
    os.environ |= places
    try:
        work(*arguments)
    finally:
        atexit._run_exitfuncs()


class Forked:
    """What `subprocess.Popen` offers, of a forked command."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
    ) -> None:
        assert list(command[:3]) == [sys.executable, "-m", MAIN], command
        outputs: list[Connection | str | None] = []
        self.stdout: IO[Any] | None = None
        writer = None
        for given in (stdout, stderr):
            if given == subprocess.PIPE:
                reader, writer = CONTEXT.Pipe(duplex=False)
                self.stdout = os.fdopen(os.dup(reader.fileno()), "r" if text else "rb")
                reader.close()
                outputs.append(writer)
            else:
                outputs.append(os.devnull if given == subprocess.DEVNULL else given and given.name)
        start_server()
        arguments = (
            [*command[3:]],
            dict(os.environ if env is None else env),
            str(Path.cwd()),
            outputs,
        )
        self.process = CONTEXT.Process(target=run_command, args=arguments)
        self.process.start()
        if writer:
            writer.close()
        assert self.process.pid
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # It ended by itself just now, as Popen ignores.
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()


def start_server() -> None:
    """Start the process that forks, with one thread a process; a no-op where it runs."""
    threads, paths = os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTHONPATH")
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in (("OMP_NUM_THREADS", threads), ("PYTHONPATH", paths)):
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""Raylets as nodes of their own: an address each, and a mount namespace in which a run's
directory cannot be seen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kit.processes import children
from kit.workers import free_port, wait_for

SERVER = f"""\
#!{sys.executable}
import os, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
words = [given["--model"], "--host", given["--host"], "--port", given["--port"], "--context", given["--max-model-len"]]
os.execv(sys.executable, [sys.executable, "-m", "turnwright.cli.main", "serve", *words])
"""  # noqa: E501
"""Starts `turnwright serve`, which speaks vLLM's API, where vLLM would be."""
TOKEN = "TURNWRIGHT_SERVE_TOKEN"
VARIABLES = {
    TOKEN: "a-key",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Of every process of a cluster."""


def write_server(home: Path) -> Path:
    """Write what starts a server to a directory of environments, and return it."""
    python = home / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(SERVER)
    python.chmod(0o755)
    return home


def with_text(text: str, pids: Iterable[int] | None = None) -> list[int]:
    """Return processes, by default any of this machine, with a text in their
    command line or their name."""
    found = []
    for pid in (
        pids
        if pids is not None
        else (int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal())
    ):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (
                Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
            )
            found += [pid] if text.encode() in words else []
    return found


@dataclass
class Node:
    """A raylet with all that it starts."""

    host: str
    process: subprocess.Popen[bytes]
    left: set[int] = field(default_factory=set)

    def pids(self, text: str) -> list[int]:
        """As `with_text`, of its processes."""
        return with_text(text, children(self.process.pid))

    def kill(self) -> None:
        """Kill the raylet by -9; what it started ends by itself."""
        self.left |= children(self.process.pid)
        for pid in self.pids("/raylet/raylet"):
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill everything."""
        for pid in (self.left & children()) | children(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


class Nodes:
    """Nodes of one cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.nodes: list[Node] = []

    @property
    def address(self) -> str:
        """Address of the head."""
        return f"127.0.0.1:{self._port}"

    def add(self, cpus: int, *, hidden: Path | None = None) -> Node:
        """Start a node, the first with the head; in `hidden` it sees an empty file system
        that it cannot write to."""
        number = len(self.nodes) + 1
        host, own = f"127.0.0.{number}", self._folder / f"node-{number}"
        own.mkdir(parents=True)
        ray = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            f"--node-ip-address={host}",
            f"--num-cpus={cpus}",
        ]
        ray += (
            ["--head", f"--port={self._port}", "--include-dashboard=false"]
            if number == 1
            else [f"--address={self.address}"]
        )
        if hidden is not None:
            script = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
            ray = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, str(hidden), *ray]
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(ray, stdout=log, stderr=log, env={**os.environ, **VARIABLES})
        self.nodes.append(Node(host, process))
        wait_for(
            lambda: "Ray runtime started" in (own / "log").read_text() or process.poll(),
            60,
            (own / "log").read_text,
        )
        assert process.poll() is None, (own / "log").read_text()
        return self.nodes[-1]


@contextmanager
def ray_nodes(folder: Path) -> Iterator[Nodes]:
    """Nodes that end with the test."""
    nodes = Nodes(folder)
    try:
        yield nodes
    finally:
        for node in reversed(nodes.nodes):
            node.end()

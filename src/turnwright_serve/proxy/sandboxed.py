"""Programs in a sandbox: the proxy's socket is their only way out.

Their files are copied in and out. What runs first inside is `sandbox_launcher`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from turnwright.envs.isolation.sandbox import Sandbox, SandboxResult, sandbox_problem
from turnwright.errors import UsageError

WORK = "/tmp/work"
"""Working directory of a program inside."""
HOME = "/tmp/home"
"""Home directory of a program inside."""
DEFAULT = Sandbox(memory=2 << 30, disk=64 << 20, processes=128, open_files=256)
"""Limits of `sandbox = true`; its `seconds` and `output` are the program's."""
_PATH = "/usr/local/bin:/usr/bin:/bin"
_INHERITED = ("LANG", "LC_ALL", "TZ")


def check_sandbox(
    given: bool | Sandbox | Mapping[str, Any], command: Sequence[str] = ()
) -> Sandbox | None:
    """Return the sandbox of `sandbox = true`, or of a table of its limits; None for false.

    Files and directories that the command names, and this Python's virtual environment, can be read
    in it. Words that are filled with a task's text are not looked at: tasks are data, and name
    nothing of this machine.

    Raises:
        UsageError: where the sandbox does not work on this machine, since nothing runs without its
            walls.
    """
    if isinstance(given, Mapping):
        limits = Sandbox.__dataclass_fields__.keys() - {"seconds", "output", "python"}
        unknown = sorted(given.keys() - limits)
        if unknown:
            names = ", ".join(sorted(limits))
            raise UsageError(f"sandbox has no limit {unknown[0]!r}; it has {names}")
        given = replace(DEFAULT, **{**given, "readable": tuple(given.get("readable", ()))})
    if not given:
        return None

    problem = sandbox_problem()
    if problem:
        raise UsageError(problem)
    box = given if isinstance(given, Sandbox) else DEFAULT
    named = [word for word in command if os.path.isabs(word) and os.path.exists(word)]
    readable = [*box.readable, *_environment(), *map(os.path.abspath, named)]
    return replace(box, readable=tuple(dict.fromkeys(readable)))


async def run_sandboxed(
    box: Sandbox,
    command: Sequence[str],
    env: Mapping[str, str],
    files: Mapping[str, str | bytes],
    gate: tuple[int, Path],
    until: asyncio.Event,
) -> SandboxResult:
    """Run a command; its directory is `WORK`, and it reaches the port of `gate` through the socket
    of `gate`."""
    port, socket = gate
    variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    variables["PATH"] = _search_path()
    order = {
        "command": command,
        "env": {**variables, **env},
        "files": {name: _base64(content) for name, content in files.items()},
        "port": port,
        "socket": str(socket),
        "work": WORK,
        "home": HOME,
    }
    box = replace(box, readable=(*box.readable, str(socket)))
    return await box.arun(
        _launcher(),
        {"order.json": json.dumps(order)},
        keep=os.path.basename(WORK),
        until=until,
    )


def _environment() -> list[str]:
    """Return the directory of this Python's virtual environment, if it has one."""
    return [sys.prefix] if sys.prefix != sys.base_prefix else []


def _search_path() -> str:
    return ":".join([*(f"{prefix}/bin" for prefix in _environment()), _PATH])


def _base64(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return base64.b64encode(data).decode()


@cache
def _launcher() -> str:
    return Path(__file__).with_name("sandbox_launcher.py").read_text("utf-8")

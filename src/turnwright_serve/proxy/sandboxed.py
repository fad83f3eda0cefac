"""Programs in a sandbox: the proxy's socket is their only way out, and their files
are copied in and out."""

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

WORK, HOME = "/tmp/work", "/tmp/home"
"""Working and home directory of a program inside."""
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
        UsageError: where the sandbox does not work on this machine, since
            nothing runs without its walls.
    """
    if isinstance(given, Mapping):
        known = Sandbox.__dataclass_fields__.keys() - {"seconds", "output", "python"}
        if wrong := sorted(given.keys() - known):
            raise UsageError(
                f"sandbox has no limit {wrong[0]!r}; it has {', '.join(sorted(known))}"
            )
        given = replace(DEFAULT, **{**given, "readable": tuple(given.get("readable", ()))})
    if not given:
        return None
    if problem := sandbox_problem():
        raise UsageError(problem)
    box = given if isinstance(given, Sandbox) else DEFAULT
    named = [
        os.path.abspath(word) for word in command if os.path.isabs(word) and os.path.exists(word)
    ]
    return replace(box, readable=tuple(dict.fromkeys([*box.readable, *_environment(), *named])))


async def run_sandboxed(
    box: Sandbox,
    command: Sequence[str],
    env: Mapping[str, str],
    files: Mapping[str, str | bytes],
    gate: tuple[int, Path],
    until: asyncio.Event,
) -> SandboxResult:
    """Run a command; its directory is `WORK`, and it reaches the port of `gate` through
    the socket of `gate`."""
    port, socket = gate
    variables = {name: os.environ[name] for name in _INHERITED if name in os.environ} | {
        "PATH": _search_path()
    }
    content = {name: base64.b64encode(_bytes(value)).decode() for name, value in files.items()}
    order = {
        "command": command,
        "env": {**variables, **env},
        "files": content,
        "port": port,
        "socket": str(socket),
    }
    order |= {"work": WORK, "home": HOME}
    given = {"order.json": json.dumps(order)}
    box = replace(box, readable=(*box.readable, str(socket)))
    return await box.arun(_launcher(), given, keep=os.path.basename(WORK), until=until)


def _environment() -> list[str]:
    return [sys.prefix] if sys.prefix != sys.base_prefix else []


def _search_path() -> str:
    return ":".join([*(f"{prefix}/bin" for prefix in _environment()), _PATH])


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@cache
def _launcher() -> str:
    return Path(__file__).with_name("sandbox_launcher.py").read_text("utf-8")

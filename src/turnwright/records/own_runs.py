"""Which runs this user started on this machine.

The settings of a run name code; commands execute that of the user's own runs without asking. A run
directory is no evidence of who wrote it: unpacking an archive makes a user the owner of its files.
So the evidence is kept outside, in the user's state directory: each `config.json` that this program
writes for a run is listed by its SHA-256. A run keeps its entry where it is moved to, and loses it
when its settings are edited.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

MAX_BYTES = 1 << 20
"""Size of the list above which its older half is dropped; 1 MiB are 16,000 runs."""


def own_runs_file() -> Path:
    """Return the list of this user's runs, which may not exist."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    return folder / "turnwright" / "runs"


def remember_run(config: bytes) -> None:
    """List the run with this `config.json`.

    Where the list cannot be written, commands on the run ask the user.
    """
    file = own_runs_file()
    digest = _digest(config)
    with contextlib.suppress(OSError):
        if digest in _listed():
            return

        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MAX_BYTES:
            lines = file.read_bytes().splitlines(keepends=True)
            newer_half = lines[len(lines) // 2 :]
            file.write_bytes(b"".join(newer_half))

        with file.open("ab") as stream:
            stream.write(digest.encode() + b"\n")


def is_own_run(run: Path) -> bool:
    """Return whether this user started or continued the run on this machine.

    A run whose settings were edited since is not the user's own.
    """
    try:
        return _digest((run / "config.json").read_bytes()) in _listed()
    except OSError:
        return False


def _listed() -> set[str]:
    """Return the digests of the list; none of one that another user can write to."""
    file = own_runs_file()
    try:
        status = file.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return set()
        return set(file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return set()


def _digest(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()

"""Which runs this user started on this machine: a list of digests in the
user's own state directory.

The settings of a run name code. A run directory is no evidence of who wrote it: unpacking an
archive makes a user the owner of its files. So what is known is kept outside: each `config.json`
that this program writes for a run is listed by its SHA-256. A run keeps its entry where it is moved
to, and loses it when its settings are edited.
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
    """List the run with this `config.json`; without a directory to write to,
    its commands ask later."""
    file = own_runs_file()
    with contextlib.suppress(OSError):
        if _digest(config) in _listed():
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MAX_BYTES:
            kept = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"".join(kept[len(kept) // 2 :]))
        with file.open("ab") as listed:
            listed.write(_digest(config).encode() + b"\n")


def is_own_run(run: Path) -> bool:
    """Return whether this user started or continued the run on this machine, with the
    settings that it has now."""
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

"""Where indexes of runs are kept: the user's cache, never the folder of a run.

A run may belong to someone else, be on a disk that is read only, or come out of an archive. So its
index lies in `$XDG_CACHE_HOME/turnwright/view` under the hash of its path, and where that cannot be
written, in a temporary folder of this process. Indexes that nobody used for 30 days are removed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

KEPT_DAYS = 30
"""Days without use after which an index is removed."""

DATABASE_SUFFIXES = ("", "-wal", "-shm")
"""Endings of SQLite's files of one index."""


def cache_folder() -> Path:
    """Return the folder of the indexes, which may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
    return folder / "turnwright" / "view"


def index_file(run: Path, version: int) -> Path:
    """Return where the index of a run is; the folder exists and can be written."""
    name = blake2b(f"{version}\0{run.resolve()}".encode(errors="surrogateescape"), digest_size=16)
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A full or read-only disk fails here, and one whose file system has no locks.
        with tempfile.TemporaryFile(dir=folder) as trial:
            fcntl.flock(trial, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="turnwright-view-"))
    return folder / f"{name.hexdigest()}.sqlite"


def remove_index(file: Path) -> None:
    """Remove the files of an index, but not its lock, which others may wait for."""
    for suffix in DATABASE_SUFFIXES:
        with suppress(OSError):
            file.with_name(file.name + suffix).unlink()


def remove_unused(now: float | None = None) -> list[Path]:
    """Remove the indexes that nobody used for `KEPT_DAYS`; return them."""
    oldest = (time.time() if now is None else now) - KEPT_DAYS * 86400
    removed = []
    for file in cache_folder().glob("*.sqlite"):
        with suppress(OSError), exclusive(file) as is_mine:
            if is_mine and file.stat().st_mtime < oldest:
                remove_index(file)
                _lock_file(file).unlink()
                removed.append(file)
    return removed


def mark_used(file: Path) -> None:
    """Note that an index is in use."""
    with suppress(OSError):
        os.utime(file)


@contextmanager
def exclusive(file: Path) -> Iterator[bool]:
    """Hold the right to write an index; yield False where another process or thread has it.

    Raises `OSError` where it cannot be had at all, so that nobody waits for it.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # a user may empty the cache
    lock = os.open(_lock_file(file), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # One that was removed meanwhile excludes nobody.
        yield _is_at(lock, _lock_file(file))
    finally:
        os.close(lock)


def _lock_file(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def _is_at(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path))
    except OSError:
        return False

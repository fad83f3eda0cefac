"""What of finished and stopped runs can go: checkpoints that nothing asks for, and what servers
left.

`leftovers` lists it, `remove` deletes it. A run that is locked by its process is left alone, and so
is everything behind a symbolic link.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from turnwright.errors import TurnwrightError
from turnwright.records.run_dir import locked
from turnwright.training.checkpoint_files import best_checkpoint, read_checkpoints
from turnwright_view.run_rows import folder_size

CHECKPOINTS = "checkpoints"

SERVER_FOLDERS = {
    "engines": "output of servers",
    "weights": "weights for servers to read",
}
"""Folders that a run writes anew when it is resumed, and what they hold."""

TRACE = "profile.json"

PARTIAL = (".writing", ".replaced", ".dropped")
"""Endings of hidden folders that a killed process left of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something in a run's folder that can be deleted."""

    place: PurePath
    """Below the run's folder."""
    what: str
    size: int | None
    """Bytes; None where it has too many files to count."""


def leftovers(run: Path) -> list[Leftover]:
    """Return what can be deleted of a run."""
    found = [*_checkpoints(run)]
    for name, what in SERVER_FOLDERS.items():
        if _is_folder(run / name):
            found.append(Leftover(PurePath(name), what, folder_size(run / name)))

    trace = _status(run / TRACE)
    if trace is not None and stat.S_ISREG(trace.st_mode):
        found.append(Leftover(PurePath(TRACE), "trace of --profile", trace.st_size))
    return found


def remove(run: Path) -> list[Leftover] | None:
    """Delete what `leftovers` lists, and return it; None if a process writes to the run.

    The run is locked meanwhile, so that none starts. Raises `TurnwrightError` for what cannot be
    deleted.
    """
    with locked(run) as is_ours:
        if not is_ours:
            return None
        removed = leftovers(run)
        for leftover in removed:
            try:
                _delete(run, leftover.place)
            except OSError as error:
                path = run / leftover.place
                raise TurnwrightError(
                    f"{path}: cannot be deleted ({error.strerror}); see who may write there"
                ) from error
        return removed


def _checkpoints(run: Path) -> Iterator[Leftover]:
    """Yield the checkpoints that nothing asks for: neither the last, from which a run goes on, nor
    the best, which is played where the last is worse."""
    root = run / CHECKPOINTS
    if not _is_folder(root):
        return

    checkpoints = [
        checkpoint for checkpoint in read_checkpoints(root) if _is_folder(checkpoint.path)
    ]
    kept = {checkpoint.path.name for checkpoint in checkpoints[-1:]}
    best = best_checkpoint(root)
    if best is not None:
        kept.add(best[0])

    for checkpoint in checkpoints:
        name = checkpoint.path.name
        if name not in kept:
            size = folder_size(checkpoint.path)
            yield Leftover(PurePath(CHECKPOINTS, name), "checkpoint", size)

    # One that was being replaced is the only one of its name until the next has taken its place.
    names = {checkpoint.path.name for checkpoint in checkpoints}
    for path in sorted(root.iterdir()):
        is_partial = path.name.startswith(".") and path.suffix in PARTIAL and _is_folder(path)
        if is_partial and (path.suffix != ".replaced" or path.stem.removeprefix(".") in names):
            size = folder_size(path)
            yield Leftover(PurePath(CHECKPOINTS, path.name), "unfinished checkpoint", size)


def _is_folder(path: Path) -> bool:
    """Return whether there is a folder, and no link to one."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (OSError, ValueError):
        return None


def _delete(run: Path, place: PurePath) -> None:
    """Delete a file or a folder below a run.

    Each folder on the way is opened in the one above it, and none that is a link: whoever puts a
    link there after it was looked at makes this an error.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    folder = os.open(run, flags)
    try:
        for part in place.parts[:-1]:
            inner = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = inner

        status = os.stat(place.name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(place.name, dir_fd=folder)
        else:
            os.unlink(place.name, dir_fd=folder)
    finally:
        os.close(folder)

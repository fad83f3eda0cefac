"""Reading of files that a user, a model or a run's directory names.

Neither a named pipe, which would wait for a writer, nor a value that is nested too deep stops a
command: both are errors like any other.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_ALREADY_OPEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Paths of what this process has open, such as `<(command)` of a shell.

Opening them does not wait.
"""


def resolved(path: str | Path, folder: Path = Path()) -> Path:
    """Return an absolute path with links followed and `~` expanded; a relative one is in `folder`.

    What cannot be followed stays as it is, such as a loop of links or an unknown user: whoever
    opens it learns what is wrong.
    """
    whole = folder / os.path.expanduser(path)
    try:
        return Path(os.path.realpath(whole))
    except ValueError:  # a zero byte
        return whole


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: as `open` does, and for a named pipe, a socket or a device.
    """
    if str(path).startswith(_ALREADY_OPEN):
        return path.open("rb")

    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(file).st_mode
    for is_kind, name in _KINDS:
        if is_kind(mode):
            os.close(file)
            raise _not_regular(path, name)
    if stat.S_ISDIR(mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return os.fdopen(file, "rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raises as `open_file`."""
    with open_file(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OSError: as `open_file`.
        UnicodeDecodeError: for a file that is not UTF-8.
    """
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the value in a file of JSON.

    Raises:
        OSError: as `open_file`.
        ValueError: for a file that is not JSON, or nested too deep to be read.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("nested too deep") from None


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow so large",
    errno.EROFS: "the file system is read-only",
}


def why_not_written(error: BaseException) -> str:
    """Return why the system could not write; empty if an exception is about something else."""
    if isinstance(error, OSError) and error.errno is not None:
        return _FULL.get(error.errno, "")
    # safetensors and tokenizers raise exceptions of their own, which have the number in their
    # message only.
    number = re.search(r"\(os error (\d+)\)", str(error))
    return "" if number is None else _FULL.get(int(number[1]), "")


def check_regular(paths: Iterable[Path]) -> None:
    """Raise `OSError` for the first path that is a named pipe, a socket or a device.

    It is for libraries that open files by name.
    """
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError:  # the caller that opens it reports why
            continue
        for is_kind, name in _KINDS:
            if is_kind(mode):
                raise _not_regular(path, name)


def _not_regular(path: Path, kind: str) -> OSError:
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))

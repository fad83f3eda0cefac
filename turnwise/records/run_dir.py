"""A run on disk: its journal, records, metrics and summary."""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from turnwise.errors import TraceError, class_name, words

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


_DEEPEST = 60


def to_json(value: Any) -> bytes:
    """A value as one line of JSON that any reader takes. Never fails: what JSON cannot say stands there as its repr.

    That is an object in an environment's info, an integer over 64 bits, what is nested too deep or in itself; NaN is null, a
    lone surrogate is written out.
    """
    try:
        return orjson.dumps(value, default=repr, option=_OPTIONS)
    except KeyboardInterrupt:
        raise
    except BaseException:  # also what a repr raises
        return orjson.dumps(_plain(value, 0))


def _plain(value: Any, depth: int) -> Any:
    """The value with everything replaced that JSON cannot say."""
    try:
        if isinstance(value, str):
            return str(value).encode("utf-8", "backslashreplace").decode()
        if depth < _DEEPEST and isinstance(value, Mapping):
            return {_plain(k if isinstance(k, str) else _repr(k), 0): _plain(item, depth + 1) for k, item in value.items()}
        if depth < _DEEPEST and isinstance(value, (list, tuple)):
            return [_plain(item, depth + 1) for item in value]
        if not isinstance(value, (Mapping, list, tuple)):
            with suppress(Exception):
                return orjson.loads(orjson.dumps(value, option=_OPTIONS))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a container or a text of the user's own
        return f"<{class_name(value)} that raises {class_name(error)}>"
    return _repr(value)


def _repr(value: Any) -> str:
    return words(value, repr).encode("utf-8", "backslashreplace").decode()


_SEAL, _SEALED = b',"crc":"%08x"}', len(b',"crc":"00000000"}')


def _seal_of(line: bytes) -> int | None:
    """The checksum at the end of a line without its newline; None where there is none."""
    end = line[-_SEALED:]
    try:
        found = int(end[8:16], 16)
    except ValueError:
        return None
    return found if end == _SEAL % found else None


@dataclass(slots=True)
class Checks:
    """What reading a file of lines with checksums found out.

    A line's field `crc` is the CRC-32 of the line without it, begun with that of the line before: a line that was changed,
    left out or moved is found. It is no defense against somebody who computes it anew. Lines without one are not checked.
    """

    mark: tuple[int, int] | None = None
    """Bytes and last checksum of the file at an earlier time, which it still has to begin with."""
    damage: list[str] = field(default_factory=list)
    """What is wrong, in the order of the file."""


class JsonLines:
    """A file of JSON lines that only grows.

    Every line is handed to the operating system before `append` returns, so a killed process loses none; `sync` makes them
    survive a power cut. A line that a crash cut off is removed when the file is opened again.
    """

    def __init__(self, path: Path, *, sealed: bool = False) -> None:
        """Open the file for appending, made if needed.

        Args:
            sealed: whether lines get a checksum (`Checks`).

        Raises:
            TraceError: when it cannot be.
        """
        self.path = path
        self._sealed = sealed
        self._seal = 0
        self.broken = ""
        """Why nothing can be written any more; empty while it can."""
        self._named: set[str] = set()
        try:
            self._repair()
            if sealed and path.exists():
                with path.open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _SEALED - 1))
                    self._seal = _seal_of(file.read()[:-1]) or 0
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise TraceError(f"{path}: cannot be opened for writing ({error.strerror}); choose another --out") from error

    def append(self, value: Any) -> None:
        """Write one line.

        Raises:
            TraceError: when the disk is full or the file cannot be written; so does every later call, since later events
                without this one would tell of something else.
        """
        line = to_json(value)
        seal = 0
        if self._sealed and line[-1:] == b"}":
            seal = zlib.crc32(line, self._seal)
            line = line[:-1] + _SEAL % seal
        line += b"\n"
        if self.broken:
            raise TraceError(self.broken)
        written = 0
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self.broken = f"{self.path}: cannot be written ({error.strerror}); make room, then use --resume"
            with suppress(OSError):  # the part of a line would be removed when the file is opened again, too
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise TraceError(self.broken) from error
        self._seal = seal

    def mark(self) -> tuple[int, int]:
        """Bytes and last checksum, for `Checks.mark`."""
        return os.fstat(self._file).st_size, self._seal

    def append_definition(self, kind: str, value: Any) -> str:
        """Write a value that many lines need, once: an event of this kind, whose `name` they say in its place.

        Returns:
            The name, which depends on kind and value alone.

        Raises:
            TraceError: as `append`.
        """
        name = blake2b(kind.encode() + b"\0" + to_json(value), digest_size=8).hexdigest()
        if name not in self._named:
            self.append({"e": kind, "name": name, "value": value})
            self._named.add(name)
        return name

    def sync(self) -> None:
        """Make every line so far survive a power cut; milliseconds, so not on an event loop.

        Raises:
            TraceError: when the disk does not take them.
        """
        try:
            os.fsync(self._file)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be written ({error.strerror}); make room, then use --resume") from error

    def close(self) -> None:
        """Close the file; harmless the second time."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _repair(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 65536)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    file.truncate(start + newline + 1)
                    return
                end = start
            file.truncate(0)


def read_json_lines(path: Path, checks: Checks | None = None) -> Iterator[Any]:
    """The values of a JSON lines file; a last line that was cut off is left out.

    Args:
        checks: takes what is damaged; without it the first damage is raised.

    Raises:
        TraceError: for any other line that is not JSON, or whose checksum is another one.
    """
    mark = checks.mark if checks is not None else None
    seal = size = 0
    for number, line in enumerate(_whole_lines(path), 1):
        said, body = _seal_of(line[:-1]), line
        if said is not None:
            body = line[: -_SEALED - 1] + b"}"
            if zlib.crc32(body, seal) != said:
                told = f"{path}:{number}: the checksum differs: this line or the one before was damaged, edited or removed"
                if checks is None:
                    raise TraceError(told)
                checks.damage.append(told)
        seal, size = said or 0, size + len(line)
        if mark == (size, seal):
            mark = None
        try:
            yield orjson.loads(body)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: not JSON ({error}); the file was damaged or edited") from error
    if checks is not None and mark is not None and mark[0] > 0:
        checks.damage.append(f"{path}: does not hold what it held when the checkpoint was written ({mark[0]:,} bytes)")


def _whole_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line


class RunDir:
    """The directory of one run, opened by one process at a time.

    `journal.jsonl` is the truth: one event a line, each turn before the next begins. `trajectories.jsonl` and
    `metrics.jsonl` are written for people and tools.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a directory for writing, made if needed.

        Raises:
            TraceError: when it cannot be made, or another process writes to it.
        """
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be made a run directory ({error.strerror}); choose another --out") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                raise TraceError(f"{self.path}: cannot be locked ({error.strerror}); choose another --out") from error
            raise TraceError(f"{self.path}: another process writes this run; wait for it or choose another --out") from error
        opened: list[JsonLines] = []
        try:
            opened.append(JsonLines(self.path / "journal.jsonl", sealed=True))
            opened.extend(JsonLines(self.path / f"{name}.jsonl") for name in ("trajectories", "metrics"))
        except TraceError:
            for lines in opened:
                lines.close()
            os.close(self._lock)
            raise
        self.journal, self.trajectories, self.metrics = opened

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def events(self, checks: Checks | None = None) -> Iterator[dict[str, Any]]:
        """The events of the journal, in order; as `read_json_lines`."""
        return read_json_lines(self.path / "journal.jsonl", checks)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file (config.json, summary.json) whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_bytes(json.dumps(value, indent=2, default=str).encode() + b"\n")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise TraceError(f"{self.path / name}: cannot be written ({error.strerror})") from error

    def sync(self) -> None:
        """Make everything so far survive a power cut."""
        for lines in (self.journal, self.trajectories, self.metrics):
            lines.sync()

    def close(self) -> None:
        """Close every file and let another process write."""
        for lines in (self.journal, self.trajectories, self.metrics):
            lines.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

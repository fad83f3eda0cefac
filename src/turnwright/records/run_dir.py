"""Run directory: journal, trajectories, metrics and small JSON files.

`JsonLines` appends lines that a killed process does not lose, `read_json_lines` reads them and
verifies their checksums, and `RunDir` holds the three files of a run. What a line of the journal
means is in `serialization.py` (`apply_event`) and `journal.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from turnwright.errors import TraceError, class_name, words
from turnwright.records.own_runs import remember_run

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_MAX_DEPTH = 60

# A sealed line ends in the field `crc`, which replaces its closing brace.
_CRC = b',"crc":"%08x"}'
_CRC_BYTES = len(b',"crc":"00000000"}')

_LOCK_WAIT_S = 5.0
"""Seconds for which a lock is waited for that others share, to look at it."""

LOG_FILE = "log.txt"
"""Notable events of a run, for people; `turnwright.display.run_log` writes it."""
FAILURE_FILE = "failure.json"
"""Why the last process of a run ended, if it was an error; `turnwright.runs` writes it."""

RECORD_VERSION = 2
"""Version of the records, in the settings of each journal; other versions are not read."""


def to_json(value: Any) -> bytes:
    """Return a value as one line of standard JSON.

    Never fails: values without a JSON form become their repr. These include arbitrary objects in an
    environment's info, integers over 64 bits, and values nested too deep or cyclically. NaN becomes
    null; a lone surrogate is escaped.

    Example::

        >>> to_json({"reward": float("nan"), "steps": range(3)})
        b'{"reward":null,"steps":"range(0, 3)"}'
    """
    try:
        try:
            return orjson.dumps(value, default=repr, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:
            # Keys that are not strings: the option costs a sixth of the time, also without such.
            return orjson.dumps(value, default=repr, option=_OPTIONS)
    except KeyboardInterrupt:
        raise
    except BaseException:  # including exceptions of a repr
        return orjson.dumps(_plain(value, 0))


def _plain(value: Any, depth: int) -> Any:
    """Return the value with everything replaced that has no JSON form."""
    try:
        if isinstance(value, str):
            return str(value).encode("utf-8", "backslashreplace").decode()

        is_container = isinstance(value, (Mapping, list, tuple))
        if not is_container:
            with suppress(Exception):
                return orjson.loads(orjson.dumps(value, option=_OPTIONS))
        elif depth < _MAX_DEPTH and isinstance(value, Mapping):
            return {_plain_key(key): _plain(item, depth + 1) for key, item in value.items()}
        elif depth < _MAX_DEPTH:
            return [_plain(item, depth + 1) for item in value]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user-defined container or string
        return f"<{class_name(value)} that raises {class_name(error)}>"
    return _repr(value)


def _plain_key(key: Any) -> Any:
    return _plain(key if isinstance(key, str) else _repr(key), 0)


def _repr(value: Any) -> str:
    return words(value, repr).encode("utf-8", "backslashreplace").decode()


def _read_crc(line: bytes) -> int | None:
    """Return the checksum at the end of a line without its newline; None if there is none."""
    end = line[-_CRC_BYTES:]
    try:
        crc = int(end[8:16], 16)
    except ValueError:
        return None
    return crc if end == _CRC % crc else None


@dataclass(slots=True)
class Checks:
    """Damage found while reading a file of lines with checksums.

    A line's field `crc` is the CRC-32 of the line without it, seeded with that of the line before.
    It reveals changed, missing and moved lines, but not deliberate edits with new checksums. Lines
    without one are not checked.
    """

    mark: tuple[int, int] | None = None
    """Size in bytes and last checksum of the file at an earlier time; the file must still
    begin with that content."""
    damage: list[str] = field(default_factory=list)
    """Descriptions of the damage, in file order."""


class EventLog(Protocol):
    """Takes the events of episodes: the journal of a run, or what carries them to it."""

    broken: str
    """Why nothing can be written any more; empty while writing works."""

    def append(self, value: Any) -> None:
        """Write an event; raise `TraceError` when it cannot be written."""

    def append_definition(self, kind: str, value: Any) -> str:
        """Write a value that many events refer to, once, and return its name."""

    async def durable(self) -> None:
        """Return when every event so far is on the disk."""


def definition_name(kind: str, value: Any) -> str:
    """Return the name of a value that many events refer to."""
    return blake2b(kind.encode() + b"\0" + to_json(value), digest_size=8).hexdigest()


class JsonLines:
    """An append-only file of JSON lines.

    Every line reaches the operating system before `append` returns, so a killed process loses
    none; `sync` protects lines against a power failure. A line cut off by a crash is removed
    when the file is opened again.
    """

    def __init__(self, path: Path, *, sealed: bool = False) -> None:
        """Open the file for appending; create it if needed.

        Lines of a `sealed` file get a checksum (`Checks`).
        """
        self.path = path
        self._place = path.absolute()  # user code may change the working directory
        self._sealed = sealed
        self._last_crc = 0
        self.broken = ""
        """Why nothing can be written any more; empty while writing works."""
        self._named: set[str] = set()

        self._appended = 0  # lines written here
        self._durable = 0  # of these, lines that are on the disk
        self._flush: asyncio.Task[None] | None = None

        self._file = _open_regular(path)
        try:
            if sealed:
                self._lock()
            self._begin()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """Lock the file itself.

        A lock file beside it may be deleted, and then two processes would hold one each.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _lock_error(self.path, error) from error
        if not self._in_place():
            # Replaced since it was opened: another process has the file that is there now.
            raise _lock_error(self.path, BlockingIOError())

    def _begin(self) -> None:
        """Remove an incomplete last line, and read the last checksum."""
        try:
            with os.fdopen(os.dup(self._file), "rb+") as file:
                size = file.truncate(_complete_size(file))
                if self._sealed:
                    file.seek(max(0, size - _CRC_BYTES - 1))
                    self._last_crc = _read_crc(file.read()[:-1]) or 0
        except OSError as error:
            raise _open_error(self.path, error) from error

    def _in_place(self) -> bool:
        """Return whether the path still leads to the file that is written here."""
        try:
            return os.path.samestat(os.stat(self._place), os.fstat(self._file))
        except OSError:
            return False

    def check(self) -> None:
        """Raise `TraceError` if a sealed file was deleted, moved or replaced.

        What is written to it is lost, and the one in its place may be another process's.
        """
        if self._sealed and not self.broken and not self._in_place():
            self.broken = (
                f"{self.path}: deleted, moved or replaced while this process was writing it, so "
                "the run stops here; put it back, then resume with --resume, or start a new run"
            )
        if self.broken:
            raise TraceError(self.broken)

    def append(self, value: Any) -> None:
        """Write one line.

        After a `TraceError` every later call fails too, since later events depend on this one.
        """
        line = to_json(value)
        crc = 0
        if self._sealed and line[-1:] == b"}":
            crc = zlib.crc32(line, self._last_crc)
            line = line[:-1] + (_CRC % crc + b"\n")
        else:
            line += b"\n"

        self.check()
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self.broken = _write_error(self.path, error)
            with suppress(OSError):  # otherwise the partial line is removed at the next opening
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise TraceError(self.broken) from error

        self._last_crc = crc
        self._appended += 1

    def mark(self) -> tuple[int, int]:
        """Return size in bytes and last checksum, for `Checks.mark`."""
        self.check()
        return os.fstat(self._file).st_size, self._last_crc

    def append_definition(self, kind: str, value: Any) -> str:
        """Write a value that many lines refer to, once.

        Returns its name for references, made of kind and value.
        """
        name = definition_name(kind, value)
        if name not in self._named:
            self.append({"e": kind, "name": name, "value": value})
            self._named.add(name)
        return name

    def sync(self) -> None:
        """Flush all lines to the disk; takes milliseconds, so do not call it on an event loop."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise TraceError(_write_error(self.path, error)) from error

    async def durable(self) -> None:
        """Return when every line so far is on the disk.

        Callers of the same tick share one flush, in a thread.
        """
        lines = self._appended
        while self._durable < lines:
            if self._flush is None or self._flush.done():
                self._flush = asyncio.create_task(self._flush_lines())
            await asyncio.shield(self._flush)

    async def _flush_lines(self) -> None:
        await asyncio.sleep(0)  # other episodes append their lines of this tick
        lines = self._appended
        try:
            await asyncio.to_thread(os.fdatasync, self._file)
        except OSError as error:
            self.broken = _write_error(self.path, error)
            raise TraceError(self.broken) from error
        self._durable = lines

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._file >= 0:
            with suppress(OSError):  # code of an environment may have closed it
                os.close(self._file)
            self._file = -1


def _lock_file(file: int) -> None:
    """Lock an open file; raise `BlockingIOError` if another process keeps it locked.

    Those that only look whether it is locked (`is_locked`) share it for an instant, which is
    waited for.
    """
    last_try = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises for one that is not shared
            fcntl.flock(file, fcntl.LOCK_UN)
            if time.monotonic() > last_try:
                raise
        time.sleep(0.001)


def is_locked(run: Path) -> bool:
    """Return whether a process writes to a run directory now.

    Creates and changes nothing; a run that starts meanwhile waits for the instant that it takes.
    """
    try:
        # Without O_NONBLOCK, a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        file = os.open(run / ".lock", flags)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


@contextmanager
def locked(run: Path) -> Iterator[bool]:
    """Keep others from writing to a run directory while the body runs; yield whether that is so.

    It is not where another process writes there, or the directory cannot be locked.
    """
    file = -1
    is_ours = False
    with suppress(OSError):
        file = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
        _lock_file(file)
        is_ours = True
    try:
        yield is_ours
    finally:
        if file >= 0:
            os.close(file)


def _open_regular(path: Path) -> int:
    """Open a file for appending, and for reading its end; create it if needed.

    Raise `TraceError` for what is no file.
    """
    try:
        # Without O_NONBLOCK, a named pipe would wait for a reader.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise _open_error(path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise TraceError(f"{path}: not a regular file; remove it, or choose another --out")
    return file


def _open_error(path: Path, error: OSError) -> TraceError:
    return TraceError(
        f"{path}: cannot be opened for writing ({error.strerror}); choose another --out"
    )


def _lock_error(path: Path, error: OSError) -> TraceError:
    if isinstance(error, BlockingIOError):
        why = "another process writes this run; wait for it or"
    else:
        why = f"cannot be locked ({error.strerror});"
    return TraceError(f"{path}: {why} choose another --out")


def _complete_size(file: BinaryIO) -> int:
    """Return the size of a file without an incomplete last line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write_error(path: Path, error: OSError) -> str:
    return f"{path}: cannot be written ({error.strerror}); free some space, then use --resume"


def read_json_lines(path: Path, checks: Checks | None = None) -> Iterator[Any]:
    """Yield the values of a JSON lines file, without an incomplete last line.

    `checks` collects lines with wrong checksums. Raises `TraceError` for a line that is not JSON
    and, without `checks`, for the first wrong checksum.

    Example::

        >>> with RunDir("runs/first") as run:
        ...     run.metrics.append({"phase": "train", "step": 1, "reward": 0.5})
        >>> for row in read_json_lines(Path("runs/first/metrics.jsonl")):
        ...     print(row["phase"], row["step"], row["reward"])
        train 1 0.5
    """
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: not a regular file; restore it from a copy")

    missing_mark = checks.mark if checks is not None else None
    previous_crc = 0
    size = 0
    for number, (_, line) in enumerate(complete_lines(path), 1):
        body = line
        crc = _read_crc(line[:-1])
        if crc is not None:
            body = line[: -_CRC_BYTES - 1] + b"}"
            if zlib.crc32(body, previous_crc) != crc:
                message = (
                    f"{path}:{number}: the checksum differs: this line or the one before "
                    "was damaged, edited or removed"
                )
                if checks is None:
                    raise TraceError(message)
                checks.damage.append(message)

        previous_crc = crc or 0
        size += len(line)
        if missing_mark == (size, previous_crc):
            missing_mark = None

        try:
            yield orjson.loads(body)
        except ValueError as error:
            raise TraceError(
                f"{path}:{number}: not JSON ({error}); the file was damaged or edited"
            ) from error

    if checks is not None and missing_mark is not None and missing_mark[0] > 0:
        checks.damage.append(
            f"{path}: lost or changed data since the checkpoint was written "
            f"({missing_mark[0]:,} bytes)"
        )


def complete_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of each complete line from an offset on.

    Yields nothing if there is no such file.
    """
    if not path.is_file():
        return
    # Lines of episodes have tens of kilobytes: with the default buffer of 8 KiB they are put
    # together from many pieces, which takes longer than reading them.
    with path.open("rb", buffering=1 << 20) as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield start, line
            start += len(line)


def check_version(run: Path) -> None:
    """Raise `TraceError` for the directory of a run that was recorded in an earlier format.

    Damaged lines say nothing about the format: `read_json_lines` and the viewer, which read all
    of the run, report them.
    """
    for _, line in complete_lines(run / "journal.jsonl"):
        try:
            event = orjson.loads(line)
        except ValueError:
            continue

        kind = event.get("e") if isinstance(event, dict) else None
        if kind == "opened":  # an episode, before which its settings are written
            return
        settings = event.get("value") if kind == "settings" else None
        if isinstance(settings, dict):
            if settings.get("v") == RECORD_VERSION:
                return
            raise TraceError(
                f"{run}: recorded by an earlier version of turnwright, whose runs this one does "
                "not read; use that version, or start a new run"
            )


class RunDir:
    """The directory of one run, written by one process at a time: the one that locks the journal.

    `journal.jsonl` is authoritative: one event per line, each turn before the next begins.
    `trajectories.jsonl` and `metrics.jsonl` are for people and tools.

    Example::

        >>> with RunDir("runs/first") as run:
        ...     run.metrics.append({"phase": "train", "step": 1, "reward": 0.5})
        ...     run.write_json("summary.json", {"steps": 1})
    """

    def __init__(self, path: str | Path, *, trajectories: bool = True) -> None:
        """Open a directory for writing, or create it.

        Without `trajectories`, finished episodes are in the journal alone; their file can be
        derived later. Raises `TraceError` when another process writes to the directory.
        """
        self.keeps_trajectories = trajectories
        """Whether finished episodes are written to `trajectories.jsonl` too."""
        self.given_path = Path(path)
        """The path as it was given, for messages."""
        # Absolute, since code of an environment may change the working directory.
        self.path = Path(os.path.abspath(path))

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            why = f"cannot create the run directory ({error.strerror}); choose another --out"
            raise TraceError(f"{self.path}: {why}") from error
        try:
            _lock_file(self._lock)
        except OSError as error:
            os.close(self._lock)
            raise _lock_error(self.path, error) from error

        self._files: list[JsonLines] = []
        try:
            for name in ("journal", "trajectories", "metrics"):
                self._files.append(JsonLines(self.path / f"{name}.jsonl", sealed=name == "journal"))
            check_version(self.path)
        except TraceError:
            self.close()
            raise
        self.journal, self.trajectories, self.metrics = self._files

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    def descriptors(self) -> list[int]:
        """Return the descriptors of the files that are open for writing."""
        return [lines._file for lines in self._files]

    def events(self, checks: Checks | None = None) -> Iterator[dict[str, Any]]:
        """Yield the events of the journal, in order; as `read_json_lines`."""
        return read_json_lines(self.path / "journal.jsonl", checks)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file (config.json, summary.json) atomically."""
        temporary = self.path / f".{name}.tmp"
        content = json.dumps(value, indent=2, default=str).encode() + b"\n"
        try:
            temporary.write_bytes(content)
            os.replace(temporary, self.path / name)
            if name == "config.json":
                remember_run(content)
        except OSError as error:
            raise TraceError(f"{self.path / name}: cannot be written ({error.strerror})") from error

    def sync(self) -> None:
        """Flush all files to the disk.

        Raises `TraceError` if the journal was deleted, moved or replaced.
        """
        self.journal.check()
        for lines in self._files:
            lines.sync()

    def close(self) -> None:
        """Close all files and release the lock."""
        for lines in self._files:
            lines.close()
        if self._lock >= 0:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

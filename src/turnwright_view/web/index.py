"""Index of a run's episodes in SQLite: one row an episode, its words, and what training made of it.

It grows by new lines of trajectories.jsonl and training.jsonl, in one transaction a batch, so a
process that is killed leaves a whole index which the next one continues. Of the viewers of a run,
one at a time writes; all read. A run that was replaced is indexed anew, and so is a damaged index.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from turnwright.display.run_data import (
    PolicyNames,
    Row,
    mapping,
    parse,
    read_line,
    read_run,
    unreadable_lines,
)
from turnwright.records.run_dir import complete_lines
from turnwright_view.run_rows import file_stamp
from turnwright_view.web import cache, index_tables
from turnwright_view.web.episode_rows import (
    EpisodeAddress,
    EpisodeColumns,
    ReadEpisode,
    read_episode,
    searched_text,
)
from turnwright_view.web.index_tables import BATCH_ROWS, VERSION, Found, IndexState
from turnwright_view.web.search import EpisodeFilter, Words

BATCH_S = 0.5
"""Seconds of reading that are written in one transaction."""

BATCH_CHARACTERS = 16 * 2**20
"""Characters of records that are written in one transaction."""

ROUND_BYTES = 64 * 2**20
"""Bytes of records after which another viewer may write."""

MAX_SCANNED = 128 * 2**20
"""Maximum bytes of records that one search looks at; the next request continues."""

LOCKED_S = 0.05
"""Seconds after which an index that another viewer writes is tried again."""

BUSY_S = 10.0
"""Seconds for which an index that another process writes is waited for."""

PAGE = 100
"""Rows of a list, unless more are asked for."""

FIRST_LINE = 65_536
"""Bytes of a file's first line that tell it from another."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Connection:
    """A connection, and the file it was opened on."""

    sql: sqlite3.Connection
    inode: int


class RunIndex:
    """Index of one run, extended in a thread while the run or the reading continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trajectories = path / "trajectories.jsonl"
        self.training = path / "training.jsonl"
        self.file = cache.index_file(path, VERSION)
        self._is_temporary = self.file.parent != cache.cache_folder()
        self.failed: set[int] = set()
        """Offsets of records whose pages could not be made when they were opened."""
        self.error = ""
        """Why the index cannot be written; empty while it can."""
        self._policies: tuple[object, PolicyNames] = (None, PolicyNames({}, 0))
        """What the files of `policies` looked like, and what was read from them."""
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._requests = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause reading while a request is answered: both hold the interpreter's lock."""
        with self._lock:
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1

    def start(self) -> None:
        """Read in a thread until `close`."""
        self._thread = threading.Thread(target=self._follow, name="index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        with self._lock:
            for connection in self._idle:
                connection.sql.close()
            self._idle.clear()
        if self._is_temporary:
            shutil.rmtree(self.file.parent, ignore_errors=True)

    def _follow(self) -> None:
        with suppress(OSError):
            cache.remove_unused()
        cache.mark_used(self.file)
        while not self._stop.is_set():
            more = False
            try:
                more = self.update(ROUND_BYTES)
                self.error = ""
            except Exception as error:  # whatever a file holds or lacks: the next round may read it
                self.error = f"{type(error).__name__}: {error}"
            self._stop.wait(0.001 if more else 0.5)

    # Writing

    def update(self, most: int = sys.maxsize) -> bool:
        """Read about `most` bytes of new lines, and return whether there may be more."""
        with cache.exclusive(self.file) as is_mine:
            if not is_mine:
                # Another viewer writes; what it has not read yet is there to be read.
                self._stop.wait(LOCKED_S)
                return not self._stop.is_set()
            try:
                return self._asked_once(lambda sql: self._update(sql, most))
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                cache.remove_index(self.file)
                return self._asked_once(lambda sql: self._update(sql, most))

    def _update(self, sql: sqlite3.Connection, most: int) -> bool:
        state = self._checked(sql, index_tables.read_state(sql))
        first = state.read
        batch: list[ReadEpisode] = []
        unreadable = 0
        characters = 0
        began = time.monotonic()
        more = False
        for at, line in complete_lines(self.trajectories, first):
            episode = read_episode(state.records + len(batch) + unreadable, at, line)
            if episode is None:
                unreadable += 1
            else:
                batch.append(episode)
                characters += len(episode.text)

            done = at + len(line)
            more = done - first >= most
            is_full = len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS
            if more or is_full or time.monotonic() - began >= BATCH_S:
                state = index_tables.write_episodes(sql, state, batch, unreadable, done, self._wait)
                batch = []
                unreadable = 0
                characters = 0
                began = time.monotonic()
            if more or self._stop.is_set():
                break
            self._wait()

        if self._stop.is_set():
            return False
        if batch or unreadable:
            state = index_tables.write_episodes(sql, state, batch, unreadable, done, self._wait)
        if not more:
            self._read_training(sql, state)
        return more

    def _wait(self) -> None:
        """Let requests go first."""
        while self._requests and not self._stop.is_set():
            time.sleep(0.001)

    def _checked(self, sql: sqlite3.Connection, state: IndexState) -> IndexState:
        """Return the state; that of an empty index where the run was replaced by another."""
        status = _status(self.trajectories)
        first_line = "" if status is None else _first_line(self.trajectories)
        device, inode, size = (0, 0, 0) if status is None else status

        is_same = (
            state.version == VERSION
            and (state.device, state.inode) == (device, inode)
            and state.first_line == first_line
            and size >= state.read
        )
        if is_same:
            return state
        if state.records or state.unreadable or state.version != VERSION:
            self.failed = set()
            index_tables.clear(sql)
        return IndexState(device=device, inode=inode, first_line=first_line)

    def _read_training(self, sql: sqlite3.Connection, state: IndexState) -> None:
        """Take what training made of episodes; of a step trained twice, the later line counts."""
        status = _status(self.training)
        inode, size = (0, 0) if status is None else status[1:]
        is_new = inode != state.trained_inode or size < state.trained_read
        if not is_new and size == state.trained_read:
            return
        if is_new:
            state = replace(state, trained_inode=inode, trained_read=0)
            index_tables.forget_training(sql, state)

        rows: list[tuple[Any, ...]] = []
        done = state.trained_read
        for at, line in complete_lines(self.training, state.trained_read):
            row = read_line(line, partial(index_tables.training_row, at))
            if row is not None:
                rows.append(row)
            done = at + len(line)
            if len(rows) >= BATCH_ROWS:
                state = replace(state, trained_read=done)
                index_tables.write_training(sql, state, rows)
                rows = []
            if self._stop.is_set():
                return
            self._wait()
        index_tables.write_training(sql, replace(state, trained_read=done), rows)

    # Reading

    def state(self) -> IndexState:
        """Return how far it is."""
        return self._asked(index_tables.read_state)

    def progress(self) -> dict[str, int]:
        """Return how many bytes of both files were read, of how many in complete lines, and the
        number of episodes."""
        state = self.state()
        size = _size_of_lines(self.trajectories, state.read)
        size += _size_of_lines(self.training, state.trained_read)
        read = state.read + state.trained_read
        return {"read": read, "size": max(size, read), "count": state.episodes}

    def problems(self) -> list[str]:
        """Return what could not be read, one line each."""
        unreadable = self.state().unreadable
        lines = [unreadable_lines(self.trajectories, unreadable)] if unreadable else []
        if self.failed:
            which = f"{len(self.failed)} records that were opened"
            if len(self.failed) == 1:
                which = "1 record that was opened"
            lines.append(f"{self.trajectories.name}: {which} cannot be read")
        if self.error:
            lines.append(f"the index of episodes cannot be written ({self.error})")
        return lines

    def facets(self) -> dict[str, Any]:
        """Return the values of each filter with their counts, the most frequent first."""
        return self._asked(index_tables.read_facets)

    def find(
        self,
        wanted: EpisodeFilter,
        order: str = "notable",
        start: int = 0,
        most: int = PAGE,
    ) -> Found:
        """Return `most` matching rows from index `start` on; raise `KeyError` for an unknown
        order."""
        if wanted.text.strip():
            return self._asked(lambda sql: self._search(sql, wanted, order, start, most))
        return self._asked(lambda sql: index_tables.find(sql, wanted, order, start, most))

    def numbers(self, wanted: EpisodeFilter, order: str = "notable") -> list[int]:
        """Return the numbers of all matching episodes, without a search of texts."""
        return self._asked(lambda sql: index_tables.numbers(sql, wanted, order))

    def steps(self, phase: str) -> list[int]:
        """Return the different steps of a phase."""
        return self._asked(lambda sql: index_tables.steps(sql, phase))

    def row(self, columns: EpisodeColumns) -> dict[str, Any]:
        """Return an episode's row of a list."""
        return self._asked(lambda sql: index_tables.rows_of(sql, [columns])[0])

    def episode(self, key: EpisodeAddress) -> EpisodeColumns | None:
        """Return the episode of a key, or None."""
        return self._asked(lambda sql: index_tables.of_key(sql, key))

    def at(self, number_: int) -> EpisodeColumns | None:
        """Return the episode at a position in the file, or None."""
        return self._asked(lambda sql: index_tables.at(sql, number_))

    def siblings(self, key: EpisodeAddress) -> list[dict[str, Any]]:
        """Return the rows of an episode's group, itself included, by sample."""
        return self._asked(lambda sql: index_tables.siblings(sql, key))

    def neighbors(self, number_: int) -> tuple[EpisodeColumns | None, EpisodeColumns | None]:
        """Return the episodes before and behind one in the file."""
        return self._asked(lambda sql: index_tables.neighbors(sql, number_))

    def record(self, columns: EpisodeColumns) -> Row:
        """Load the record of an episode."""
        return mapping(parse(_read_at(self.trajectories, columns.at, columns.length)))

    def trained(self, columns: EpisodeColumns) -> Row:
        """Load what training made of an episode; empty if there is nothing."""
        if columns.trained_at is None:
            return {}
        with self.training.open("rb") as file:
            file.seek(columns.trained_at)
            return mapping(parse(file.readline()))

    def policies(self) -> PolicyNames:
        """Return the names of the run's policies.

        All its metrics are read for them, which takes 0.4 s after 2,000 steps: so this happens
        again only when the files have changed.
        """
        stamps = [file_stamp(self.path / name) for name in ("config.json", "metrics.jsonl")]
        read_stamps, policies = self._policies
        if stamps != read_stamps:
            policies = read_run(self.path).policies
            self._policies = (stamps, policies)
        return policies

    def _search(
        self, sql: sqlite3.Connection, wanted: EpisodeFilter, order: str, start: int, most: int
    ) -> Found:
        """Look at the text of each candidate, in order, until there are enough."""
        words = Words.of(wanted.text)
        found: list[EpisodeColumns] = []
        snippets: list[str] = []
        scanned = 0
        position = start
        end: int | None = None
        for columns in index_tables.candidates(sql, wanted, words, order, start):
            if len(found) == most or scanned > MAX_SCANNED:
                end = position
                break
            scanned += columns.length
            position += 1
            line = _read_at(self.trajectories, columns.at, columns.length)
            snippet = read_line(line, lambda row: words.snippet(_text_of(row)))
            if snippet is not None:
                found.append(columns)
                snippets.append(snippet)

        rows = index_tables.rows_of(sql, found)
        for row, snippet in zip(rows, snippets, strict=True):
            row["snippet"] = snippet
        return Found(rows, None, end)

    # Connections

    def _asked(self, ask: Callable[[sqlite3.Connection], T]) -> T:
        """Return the answer to a question; where the database is damaged, that of a new one."""
        try:
            return self._asked_once(ask)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        with cache.exclusive(self.file) as is_mine:
            if is_mine or not self.file.exists():
                cache.remove_index(self.file)
        return self._asked_once(ask)

    def _asked_once(self, ask: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection()
        try:
            answer = ask(connection.sql)
        except BaseException:
            connection.sql.close()
            raise
        with self._lock:
            is_closed = self._stop.is_set()
            if not is_closed:
                self._idle.append(connection)
        if is_closed:
            connection.sql.close()
        return answer

    def _connection(self) -> _Connection:
        """Return an idle connection, or a new one; none to a file that was removed."""
        inode = _inode(self.file)
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return _connected(self.file)
            if connection.inode == inode:
                return connection
            connection.sql.close()


def _connected(file: Path) -> _Connection:
    """Open an index, and create what it lacks."""
    patient_until = time.monotonic() + BUSY_S
    while True:
        sql = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        try:
            _prepare(sql)
            return _Connection(sql, _inode(file))
        except BaseException as error:
            sql.close()
            # Two that create an index at once: SQLite refuses the change to WAL without waiting.
            if not _is_busy(error) or time.monotonic() > patient_until:
                raise
        time.sleep(0.01)


def _prepare(sql: sqlite3.Connection) -> None:
    sql.execute("PRAGMA journal_mode = WAL")
    # What a power failure leaves is a damaged index at worst, which is made anew.
    sql.execute("PRAGMA synchronous = OFF")
    sql.execute("PRAGMA temp_store = MEMORY")
    if sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        sql.executescript(f"BEGIN IMMEDIATE; {index_tables.SCHEMA} COMMIT;")


def _is_busy(error: BaseException) -> bool:
    if not isinstance(error, sqlite3.OperationalError):
        return False
    # Of two, the later one finds the tables of the earlier one.
    found_tables = "already exists" in str(error)
    return found_tables or _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary code of an error; 0 for one of the module itself."""
    try:
        return error.sqlite_errorcode & 0xFF
    except AttributeError:
        return 0


def _inode(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_ino
    return 0


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether a database must be made anew: not if it is only busy, or the disk full."""
    passing = (0, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
    return _code(error) not in passing


def _status(path: Path) -> tuple[int, int, int] | None:
    """Return device, inode and size of a regular file; None for anything else."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size) if path.is_file() else None


def _size_of_lines(path: Path, read: int) -> int:
    """Return the bytes of a file of which so many were read; without those of a last line that has
    no end, which a process that was killed leaves for good."""
    status = _status(path)
    size = 0 if status is None else status[2]
    with suppress(OSError):  # what cannot be opened is not read yet
        if size > read and next(complete_lines(path, read), None) is None:
            return read
    return size


def _first_line(path: Path) -> str:
    """Return what tells a file from another: the hash of its first line; empty without one."""
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE)
    is_whole = line.endswith(b"\n") or len(line) == FIRST_LINE
    return blake2b(line, digest_size=16).hexdigest() if is_whole else ""


def _read_at(path: Path, at: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(length)


def _text_of(row: Row) -> str:
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    return searched_text(row, spans)

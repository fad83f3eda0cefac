"""Index of a run's episodes in SQLite: one row an episode, its words, and what training made of it.

It grows by new lines of trajectories.jsonl and training.jsonl, in one transaction a batch, so a
process that is killed leaves a whole index which the next one continues. Of the viewers of a run,
one at a time writes; all read. A run that was replaced is indexed anew, and so is a damaged index.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from turnwright.display.run_data import (
    Row,
    as_it_is,
    mapping,
    number,
    parse,
    read_line,
    unreadable_lines,
)
from turnwright.records.run_dir import complete_lines
from turnwright_view.web import cache
from turnwright_view.web.episode_rows import (
    EpisodeColumns,
    EpisodeKey,
    ReadEpisode,
    key_of,
    names_in,
    read_episode,
    row_of,
    searched_text,
)
from turnwright_view.web.search import ORDERS, EpisodeFilter, Words, indexed_text

VERSION = 1
"""Format of the index; one of another format is not read."""

BATCH_BYTES = 8 * 2**20
"""Bytes of records that are written in one transaction."""

BATCH_ROWS = 2_000
"""Rows that are written in one transaction."""

MAX_SCANNED = 128 * 2**20
"""Maximum bytes of records that one search looks at; the next request continues."""

PAGE = 100
"""Rows of a list, unless more are asked for."""

MAX_SIBLINGS = 64
"""Maximum episodes of a group on its page."""

MAX_FACETS = 50
"""Maximum values of a facet, the most frequent first."""

FIRST_LINE = 65_536
"""Bytes of a file's first line that tell it from another."""

T = TypeVar("T")
_COLUMNS = ", ".join(EpisodeColumns._fields)
_KEY = "phase, step, task, sample, attempt"
_SAME_KEY = "phase = ? AND step = ? AND task = ? AND sample = ? AND attempt = ?"
_FACETS = {"phase": "phase", "stop": "stop", "error": "error", "tool": "tools", "agent": "agents"}

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS state (
    id INTEGER PRIMARY KEY CHECK (id = 0), version, device, inode, first_line, read, records,
    episodes, unreadable, trained_inode, trained_read
);
CREATE TABLE IF NOT EXISTS episode (
    number INTEGER PRIMARY KEY, at, length, phase, step, task, sample, attempt, place, failed,
    reward, tie, stop, error, turns, tokens, images, branches, tools, agents, wall_s, advantage,
    reason, trained, trained_at
);
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON episode ({_KEY});
CREATE INDEX IF NOT EXISTS by_notable ON episode (
    place, step DESC, failed DESC, reward, tie DESC, number
);
CREATE INDEX IF NOT EXISTS by_reward ON episode (reward, number);
CREATE INDEX IF NOT EXISTS by_tokens ON episode (tokens DESC, number);
CREATE INDEX IF NOT EXISTS by_wall ON episode (wall_s DESC, number);
CREATE INDEX IF NOT EXISTS by_error ON episode (error) WHERE failed = 1;
CREATE TABLE IF NOT EXISTS shown (number INTEGER PRIMARY KEY, prompt, reply);
CREATE TABLE IF NOT EXISTS training ({_KEY}, at, advantage, reason, PRIMARY KEY ({_KEY}))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facet (kind, value, count, PRIMARY KEY (kind, value)) WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (
    text, content = '', columnsize = 0, detail = none, tokenize = 'unicode61 remove_diacritics 0'
);
"""


@dataclass(frozen=True, slots=True)
class IndexState:
    """How far an index is, and of which file."""

    version: int = VERSION
    device: int = 0
    inode: int = 0
    first_line: str = ""
    read: int = 0
    """Bytes of trajectories.jsonl."""
    records: int = 0
    """Records that were read."""
    episodes: int = 0
    """Different episodes: of several records with the same key the last counts."""
    unreadable: int = 0
    trained_inode: int = 0
    trained_read: int = 0
    """Bytes of training.jsonl."""


@dataclass(frozen=True, slots=True)
class Found:
    """Episodes of a list."""

    rows: list[dict[str, Any]]
    total: int | None
    """None in a search, whose other hits were not looked at."""
    next: int | None
    """Where the next rows start; None at the end."""


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
        self.failed: set[int] = set()
        """Offsets of records whose pages could not be made when they were opened."""
        self.error = ""
        """Why the index cannot be written; empty while it can."""
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
        if self.file.parent != cache.cache_folder():
            shutil.rmtree(self.file.parent, ignore_errors=True)

    def _follow(self) -> None:
        with suppress(OSError):
            cache.remove_unused()
        cache.mark_used(self.file)
        while not self._stop.is_set():
            more = False
            try:
                more = self.update(BATCH_BYTES)
                self.error = ""
            except Exception as error:  # whatever a file holds or lacks: the next round may read it
                self.error = f"{type(error).__name__}: {error}"
            self._stop.wait(0.001 if more else 0.5)

    # Writing

    def update(self, most: int = sys.maxsize) -> bool:
        """Read about `most` bytes of new lines, and return whether there may be more."""
        with cache.exclusive(self.file) as is_mine:
            if not is_mine:
                return False
            return self._asked(lambda sql: self._update(sql, most))

    def _update(self, sql: sqlite3.Connection, most: int) -> bool:
        state = self._checked(sql, _read_state(sql))
        batch: list[ReadEpisode] = []
        unreadable = 0
        done = 0
        written = state.read
        more = False
        for at, line in complete_lines(self.trajectories, state.read):
            episode = read_episode(state.records + len(batch) + unreadable, at, line)
            if episode is None:
                unreadable += 1
            else:
                batch.append(episode)
            done = at + len(line)

            if len(batch) >= BATCH_ROWS or done - state.read >= min(most, BATCH_BYTES):
                state = _write_episodes(sql, state, batch, unreadable, done)
                batch = []
                unreadable = 0
                more = done - written >= most
            if more or self._stop.is_set():
                break
            while self._requests and not self._stop.is_set():  # requests have priority
                time.sleep(0.001)

        if (batch or unreadable) and not self._stop.is_set():
            state = _write_episodes(sql, state, batch, unreadable, done)
        if not more:
            self._read_training(sql, state)
        return more

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
            _clear(sql)
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
            _forget_training(sql, state)

        rows: list[tuple[Any, ...]] = []
        done = state.trained_read
        for at, line in complete_lines(self.training, state.trained_read):
            row = read_line(line, lambda row, at=at: _training_row(row, at))  # type: ignore[misc]
            if row is not None:
                rows.append(row)
            done = at + len(line)
            if len(rows) >= BATCH_ROWS:
                state = replace(state, trained_read=done)
                _write_training(sql, state, rows)
                rows = []
            if self._stop.is_set():
                return
            while self._requests and not self._stop.is_set():
                time.sleep(0.001)
        _write_training(sql, replace(state, trained_read=done), rows)

    # Reading

    def state(self) -> IndexState:
        """Return how far it is."""
        return self._asked(_read_state)

    def progress(self) -> dict[str, int]:
        """Return how many bytes were read, of how many, and the number of episodes."""
        state = self.state()
        status = _status(self.trajectories)
        size = 0 if status is None else status[2]
        return {"read": state.read, "size": max(size, state.read), "count": state.episodes}

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
        return self._asked(_read_facets)

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
        return self._asked(lambda sql: _find(sql, wanted, order, start, most))

    def numbers(self, wanted: EpisodeFilter, order: str = "notable") -> list[int]:
        """Return the numbers of all matching episodes."""
        terms, values = wanted.sql()
        select = f"SELECT number FROM episode WHERE {terms} ORDER BY {ORDERS[order]}"
        return self._asked(lambda sql: [row[0] for row in sql.execute(select, values)])

    def columns(self) -> Iterator[EpisodeColumns]:
        """Return the columns of all episodes, in the order of the file."""
        select = f"SELECT {_COLUMNS} FROM episode ORDER BY number"
        rows = self._asked(lambda sql: sql.execute(select).fetchall())
        return map(EpisodeColumns._make, rows)

    def row(self, columns: EpisodeColumns) -> dict[str, Any]:
        """Return an episode's row of a list."""
        return self._asked(lambda sql: _rows(sql, [columns])[0])

    def episode(self, key: EpisodeKey) -> EpisodeColumns | None:
        """Return the episode of a key, or None."""
        return self._asked(lambda sql: _one(sql, _SAME_KEY, key))

    def at(self, number_: int) -> EpisodeColumns | None:
        """Return the episode at a position in the file, or None."""
        return self._asked(lambda sql: _one(sql, "number = ?", (number_,)))

    def siblings(self, key: EpisodeKey) -> list[dict[str, Any]]:
        """Return the rows of an episode's group, itself included, by sample."""

        def ask(sql: sqlite3.Connection) -> list[dict[str, Any]]:
            select = (
                f"SELECT {_COLUMNS} FROM episode WHERE phase = ? AND step = ? AND task = ? "
                f"ORDER BY sample, attempt LIMIT {MAX_SIBLINGS}"
            )
            found = [EpisodeColumns._make(row) for row in sql.execute(select, key[:3])]
            return _rows(sql, found)

        return self._asked(ask)

    def neighbors(self, number_: int) -> tuple[EpisodeColumns | None, EpisodeColumns | None]:
        """Return the episodes before and behind one in the file."""
        before = "number = (SELECT max(number) FROM episode WHERE number < ?)"
        behind = "number = (SELECT min(number) FROM episode WHERE number > ?)"
        return self._asked(
            lambda sql: (_one(sql, before, (number_,)), _one(sql, behind, (number_,)))
        )

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
        for columns in _candidates(sql, wanted, words, order, start):
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

        rows = _rows(sql, found)
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
            self._idle.append(connection)
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
    sql = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=10)
    try:
        sql.execute("PRAGMA journal_mode = WAL")
        # What a power failure leaves is a damaged index at worst, which is made anew.
        sql.execute("PRAGMA synchronous = OFF")
        sql.execute("PRAGMA temp_store = MEMORY")
        if sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            sql.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    except BaseException:
        sql.close()
        raise
    return _Connection(sql, _inode(file))


def _inode(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_ino
    return 0


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether a database must be made anew: not if it is only busy, or the disk full."""
    code = getattr(error, "sqlite_errorcode", None)
    passing = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)
    return code is not None and code & 0xFF not in passing


def _status(path: Path) -> tuple[int, int, int] | None:
    """Return device, inode and size of a regular file; None for anything else."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size) if path.is_file() else None


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


# State


def _read_state(sql: sqlite3.Connection) -> IndexState:
    names = ", ".join(field.name for field in fields(IndexState))
    row = sql.execute(f"SELECT {names} FROM state").fetchone()
    return IndexState() if row is None else IndexState(*row)


def _write_state(sql: sqlite3.Connection, state: IndexState) -> None:
    values = astuple(state)
    marks = ", ".join("?" * len(values))
    sql.execute(f"INSERT OR REPLACE INTO state VALUES (0, {marks})", values)


@contextmanager
def _transaction(sql: sqlite3.Connection) -> Iterator[None]:
    sql.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        sql.execute("ROLLBACK")
        raise
    sql.execute("COMMIT")


def _clear(sql: sqlite3.Connection) -> None:
    with _transaction(sql):
        for table in ("state", "episode", "shown", "training", "facet"):
            sql.execute(f"DELETE FROM {table}")
        sql.execute("INSERT INTO words (words) VALUES ('delete-all')")


# Episodes


def _write_episodes(
    sql: sqlite3.Connection,
    state: IndexState,
    batch: Sequence[ReadEpisode],
    unreadable: int,
    read: int,
) -> IndexState:
    """Write a batch in one transaction; return the state behind it."""
    state = replace(
        state,
        read=read,
        records=state.records + len(batch) + unreadable,
        unreadable=state.unreadable + unreadable,
        episodes=state.episodes + len(batch),
    )
    columns = _with_ties([episode.columns for episode in batch])
    with _transaction(sql):
        is_new = _insert(sql, columns)
        sql.executemany(
            "INSERT INTO shown VALUES (?, ?, ?)",
            [(episode.columns.number, episode.prompt, episode.reply) for episode in batch],
        )
        sql.executemany(
            "INSERT INTO words (rowid, text) VALUES (?, ?)",
            [(episode.columns.number, indexed_text(episode.text)) for episode in batch],
        )
        _update_ties(sql, columns)
        if state.trained_read:
            _join_training(sql, [one.key for one in columns])

        if is_new:
            _add_facets(sql, columns)
        else:
            count = sql.execute("SELECT count(*) FROM episode").fetchone()[0]
            state = replace(state, episodes=count)
            _count_facets(sql)
        _write_state(sql, state)
    return state


def _insert(sql: sqlite3.Connection, columns: Sequence[EpisodeColumns]) -> bool:
    """Insert rows; return whether no earlier episode had one of their keys."""
    marks = ", ".join("?" * len(EpisodeColumns._fields))
    sql.execute("SAVEPOINT rows")
    try:
        sql.executemany(f"INSERT INTO episode VALUES ({marks})", columns)
    except sqlite3.IntegrityError:
        sql.execute("ROLLBACK TO rows")
        sql.executemany(f"INSERT OR REPLACE INTO episode VALUES ({marks})", columns)
        return False
    finally:
        sql.execute("RELEASE rows")
    return True


def _with_ties(columns: Sequence[EpisodeColumns]) -> list[EpisodeColumns]:
    """Return rows with ties among themselves: groups whose rewards, at least two, are all equal."""
    rewards: dict[tuple[str, int, str], list[float]] = {}
    for one in columns:
        if one.reward is not None:
            rewards.setdefault(one.key[:3], []).append(one.reward)
    tied = {group for group, of_group in rewards.items() if _is_tie(of_group)}
    return [one._replace(tie=1) if one.key[:3] in tied else one for one in columns]


def _is_tie(rewards: Sequence[float]) -> bool:
    return len(rewards) > 1 and min(rewards) == max(rewards)


def _update_ties(sql: sqlite3.Connection, columns: Sequence[EpisodeColumns]) -> None:
    """Bring ties of the groups of new rows up to date, whose other members may be older."""
    for group in {one.key[:3] for one in columns}:
        of_group = "phase = ? AND step = ? AND task = ?"
        count, low, high, least, most = sql.execute(
            "SELECT count(reward), min(reward), max(reward), min(tie), max(tie) FROM episode "
            f"WHERE {of_group}",
            group,
        ).fetchone()
        tie = int(count > 1 and low == high)
        if least != tie or most != tie:
            sql.execute(f"UPDATE episode SET tie = ? WHERE {of_group}", (tie, *group))


# Training


def _training_row(row: Row, at: int) -> tuple[Any, ...]:
    names = ("phase", "step", "task", "sample", "attempt")
    key = key_of(dict(zip(names, row["key"], strict=True)))
    reason = row.get("reason")
    return (*key, at, number(row.get("advantage")), None if reason is None else str(reason)[:400])


def _write_training(
    sql: sqlite3.Connection, state: IndexState, rows: Sequence[tuple[Any, ...]]
) -> None:
    with _transaction(sql):
        sql.executemany("INSERT OR REPLACE INTO training VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        _join_training(sql, [row[:5] for row in rows])
        _write_state(sql, state)


def _join_training(sql: sqlite3.Connection, keys: Sequence[tuple[Any, ...]]) -> None:
    """Give episodes what training made of them."""
    sql.executemany(
        "UPDATE episode SET advantage = made.advantage, reason = made.reason, "
        "trained_at = made.at, trained = made.advantage IS NOT NULL AND made.reason IS NULL "
        f"FROM (SELECT at, advantage, reason FROM training WHERE {_SAME_KEY}) AS made "
        f"WHERE {_SAME_KEY}",
        [(*key, *key) for key in keys],
    )


def _forget_training(sql: sqlite3.Connection, state: IndexState) -> None:
    with _transaction(sql):
        sql.execute("DELETE FROM training")
        sql.execute(
            "UPDATE episode SET advantage = NULL, reason = NULL, trained = 0, trained_at = NULL "
            "WHERE trained_at IS NOT NULL"
        )
        _write_state(sql, state)


# Facets


def _counted(columns: Sequence[EpisodeColumns]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    counts.update(("phase", one.phase) for one in columns)
    counts.update(("stop", one.stop) for one in columns)
    counts.update(("error", one.error) for one in columns if one.failed)
    for one in columns:
        counts.update(("tool", name) for name in names_in(one.tools))
        counts.update(("agent", name) for name in names_in(one.agents))
    return counts


def _add_facets(sql: sqlite3.Connection, columns: Sequence[EpisodeColumns]) -> None:
    sql.executemany(
        "INSERT INTO facet VALUES (?, ?, ?) "
        "ON CONFLICT (kind, value) DO UPDATE SET count = count + excluded.count",
        [(kind, value, count) for (kind, value), count in _counted(columns).items()],
    )


def _count_facets(sql: sqlite3.Connection) -> None:
    """Count all anew, where rows were replaced."""
    sql.execute("DELETE FROM facet")
    select = f"SELECT {_COLUMNS} FROM episode"
    cursor = sql.execute(select)
    while rows := cursor.fetchmany(BATCH_ROWS):
        _add_facets(sql, [EpisodeColumns._make(row) for row in rows])


def _read_facets(sql: sqlite3.Connection) -> dict[str, Any]:
    facets: dict[str, Any] = {}
    for kind in _FACETS:
        select = (
            "SELECT value, count FROM facet WHERE kind = ? AND value != '' "
            f"ORDER BY count DESC, value LIMIT {MAX_FACETS}"
        )
        facets[kind] = [list(row) for row in sql.execute(select, (kind,))]

    steps: list[int] = []
    for phase, _ in facets["phase"]:
        for end in ("min", "max"):  # each by itself, since one look at the index answers it
            select = f"SELECT {end}(step) FROM episode WHERE phase = ?"
            steps += [row[0] for row in sql.execute(select, (phase,)) if row[0] is not None]
    facets["step"] = [min(steps), max(steps)] if steps else []
    return facets


# Lists


def _find(
    sql: sqlite3.Connection, wanted: EpisodeFilter, order: str, start: int, most: int
) -> Found:
    terms, values = wanted.sql()
    total = _total(sql, wanted)
    select = f"SELECT {_COLUMNS} FROM episode WHERE {terms} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?"
    cursor = sql.execute(select, (*values, most, start))
    found = [EpisodeColumns._make(row) for row in cursor]
    end = start + most
    return Found(_rows(sql, found), total, end if end < total else None)


def _total(sql: sqlite3.Connection, wanted: EpisodeFilter) -> int:
    if wanted.is_empty:
        return _read_state(sql).episodes
    terms, values = wanted.sql()
    count: int = sql.execute(f"SELECT count(*) FROM episode WHERE {terms}", values).fetchone()[0]
    return count


def _candidates(
    sql: sqlite3.Connection, wanted: EpisodeFilter, words: Words, order: str, start: int
) -> Iterator[EpisodeColumns]:
    """Yield the episodes that may have the words, in order."""
    terms, values = wanted.sql()
    match = words.match
    if match:
        terms += " AND number IN (SELECT rowid FROM words WHERE words MATCH ?)"
        values.append(match)
    select = (
        f"SELECT {_COLUMNS} FROM episode WHERE {terms} ORDER BY {ORDERS[order]} LIMIT -1 OFFSET ?"
    )
    return map(EpisodeColumns._make, sql.execute(select, (*values, start)))


def _one(
    sql: sqlite3.Connection, condition: str, values: Sequence[Any]
) -> EpisodeColumns | None:
    row = sql.execute(f"SELECT {_COLUMNS} FROM episode WHERE {condition}", values).fetchone()
    return None if row is None else EpisodeColumns._make(row)


def _rows(sql: sqlite3.Connection, found: Sequence[EpisodeColumns]) -> list[dict[str, Any]]:
    """Return rows of a list, with their texts."""
    rows = []
    for columns in found:
        shown = sql.execute("SELECT prompt, reply FROM shown WHERE number = ?", (columns.number,))
        prompt, reply = shown.fetchone()
        rows.append(row_of(columns, prompt, reply))
    return rows

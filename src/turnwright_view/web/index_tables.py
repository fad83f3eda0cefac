"""Tables of the index: their schema, how batches of episodes are written, how lists are read.

`index.py` says when; here is what in SQL. A function that writes takes part in a transaction of its
own, so that a process which is killed leaves all of a batch, or nothing of it.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from turnwright.display.run_data import Row, number
from turnwright_view.web.episode_rows import (
    EpisodeAddress,
    EpisodeColumns,
    ReadEpisode,
    key_of_values,
    names_in,
    row_of,
)
from turnwright_view.web.search import FACETS, ORDERS, EpisodeFilter, Words, indexed_text

VERSION = 1
"""Format of the index; one of another format is not read."""

MAX_FACETS = 50
"""Maximum values of a facet, the most frequent first."""

BATCH_ROWS = 2_000
"""Rows that are written, or read, at a time."""

SLICE_ROWS = 50
"""Rows of words that are written before a request may go first."""

COMMON = 2_000
"""Episodes at each end of the file from which it is told how common a word is."""

MAX_SIBLINGS = 64
"""Maximum episodes of a group on its page."""

COLUMNS = ", ".join(EpisodeColumns._fields)
_KEY = ", ".join(EpisodeAddress._fields)
_SAME_KEY = " AND ".join(f"{name} = ?" for name in EpisodeAddress._fields)

SCHEMA = f"""
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


# State


def read_state(sql: sqlite3.Connection) -> IndexState:
    """Return how far an index is."""
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


def clear(sql: sqlite3.Connection) -> None:
    """Empty an index."""
    with _transaction(sql):
        for table in ("state", "episode", "shown", "training", "facet"):
            sql.execute(f"DELETE FROM {table}")
        sql.execute("INSERT INTO words (words) VALUES ('delete-all')")


# Episodes


def write_episodes(
    sql: sqlite3.Connection,
    state: IndexState,
    batch: Sequence[ReadEpisode],
    unreadable: int,
    read: int,
    wait: Callable[[], None],
) -> IndexState:
    """Write a batch in one transaction; return the state behind it.

    Now and then `wait` is called, for what must not wait for the whole batch.
    """
    state = replace(
        state,
        read=read,
        records=state.records + len(batch) + unreadable,
        unreadable=state.unreadable + unreadable,
        episodes=state.episodes + len(batch),
    )
    columns = _with_ties([episode.columns for episode in batch])
    with _transaction(sql):
        if not batch:
            _write_state(sql, state)
            return state
        is_new = _insert(sql, columns)
        sql.executemany(
            "INSERT INTO shown VALUES (?, ?, ?)",
            [(episode.columns.number, episode.prompt, episode.reply) for episode in batch],
        )
        for start in range(0, len(batch), SLICE_ROWS):
            wait()
            sql.executemany(
                "INSERT INTO words (rowid, text) VALUES (?, ?)",
                [
                    (episode.columns.number, indexed_text(episode.text))
                    for episode in batch[start : start + SLICE_ROWS]
                ],
            )
        wait()
        _update_ties(sql, columns[0].number)
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


def _update_ties(sql: sqlite3.Connection, first: int) -> None:
    """Bring ties of the groups with episodes from a number on up to date, whose other members may
    be older."""
    changed = sql.execute(
        "SELECT count(reward) > 1 AND min(reward) = max(reward) AS tied, phase, step, task "
        "FROM (SELECT DISTINCT phase, step, task FROM episode WHERE number >= ?) "
        "JOIN episode USING (phase, step, task) GROUP BY phase, step, task "
        "HAVING tied != min(tie) OR tied != max(tie)",
        (first,),
    )
    sql.executemany(
        "UPDATE episode SET tie = ? WHERE phase = ? AND step = ? AND task = ?", changed.fetchall()
    )


# Training


def training_row(at: int, row: Row) -> tuple[Any, ...]:
    """Return the row of the table `training` for a line at an offset; raise an error for one that
    is none."""
    key = key_of_values(row["key"])
    reason = row.get("reason")
    return (*key, at, number(row.get("advantage")), None if reason is None else str(reason)[:400])


def write_training(
    sql: sqlite3.Connection, state: IndexState, rows: Sequence[tuple[Any, ...]]
) -> None:
    """Write what training made of episodes, in one transaction."""
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


def forget_training(sql: sqlite3.Connection, state: IndexState) -> None:
    """Forget what training made of episodes."""
    with _transaction(sql):
        sql.execute("DELETE FROM training")
        sql.execute(
            "UPDATE episode SET advantage = NULL, reason = NULL, trained = 0, trained_at = NULL "
            "WHERE trained_at IS NOT NULL"
        )
        _write_state(sql, state)


# Facets


def _counted(columns: Sequence[EpisodeColumns]) -> Counter[tuple[str, str]]:
    """Count the values of each facet."""
    counts: Counter[tuple[str, str]] = Counter()
    for kind, values in (
        ("phase", [one.phase for one in columns]),
        ("stop", [one.stop for one in columns]),
        ("error", [one.error for one in columns if one.failed]),
    ):
        for value, count in Counter(values).items():
            counts[kind, value] = count

    # Most episodes have the same tools: their names are taken apart once.
    for kind, joined in (
        ("tool", Counter([one.tools for one in columns])),
        ("agent", Counter([one.agents for one in columns])),
    ):
        for names, count in joined.items():
            for name in names_in(names):
                counts[kind, name] += count
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
    select = f"SELECT {COLUMNS} FROM episode"
    cursor = sql.execute(select)
    while rows := cursor.fetchmany(BATCH_ROWS):
        _add_facets(sql, [EpisodeColumns._make(row) for row in rows])


def read_facets(sql: sqlite3.Connection) -> dict[str, Any]:
    """Return the values of each facet with their counts, and the bounds of steps."""
    facets: dict[str, Any] = {}
    for kind in FACETS:
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


def find(
    sql: sqlite3.Connection, wanted: EpisodeFilter, order: str, start: int, most: int
) -> Found:
    """Return some of the matching episodes, without a search of texts."""
    terms, values = wanted.sql()
    total = _total(sql, wanted)
    select = (
        f"SELECT {COLUMNS} FROM episode WHERE {terms} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?"
    )
    cursor = sql.execute(select, (*values, most, start))
    found = [EpisodeColumns._make(row) for row in cursor]
    end = start + most
    return Found(rows_of(sql, found), total, end if end < total else None)


def _total(sql: sqlite3.Connection, wanted: EpisodeFilter) -> int:
    """Return the number of matching episodes: as counted already where one value is asked for."""
    if wanted.is_empty:
        return read_state(sql).episodes
    counted = wanted.facet
    if counted is not None:
        select = "SELECT sum(count) FROM facet WHERE kind = ? AND (value = ? OR ? = '*')"
        kind, value = counted
        return sql.execute(select, (kind, value, value)).fetchone()[0] or 0
    terms, values = wanted.sql()
    count: int = sql.execute(f"SELECT count(*) FROM episode WHERE {terms}", values).fetchone()[0]
    return count


def candidates(
    sql: sqlite3.Connection, wanted: EpisodeFilter, words: Words, order: str, start: int
) -> Iterator[EpisodeColumns]:
    """Yield the episodes that may have the words, in order."""
    terms, values = wanted.sql()
    match = words.match
    if match and not _is_common(sql, match):
        terms += " AND number IN (SELECT rowid FROM words WHERE words MATCH ?)"
        values.append(match)
    select = (
        f"SELECT {COLUMNS} FROM episode WHERE {terms} ORDER BY {ORDERS[order]} LIMIT -1 OFFSET ?"
    )
    return map(EpisodeColumns._make, sql.execute(select, (*values, start)))


def _is_common(sql: sqlite3.Connection, match: str) -> bool:
    """Return whether most episodes have the words, so that looking at their texts in order is
    quicker than sorting all that have them: of 100,000, in 0.04 s instead of 0.3."""
    records = read_state(sql).records
    for order, bound in (("", "max"), ("DESC", "min")):
        first = f"SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid {order} LIMIT {COMMON}"
        count, end = sql.execute(
            f"SELECT count(*), {bound}(rowid) FROM ({first})", (match,)
        ).fetchone()
        if count < COMMON:
            return False
        passed = end if bound == "max" else records - end
        if passed > 2 * COMMON:
            return False
    return True


def numbers(sql: sqlite3.Connection, wanted: EpisodeFilter, order: str) -> list[int]:
    """Return the numbers of all matching episodes."""
    terms, values = wanted.sql()
    select = f"SELECT number FROM episode WHERE {terms} ORDER BY {ORDERS[order]}"
    return [row[0] for row in sql.execute(select, values)]


def steps(sql: sqlite3.Connection, phase: str) -> list[int]:
    """Return the different steps of a phase."""
    select = "SELECT DISTINCT step FROM episode WHERE phase = ? ORDER BY step"
    return [row[0] for row in sql.execute(select, (phase,))]


# Single episodes


def of_key(sql: sqlite3.Connection, key: EpisodeAddress) -> EpisodeColumns | None:
    """Return the episode of a key, or None."""
    return _one(sql, _SAME_KEY, key)


def at(sql: sqlite3.Connection, number_: int) -> EpisodeColumns | None:
    """Return the episode at a position in the file, or None."""
    return _one(sql, "number = ?", (number_,))


def neighbors(
    sql: sqlite3.Connection, number_: int
) -> tuple[EpisodeColumns | None, EpisodeColumns | None]:
    """Return the episodes before and behind one in the file."""
    before = "number = (SELECT max(number) FROM episode WHERE number < ?)"
    behind = "number = (SELECT min(number) FROM episode WHERE number > ?)"
    return _one(sql, before, (number_,)), _one(sql, behind, (number_,))


def siblings(sql: sqlite3.Connection, key: EpisodeAddress) -> list[dict[str, Any]]:
    """Return the rows of an episode's group, itself included, by sample."""
    select = (
        f"SELECT {COLUMNS} FROM episode WHERE phase = ? AND step = ? AND task = ? "
        f"ORDER BY sample, attempt LIMIT {MAX_SIBLINGS}"
    )
    found = [EpisodeColumns._make(row) for row in sql.execute(select, key[:3])]
    return rows_of(sql, found)


def _one(sql: sqlite3.Connection, condition: str, values: Sequence[Any]) -> EpisodeColumns | None:
    row = sql.execute(f"SELECT {COLUMNS} FROM episode WHERE {condition}", values).fetchone()
    return None if row is None else EpisodeColumns._make(row)


def rows_of(sql: sqlite3.Connection, found: Sequence[EpisodeColumns]) -> list[dict[str, Any]]:
    """Return rows of a list, with their texts."""
    # Each statement gives the interpreter to the thread that indexes: one instead of a hundred.
    marks = ", ".join("?" * len(found))
    select = f"SELECT number, prompt, reply FROM shown WHERE number IN ({marks})"
    shown = sql.execute(select, [columns.number for columns in found]).fetchall()
    texts = {number_: (prompt, reply) for number_, prompt, reply in shown}
    # There are none where another viewer has emptied the index since the rows were found.
    return [row_of(columns, *texts.get(columns.number, ("", ""))) for columns in found]

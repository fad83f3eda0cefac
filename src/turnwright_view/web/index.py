"""Index of a run's trajectories: byte offsets, and one row of the table per
trajectory in memory."""

from __future__ import annotations

import math
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from turnwright.display.run_data import (
    Row,
    as_it_is,
    episode_record,
    integer,
    load_at,
    mapping,
    number,
    read_line,
    unreadable_lines,
)
from turnwright.records.run_dir import complete_lines

# Maximum bytes searched for a text per request; the next request continues.
MAX_SCANNED = 128 * 2**20
PAGE = 100


class IndexEntry(NamedTuple):
    """A trajectory's row of the table."""

    at: int  # byte offset of its line
    phase: str
    step: int  # from 1 in training, like the rows of metrics.jsonl; elsewhere the step of the key
    task: str
    sample: int
    attempt: int
    reward: float | None
    stop: str
    error: str
    turns: int
    tokens: int  # number of sampled tokens
    tools: tuple[str, ...]
    images: int
    branches: int
    wall_s: float

    @property
    def played(self) -> int:
        """Step of the key, from 0 in training."""
        return self.step - (self.phase == "train")


class TableFilter(NamedTuple):
    """Filter of the table; empty fields match all."""

    phase: str = ""
    step: tuple[float | None, float | None] = (None, None)
    reward: tuple[float | None, float | None] = (None, None)
    turns: tuple[float | None, float | None] = (None, None)
    stop: str = ""
    error: str = ""  # exact error; `*` matches any
    tool: str = ""
    task: str = ""
    text: str = ""

    def among(self, entries: list[IndexEntry]) -> list[IndexEntry]:
        """Return the matching entries, without their texts; one pass per condition."""
        for name in ("phase", "stop", "task"):
            if word := getattr(self, name):
                get = attrgetter(name)
                entries = [entry for entry in entries if get(entry) == word]
        if self.tool:
            entries = [entry for entry in entries if self.tool in entry.tools]
        if self.error == "*":
            entries = [entry for entry in entries if entry.error]
        elif self.error:
            entries = [entry for entry in entries if entry.error == self.error]
        for name in ("step", "turns", "reward"):
            low, high = getattr(self, name)
            get = attrgetter(name)
            if low is not None:
                entries = [
                    entry for entry in entries if (value := get(entry)) is not None and value >= low
                ]
            if high is not None:
                entries = [
                    entry
                    for entry in entries
                    if (value := get(entry)) is not None and value <= high
                ]
        return entries


class TrajectoryIndex:
    """Index of one run, extended in a thread while the run or the reading continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trajectories = path / "trajectories.jsonl"
        self.entries: list[IndexEntry] = []
        self.training: dict[tuple[Any, ...], int] = {}
        """Offset in training.jsonl by key; of a step trained twice, the later one."""
        self.read = self.size = self.unreadable = 0
        self.failed: set[int] = set()
        """Offsets of records whose pages could not be made when they were opened."""
        self._trained = 0
        self._counting = threading.RLock()
        self._requests = 0
        self._reset_counts()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause reading while a request is answered: both hold the interpreter's lock."""
        with self._counting:
            self._requests += 1
        try:
            yield
        finally:
            with self._counting:
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

    def update(self, most: int = sys.maxsize) -> bool:
        """Read about `most` bytes of new lines, and return whether there may be more."""
        self.size = self.trajectories.stat().st_size if self.trajectories.is_file() else 0
        if self.size < self.read:  # replaced by another run
            self.entries, self.training, self.read, self._trained, self.unreadable = [], {}, 0, 0, 0
            self.failed = set()
            with self._counting:
                self._reset_counts()
        start = self.read
        for at, line in complete_lines(self.trajectories, self.read):
            if (entry := entry_of(at, line)) is None:
                self.unreadable += 1
            else:
                self.entries.append(entry)
            self.read = at + len(line)
            if self.read - start > most or self._stop.is_set():
                return True
            while self._requests and not self._stop.is_set():  # requests have priority
                time.sleep(0.001)
        for at, line in complete_lines(self.path / "training.jsonl", self._trained):
            key = mapping(read_line(line, as_it_is)).get("key")
            if isinstance(key, list):
                self.training[tuple(map(str, key))] = at
            self._trained = at + len(line)
        return False

    def _reset_counts(self) -> None:
        self._counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("phase", "stop", "error", "tool")
        }
        self._counted = 0

    def _follow(self) -> None:
        while not self._stop.is_set():
            more = False
            with suppress(Exception):  # whatever a file holds or lacks: the next round may read it
                more = self.update(8 * 2**20)
            self._stop.wait(0.001 if more else 0.5)

    def find(
        self,
        wanted: TableFilter,
        start: int = 0,
        most: int = PAGE,
        newest: bool = False,
        worst: bool = False,
    ) -> dict[str, Any]:
        """Return `most` matching `rows` from the index `start` on, their `total` (None in a text
        search), and the `next` start.

        The newest come first, or those of the worst reward (none before any);
        `next` is None at the end.
        """
        matching = wanted.among(self.entries[::-1] if newest else self.entries[:])
        if worst:
            matching.sort(key=lambda entry: -math.inf if entry.reward is None else entry.reward)
        if wanted.text:
            return self._search(matching, wanted.text, start, most)
        rows = [entry._asdict() for entry in matching[start : start + most]]
        return {
            "rows": rows,
            "total": len(matching),
            "next": start + most if start + most < len(matching) else None,
        }

    def _search(
        self, matching: Sequence[IndexEntry], text: str, start: int, most: int
    ) -> dict[str, Any]:
        needle = orjson.dumps(text)[1:-1].lower()
        rows: list[dict[str, Any]] = []
        scanned = 0
        with self.trajectories.open("rb") as file:
            for position in range(start, len(matching)):
                if len(rows) == most or scanned > MAX_SCANNED:
                    return {"rows": rows, "total": None, "next": position}
                file.seek(matching[position].at)
                line = file.readline()
                scanned += len(line)
                if needle in line.lower() and _mentions(line, text):
                    rows.append(matching[position]._asdict())
        return {"rows": rows, "total": None, "next": None}

    @property
    def problems(self) -> list[str]:
        """What could not be read, one line each."""
        lines = [unreadable_lines(self.trajectories, self.unreadable)] if self.unreadable else []
        if self.failed:
            which = (
                "1 record that was opened"
                if len(self.failed) == 1
                else f"{len(self.failed)} records that were opened"
            )
            lines.append(f"{self.trajectories.name}: {which} cannot be read")
        return lines

    def facets(self) -> dict[str, list[str]]:
        """Return the values of each filter, the most frequent first; only
        new entries are counted."""
        with self._counting:
            entries = self.entries[self._counted :]
            for name in ("phase", "stop", "error"):
                self._counts[name].update(map(attrgetter(name), entries))
            self._counts["tool"].update(tool for entry in entries for tool in entry.tools)
            self._counted += len(entries)
            return {
                name: [value for value, _ in counts.most_common(50) if value]
                for name, counts in self._counts.items()
            }

    def entry(self, at: int) -> tuple[int, IndexEntry] | None:
        """Return (number, entry) at an offset, or None if no trajectory starts there."""
        number = bisect_left(self.entries, at, key=attrgetter("at"))
        found = self.entries[number : number + 1]
        return (number, found[0]) if found and found[0].at == at else None

    def siblings(self, entry: IndexEntry) -> list[IndexEntry]:
        """Return the trajectories of an entry's group, itself included, by sample."""
        name = (entry.phase, entry.step, entry.task)
        found = [one for one in self.entries[:] if (one.phase, one.step, one.task) == name]
        return sorted(found, key=lambda one: (one.sample, one.attempt))[:64]

    def row(self, entry: IndexEntry) -> Row:
        """Load the full record of a trajectory."""
        return load_at(self.trajectories, entry.at)

    def trained(self, entry: IndexEntry) -> Row:
        """Load the training record of a trajectory; empty if there is none."""
        key = tuple(map(str, (entry.phase, entry.played, entry.task, entry.sample, entry.attempt)))
        at = self.training.get(key)
        return {} if at is None else load_at(self.path / "training.jsonl", at)


def entry_of(at: int, line: bytes) -> IndexEntry | None:
    """Return the entry of a line, or None if it is no trajectory that can be read."""
    return read_line(line, lambda row: _entry(at, episode_record(row)))


def _entry(at: int, row: Row) -> IndexEntry:
    key, error = mapping(row.get("key")), mapping(row.get("error"))
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    tools: dict[str, None] = {}
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, Mapping)]
    for turn in turns:
        for call in mapping(turn.get("reply")).get("tool_calls") or ():
            tools[str(mapping(mapping(call).get("function")).get("name"))[:80]] = None
    return IndexEntry(
        at,
        sys.intern(str(key.get("phase", ""))),
        integer(key.get("step")) + (key.get("phase") == "train"),
        str(key.get("task", "")),
        integer(key.get("sample")),
        integer(key.get("attempt")),
        number(row.get("reward")),
        sys.intern(str(row.get("stop") or "")),
        sys.intern(f"{error.get('phase', '?')}/{error.get('type', '?')}"[:80]) if error else "",
        len(turns),
        sum(len(span.get("ids") or ()) for span in spans if span.get("origin") == "model"),
        tuple(map(sys.intern, list(tools)[:8])),
        sum(len(span.get("media") or ()) for span in spans),
        sum(integer(count) for count in mapping(row.get("branches")).values()),
        number(row.get("wall_s")) or 0.0,
    )


def _mentions(line: bytes, text: str) -> bool:
    """Return whether a text of the record has another in it; a record that
    cannot be read has none."""
    return bool(read_line(line, lambda row: any(text.lower() in one.lower() for one in texts(row))))


def texts(row: Row) -> Iterator[str]:
    """Yield all free texts of a record."""
    places = [(span, "text") for span in row.get("spans") or ()]
    places += [(row.get("error"), "message"), (row.get("error"), "traceback")]
    places += [(message, "content") for message in row.get("final") or ()]
    places += [(row.get("task"), "answer"), (row.get("key"), "task")]
    return (str(mapping(place).get(name) or "") for place, name in places)

"""A run as the viewer reads it: where each trajectory lies in its file; in memory is nothing but a line for the table."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from turnwise.viewer.run_data import Row, integer, load_at, number, parse

MOST_SCANNED = 128 * 2**20
"""Bytes that one request searches for a text; the next one goes on from there."""
PAGE = 100


class IndexEntry(NamedTuple):
    """A trajectory as the table shows it."""

    at: int
    """Byte offset of its line."""
    phase: str
    step: int
    """From 1 in training, as the rows of metrics.jsonl count; as in the key elsewhere."""
    task: str
    sample: int
    attempt: int
    reward: float | None
    stop: str
    error: str
    turns: int
    tokens: int
    """Sampled."""
    tools: tuple[str, ...]
    images: int
    branches: int
    wall_s: float

    @property
    def played(self) -> int:
        """The step in the key: from 0 in training."""
        return self.step - (self.phase == "train")


class TableFilter(NamedTuple):
    """What is asked for; empty takes all."""

    phase: str = ""
    step: tuple[float | None, float | None] = (None, None)
    reward: tuple[float | None, float | None] = (None, None)
    turns: tuple[float | None, float | None] = (None, None)
    stop: str = ""
    error: str = ""
    """`*` is any."""
    tool: str = ""
    task: str = ""
    text: str = ""

    def among(self, entries: list[IndexEntry]) -> list[IndexEntry]:
        """The entries that are meant, their texts aside; one pass over what is left for each condition that is set."""
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
                entries = [entry for entry in entries if (value := get(entry)) is not None and value >= low]
            if high is not None:
                entries = [entry for entry in entries if (value := get(entry)) is not None and value <= high]
        return entries


class TrajectoryIndex:
    """One run: an index of its trajectories that grows in a thread while the run, or the reading of it, goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trajectories = path / "trajectories.jsonl"
        self.entries: list[IndexEntry] = []
        self.training: dict[tuple[Any, ...], int] = {}
        """Offset in training.jsonl by key; where a step was trained twice, that of the later."""
        self.read = self.size = self.unreadable = 0
        self._trained = 0
        self._counting = threading.RLock()
        self._asked = 0
        self._forget()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While somebody waits for an answer, reading on waits too: both hold the interpreter's lock."""
        with self._counting:
            self._asked += 1
        try:
            yield
        finally:
            with self._counting:
                self._asked -= 1

    def start(self) -> None:
        """Read on in a thread until `close`."""
        self._thread = threading.Thread(target=self._follow, name="index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def update(self, most: int = sys.maxsize) -> bool:
        """Read lines that are new, about `most` bytes of them; whether there may be more."""
        self.size = self.trajectories.stat().st_size if self.trajectories.is_file() else 0
        if self.size < self.read:  # another run in its place
            self.entries, self.training, self.read, self._trained, self.unreadable = [], {}, 0, 0, 0
            with self._counting:
                self._forget()
        start = self.read
        for at, line in _lines(self.trajectories, self.read):
            entry = entry_of(at, line)
            if entry is None:
                self.unreadable += 1
            else:
                self.entries.append(entry)
            self.read = at + len(line)
            if self.read - start > most or self._stop.is_set():
                return True
            while self._asked and not self._stop.is_set():  # whoever looks comes first
                time.sleep(0.001)
        for at, line in _lines(self.path / "training.jsonl", self._trained):
            row = _parse(line)
            key = row.get("key")
            if isinstance(key, list):
                self.training[tuple(map(str, key))] = at
            self._trained = at + len(line)
        return False

    def _forget(self) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in ("phase", "stop", "error", "tool")}
        self._counted = 0

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                more = self.update(8 * 2**20)
            except OSError:
                more = False
            self._stop.wait(0.001 if more else 0.5)

    def find(
        self, wanted: TableFilter, start: int = 0, most: int = PAGE, newest: bool = False, worst: bool = False
    ) -> dict[str, Any]:
        """A page of entries.

        Args:
            start: of the entries that fit, the one to begin with.
            newest: the last ones first.
            worst: those without a reward first, then by reward.

        Returns:
            `rows`, `total` (None where a text is searched for), and `next`: what `start` has to be to go on, None at the end.
        """
        entries = self.entries[::-1] if newest else self.entries[:]
        fit = wanted.among(entries)
        if worst:
            fit.sort(key=lambda entry: -math.inf if entry.reward is None else entry.reward)
        if wanted.text:
            return self._search(fit, wanted.text, start, most)
        rows = fit[start : start + most]
        following = start + most if start + most < len(fit) else None
        return {"rows": [entry._asdict() for entry in rows], "total": len(fit), "next": following}

    def _search(self, fit: Sequence[IndexEntry], text: str, start: int, most: int) -> dict[str, Any]:
        needle = orjson.dumps(text)[1:-1].lower()
        rows: list[dict[str, Any]] = []
        scanned = 0
        with self.trajectories.open("rb") as file:
            for position in range(start, len(fit)):
                if len(rows) == most or scanned > MOST_SCANNED:
                    return {"rows": rows, "total": None, "next": position}
                file.seek(fit[position].at)
                line = file.readline()
                scanned += len(line)
                if needle in line.lower() and any(text.lower() in said.lower() for said in texts(_parse(line))):
                    rows.append(fit[position]._asdict())
        return {"rows": rows, "total": None, "next": None}

    def facets(self) -> dict[str, list[str]]:
        """What can be chosen from, the commonest first; only entries that are new are counted."""
        with self._counting:
            return self._facets()

    def _facets(self) -> dict[str, list[str]]:
        entries = self.entries[self._counted :]
        for name in ("phase", "stop", "error"):
            self._counts[name].update(map(attrgetter(name), entries))
        self._counts["tool"].update(tool for entry in entries for tool in entry.tools)
        self._counted += len(entries)
        counts = {name: counter.copy() for name, counter in self._counts.items()}
        return {name: [value for value, _ in counter.most_common(50) if value] for name, counter in counts.items()}

    def entry(self, at: int) -> tuple[int, IndexEntry] | None:
        """The entry at an offset, with its number; None where no trajectory begins there."""
        low, high = 0, len(self.entries)
        while low < high:
            middle = (low + high) // 2
            if self.entries[middle].at < at:
                low = middle + 1
            else:
                high = middle
        return (low, self.entries[low]) if low < len(self.entries) and self.entries[low].at == at else None

    def siblings(self, entry: IndexEntry) -> list[IndexEntry]:
        """The trajectories of its group, itself included, by sample."""
        name = (entry.phase, entry.step, entry.task)
        found = [one for one in self.entries[:] if (one.phase, one.step, one.task) == name]
        return sorted(found, key=lambda one: (one.sample, one.attempt))[:64]

    def row(self, entry: IndexEntry) -> Row:
        """The whole record of a trajectory."""
        return load_at(self.trajectories, entry.at)

    def trained(self, entry: IndexEntry) -> Row:
        """What training made of a trajectory; empty where nothing is known."""
        key = tuple(map(str, (entry.phase, entry.played, entry.task, entry.sample, entry.attempt)))
        at = self.training.get(key)
        return {} if at is None else load_at(self.path / "training.jsonl", at)


def entry_of(at: int, line: bytes) -> IndexEntry | None:
    """What the table shows of a line; None where it is no trajectory."""
    row = _parse(line)
    if not row:
        return None
    key, error = _map(row.get("key")), _map(row.get("error"))
    spans = [span for span in row.get("spans") or () if isinstance(span, Mapping)]
    tools: dict[str, None] = {}
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, Mapping)]
    for turn in turns:
        for call in _map(turn.get("reply")).get("tool_calls") or ():
            tools[str(_map(_map(call).get("function")).get("name"))[:80]] = None
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
        sum(integer(count) for count in _map(row.get("branches")).values()),
        number(row.get("wall_s")) or 0.0,
    )


def texts(row: Row) -> Iterator[str]:
    """Everything of a record that somebody wrote."""
    for span in row.get("spans") or ():
        yield str(_map(span).get("text") or "")
    yield str(_map(row.get("error")).get("message") or "")
    yield str(_map(row.get("error")).get("traceback") or "")
    for message in row.get("final") or ():
        yield str(_map(message).get("content") or "")
    yield str(_map(row.get("task")).get("answer") or "")
    yield str(_map(row.get("key")).get("task") or "")


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line that is complete, from an offset on."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield start, line
            start += len(line)


def _parse(line: bytes) -> Row:
    found = parse(line)
    return found if isinstance(found, dict) else {}


def _map(value: Any) -> Row:
    return value if isinstance(value, Mapping) else {}

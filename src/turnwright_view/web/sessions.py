"""The runs of one viewer: those that it was given, or all below a folder, also new ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from turnwright_view.run_rows import RunRow, RunRows, find_runs, is_run_folder, unused_id
from turnwright_view.web.index import RunIndex

SEARCH_S = 5.0
"""Seconds after which a folder is searched for new runs again."""

MAX_FOLLOWED = 16
"""Maximum runs whose episodes are indexed at one time; those that were opened last."""


class Session:
    """Runs by id, with an index of the episodes of each one that somebody looks at."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._runs = find_runs(self._paths)
        self._searched = time.monotonic()
        self._rows = RunRows()
        self._indexes: dict[str, RunIndex] = {}
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def folder(self) -> str:
        """Name of the folder that has the runs; empty where runs were named themselves."""
        if len(self._paths) != 1 or is_run_folder(self._paths[0]):
            return ""
        return self._paths[0].resolve().name

    def runs(self) -> Mapping[str, Path]:
        """Return the runs by id; an id stays with its run."""
        with self._lock:
            if time.monotonic() - self._searched > SEARCH_S:
                known = set(self._runs.values())
                for run_id, path in find_runs(self._paths).items():
                    if path not in known:
                        self._runs[unused_id(run_id, self._runs)] = path
                self._searched = time.monotonic()
            return dict(self._runs)

    def rows(self) -> list[RunRow]:
        """Return the row of each run."""
        runs = self.runs()
        with self._lock:
            return self._rows.rows(runs)

    def row(self, run_id: str) -> RunRow | None:
        """Return the row of one run, or None."""
        path = self.runs().get(run_id)
        if path is None:
            return None
        with self._lock:
            return self._rows.rows({run_id: path})[0]

    def index(self, run_id: str, *, follow: bool = True) -> RunIndex | None:
        """Return the index of a run's episodes, which goes on in a thread; None for no such run."""
        path = self.runs().get(run_id)
        if path is None:
            return None
        oldest: RunIndex | None = None
        with self._lock:
            if self._is_closed:
                return None
            index = self._indexes.pop(run_id, None)
            if index is None:
                index = RunIndex(path)
                if follow:
                    index.start()
            self._indexes[run_id] = index  # the last one is that which was opened last
            if len(self._indexes) > MAX_FOLLOWED:
                oldest = self._indexes.pop(next(iter(self._indexes)))
        # Closing waits for a batch that is being written, and every request needs the lock.
        if oldest is not None:
            oldest.close()
        return index

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause indexing while a request is answered."""
        with self._lock:
            indexes = list(self._indexes.values())
        with ExitStack() as stack:
            for index in indexes:
                stack.enter_context(index.paused())
            yield

    def close(self) -> None:
        """Stop indexing."""
        with self._lock:
            self._is_closed = True
            for index in self._indexes.values():
                index.close()
            self._indexes.clear()

"""Garbage collection during rollouts.

It is rare, because episodes have no reference cycles, but comes before those of user code fill the
memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
from pathlib import Path
from typing import Self

NEW_OBJECTS = 250_000
"""New objects before a collection, which took 0.13 s for so many; no episode goes on meanwhile."""
GROWTH = 1.25
"""Growth of the process after which its young objects are collected anyway."""
PERIOD_S = 1.0
"""Seconds between two looks at the process's size."""


class _Thresholds:
    """Thresholds of the collector, raised while any context of this process is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_contexts = 0
        self._before = gc.get_threshold()

    def raise_for_one(self) -> None:
        with self._lock:
            if not self._open_contexts:
                self._before = gc.get_threshold()
                gc.set_threshold(max(self._before[0], NEW_OBJECTS), *self._before[1:])
            self._open_contexts += 1

    def restore_for_one(self) -> None:
        with self._lock:
            self._open_contexts -= 1
            if not self._open_contexts:
                gc.set_threshold(*self._before)


_THRESHOLDS = _Thresholds()


class GarbageWatch:
    """Context in which young objects are collected when 250,000 are new, or when the process has
    grown by a quarter.

    Python collects them at every 700 allocations. This cost 8% of the rollout loop, since a
    collection visits every id of every new record; the memory that cycles hold does not depend on
    their number.
    """

    def __enter__(self) -> Self:
        """Begin; an event loop must be running, which looks at the process's size every second."""
        _THRESHOLDS.raise_for_one()
        self._size = resident_bytes()
        self._later()
        return self

    def __exit__(self, *error: object) -> None:
        """End; the last open context restores Python's thresholds."""
        self._timer.cancel()
        _THRESHOLDS.restore_for_one()

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        size = resident_bytes()
        if size > GROWTH * self._size and gc.isenabled():
            gc.collect(1)
            self._size = resident_bytes()
        else:
            self._size = min(self._size, size)
        self._later()


def resident_bytes() -> int:
    """Return the size of this process in memory, in bytes.

    Where there is no /proc it is the peak, in units of the system.
    """
    try:
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

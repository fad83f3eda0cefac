"""The process of a tracker: follows a run's metrics.jsonl, and hands each row on.

The file is the queue between training and tracker. Training only ever appends to it, so nothing that a tracker does can fill
memory, hold a lock, or lose a row for those that come later; what was handed on is remembered, so that a resumed run goes on
behind it. Ends when its standard input does: with the training process, however that ended.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.trace.measure import flatten_row
from turnwise.view.rundir import integer, parse
from turnwise.view.track.base import Tracker, folder_of, tracker_of

POLL_S = 0.5
LEAST_FREE = 256 * 2**20
"""Bytes that a tracker leaves free on the run's disk: with fewer it ends, before the run itself cannot write any more."""
MOST_FILE = 2**30
"""Bytes of one file that a tracker may write."""


class DiskFull(Exception):
    """The disk of the run is nearly full."""


class TrackerPosition:
    """How far a tracker is, in RUN/track/NAME.json."""

    def __init__(self, run: Path, spec: str) -> None:
        self.path = run / "track" / f"{folder_of(spec)}.json"
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self.offset, self.rows, self.error = integer(found.get("offset", 0)), integer(found.get("rows", 0)), ""

    def save(self) -> None:
        """Write it down."""
        told = {"offset": self.offset, "rows": self.rows, "error": self.error}
        fresh = self.path.with_suffix(".writing")
        fresh.write_text(json.dumps(told), encoding="utf-8")
        os.replace(fresh, self.path)


def rows_from(path: Path, offset: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(offset behind it, row) of each complete line from an offset on."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            row = parse(line)
            yield offset, row if isinstance(row, dict) else {}


def forward_rows(tracker: Tracker, run: Path, position: TrackerPosition) -> None:
    """Hand on every row that is new.

    Raises:
        DiskFull: with under `LEAST_FREE` bytes left.
    """
    for offset, row in rows_from(run / "metrics.jsonl", position.offset):
        if shutil.disk_usage(run).free < LEAST_FREE:
            raise DiskFull(f"under {LEAST_FREE >> 20} MiB are left on the disk of {run}")
        figures = {name: value for name, value in flatten_row(row) if name != "step"}
        phase = "/".join(str(row[name]) for name in ("phase", "mode") if isinstance(row.get(name), str))
        if figures and phase:
            tracker.log(phase, max(0, integer(row.get("step"))), figures)
            position.rows += 1
        position.offset = offset
        position.save()


def follow(spec: str, run: Path, project: str, name: str) -> None:
    """Follow a run until standard input ends, then hand on what is left."""
    position = TrackerPosition(run, spec)
    try:
        position.save()
        config = json.loads((run / "config.json").read_text(encoding="utf-8")).get("config", {})
        tracker = tracker_of(spec)
        tracker.start(run, project, name, config)
        over = False
        while not over:
            over = bool(select.select([sys.stdin], [], [], POLL_S)[0])  # readable is the end: nobody ever writes
            forward_rows(tracker, run, position)
        tracker.finish()
    except BaseException as error:
        traceback.print_exc()
        position.error = f"{type(error).__name__}: {error}"[:400]
        position.save()
        os._exit(1)  # whatever threads a tracker has are not waited for


def main() -> None:
    """Begin: SPEC RUN PROJECT NAME."""
    spec, run, project, name = sys.argv[1:5]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    most = MOST_FILE if hard == resource.RLIM_INFINITY else min(MOST_FILE, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    follow(spec, Path(run), project, name)


if __name__ == "__main__":
    main()

"""Trackers, and a process for each that forwards the rows of a run's metrics.jsonl.

The file is the queue between training and tracker. Training only appends to it, so a tracker cannot
fill memory, hold a lock, or lose rows. The position in the file is saved, so a resumed run
continues after the last row sent. A tracker's process ends when its standard input closes: with the
training process, however that ended.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from turnwright import files, plugins
from turnwright.child_processes import ChildProcess, python_path
from turnwright.display.run_data import integer, mapping, parse
from turnwright.display.text import single_line
from turnwright.errors import ConfigError, UsageError
from turnwright.records.episode_metrics import flatten_row
from turnwright.records.run_dir import complete_lines


class Tracker(Protocol):
    """Receives the rows of a run, in its own process; a tracker that hangs, raises or prints cannot
    harm the run."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run, with its directory, `track.project`, `track.name` and its
        settings as in config.json.

        The tracker's files belong in the folder `track` of the run directory.
        """

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        """Receive a row: its metrics by flat name (`seconds.tool.p95`), all finite."""

    def finish(self) -> None:
        """Finish: the run has ended, or is stopped for now."""


def tracker_of(spec: str) -> Tracker:
    """Return a tracker by name, or a user-defined one as `file.py:Class` or `module:Class`.

    Raises:
        ConfigError: if it is none.
    """
    from turnwright.envs.resolve import load_object

    try:
        make = load_object(spec) if ":" in spec else plugins.load("trackers", spec)
        tracker: Tracker = make()
    except UsageError as error:
        raise ConfigError(f"track.to = {spec!r}: {error}") from error
    methods = ("start", "log", "finish")
    missing = [name for name in methods if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(
            f"track.to = {spec!r}: a tracker needs start, log and finish; it lacks "
            f"{', '.join(missing)}"
        )
    return tracker


def folder_of(spec: str) -> str:
    """Return a tracker's name as a file name."""
    return re.sub(r"\W+", "-", spec).strip("-")[-60:] or "own"


POLL_S = 0.5
"""Seconds between two looks for new rows."""

MIN_FREE = 256 * 2**20
"""Free bytes on the run's disk below which a tracker stops, so that the run can still write."""

MAX_FILE = 2**30
"""Maximum bytes of one file written by a tracker."""


class DiskFull(Exception):
    """The run's disk is nearly full."""


def _saved(path: Path) -> Mapping[str, Any]:
    """Return a saved position; empty if there is none."""
    try:
        position: Mapping[str, Any] = files.read_json(path)
    except (OSError, ValueError):
        return {}
    return position


class TrackerPosition:
    """A tracker's position in metrics.jsonl, saved in RUN/track/NAME.json."""

    def __init__(self, run: Path, spec: str) -> None:
        self.path = run / "track" / f"{folder_of(spec)}.json"
        saved = _saved(self.path)
        self.offset = integer(saved.get("offset", 0))
        self.rows = integer(saved.get("rows", 0))
        self.error = ""

    def save(self) -> None:
        """Save the position."""
        row = {"offset": self.offset, "rows": self.rows, "error": self.error}
        temporary = self.path.with_suffix(".writing")
        temporary.write_text(json.dumps(row), encoding="utf-8")
        os.replace(temporary, self.path)


def forward_rows(tracker: Tracker, run: Path, position: TrackerPosition) -> None:
    """Forward all new rows; raise `DiskFull` with less than `MIN_FREE` bytes left."""
    for offset, line in complete_lines(run / "metrics.jsonl", position.offset):
        if shutil.disk_usage(run).free < MIN_FREE:
            raise DiskFull(f"less than {MIN_FREE >> 20} MiB are free on the disk of {run}")
        row = mapping(parse(line))
        figures = {name: value for name, value in flatten_row(row) if name != "step"}
        parts = [row[name] for name in ("phase", "mode") if isinstance(row.get(name), str)]
        phase = "/".join(parts)
        if figures and phase:
            tracker.log(phase, max(0, integer(row.get("step"))), figures)
            position.rows += 1
        position.offset = offset + len(line)
        position.save()


def follow(spec: str, run: Path, project: str, name: str) -> None:
    """Follow a run until standard input ends, then forward the remaining rows."""
    position = TrackerPosition(run, spec)
    try:
        position.save()
        config = files.read_json(run / "config.json").get("config", {})
        tracker = tracker_of(spec)
        tracker.start(run, project, name, config)

        is_closed = False
        while not is_closed:
            # It receives no data, so that it is readable when it is closed.
            readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
            is_closed = bool(readable)
            forward_rows(tracker, run, position)
        tracker.finish()
    except BaseException as error:
        traceback.print_exc()
        position.error = f"{type(error).__name__}: {error}"[:400]
        position.save()
        os._exit(1)  # without waiting for the tracker's threads


def main() -> None:
    """Run a tracker's process; arguments SPEC RUN PROJECT NAME."""
    spec, run, project, name = sys.argv[1:5]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MAX_FILE if hard == resource.RLIM_INFINITY else min(MAX_FILE, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    follow(spec, Path(run), project, name)


PATIENCE_S = 10.0
"""Seconds that the end of a run waits for trackers to receive the last rows."""


class TrackerProcesses:
    """One process per tracker; training only writes metrics.jsonl."""

    def __init__(self, to: Sequence[str], run: Path, project: str, name: str | None) -> None:
        """Start the processes; `close` reports those that fail to start.

        The name of the run is by default the directory's.
        """
        self._run = run.resolve()
        self._processes: list[tuple[str, ChildProcess]] = []
        self._failed: list[str] = []
        for spec in to:
            try:
                process = self._start(spec, project, name or self._run.name)
                self._processes.append((spec, process))
            except OSError as error:
                self._failed.append(f"tracker {spec} could not be started ({error.strerror})")

    def _start(self, spec: str, project: str, name: str) -> ChildProcess:
        (self._run / "track").mkdir(exist_ok=True)
        # A tracker may be a module of the working directory; it must not hide one of a library.
        path = os.pathsep.join([python_path(), os.getcwd()])
        command = [sys.executable, "-P", "-m", "turnwright.trackers"]
        with self._log(spec).open("ab") as log:
            return ChildProcess(
                [*command, spec, str(self._run), project, name],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def _log(self, spec: str) -> Path:
        return self._run / "track" / f"{folder_of(spec)}.log"

    def close(self, patience_s: float | None = None) -> list[str]:
        """Wait for the last rows to arrive, kill trackers that need longer, and return a sentence
        for each that misses some."""
        deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        for _, process in self._processes:
            process.stdin.close()

        for spec, process in self._processes:
            is_stuck = not process.wait(deadline - time.monotonic())
            if is_stuck:
                process.kill()
            if is_stuck or process.status:
                self._failed.append(self._failure(spec, is_stuck))
        self._processes = []
        return self._failed

    def _failure(self, spec: str, is_stuck: bool) -> str:
        """Return how a tracker failed, and the command that sends the rest."""
        position = _saved(self._run / "track" / f"{folder_of(spec)}.json")
        why = "did not finish"
        if not is_stuck:
            error = str(position.get("error") or "died")
            why = f"failed: {single_line(error, 400)}"
        return (
            f"tracker {spec} {why} after {position.get('rows', 0)} rows; metrics.jsonl has all of "
            f"them, send the rest with: turnwright track {self._run} --to {spec} (see "
            f"{self._log(spec)})"
        )


if __name__ == "__main__":
    main()

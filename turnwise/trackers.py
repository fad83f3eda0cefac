"""Tracker, the built-in trackers, and the processes that feed them.

The process of a tracker: follows a run's metrics.jsonl, and hands each row on.

The file is the queue between training and tracker. Training only ever appends to it, so nothing that a tracker does can fill
memory, hold a lock, or lose a row for those that come later; what was handed on is remembered, so that a resumed run goes on
behind it. Ends when its standard input does: with the training process, however that ended.
"""

from __future__ import annotations

import importlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import ConfigError, UsageError
from turnwise.records.metrics import flatten_row
from turnwise.viewer.run_data import integer, parse
from turnwise.viewer.text import single_line

_TAG = re.compile(r"[^\w./() -]")


class Tracker(Protocol):
    """Takes the rows of a run. May hang, raise and write what it likes: only its own process is hurt."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Begin, or go on with, the run.

        Args:
            run: the run directory; files of the tracker belong into its `track` folder.
            project: `track.project`.
            name: `track.name`.
            config: the resolved settings, as config.json has them.
        """
        ...

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        """Take a row: its figures by flat name (`seconds.tool.p95`), all finite."""
        ...

    def finish(self) -> None:
        """The run is over, or stopped for now."""
        ...


class Tensorboard:
    """Event files in RUN/track/tensorboard; needs the package `tensorboard`, and neither TensorFlow nor torch."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Open an event file."""
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer: Any = writer.EventFileWriter(str(run / "track" / "tensorboard"))

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        """One event with a scalar per figure, `train/seconds.tool.p95`."""
        value = self._summaries.Summary.Value
        values = [value(tag=_TAG.sub("_", f"{phase}/{name}"), simple_value=figure) for name, figure in figures.items()]
        event = self._events.Event(wall_time=time.time(), step=step, summary=self._summaries.Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """Weights & Biases; its files lie in RUN/track. A run that is resumed goes on under the same id."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Begin or resume."""
        wandb: Any = importlib.import_module("wandb")
        own = sha256(str(run.resolve()).encode()).hexdigest()[:16]
        where = {"dir": str(run / "track"), "id": own, "resume": "allow"}
        self._run: Any = wandb.init(project=project, name=name, config=dict(config), **where)
        self._phases: set[str] = set()

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        """A row whose axis is the step of its phase."""
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log({f"{phase}/{figure}": value for figure, value in figures.items()} | {f"{phase}/step": step})

    def finish(self) -> None:
        """Send the rest."""
        self._run.finish()


class Trackio:
    """trackio, which keeps runs on this machine and shows them with `trackio show`."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Begin or resume."""
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        """A row with its step beside it, since several phases count their own."""
        self._trackio.log({f"{phase}/{figure}": value for figure, value in figures.items()} | {f"{phase}/step": step})

    def finish(self) -> None:
        """Write the rest."""
        self._trackio.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {"trackio": Trackio, "wandb": Wandb, "tensorboard": Tensorboard}


def tracker_of(spec: str) -> Tracker:
    """A tracker by name, or one's own as `file.py:Class` or `module:Class`.

    Raises:
        ConfigError: when there is none.
    """
    if spec in TRACKERS:
        return TRACKERS[spec]()
    from turnwise.envs.resolve import load_object

    try:
        made = load_object(spec)()
    except UsageError as error:
        raise ConfigError(f"track.to = {spec!r}: {error}") from error
    lacks = [name for name in ("start", "log", "finish") if not callable(getattr(made, name, None))]
    if lacks:
        raise ConfigError(f"track.to = {spec!r}: a tracker needs start, log and finish; it lacks {', '.join(lacks)}")
    found: Tracker = made
    return found


def folder_of(spec: str) -> str:
    """A tracker's name as a file name."""
    return re.sub(r"\W+", "-", spec).strip("-")[-60:] or "own"


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


PATIENCE_S = 10.0
"""Seconds that the end of a run waits for trackers to take the last rows."""


class TrackerProcesses:
    """A process for each tracker; training writes metrics.jsonl and does nothing else for them."""

    def __init__(self, to: Sequence[str], run: Path, project: str, name: str | None) -> None:
        """Start them. One that cannot be started is told of by `close`.

        Args:
            to: trackers by name, or `file.py:Class`.
            run: the run directory.
            project: what they call the project.
            name: what they call the run; its directory's name where None.
        """
        self._run = run.resolve()
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._failed: list[str] = []
        for spec in to:
            try:
                (self._run / "track").mkdir(exist_ok=True)
                with (self._run / "track" / f"{folder_of(spec)}.log").open("ab") as log:
                    words = [*_COMMAND, spec, str(self._run), project, name or self._run.name]
                    process = subprocess.Popen(
                        words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=_environment()
                    )
            except OSError as error:
                self._failed.append(f"tracker {spec} could not be started ({error.strerror})")
                continue
            self._processes.append((spec, process))

    def close(self, patience_s: float | None = None) -> list[str]:
        """Let them take the last rows, and end those that do not come to an end.

        Returns:
            A sentence for each tracker that did not take everything.
        """
        until = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        for _, process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for spec, process in self._processes:
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
                stuck = False
            except subprocess.TimeoutExpired:
                process.kill()
                status, stuck = process.wait(), True
            if status or stuck:
                self._failed.append(self._told(spec, stuck))
        self._processes = []
        return self._failed

    def _told(self, spec: str, stuck: bool) -> str:
        try:
            found = json.loads((self._run / "track" / f"{folder_of(spec)}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        why = "did not come to an end" if stuck else single_line(str(found.get("error") or "died"), 400)
        log = self._run / "track" / f"{folder_of(spec)}.log"
        return (
            f"tracker {spec} {'' if stuck else 'failed: '}{why}, after {found.get('rows', 0)} rows; metrics.jsonl has all, "
            f"send the rest with: turnwise track {self._run} --to {spec} (see {log})"
        )


def follow_once(to: Sequence[str], run: Path, project: str, name: str | None, patience_s: float = 600.0) -> list[str]:
    """Send what a run that is over, or stopped, has in its metrics.jsonl; gives what went wrong, a sentence each."""
    return TrackerProcesses(to, run, project, name).close(patience_s)


_COMMAND = (sys.executable, "-m", "turnwise.trackers")


def _environment() -> dict[str, str]:
    """That of this process, in which Turnwise itself can be imported wherever it came from."""
    root = str(Path(__file__).parents[3])
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


if __name__ == "__main__":
    main()

"""What a tracker is, and those that come with Turnwise; each imports its package when it starts, in a process of its own."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import ConfigError, UsageError

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
    from turnwise.env.resolve import load_object

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

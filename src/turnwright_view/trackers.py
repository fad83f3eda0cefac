"""Trackers of other projects, each in a process of its own: TensorBoard,
Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from turnwright.trackers import Tracker

_TAG = re.compile(r"[^\w./() -]")


class Tensorboard(Tracker):
    """Writes event files to RUN/track/tensorboard; needs the package `tensorboard`, but neither
    TensorFlow nor torch."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer: Any = writer.EventFileWriter(str(run / "track" / "tensorboard"))

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        values = [
            value(tag=_TAG.sub("_", f"{phase}/{name}"), simple_value=figure)
            for name, figure in figures.items()
        ]
        event = self._events.Event(
            wall_time=time.time(), step=step, summary=self._summaries.Summary(value=values)
        )
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases, with its files in RUN/track; a resumed run keeps its id."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        own = sha256(str(run.resolve()).encode()).hexdigest()[:16]
        where = {"dir": str(run / "track"), "id": own, "resume": "allow"}
        self._run: Any = wandb.init(project=project, name=name, config=dict(config), **where)
        self._phases: set[str] = set()

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        if phase not in self._phases:  # its axis is the step of its phase
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log(_with_step(phase, step, figures))

    def finish(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """trackio, which stores runs on this machine and displays them with `trackio show`."""

    def start(self, run: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(
            project=project, name=name, config=dict(config), resume="allow", embed=False
        )

    def log(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(_with_step(phase, step, figures))

    def finish(self) -> None:
        self._trackio.finish()


def _with_step(phase: str, step: int, figures: Mapping[str, float]) -> dict[str, float]:
    """Return a row under the names of its phase, with its step, since each phase counts its own."""
    return {f"{phase}/{figure}": value for figure, value in figures.items()} | {
        f"{phase}/step": step
    }

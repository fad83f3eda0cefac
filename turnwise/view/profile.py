"""A watch that writes what a run spends its time on as a Chrome trace: open it in Perfetto, or at chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.trace.watch import ProgressListener
from turnwise.view.rundir import number

FILE = "profile.json"
LEAST = 1e-3
"""Share of an episode under which one of its phases is left out."""
HELD = 20_000
"""Events that are held before they are written."""
TRACKS = ("phase", "step", "waiting for", "episodes, summed")


class ProfileListener:
    """Passes everything on to another watch, and appends an event for each phase, step and wait to RUN/profile.json.

    Times are wall-clock microseconds since the profile began. Of a training step, `rollout` and `train` are laid out as their
    seconds say, ending where the step does. What its episodes spent, summed over all of them though they overlap, stands as
    counters. Each episode is a span of its own, beside those that ran at the same time, with its phases under it. A
    profile that cannot be written costs the run nothing. Until the end the closing bracket is left out, as the format allows.
    """

    def __init__(self, watch: ProgressListener, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch, self._clock, self._began = watch, clock, clock()
        self._path = run / FILE
        self._text: list[str] = []
        self._open: dict[str, tuple[str, float]] = {}
        self._written = self._begun = False
        for thread, name in enumerate(TRACKS, 1):
            self._add({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}})

    def phase(self, name: str, total: int, unit: str) -> None:
        """A phase ends, the next begins."""
        self._begun = True
        self._next("phase", name)
        self._next("step", "")
        self._watch.phase(name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """A unit of the phase is done."""
        with suppress(Exception):  # figures of an odd shape
            self._step(done, figures)
        self._watch.progress(done, figures)

    def waiting(self, what: str) -> None:
        """A wait ends, maybe another begins; how many episodes are done is no part of its name."""
        self._next("waiting for", "episodes" if " episodes done" in what else what)
        self._watch.waiting(what)

    def note(self, text: str) -> None:
        """Passed on."""
        self._watch.note(text)

    def episode(self, session: str, phases: Sequence[tuple[str, float]], end: float) -> None:
        """An episode is over; phases under a thousandth of it are left out."""
        if not phases or not self._begun:
            return
        first = phases[0][1]
        ends = [began for _, began in phases[1:]] + [end]
        self._async("b", session, f"episode {session}", first)
        for (name, began), over in zip(phases, ends, strict=True):
            if over - began >= LEAST * (end - first):
                self._async("b", session, name, began)
                self._async("e", session, name, over)
        self._async("e", session, f"episode {session}", end)
        if len(self._text) > HELD:
            self._write()

    def _async(self, kind: str, session: str, name: str, moment: float) -> None:
        self._add({"ph": kind, "cat": "episode", "id": session, "pid": 1, "tid": 5, "name": name, "ts": self._at(moment)})

    def close(self) -> None:
        """End what is open, and the file."""
        if self._begun:  # a run that was refused has nothing to tell, and the directory may be another's
            for track in ("waiting for", "step", "phase"):
                self._next(track, "")
            self._write(end=True)
        self._begun = False
        self._watch.close()

    def _step(self, done: int, figures: Mapping[str, Any]) -> None:
        now = self._clock()
        train, rollout = number(figures.get("train_s")), number(figures.get("rollout_s"))
        if train is not None and rollout is not None:
            told = {name: value for name, value in figures.items() if isinstance(value, (int, float))}
            self._span("step", f"rollout {done}", now - train - rollout, now - train, {})
            self._span("step", f"train {done}", now - train, now, told)
        spent = figures.get("seconds")
        if isinstance(spent, Mapping):
            sums = {str(name): number(row.get("sum")) or 0.0 for name, row in spent.items() if isinstance(row, Mapping)}
            self._add({"ph": "C", "pid": 1, "tid": 4, "name": TRACKS[3], "ts": self._at(now), "args": sums})
        self._write()

    def _next(self, track: str, name: str) -> None:
        now = self._clock()
        before = self._open.pop(track, None)
        if before is not None and before[0] == name:
            self._open[track] = before
            return
        if before is not None:
            self._span(track, before[0], before[1], now, {})
        if name:
            self._open[track] = (name, now)

    def _span(self, track: str, name: str, start: float, end: float, told: Mapping[str, Any]) -> None:
        event = {"ph": "X", "pid": 1, "tid": TRACKS.index(track) + 1, "name": name, "ts": self._at(start)}
        self._add(event | {"dur": max(0, self._at(end) - self._at(start)), "args": dict(told)})

    def _at(self, moment: float) -> int:
        return max(0, round(1e6 * (moment - self._began)))

    def _add(self, event: Mapping[str, Any]) -> None:
        self._text.append(json.dumps(event, default=str))

    def _write(self, end: bool = False) -> None:
        text = ",\n".join(self._text)
        if text:
            text = f",\n{text}" if self._written else f"[\n{text}"
        with suppress(OSError):
            with self._path.open("a" if self._written else "w", encoding="utf-8") as file:
                file.write(text + ("\n]\n" if end else ""))
            self._written = True
        self._text = []

"""Progress displays for terminals, and a Chrome trace of a run.

A display never raises into the run and never delays it: `progress` only stores its arguments, and
drawing happens in rich's own thread, or on the next call when a line is due.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnwright.display.run_data import number
from turnwright.display.text import single_line
from turnwright.errors import UsageError
from turnwright.records.listeners import NullListener, ProgressListener

P = ParamSpec("P")

FILE = "profile.json"

MIN_SHARE = 1e-3
"""Share of an episode below which one of its phases is left out."""

MAX_BUFFERED = 20_000
"""Maximum number of buffered events."""

SPARKLINE_VALUES = 40
"""Last values that a sparkline shows."""

TRACKS = ("phase", "step", "waiting for", "episodes, summed")


class ProfileListener(ProgressListener):
    """Forwards everything to another listener, and appends an event for each phase, step and wait
    to RUN/profile.json.

    Times are wall-clock microseconds since the profile started. Within a training step, `rollout`
    and `train` have their measured lengths and end with the step. Seconds spent by the step's
    episodes are counters, summed although episodes overlap. Each episode is an asynchronous span
    with its phases below it. Write errors are ignored. The closing bracket is written last, as the
    format allows.
    """

    def __init__(
        self, watch: ProgressListener, run: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._watch, self._clock, self._origin = watch, clock, clock()
        self._path = run / FILE
        self._text: list[str] = []
        self._open: dict[str, tuple[str, float]] = {}
        self._written = self._started = False
        for thread, name in enumerate(TRACKS, 1):
            self._add(
                {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
            )

    def phase(self, name: str, total: int, unit: str) -> None:
        self._started = True
        self._next("phase", name)
        self._next("step", "")
        self._watch.phase(name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        with suppress(Exception):  # malformed metrics
            now = self._clock()
            train_s = number(figures.get("train_s"))
            rollout_s = number(figures.get("rollout_s"))
            if train_s is not None and rollout_s is not None:
                args = {}
                for name, value in figures.items():
                    if isinstance(value, (int, float)):
                        args[name] = value
                train_start = now - train_s
                self._span("step", f"rollout {done}", train_start - rollout_s, train_start, {})
                self._span("step", f"train {done}", train_start, now, args)

            seconds = figures.get("seconds")
            if isinstance(seconds, Mapping):
                sums = {}
                for name, row in seconds.items():
                    if isinstance(row, Mapping):
                        sums[str(name)] = number(row.get("sum")) or 0.0
                event = {"ph": "C", "pid": 1, "tid": 4, "name": TRACKS[3], "ts": self._at(now)}
                self._add({**event, "args": sums})
            self._write()
        self._watch.progress(done, figures)

    def waiting(self, what: str) -> None:
        """End a wait, and maybe start another; the count of finished episodes is not part of its
        name."""
        self._next("waiting for", "episodes" if " episodes; " in what else what)
        self._watch.waiting(what)

    def note(self, text: str) -> None:
        self._watch.note(text)

    def episode(self, session: str, phases: Sequence[tuple[str, float]], end: float) -> None:
        """Record a finished episode, without phases below a thousandth of it."""
        if not phases or not self._started:
            return
        first = phases[0][1]
        ends = [began for _, began in phases[1:]] + [end]
        self._async("b", session, f"episode {session}", first)
        for (name, began), over in zip(phases, ends, strict=True):
            if over - began >= MIN_SHARE * (end - first):
                self._async("b", session, name, began)
                self._async("e", session, name, over)
        self._async("e", session, f"episode {session}", end)
        if len(self._text) > MAX_BUFFERED:
            self._write()

    def _async(self, kind: str, session: str, name: str, moment: float) -> None:
        self._add(
            {
                "ph": kind,
                "cat": "episode",
                "id": session,
                "pid": 1,
                "tid": 5,
                "name": name,
                "ts": self._at(moment),
            }
        )

    def close(self) -> None:
        if self._started:
            # A rejected run has no events, and the directory may belong to another run.
            for track in ("waiting for", "step", "phase"):
                self._next(track, "")
            self._write(end=True)
        self._started = False
        self._watch.close()

    def _next(self, track: str, name: str) -> None:
        now = self._clock()
        before = self._open.get(track)
        if before is not None:
            if before[0] == name:
                return
            self._span(track, *self._open.pop(track), now, {})
        if name:
            self._open[track] = (name, now)

    def _span(
        self, track: str, name: str, start: float, end: float, args: Mapping[str, Any]
    ) -> None:
        event = {
            "ph": "X",
            "pid": 1,
            "tid": TRACKS.index(track) + 1,
            "name": name,
            "ts": self._at(start),
        }
        self._add(event | {"dur": max(0, self._at(end) - self._at(start)), "args": dict(args)})

    def _at(self, moment: float) -> int:
        return max(0, round(1e6 * (moment - self._origin)))

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


_BARS = "▁▂▃▄▅▆▇█"

# Displayed metrics, in order: key of metrics.jsonl, label, formatter.
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", "{:.3g}".format),
    ("reward", "reward", "{:.3f}".format),
    ("success", "success", "{:.1%}".format),
    ("greedy", "greedy", "{:.1%}".format),
    ("turns", "turns", "{:.2f}".format),
    ("tokens_per_s", "tokens/s", lambda x: amount(x)),
    ("trajectories_trained_share", "trained", "{:.0%}".format),
    ("kl", "kl", "{:.2g}".format),
    ("entropy", "entropy", "{:.2f}".format),
    ("mismatch_max", "logprob diff", "{:.1e}".format),
    ("lag_mean", "lag", "{:.2f}".format),
)


class ProgressState:
    """Metrics of a run for a display; cheap enough for hundreds of updates per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started = clock()
        self.notes: deque[str] = deque(maxlen=5)
        self.begin("starting", 0, "")

    def begin(self, name: str, total: int, unit: str) -> None:
        """Start a phase with empty metrics."""
        self.phase = single_line(str(name), 60)
        self.unit = single_line(str(unit), 20)
        self.total = max(0, int(total))
        self.done = 0
        self.phase_started = self.clock()
        self.figures: dict[str, float] = {}
        self.stops: Counter[str] = Counter()
        self.waiting = ""
        self.waiting_since = self.clock()
        self.series: dict[str, deque[float]] = {
            key: deque(maxlen=60) for key in ("reward", "success", "loss")
        }
        self._marks: deque[tuple[float, int]] = deque([(self.clock(), 0)], maxlen=32)

    def update(self, done: int, figures: Mapping[str, Any]) -> None:
        """Set the number of finished units and the latest metrics."""
        has_advanced = int(done) > self.done
        self.done = int(done)
        for key, value in figures.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and math.isfinite(value):
                self.figures[key] = float(value)
                if key in self.series and has_advanced:
                    self.series[key].append(float(value))
        stops = figures.get("stops")
        if isinstance(stops, Mapping):
            counts = {single_line(str(name), 24): int(count) for name, count in stops.items()}
            self.stops = Counter(counts)

        # At most one mark per half second, so that 32 of them cover enough time for a steady
        # estimate.
        if has_advanced:
            last_mark, _ = self._marks[-1]
            if self.clock() - last_mark >= 0.5 or len(self._marks) == 1:
                self._marks.append((self.clock(), self.done))

    def wait(self, what: str) -> None:
        """Set what the run is waiting for."""
        text = single_line(str(what), 100)
        if text != self.waiting:
            self.waiting = text
            self.waiting_since = self.clock()

    def left_s(self) -> float | None:
        """Return the remaining seconds of the phase at the recent pace, or None if unknown."""
        if not self.total or not 0 < self.done < self.total:
            return None
        since, done = self._marks[0]
        elapsed = self.clock() - since
        advanced = self.done - done
        if advanced <= 0 or elapsed <= 0:
            return None
        return elapsed / advanced * (self.total - self.done)


def figure_text(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the displayed metrics as (label, text)."""
    return [(label, write(figures[key])) for key, label, write in _FIGURES if key in figures]


def sparkline(values: list[float]) -> str:
    """Render the last `SPARKLINE_VALUES` values as a row of bars between their minimum and maximum.

    Example::

        >>> sparkline([0.0, 0.25, 0.5, 1.0])
        '▁▃▅█'
    """
    finite = [value for value in values[-SPARKLINE_VALUES:] if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite)
    high = max(finite)
    if high == low:
        return _BARS[3] * len(finite)

    highest_bar = len(_BARS) - 1
    bars = []
    for value in finite:
        height = int(len(_BARS) * (value - low) / (high - low))
        bars.append(_BARS[min(highest_bar, height)])
    return "".join(bars)


def duration(seconds: float) -> str:
    """Format a duration: 8 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def amount(value: float) -> str:
    """Format a count: 840, 12.3k, 4.1M.

    Example::

        >>> amount(840), amount(12_300), amount(4_100_000)
        ('840', '12.3k', '4.1M')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:.1f}G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.1f}k"
    return f"{value:.0f}"


def make_display(mode: str = "auto", *, stream: TextIO | None = None) -> ProgressListener:
    """Return a display for `auto`, `rich`, `plain` or `none`; it writes to standard error, so that
    results can be piped."""
    stream = sys.stderr if stream is None else stream
    if mode == "auto":
        is_dumb = os.environ.get("TERM", "") in ("", "dumb") or bool(os.environ.get("CI"))
        mode = "rich" if stream.isatty() and not is_dumb else "plain"
    if mode not in ("rich", "plain", "none"):
        raise UsageError(f"display {mode!r}: write auto, rich, plain or none")
    if mode == "none":
        return NullListener()
    return PlainDisplay(stream) if mode == "plain" else RichDisplay(stream)


def _never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """Suppress exceptions of a display: a closed pipe or terminal, or a malformed metric, must not
    stop the run."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(Exception):
            method(*args, **kwargs)

    return guarded


class PlainDisplay(ProgressListener):
    """Prints a line every few seconds, without control codes: for pipes, logs and CI."""

    def __init__(
        self, stream: TextIO, *, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._state = ProgressState(clock)
        self._printed_at = clock()
        self._printed_done = -1
        self._printed_waiting = ""

    @_never_raises
    def phase(self, name: str, total: int, unit: str) -> None:
        self._flush()
        state = self._state
        state.begin(name, total, unit)
        self._printed_done = -1
        self._print(f"{state.phase}: {state.total} {state.unit}" if state.total else state.phase)

    @_never_raises
    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        state = self._state
        state.update(done, figures)
        is_last = 0 < state.total <= state.done and self._printed_done != state.done
        if is_last or self._is_due():
            self._print_figures()

    @_never_raises
    def waiting(self, what: str) -> None:
        self._state.wait(what)
        if what and what != self._printed_waiting and self._is_due():
            self._printed_waiting = what
            self._print(f"{self._state.phase}: waiting for {self._state.waiting}")

    @_never_raises
    def note(self, text: str) -> None:
        self._print(text)

    @_never_raises
    def close(self) -> None:
        self._flush()

    def _is_due(self) -> bool:
        """Return whether the next line may be printed."""
        return self._clock() - self._printed_at >= self._every_s

    def _flush(self) -> None:
        if self._state.done > 0 and self._printed_done != self._state.done:
            self._print_figures()

    def _print_figures(self) -> None:
        state = self._state
        self._printed_done = state.done
        of_total = f"/{state.total}" if state.total else ""
        parts = [f"{state.phase} {state.done}{of_total} {state.unit}".strip()]
        parts += [f"{label} {text}" for label, text in figure_text(state.figures)]
        if state.stops:
            total = state.stops.total() or 1
            shares = [f"{name} {100 * n / total:.0f}%" for name, n in state.stops.most_common(3)]
            parts.append(f"stops {' '.join(shares)}")
        left_s = state.left_s()
        if left_s is not None:
            parts.append(f"{duration(left_s)} left")
        self._print("  ".join(parts))

    def _print(self, line: str) -> None:
        self._printed_at = self._clock()
        self._stream.write(single_line(line, 400) + "\n")
        self._stream.flush()


class RichDisplay(ProgressListener):
    """Live panel: phase, progress, metrics, stop reasons, waiting, time left, and the last notes.

    All strings are `Text` objects, so brackets in a model's text are never parsed as rich markup.
    """

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None) -> None:
        self._console = console or Console(file=stream, stderr=stream is None, highlight=False)
        self._state = ProgressState()
        self._live: Live | None = None

    @_never_raises
    def phase(self, name: str, total: int, unit: str) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self._frame,
                console=self._console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        self._print_result()
        self._state.begin(name, total, unit)

    @_never_raises
    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        self._state.update(done, figures)

    @_never_raises
    def waiting(self, what: str) -> None:
        self._state.wait(what)

    @_never_raises
    def note(self, text: str) -> None:
        self._state.notes.append(single_line(str(text), 300))

    @_never_raises
    def close(self) -> None:
        self._print_result()
        notes = list(self._state.notes)
        self._state.notes = deque(maxlen=5)  # a new one: the drawing thread may read the last
        live = self._live
        self._live = None
        if live is not None:
            live.stop()
        for note in notes:
            self._console.print(Text(note), soft_wrap=True)
        self._state.done = 0

    def _print_result(self) -> None:
        state = self._state
        if not state.done:
            return
        complete = state.done >= state.total
        mark = ("✓ ", "green") if complete else ("… ", "yellow")
        of = "" if complete else f" of {state.total}"
        line = Text.assemble(mark, (state.phase, "bold"), f"  {state.done}{of} {state.unit}")
        for label, value in figure_text(state.figures):
            line.append_text(Text.assemble("  ", (label, "dim"), f" {value}"))
        line.append(f"  {duration(state.clock() - state.phase_started)}", "dim")
        self._console.print(line, soft_wrap=True)

    def _frame(self) -> RenderableType:
        try:
            return self._draw()
        except Exception as error:  # would end the drawing thread, and the panel with it
            return Text(f"display: {type(error).__name__}")

    def _draw(self) -> RenderableType:
        """Return the panel."""
        state = self._state
        of_total = f" of {state.total}" if state.total else ""
        title = Text.assemble((state.phase, "bold"), f"  {state.done}{of_total} {state.unit}")
        rows: list[RenderableType] = [title, self._bar_and_times(), *self._figure_rows()]
        if state.stops:
            counts = state.stops.most_common(6)
            total = sum(count for _, count in counts) or 1
            line = Text.assemble(("stops  ", "dim"))
            for name, count in counts:
                line.append_text(Text.assemble(name, (f" {100 * count / total:.0f}%  ", "bold")))
            rows.append(line)
        if state.waiting:
            waited_s = state.clock() - state.waiting_since
            since = f" ({duration(waited_s)})" if waited_s >= 2 else ""
            rows.append(Text.assemble(("waiting for ", "yellow"), state.waiting, (since, "dim")))
        for note in list(state.notes):
            rows.append(Text(note, "dim", no_wrap=True, overflow="ellipsis"))
        return Panel(
            Group(*rows),
            title=Text("turnwright"),
            title_align="left",
            border_style="dim",
            width=min(100, self._console.width),
        )

    def _bar_and_times(self) -> Table:
        """Return the progress bar, beside the time that has passed and that is left."""
        state = self._state
        times = duration(state.clock() - state.phase_started)
        left_s = state.left_s()
        if left_s is not None:
            times += f", {duration(left_s)} left"

        total = state.total or None  # unknown: the bar pulses
        bar = ProgressBar(
            total,
            state.done,
            pulse=total is None,
            complete_style="cyan",
            finished_style="green",
            pulse_style="cyan",
        )
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(bar, Text(times, "dim"))
        return grid

    def _figure_rows(self) -> list[RenderableType]:
        """Return the metrics with a sparkline, each in a row, and the others in one line."""
        state = self._state
        with_sparkline = Table.grid(padding=(0, 2))
        others = Text()
        for label, value in figure_text(dict(state.figures)):
            series = state.series.get(label)
            if series:
                bars = Text(sparkline(list(series)), "cyan")
                with_sparkline.add_row(Text(label, "dim"), Text(value, "bold"), bars)
            else:
                others.append_text(Text.assemble((label, "dim"), " ", (value, "bold"), "   "))
        return [with_sparkline, others]

"""What a display knows: the phase, how far it is, the last figures, and how long the rest may take."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.view.text import single_line

_BARS = "▁▂▃▄▅▆▇█"
# Figures that are shown, in this order: key of metrics.jsonl, label, how it is written.
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda x: f"{x:.3g}"),
    ("reward", "reward", lambda x: f"{x:.3f}"),
    ("success", "success", lambda x: f"{100 * x:.1f}%"),
    ("turns", "turns", lambda x: f"{x:.2f}"),
    ("tokens_per_s", "tokens/s", lambda x: amount(x)),
    ("used", "used", lambda x: f"{100 * x:.0f}%"),
    ("kl", "kl", lambda x: f"{x:.2g}"),
    ("entropy", "entropy", lambda x: f"{x:.2f}"),
    ("mismatch_max", "mismatch", lambda x: f"{x:.1e}"),
)


class ProgressState:
    """The figures of one run as a display needs them; cheap enough to be called hundreds of times a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started = clock()
        self.notes: deque[str] = deque(maxlen=5)
        self.begin("starting", 0, "")

    def begin(self, name: str, total: int, unit: str) -> None:
        """A phase begins: its figures are its own."""
        self.phase = single_line(str(name), 60)
        self.unit = single_line(str(unit), 20)
        self.total = max(0, int(total))
        self.done = 0
        self.phase_started = self.clock()
        self.figures: dict[str, float] = {}
        self.stops: Counter[str] = Counter()
        self.waiting = ""
        self.waiting_since = self.clock()
        self.series: dict[str, deque[float]] = {key: deque(maxlen=60) for key in ("reward", "success", "loss")}
        self._marks: deque[tuple[float, int]] = deque([(self.clock(), 0)], maxlen=32)

    def update(self, done: int, figures: Mapping[str, Any]) -> None:
        """So many units are done."""
        advanced = int(done) > self.done
        self.done = int(done)
        for key, value in figures.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                self.figures[key] = float(value)
                if key in self.series and advanced:
                    self.series[key].append(float(value))
        stops = figures.get("stops")
        if isinstance(stops, Mapping):
            self.stops = Counter({single_line(str(name), 24): int(count) for name, count in stops.items()})
        # A mark per half second at most, so that 32 of them look back far enough to be steady.
        if advanced and (self.clock() - self._marks[-1][0] >= 0.5 or len(self._marks) == 1):
            self._marks.append((self.clock(), self.done))

    def wait(self, what: str) -> None:
        """What the run waits for now."""
        text = single_line(str(what), 100)
        if text != self.waiting:
            self.waiting, self.waiting_since = text, self.clock()

    def left_s(self) -> float | None:
        """Seconds that the rest of the phase takes at the recent pace, None while that is not known."""
        if not self.total or not 0 < self.done < self.total:
            return None
        since, done = self._marks[0]
        elapsed, advanced = self.clock() - since, self.done - done
        return elapsed / advanced * (self.total - self.done) if advanced > 0 and elapsed > 0 else None


def figure_text(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """The figures that are shown, as (label, text)."""
    return [(label, write(figures[key])) for key, label, write in _FIGURES if key in figures]


def sparkline(values: list[float], width: int = 40) -> str:
    """The last values as a row of bars between their least and their greatest."""
    values = [value for value in values[-width:] if math.isfinite(value)]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def duration(seconds: float) -> str:
    """A duration for people: 8 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(value: float) -> str:
    """A count for people: 840, 12.3k, 4.1M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{value:.0f}"

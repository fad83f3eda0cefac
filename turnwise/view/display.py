"""Watches that a person looks at: a live panel on a terminal, plain lines elsewhere.

A display never raises into the run and never slows it: `progress` only stores what it is given, and drawing happens in
rich's own thread, or on the next call when a line is due.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from turnwise.errors import UsageError
from turnwise.trace.watch import NullListener, ProgressListener
from turnwise.view.state import ProgressState, duration, figure_text
from turnwise.view.text import single_line


def make_display(mode: str = "auto", *, stream: TextIO | None = None) -> ProgressListener:
    """A watch for `auto`, `rich`, `plain` or `none`; it writes to standard error, so that results can be piped.

    Raises:
        UsageError: for another word.
    """
    stream = sys.stderr if stream is None else stream
    if mode == "auto":
        dumb = os.environ.get("TERM", "") in ("", "dumb") or bool(os.environ.get("CI"))
        mode = "rich" if stream.isatty() and not dumb else "plain"
    if mode == "none":
        return NullListener()
    if mode == "plain":
        return PlainDisplay(stream)
    if mode == "rich":
        from turnwise.view.live import RichDisplay

        return RichDisplay(stream)
    raise UsageError(f"display {mode!r}: write auto, rich, plain or none")


class PlainDisplay:
    """One line every few seconds, without control codes: for pipes, logs and CI."""

    def __init__(self, stream: TextIO, *, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._state = ProgressState(clock)
        self._printed_at = clock()
        self._printed_done = -1
        self._said_waiting = ""

    def phase(self, name: str, total: int, unit: str) -> None:
        """Say what begins."""
        self._guard(self._phase, name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """Keep the figures; print a line when one is due, and for the last unit."""
        self._guard(self._progress, done, figures)

    def waiting(self, what: str) -> None:
        """Say what the run waits for, where nothing was printed for a while."""
        self._guard(self._waiting, what)

    def note(self, text: str) -> None:
        """Print one line."""
        self._guard(lambda: self._print(single_line(text, 400)))

    def close(self) -> None:
        """Print the figures that were not printed yet."""
        self._guard(self._flush)

    def _phase(self, name: str, total: int, unit: str) -> None:
        self._flush()
        self._state.begin(name, total, unit)
        self._printed_done = -1
        self._print(f"{self._state.phase}: {self._state.total} {self._state.unit}" if self._state.total else self._state.phase)

    def _progress(self, done: int, figures: Mapping[str, Any]) -> None:
        self._state.update(done, figures)
        last = 0 < self._state.total <= self._state.done
        if (last and self._printed_done != self._state.done) or self._clock() - self._printed_at >= self._every_s:
            self._print_figures()

    def _waiting(self, what: str) -> None:
        self._state.wait(what)
        if what and what != self._said_waiting and self._clock() - self._printed_at >= self._every_s:
            self._said_waiting = what
            self._print(f"{self._state.phase}: waiting for {self._state.waiting}")

    def _flush(self) -> None:
        if self._state.done > 0 and self._printed_done != self._state.done:
            self._print_figures()

    def _print_figures(self) -> None:
        state = self._state
        self._printed_done = state.done
        of = f"/{state.total}" if state.total else ""
        parts = [f"{state.phase} {state.done}{of} {state.unit}".strip()]
        parts += [f"{label} {text}" for label, text in figure_text(state.figures)]
        if state.stops:
            whole = sum(state.stops.values()) or 1
            parts.append("stops " + " ".join(f"{name} {100 * n / whole:.0f}%" for name, n in state.stops.most_common(3)))
        left = state.left_s()
        if left is not None:
            parts.append(f"{duration(left)} left")
        self._print("  ".join(parts))

    def _print(self, line: str) -> None:
        self._printed_at = self._clock()
        self._stream.write(single_line(line, 400) + "\n")
        self._stream.flush()

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception:  # a closed pipe, a figure of an odd type: the run is worth more than its display
            return

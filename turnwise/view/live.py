"""A live panel on a terminal, drawn by rich at most eight times a second in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnwise.view.state import ProgressState, duration, figure_text, sparkline
from turnwise.view.text import single_line

REFRESH_HZ = 8


class RichDisplay:
    """Phase, progress, figures, stop reasons, what is waited for, time left, and the last notes.

    Everything is put in `Text` objects, so brackets in a model's text are never read as rich markup.
    """

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None) -> None:
        self._console = console or Console(file=stream, stderr=stream is None, highlight=False)
        self._state = ProgressState()
        self._live: Live | None = None

    def phase(self, name: str, total: int, unit: str) -> None:
        """A phase begins; what the one before came to stays above the panel."""
        self._guard(self._phase, name, total, unit)

    def progress(self, done: int, figures: Mapping[str, Any]) -> None:
        """Keep the figures for the next frame."""
        self._guard(self._state.update, done, figures)

    def waiting(self, what: str) -> None:
        """Keep what is waited for."""
        self._guard(self._state.wait, what)

    def note(self, text: str) -> None:
        """Keep one line."""
        self._guard(lambda: self._state.notes.append(single_line(str(text), 300)))

    def close(self) -> None:
        """Draw once more and give the terminal back."""
        self._guard(self._close)

    def _phase(self, name: str, total: int, unit: str) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self._frame,
                console=self._console,
                refresh_per_second=REFRESH_HZ,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        self._leave_line()
        self._state.begin(name, total, unit)

    def _close(self) -> None:
        self._leave_line()
        notes, self._state.notes = list(self._state.notes), self._state.notes.__class__(maxlen=5)
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        for note in notes:
            self._console.print(Text(note), soft_wrap=True)
        self._state.done = 0

    def _leave_line(self) -> None:
        state = self._state
        if not state.done:
            return
        whole = state.done >= state.total
        mark = ("✓ ", "green") if whole else ("… ", "yellow")
        of = "" if whole else f" of {state.total}"
        line = Text.assemble(mark, (state.phase, "bold"), f"  {state.done}{of} {state.unit}")
        for label, value in figure_text(state.figures):
            line.append_text(Text.assemble("  ", (label, "dim"), f" {value}"))
        line.append(f"  {duration(state.clock() - state.phase_started)}", "dim")
        self._console.print(line, soft_wrap=True)

    def _frame(self) -> RenderableType:
        try:
            return self._draw()
        except Exception as error:  # the thread that draws would end, and the panel with it
            return Text(f"display: {type(error).__name__}")

    def _draw(self) -> RenderableType:
        state = self._state
        rows: list[RenderableType] = []
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        of = f" of {state.total}" if state.total else ""
        left = state.left_s()
        times = f"{duration(state.clock() - state.phase_started)}" + (f", {duration(left)} left" if left is not None else "")
        head.add_row(
            ProgressBar(
                total=state.total or None,
                completed=state.done,
                pulse=not state.total,
                complete_style="cyan",
                finished_style="green",
                pulse_style="cyan",
            ),
            Text(times, "dim"),
        )
        rows += [Text.assemble((state.phase, "bold"), f"  {state.done}{of} {state.unit}"), head]
        figures = Table.grid(padding=(0, 2))
        rest = Text()
        for label, value in figure_text(dict(state.figures)):
            if state.series.get(label):
                figures.add_row(Text(label, "dim"), Text(value, "bold"), Text(sparkline(list(state.series[label])), "cyan"))
            else:
                rest.append_text(Text.assemble((label, "dim"), " ", (value, "bold"), "   "))
        rows += [figures, rest]
        if state.stops:
            rows.append(self._stops())
        if state.waiting:
            for_s = state.clock() - state.waiting_since
            since = f" ({duration(for_s)})" if for_s >= 2 else ""
            rows.append(Text.assemble(("waiting for ", "yellow"), state.waiting, (since, "dim")))
        rows += [Text(note, "dim", no_wrap=True, overflow="ellipsis") for note in list(state.notes)]
        return Panel(
            Group(*rows), title=Text("turnwise"), title_align="left", border_style="dim", width=min(100, self._console.width)
        )

    def _stops(self) -> RenderableType:
        counts = self._state.stops.most_common(6)
        whole = sum(count for _, count in counts) or 1
        line = Text("stops  ", "dim")
        for name, count in counts:
            line.append_text(Text.assemble(name, (f" {100 * count / whole:.0f}%  ", "bold")))
        return line

    def _guard(self, action: Callable[..., object], *args: Any) -> None:
        try:
            action(*args)
        except Exception:  # a terminal that went away, a figure of an odd type: the run is worth more than its display
            return

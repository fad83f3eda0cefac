"""Small charts as inline SVG, colored by the style sheet around them and readable without color."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from turnwright.display.text import visible

Point = tuple[float, float]
Format = Callable[[float], str]

MAX_POINTS = 240
"""Points of a line; a longer one is averaged."""

CHART_WIDTH = 440.0
CHART_HEIGHT = 170.0
"""Size in SVG units; the drawing scales with the page."""
BAR_WIDTH = 400.0
SHARES_WIDTH = 900.0
SMALL_WIDTH = 80.0

LABEL_HEIGHT = 11.0
"""Distance below which two labels overlap."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    label: str
    points: Sequence[Point]
    css: str = "s1"
    """CSS class: `s1` solid, with its last value beside it, or `thin`."""


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where the points of a chart are drawn."""

    x_low: float
    x_high: float
    ticks: Sequence[float]
    """Values of the vertical axis that have a line, from its lowest to its highest."""
    left: float
    right: float
    top: float
    bottom: float

    def at(self, x: float, y: float) -> Point:
        """Return the place of a point in the drawing."""
        across = 0.5
        if self.x_high > self.x_low:
            across = (x - self.x_low) / (self.x_high - self.x_low)
        up = (y - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return (
            self.left + across * (self.right - self.left),
            self.bottom - up * (self.bottom - self.top),
        )


def tag(name: str, *children: str | Markup, **attributes: str | float) -> Markup:
    """Return an element with escaped text and attribute values; `text_anchor` becomes
    `text-anchor`, `class_` `class`."""
    written = Markup("")
    for key, value in attributes.items():
        text = value
        if isinstance(value, float):
            text = f"{value:.2f}".rstrip("0").rstrip(".")
        attribute = key.rstrip("_").replace("_", "-")
        written += Markup(' {}="{}"').format(attribute, visible(str(text)))

    inside = Markup("")
    for child in children:
        inside += child if isinstance(child, Markup) else escape(visible(child))
    return Markup(f"<{name}{written}>") + inside + Markup(f"</{name}>")


def line_chart(title: str, series: Sequence[Series], write: Format) -> Markup:
    """Draw lines over steps; `write` formats the values."""
    drawn = [Series(line.label, _thin(line.points), line.css) for line in series if line.points]
    if not drawn:
        return Markup("")

    axes = _axes(drawn, write)
    parts = [*_grid(axes, write)]
    labels: list[float] = []  # heights that are taken
    for line in drawn:
        parts += _line(line, axes, write)
        if line.css != "thin":
            parts.append(_end_label(line, axes, write, labels))
    return tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {CHART_WIDTH:g} {CHART_HEIGHT:g}",
        role="img",
        class_="chart",
    )


def _axes(series: Sequence[Series], write: Format) -> _Axes:
    """Return axes that the points of all lines fit in."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    ticks = _ticks(min(ys), max(ys))
    longest = max(len(write(tick)) for tick in ticks)
    return _Axes(
        x_low=min(xs),
        x_high=max(xs),
        ticks=ticks,
        left=12.0 + 7.0 * longest,
        right=CHART_WIDTH - 58.0,  # the last values are written there
        top=10.0,
        bottom=CHART_HEIGHT - 24.0,
    )


def _grid(axes: _Axes, write: Format) -> list[Markup]:
    """Draw the lines of the vertical axis with their values, and the first and last step."""
    parts = []
    for tick in axes.ticks:
        _, y = axes.at(axes.x_low, tick)
        parts.append(tag("line", class_="grid", x1=axes.left, x2=axes.right, y1=y, y2=y))
        label = write(tick)
        parts.append(
            tag("text", label, class_="tick", x=axes.left - 6, y=y + 3.5, text_anchor="end")
        )

    steps = [(axes.x_low, "start"), (axes.x_high, "end")]
    if axes.x_high == axes.x_low:
        steps = [(axes.x_low, "middle")]
    for step, anchor in steps:
        x, _ = axes.at(step, axes.ticks[0])
        y = CHART_HEIGHT - 8.0
        parts.append(tag("text", f"step {step:g}", class_="tick", x=x, y=y, text_anchor=anchor))
    return parts


def _line(line: Series, axes: _Axes, write: Format) -> list[Markup]:
    """Draw a line, and over each of its points a circle that shows its value when pointed at."""
    marks = [axes.at(x, y) for x, y in line.points]
    parts = []
    if len(marks) > 1:
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in marks)
        parts.append(tag("path", class_=f"line {line.css}", d=path))

    css, radius = "hit", 5.0
    if len(marks) == 1:  # else there would be nothing to see
        css, radius = "mark", 3.5
    for (step, value), (x, y) in zip(line.points, marks, strict=True):
        hover = tag("title", f"{line.label}, step {step:g}: {write(value)}")
        parts.append(tag("circle", hover, class_=css, cx=x, cy=y, r=radius))
    return parts


def _end_label(line: Series, axes: _Axes, write: Format, taken: list[float]) -> Markup:
    """Write the last value of a line beside it, where no other label is."""
    last_step, last_value = line.points[-1]
    x, y = axes.at(last_step, last_value)
    height = y
    for shift in (0.0, 12.0, -12.0, 24.0, -24.0):
        if all(abs(y + shift - other) >= LABEL_HEIGHT for other in taken):
            height = y + shift
            break
    taken.append(height)
    return tag("text", write(last_value), class_="endlabel", x=x + 6, y=height + 3.5)


def interval_bar(value: float, low: float, high: float) -> Markup:
    """Draw a share from 0 to 1 as a bar, and its interval as a whisker."""
    start = f"{low * BAR_WIDTH:.1f}"
    end = f"{high * BAR_WIDTH:.1f}"
    width = max(1.0, value * BAR_WIDTH)
    return tag(
        "svg",
        tag("title", f"{value:.1%}, 95% interval {100 * low:.1f} to {high:.1%}"),
        tag("rect", class_="track", x=0.0, y=5.0, width=BAR_WIDTH, height=16.0, rx=2.0),
        tag("rect", class_="bar", x=0.0, y=5.0, width=width, height=16.0, rx=2.0),
        tag("path", class_="whisker", d=f"M{start},13H{end}M{start},8V18M{end},8V18"),
        viewBox="-2 0 404 26",
        class_="ibar",
        role="img",
        preserveAspectRatio="none",
    )


def share_bar(shares: Sequence[tuple[str, float]], heading: str) -> Markup:
    """Draw shares of a total in one bar, each with its number in a list beside it."""
    total = sum(value for _, value in shares) or 1.0
    parts: list[Markup] = []
    x = 0.0
    for number, (label, value) in enumerate(shares, 1):
        width = SHARES_WIDTH * value / total
        title = tag("title", f"{label}: {100 * value / total:.0f}%")
        css = f"part p{number}"
        inner = max(0.5, width - 2)
        parts.append(tag("rect", title, class_=css, x=x + 1, y=0.0, width=inner, height=28.0))
        if width > 24:
            middle = x + width / 2
            parts.append(
                tag("text", str(number), class_="inpart", x=middle, y=19.0, text_anchor="middle")
            )
        x += width
    return tag(
        "svg",
        tag("title", heading),
        *parts,
        viewBox=f"0 0 {SHARES_WIDTH:g} 28",
        class_="sbar",
        role="img",
    )


def small_bar(share: float) -> Markup:
    """Draw a share from 0 to 1 as a small bar for a table cell."""
    width = max(0.0, min(1.0, share)) * SMALL_WIDTH
    return tag(
        "svg",
        tag("rect", class_="track", x=0.0, y=2.0, width=SMALL_WIDTH, height=8.0),
        tag("rect", class_="bar", x=0.0, y=2.0, width=width, height=8.0),
        viewBox=f"0 0 {SMALL_WIDTH:g} 12",
        class_="tiny",
    )


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of the last `window` points at each point."""
    smoothed = []
    for place, (step, _) in enumerate(points):
        last = [value for _, value in points[max(0, place + 1 - window) : place + 1]]
        smoothed.append((step, sum(last) / len(last)))
    return smoothed


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers around a range."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low -= pad if low else 0.0  # a line at 0 starts the axis
        high += pad

    raw = (high - low) / 3
    size = 10 ** math.floor(math.log10(raw))
    unit = 10.0 * size
    for factor in (1, 2, 5):
        if factor * size >= raw * 0.999:
            unit = factor * size
            break
    first = math.floor(low / unit + 1e-9)
    last = math.ceil(high / unit - 1e-9)
    return [round(number * unit, 12) for number in range(first, last + 1)]


def _thin(points: Sequence[Point]) -> list[Point]:
    """Return at most `MAX_POINTS` points, each the mean of those that it stands for."""
    if len(points) <= MAX_POINTS:
        return list(points)

    size = math.ceil(len(points) / MAX_POINTS)
    means = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        last_step, _ = chunk[-1]
        means.append((last_step, sum(value for _, value in chunk) / len(chunk)))
    return means

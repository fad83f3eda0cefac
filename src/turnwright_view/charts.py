"""Small charts as inline SVG, colored by the page's style sheet and readable without color."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from turnwright.display.text import visible

Point = tuple[float, float]
Format = Callable[[float], str]
_MAX_POINTS = 240


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    label: str
    points: Sequence[Point]
    css: str = "s1"  # CSS class: `s1` solid, `s2` dashed, `dots` for single marks


def tag(name: str, *children: str | Markup, **attributes: str | float) -> Markup:
    """Return an element with escaped text and attribute values; `text_anchor` becomes
    `text-anchor`, `class_` `class`."""
    values = {
        key: f"{v:.2f}".rstrip("0").rstrip(".") if isinstance(v, float) else str(v)
        for key, v in attributes.items()
    }
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in values.items()
    )
    inside = Markup("").join(
        child if isinstance(child, Markup) else escape(visible(child)) for child in children
    )
    return Markup(f"<{name}{written}>") + inside + Markup(f"</{name}>")


def line_chart(
    title: str,
    series: Sequence[Series],
    write: Format,
    *,
    bounds: tuple[float | None, float | None] = (None, None),
) -> Markup:
    """Draw lines over steps, averaged down to at most 240 points; a bound of the vertical axis that
    is None fits the data."""
    width, height = 440, 170  # in SVG units; the drawing scales with the page
    drawn = [Series(s.label, _thin(s.points), s.css) for s in series if s.points]
    if not drawn:
        return Markup("")
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    ticks = _ticks(
        min(ys) if bounds[0] is None else bounds[0], max(ys) if bounds[1] is None else bounds[1]
    )
    left, right, top, bottom = (
        12 + 7 * max(len(write(t)) for t in ticks),
        width - 58,
        10,
        height - 24,
    )
    x_low, x_high = min(xs), max(xs)

    def at(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - ticks[0]) / (ticks[-1] - ticks[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    parts: list[Markup] = []
    for tick in ticks:
        y = at(x_low, tick)[1]
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(
            tag("text", write(tick), class_="tick", x=left - 6, y=y + 3.5, text_anchor="end")
        )
    for x, anchor in (
        ((x_low, "start"), (x_high, "end")) if x_high > x_low else ((x_low, "middle"),)
    ):
        parts.append(
            tag(
                "text",
                f"step {x:g}",
                class_="tick",
                x=at(x, ticks[0])[0],
                y=height - 8.0,
                text_anchor=anchor,
            )
        )
    ends: list[float] = []
    for s in drawn:
        marks = [at(x, y) for x, y in s.points]
        if s.css != "dots" and len(marks) > 1:
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in marks)
            parts.append(tag("path", class_=f"line {s.css}", d=path))
        radius = 3.5 if s.css == "dots" or len(marks) == 1 else 5.0
        for (x, y), (px, py) in zip(s.points, marks, strict=True):
            hover = tag("title", f"{s.label}, step {x:g}: {write(y)}")
            parts.append(
                tag(
                    "circle",
                    hover,
                    class_=f"mark {s.css}" if radius < 4 else "hit",
                    cx=px,
                    cy=py,
                    r=radius,
                )
            )
        if s.css != "thin":
            # The first that is a line away from others.
            heights = [marks[-1][1] + shift for shift in (0, 12, -12, 24, -24)]
            label_y = next(
                (y for y in heights if all(abs(y - end) >= 11 for end in ends)), heights[0]
            )
            ends.append(label_y)
            parts.append(
                tag(
                    "text",
                    write(s.points[-1][1]),
                    class_="endlabel",
                    x=marks[-1][0] + 6,
                    y=label_y + 3.5,
                )
            )
    return tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        class_="chart",
    )


def interval_bar(
    value: float, low: float, high: float, reference: float | None = None, *, after: bool = False
) -> Markup:
    """Draw a share from 0 to 1 as a bar, its interval as a whisker, and a
    reference as a dashed mark."""
    width = 400.0
    start, end = f"{low * width:.1f}", f"{high * width:.1f}"
    parts = [
        tag("rect", class_="track", x=0.0, y=5.0, width=width, height=16.0, rx=2.0),
        tag(
            "rect",
            class_="bar after" if after else "bar",
            x=0.0,
            y=5.0,
            width=max(1.0, value * width),
            height=16.0,
            rx=2.0,
        ),
        tag("path", class_="whisker", d=f"M{start},13H{end}M{start},8V18M{end},8V18"),
    ]
    if reference is not None:
        parts.append(tag("path", class_="reference", d=f"M{reference * width:.1f},0V26"))
    title = f"{value:.1%}, 95% interval {100 * low:.1f} to {high:.1%}"
    return tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox="-2 0 404 26",
        class_="ibar",
        role="img",
        preserveAspectRatio="none",
    )


def share_bar(shares: Sequence[tuple[str, float]], heading: str = "shares of the time") -> Markup:
    """Draw shares of a total in one bar, each with the number of its row in the table below."""
    total = sum(value for _, value in shares) or 1.0
    parts: list[Markup] = []
    x = 0.0
    for number, (label, value) in enumerate(shares, 1):
        width = 900.0 * value / total
        title = tag("title", f"{label}: {100 * value / total:.0f}%")
        parts.append(
            tag(
                "rect",
                title,
                class_=f"part p{number}",
                x=x + 1,
                y=0.0,
                width=max(0.5, width - 2),
                height=28.0,
            )
        )
        if width > 24:
            parts.append(
                tag(
                    "text",
                    str(number),
                    class_="inpart",
                    x=x + width / 2,
                    y=19.0,
                    text_anchor="middle",
                )
            )
        x += width
    return tag(
        "svg",
        tag("title", heading),
        *parts,
        viewBox="0 0 900 28",
        class_="sbar",
        role="img",
    )


def small_bar(share: float) -> Markup:
    """Draw a share from 0 to 1 as a small bar for a table cell."""
    widths = {"track": 80.0, "bar": max(0.0, min(1.0, share)) * 80}
    bars = [
        tag("rect", class_=name, x=0.0, y=2.0, width=width, height=8.0)
        for name, width in widths.items()
    ]
    return tag("svg", *bars, viewBox="0 0 80 12", class_="tiny")


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of the last `window` points at each point."""
    return [
        (
            points[i][0],
            sum(y for _, y in points[max(0, i + 1 - window) : i + 1]) / min(window, i + 1),
        )
        for i in range(len(points))
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers around a range."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - (pad if low else 0.0), high + pad
    raw = (high - low) / 3
    size = 10 ** math.floor(math.log10(raw))
    unit = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    return [
        round(i * unit, 12)
        for i in range(math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9) + 1)
    ]


def _thin(points: Sequence[Point]) -> list[Point]:
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / _MAX_POINTS)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]

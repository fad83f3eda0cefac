"""HTML of trajectories, groups, evaluations and runs, as a notebook shows them.

Static elements and inline SVG, without a script. All text is escaped, since models and tools wrote
it. Colors are those of the notebook, or stand out on light and on dark.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from turnwright import EvaluationResult, Group, ImageRef, MediaStore, Message, Trajectory, VideoRef
from turnwright.display.progress import duration
from turnwright.display.run_data import sentence_of
from turnwright.errors import MediaError
from turnwright.media import MediaLimits
from turnwright.saved_runs import Columns, HeldOutSuccess, Run, SavedEpisode
from turnwright_view.charts import (
    Series,
    interval_bar,
    line_chart,
    share_bar,
    small_bar,
    smooth,
    tag,
)
from turnwright_view.run_rows import RunRows

MAX_MESSAGES = 24
"""Messages of a conversation; those in the middle of a longer one are counted."""
MAX_TEXT = 2_000
"""Characters of a message."""
MAX_LINE = 160
"""Characters of a reply in a table."""
MAX_SAMPLES = 64
"""Rows of a group."""
MAX_STOPS = 8

MAX_PICTURES = 8
MAX_PIXELS = 160 * 160
"""Size to which a picture is scaled down."""
MAX_PICTURE_BYTES = 400_000
"""Bytes of all pictures of an output."""

SMOOTHED = 5
"""Steps over which the bold line of a curve is averaged."""

CURVES = (
    ("Reward", "reward", "{:.2f}"),
    ("Success", "success", "{:.0%}"),
    ("Turns", "turns", "{:.1f}"),
    ("Entropy", "entropy", "{:.2f}"),
)
"""Title, metric and format of the curves of a run."""

_HASH = re.compile("[0-9a-f]{64}")

_STYLE = """
.tw-out{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:960px}
.tw-out table{border-collapse:collapse;margin:6px 0;width:auto}
.tw-out th,.tw-out td{padding:2px 10px 2px 0;text-align:left;vertical-align:top;border:0;
background:none}
.tw-out .tw-num{text-align:right;font-variant-numeric:tabular-nums}
.tw-out .tw-head{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline;margin-bottom:4px}
.tw-out .tw-dim{opacity:.68}
.tw-out .tw-pill{padding:0 7px;border-radius:9px;background:rgba(128,128,128,.22)}
.tw-out .tw-good{background:rgba(46,160,67,.32)}
.tw-out .tw-bad{background:rgba(218,54,51,.32)}
.tw-out .tw-message{display:flex;gap:10px;border-top:1px solid rgba(128,128,128,.25);padding:3px 0}
.tw-out .tw-role{flex:0 0 84px;opacity:.68}
.tw-out .tw-text{flex:1;min-width:0;white-space:pre-wrap;overflow-wrap:anywhere;
font-family:ui-monospace,monospace;font-size:12px}
.tw-out .tw-reply{background:rgba(74,134,224,.13)}
.tw-out .tw-call{display:block;opacity:.85}
.tw-out img{max-width:160px;image-rendering:pixelated;margin:2px 4px 2px 0}
.tw-out .tw-charts{display:flex;flex-wrap:wrap;gap:10px 18px}
.tw-out .tw-charts figure{margin:0;width:300px}
.tw-out svg{max-width:100%;height:auto;overflow:visible}
.tw-out svg.ibar{width:220px;height:16px}
.tw-out svg.tiny{width:80px;height:12px}
.tw-out svg.sbar{width:420px;height:14px}
.tw-out svg.tw-spans{width:100%;height:12px}
.tw-out svg text{fill:currentColor;font-size:11px}
.tw-out svg .grid{stroke:currentColor;opacity:.15}
.tw-out svg .tick{opacity:.68}
.tw-out svg .line{fill:none;stroke:#4a86e0;stroke-width:2.2}
.tw-out svg .thin{stroke-width:1;opacity:.5}
.tw-out svg .mark{fill:#4a86e0}
.tw-out svg .hit{fill:transparent}
.tw-out svg .track{fill:rgba(128,128,128,.2)}
.tw-out svg .bar{fill:#4a86e0;opacity:.75}
.tw-out svg .whisker{stroke:currentColor;fill:none;stroke-width:1.5}
.tw-out svg .part,.tw-out svg .tw-other{fill:rgba(128,128,128,.4)}
.tw-out svg .p1,.tw-out svg .tw-trained{fill:#4a86e0}
.tw-out svg .p2,.tw-out svg .tw-untrained{fill:#d08700}
.tw-out svg .p3{fill:#2f9e62}
.tw-out svg .p4{fill:#b05cc6}
""".replace("\n", "")


def html(value: Any) -> str | None:
    """Return the HTML of a value; None for one of another type."""
    body: Markup
    if isinstance(value, SavedEpisode):
        body = _episode(value)
    elif isinstance(value, Trajectory):
        body = _trajectory(value, _Pictures(None))
    elif isinstance(value, Group):
        body = _group(value)
    elif isinstance(value, EvaluationResult):
        body = _evaluation(value)
    elif isinstance(value, Run):
        body = _run(value)
    else:
        return None
    return str(tag("div", Markup(f"<style>{_STYLE}</style>"), body, class_="tw-out"))


def _episode(episode: SavedEpisode) -> Markup:
    """Draw an episode of a run, with what training made of it."""
    facts = [f"{episode.phase}, step {episode.step}"]
    if episode.advantage is not None:
        facts.append(f"advantage {episode.advantage:.3g}")
    if episode.reason is not None:
        facts.append(f"not trained: {episode.reason}")
    return _trajectory(episode.trajectory, _Pictures(episode.run / "media"), facts)


def _trajectory(trajectory: Trajectory, pictures: _Pictures, facts: Sequence[str] = ()) -> Markup:
    """Draw what happened, the tokens as a strip, and the conversation of the last turn."""
    figures = [
        *facts,
        f"{len(trajectory.turns)} turns",
        f"{trajectory.sampled_tokens:,} sampled tokens",
        duration(trajectory.wall_s),
    ]
    head = tag(
        "div",
        tag("strong", _cut(f"task {trajectory.task.id}", MAX_LINE)),
        _reward(trajectory.reward),
        _stop(str(trajectory.stop or "running")),
        tag("span", ", ".join(figures), class_="tw-dim"),
        class_="tw-head",
    )

    failure = Markup("")
    if trajectory.error is not None:
        error = trajectory.error
        text = f"{error.type} in {error.phase}: {error.message}"
        failure = tag("div", _cut(text, MAX_TEXT), class_="tw-pill tw-bad")
    messages = _messages(trajectory, pictures)
    return Markup("").join([head, failure, _spans(trajectory), *messages])


def _spans(trajectory: Trajectory) -> Markup:
    """Draw the spans as a strip: sampled ids that are trained, those that are not, and all
    others."""
    total = sum(len(span.ids) for span in trajectory.spans)
    parts = []
    start = 0
    for span in trajectory.spans:
        count = len(span.ids)
        kinds = [("tw-other", str(span.origin), count)]
        if span.sampled:
            left_out = f"sampled, not trained: {span.untrained}"
            kinds = [
                ("tw-trained", "sampled", span.trained),
                ("tw-untrained", left_out, count - span.trained),
            ]
        for css, name, length in kinds:
            if length > 0:
                title = tag("title", f"{name}: {length:,} tokens")
                x = 1000.0 * start / total
                width = max(1000.0 * length / total - 1.0, 0.5)
                parts.append(tag("rect", title, class_=css, x=x, y=0.0, width=width, height=12.0))
            start += length
    if not parts:
        return Markup("")
    title = tag("title", f"{total:,} tokens: blue sampled and trained, orange sampled only")
    return tag(
        "svg",
        title,
        *parts,
        viewBox="0 0 1000 12",
        preserveAspectRatio="none",
        class_="tw-spans",
        role="img",
    )


def _messages(trajectory: Trajectory, pictures: _Pictures) -> Iterator[Markup]:
    """Yield the conversation of the last turn, without the middle of a long one."""
    conversation: list[tuple[Message, bool]] = []
    for number in trajectory.turn_chain(len(trajectory.turns) - 1):
        turn = trajectory.turns[number]
        conversation += [(message, False) for message in turn.messages]
        conversation.append((turn.reply, True))
    if not trajectory.turns:
        conversation = [(message, False) for message in trajectory.task.messages]
    conversation += [(message, False) for message in trajectory.final]

    left_out = len(conversation) - MAX_MESSAGES
    for place, (message, is_reply) in enumerate(conversation):
        if left_out > 0 and place == MAX_MESSAGES // 2:
            yield tag("div", f"… {left_out} more messages …", class_="tw-message tw-dim")
        if left_out <= 0 or not MAX_MESSAGES // 2 <= place < MAX_MESSAGES // 2 + left_out:
            yield _message(message, is_reply, pictures)


def _message(message: Message, is_reply: bool, pictures: _Pictures) -> Markup:
    parts: list[str | Markup] = []
    if message.reasoning:
        parts.append(tag("span", _cut(message.reasoning, MAX_TEXT) + "\n", class_="tw-dim"))
    parts.append(_cut(message.text, MAX_TEXT))
    for media in message.media:
        frames = media.frames if isinstance(media, VideoRef) else (media,)
        parts += [pictures.draw(frame) for frame in frames]
    for call in message.tool_calls:
        text = _cut(f"{call.name}({dict(call.arguments)})", MAX_TEXT)
        parts.append(tag("span", text, class_="tw-call"))
    return tag(
        "div",
        tag("span", _cut(message.role, 20), class_="tw-role"),
        tag("span", *parts, class_="tw-text"),
        class_="tw-message tw-reply" if is_reply else "tw-message",
    )


class _Pictures:
    """Pictures of one output, read from a run's media within limits."""

    def __init__(self, media: Path | None) -> None:
        self._store = None
        if media is not None and media.is_dir() and not media.is_symlink():
            self._store = MediaStore(media, limits=MediaLimits(pixels=20_000_000))
        self._left = MAX_PICTURES
        self._bytes_left = MAX_PICTURE_BYTES

    def draw(self, media: Any) -> Markup:
        """Return an image, or its size where it is not shown."""
        if not isinstance(media, ImageRef):
            return tag("span", "[image]", class_="tw-dim")

        size = f"[image of {media.width} × {media.height}]"
        is_named_by_hash = _HASH.fullmatch(str(media.sha256)) is not None
        if self._store is None or self._left <= 0 or not is_named_by_hash:
            return tag("span", size, class_="tw-dim")
        try:
            png = self._store.png_bytes(replace(media, max_pixels=MAX_PIXELS))
        except (MediaError, OSError, ValueError, ImportError):
            return tag("span", f"{size} cannot be read", class_="tw-dim")

        if len(png) > self._bytes_left:
            return tag("span", size, class_="tw-dim")
        self._left -= 1
        self._bytes_left -= len(png)
        source = f"data:image/png;base64,{b64encode(png).decode()}"
        return Markup('<img src="{}" alt="{}">').format(source, size)


def _group(group: Group) -> Markup:
    """Draw a group: a row for each of its trajectories."""
    rewards = [reward for reward in group.rewards if reward is not None]
    text = f"{len(group.trajectories)} trajectories"
    if rewards:
        spread = max(rewards) - min(rewards)
        text += f", mean reward {sum(rewards) / len(rewards):.3g}, spread {spread:.3g}"
        if len(rewards) > 1 and not spread:
            text += ": equal rewards give no signal"
    head = tag(
        "div",
        tag("strong", _cut(f"task {group.task.id}", MAX_LINE)),
        tag("span", text, class_="tw-dim"),
        class_="tw-head",
    )
    opening = ""
    if group.task.messages:
        opening = group.task.messages[-1].text_with_alt

    highest = max([abs(reward) for reward in rewards], default=0.0) or 1.0
    rows = []
    for trajectory in group.trajectories[:MAX_SAMPLES]:
        share = 0.0 if trajectory.reward is None else max(trajectory.reward, 0.0) / highest
        cells: list[str | Markup] = [
            str(trajectory.key.sample),
            _reward(trajectory.reward),
            small_bar(share),
            f"{len(trajectory.turns)}",
            f"{trajectory.sampled_tokens:,}",
            _stop(str(trajectory.stop or "running")),
            _cut(" ".join(trajectory.final_text.split()), MAX_LINE),
        ]
        rows.append(cells)
    left_out = len(group.trajectories) - len(rows)
    more = tag("div", f"… and {left_out} more", class_="tw-dim") if left_out > 0 else Markup("")
    names = ("sample", "reward", "", "turns", "tokens", "stop", "last reply")
    first_line = tag("div", _cut(" ".join(opening.split()), MAX_LINE), class_="tw-text")
    return Markup("").join([head, first_line, _table(names, rows), more])


def _evaluation(evaluation: EvaluationResult) -> Markup:
    """Draw an evaluation: success with its interval, pass@k, and how episodes ended."""
    rows: list[list[str | Markup]] = []
    for mode, scores in evaluation.scores.items():
        if scores.success is None:
            rows.append([mode, "no reward", "", "", f"{scores.failed} failed", ""])
            continue
        low, high = scores.ci
        failed = f", {scores.failed} failed" if scores.failed else ""
        rows.append(
            [
                mode,
                f"{scores.success:.1%}",
                interval_bar(scores.success, low, high),
                f"[{100 * low:.1f}, {100 * high:.1f}]",
                f"{scores.n}{failed}",
                f"{scores.turns:.2f}",
            ]
        )
    for k, estimate in evaluation.pass_at_k.items():
        bar = interval_bar(estimate.value, estimate.low, estimate.high)
        bounds = f"[{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
        rows.append([f"pass@{k}", f"{estimate.value:.1%}", bar, bounds, "", ""])
    names = ("", "success", "", "95% interval", "episodes", "turns")
    return _table(names, rows) + _stops(evaluation.stops)


def _stops(stops: Mapping[str, int]) -> Markup:
    """Draw how episodes ended, as shares of one bar with their names below it."""
    total = sum(stops.values())
    if not total:
        return Markup("")
    commonest = sorted(stops.items(), key=lambda item: (-item[1], item[0]))[:MAX_STOPS]
    names = []
    for number, (stop, count) in enumerate(commonest, 1):
        names.append(tag("span", f"{number} {_cut(stop, 40)} {count / total:.0%}"))
    shares = [(stop, float(count)) for stop, count in commonest]
    legend = tag("div", *names, class_="tw-head tw-dim")
    return share_bar(shares, "how episodes ended") + legend


def _run(run: Run) -> Markup:
    """Draw a run: what it is, what it learned, and its curves."""
    [row] = RunRows().rows({run.name: run.path})
    facts = [row.state, row.env, row.model, f"{row.steps} of {row.planned} steps"]
    if row.episodes is not None:
        facts.append(f"{row.episodes:,} episodes")
    if row.wall_s is not None:
        facts.append(duration(row.wall_s))
    head = tag(
        "div",
        tag("strong", row.name),
        tag("span", ", ".join(filter(None, facts)), class_="tw-dim"),
        class_="tw-head",
    )

    parts = [head, _held_out(run.evaluations)]
    train = run.metrics.get("train")
    if train is not None:
        charts = [_curve(title, train, name, form.format) for title, name, form in CURVES]
        drawn = [chart for chart in charts if chart]
        parts.append(tag("div", *drawn, class_="tw-charts"))
    return Markup("").join(parts)


def _held_out(evaluations: Sequence[HeldOutSuccess]) -> Markup:
    """Draw the sampled evaluations, those before and after last and the latest in between."""
    sampled = [success for success in evaluations if success.mode == "sampled"]
    shown = sampled if len(sampled) <= 6 else [sampled[0], *sampled[-5:]]
    rows: list[list[str | Markup]] = []
    for success in shown:
        rows.append(
            [
                _cut(success.name, 40),
                f"{success.success:.1%}",
                interval_bar(success.success, success.low, success.high),
                f"[{100 * success.low:.1f}, {100 * success.high:.1f}]",
                f"{success.n}",
            ]
        )
    if not rows:
        return Markup("")
    return _table(("held-out tasks", "success", "", "95% interval", "episodes"), rows)


def _curve(title: str, train: Columns, name: str, write: Callable[[float], str]) -> Markup:
    """Draw a metric over training steps; nothing where no step has it."""
    points = [
        (step, value)
        for step, value in zip(train.get("step", []), train.get(name, []), strict=False)
        if math.isfinite(step) and math.isfinite(value)
    ]
    if not points:
        return Markup("")
    series = [Series(title, points, "thin"), Series(title, smooth(points, SMOOTHED), "s1")]
    caption = tag("figcaption", title, class_="tw-dim")
    return tag("figure", caption, line_chart(title, series, write))


def _table(names: Sequence[str], rows: Sequence[Sequence[str | Markup]]) -> Markup:
    head = tag("tr", *[tag("th", name, scope="col") for name in names])
    body = [tag("tr", *[tag("td", cell) for cell in row]) for row in rows]
    return tag("table", tag("thead", head), tag("tbody", *body))


def _reward(reward: float | None) -> Markup:
    """Draw a reward as a pill: colored where it is clearly good or bad."""
    if reward is None:
        return tag("span", "reward not computed", class_="tw-pill")
    css = "tw-pill"
    if reward >= 1:
        css = "tw-pill tw-good"
    elif reward <= 0:
        css = "tw-pill tw-bad"
    return tag("span", f"reward {reward:.4g}", class_=css)


def _stop(stop: str) -> Markup:
    """Write a stop reason with its sentence as a tooltip."""
    return tag("span", _cut(stop, 40), class_="tw-pill", title=sentence_of(stop))


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]} … {len(text) - limit:,} more characters"

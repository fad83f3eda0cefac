"""`report.html`: a self-contained page about a run, without scripts or network access.

Text from models, tools and tasks is escaped; control and bidirectional characters are rendered as
visible signs. The content security policy forbids all scripts and requests, and all styles except
the page's own (by hash). Images are embedded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from turnwright.display.diagnosis import diagnose, findings
from turnwright.display.progress import amount, duration
from turnwright.display.run_data import (
    Row,
    RunData,
    index,
    integer,
    mapping,
    number,
    pair,
    read_run,
    sentence_of,
    sum_tables,
)
from turnwright.display.text import csp_digest, visible
from turnwright.errors import TraceError
from turnwright.records.episode_metrics import wilson
from turnwright_view.charts import Series, interval_bar, line_chart, share_bar, small_bar, smooth
from turnwright_view.conversation import Gallery, conversations

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True, slots=True)
class Bar:
    """Held-out success of one evaluation."""

    label: str
    value: float
    low: float
    high: float
    n: int | None
    turns: float | None
    drawing: Markup


Format = Callable[[float], str]
Bounds = tuple[float | None, float | None]
# Title, key of metrics.jsonl, formatter, note, vertical bounds.
Curve = tuple[str, str, Format, str, Bounds]
Chart = tuple[str, str, Markup]  # title, note on how to read it, drawing


percent = "{:.1%}".format
_percent0 = "{:.0%}".format
_fixed0 = "{:.0f}".format
_fixed2 = "{:.2f}".format


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{value:.2f} s"


def _power(value: float) -> str:
    return f"{value:.0e}" if value else "0"


_FREE: Bounds = (None, None)
_SHARE: Bounds = (0.0, 1.0)
_FROM_0: Bounds = (0.0, None)
_USED_SHARE = "trajectories whose group gave a signal; falls as tasks are solved"
# Curves of reinforcement.
_CURVES: tuple[Curve, ...] = (
    ("Reward", "reward", _fixed2, "mean of a step's episodes; bold: mean of 5 steps", _FREE),
    ("Success", "success", _percent0, "share of a step's episodes that succeeded", _SHARE),
    ("Turns", "turns", "{:.1f}".format, "mean turns of an episode", _FREE),
    (
        "Repetition",
        "repetition",
        percent,
        "share of 4-id sequences that repeat within a reply",
        _FROM_0,
    ),
    ("Reply length", "reply_tokens.mean", amount, "mean sampled tokens of a reply", _FROM_0),
    ("Sampled tokens", "sampled_tokens", amount, "per step", _FROM_0),
    ("Trained tokens", "trained_tokens", amount, "tokens that carried loss, per step", _FROM_0),
    ("Tokens per second", "tokens_per_s", amount, "sampled tokens over the rollout time", _FROM_0),
    ("Rollout time", "rollout_s", _seconds, "wall-clock seconds of a step's episodes", _FROM_0),
    ("Training time", "train_s", _seconds, "wall-clock seconds of a step's training", _FROM_0),
    (
        "Rollout over training",
        "rollout_over_train",
        _fixed2,
        "ratio of the two times, where there was an update",
        _FROM_0,
    ),
    ("Used share", "trajectories_trained_share", _percent0, _USED_SHARE, _SHARE),
    (
        "Mismatch",
        "mismatch_max",
        _power,
        "maximum |trainer logprob − engine logprob| of a token",
        _FROM_0,
    ),
    (
        "Lag",
        "lag_mean",
        _fixed2,
        "mean updates between the policy that sampled a trained token and the one trained",
        _FROM_0,
    ),
    (
        "Entropy",
        "entropy",
        _fixed2,
        "of the policy, per sampled token; at 0 exploration has ended",
        _FROM_0,
    ),
    ("Gradient norm", "grad_norm", _fixed2, "before scaling down", _FROM_0),
    (
        "Agreement",
        "gradient_agreement",
        _fixed2,
        "cosine of the gradient and those of earlier steps; around 0 is noise",
        _FREE,
    ),
    ("Clipped share", "clip_fraction", percent, "of sampled tokens", _FROM_0),
    ("KL", "kl", _power, "to the policy at the start of reinforcement", _FROM_0),
)


# Mode and name of an evaluation, and its key in summary.json.
_SUMMARISED = (
    ("sampled", "before", "success_before"),
    ("greedy", "before", "greedy_before"),
    ("sampled", "after", "success_after"),
    ("greedy", "after", "greedy_after"),
    ("blind", "after", "success_blind"),
)
BLIND = "after, every image gray"  # label of the blind control
_MODES = {"sampled": 0, "greedy": 1, "blind": 2}


def held_out(run: RunData) -> list[Bar]:
    """Return held-out success before, during and after training, sampled, greedy and blind, with
    Wilson 95% intervals."""
    rows: dict[tuple[str, str], Row] = {}
    for row in run.phase("eval"):
        if number(row.get("success")) is not None:
            rows[(str(row.get("mode", "sampled")), str(row.get("name", "")))] = row
    for mode, name, key in _SUMMARISED:
        value = number(run.summary.get(key))
        if (mode, name) not in rows and value is not None:
            known = {
                "success": value,
                "ci": run.summary.get(f"{key}_ci"),
                "n": run.summary.get("n_eval"),
            }
            if mode == "sampled":
                known["turns"] = run.summary.get(f"turns_{name}")
            rows[(mode, name)] = known
    reference = number(run.summary.get("single_turn_best"))
    order = {"before": 0, "after": 2}
    ranked = sorted(rows, key=lambda key: (_MODES.get(key[0], 1), order.get(key[1], 1)))
    return [_bar(mode, name, rows[mode, name], reference) for mode, name in ranked]


def _bar(mode: str, name: str, row: Row, reference: float | None) -> Bar:
    value = min(1.0, max(0.0, number(row.get("success")) or 0.0))
    n = integer(row.get("n"))
    low, high = pair(row.get("ci")) or (wilson(round(value * n), n) if n > 0 else (value, value))
    drawing = interval_bar(value, low, high, reference, after=name == "after" and mode != "blind")
    label = f"{name or 'held-out'}, {'every image gray' if mode == 'blind' else mode}"
    return Bar(label, value, low, high, n if n > 0 else None, number(row.get("turns")), drawing)


def sentence(run: RunData, bars: Sequence[Bar], played: int) -> str:
    """Summarize the result in one sentence that the intervals support."""
    by_label = {bar.label: bar for bar in bars}
    before, after = by_label.get("before, sampled"), by_label.get("after, sampled")
    steps = integer(run.summary.get("rl_steps"))
    trained = run.phase("train")
    if before is None or after is None:
        planned = mapping(run.config.get("train")).get("steps")
        of = f" of {planned}" if planned else ""
        if trained:
            reward = number(trained[-1].get("reward"))
            last = f" The last mean reward is {reward:.3f}." if reward is not None else ""
            return (
                f"The run has no final evaluation yet: {len(trained)}{of} reinforcement steps "
                f"are done.{last}"
            )
        if run.rows:
            return "Reinforcement has not started yet."
        return (
            f"{played:,} trajectories were played; nothing was trained."
            if played
            else "This run has no metrics yet."
        )
    taken = f" in {steps if steps >= 0 else len(trained)} reinforcement steps"
    change = f"{percent(before.value)} to {percent(after.value)}"
    if after.low > before.high:
        text = f"Reinforcement raised held-out success from {change}{taken}"
    elif after.high < before.low:
        text = f"Reinforcement lowered held-out success from {change}{taken}"
    else:
        text = (
            f"Held-out success went from {change}{taken}; the intervals overlap, so no change "
            "is established"
        )
    best = number(run.summary.get("single_turn_best"))
    if best is not None and after.low > best:
        text += f"; a single reply could reach {percent(best)} at best"
    if (blind := by_label.get(BLIND)) is not None:
        text += f"; with every image gray the same policy has {percent(blind.value)}"
    if before.turns is not None and after.turns is not None:
        text += f". An episode took {before.turns:.1f} turns before and {after.turns:.1f} after"
    return text + "."


def headline_metrics(run: RunData) -> list[tuple[str, str]]:
    """Return the headline metrics as (label, value)."""
    found: list[tuple[str, float | None, Format]] = [
        ("reinforcement steps", integer(run.summary.get("rl_steps")), _fixed0),
        ("wall time", number(run.summary.get("wall_s")), duration),
        ("CPU time", number(run.summary.get("cpu_s")), duration),
        ("held-out tasks", integer(run.summary.get("n_eval")), _fixed0),
        ("seed", integer(run.summary.get("seed", run.config.get("seed"))), _fixed0),
    ]
    tokens = sum(number(row.get("sampled_tokens")) or 0 for row in run.phase("train"))
    known = [
        (label, write(value)) for label, value, write in found if value is not None and value >= 0
    ]
    return [*known, ("sampled tokens", amount(tokens))] if tokens else known


def warmup_charts(run: RunData) -> list[Chart]:
    """Return the charts of the supervised phase, which trains on demonstrations, not on reward."""
    rows = run.phase("warmup")
    charts = _charts(
        rows, [("Supervised loss", "loss", _fixed2, "per sampled token, on demonstrations", _FREE)]
    )
    if success := _points(rows, "success"):
        series = [Series("success", success, "s1" if len(success) > 1 else "dots")]
        drawing = line_chart("Success at the gate", series, _percent0, bounds=(0, 1))
        charts.append(
            (
                "Success at the gate",
                "sampled, on training tasks; meeting the gate ends the phase",
                drawing,
            )
        )
    return charts


def stop_table(run: RunData) -> list[tuple[str, str, list[tuple[str, Markup]]]]:
    """Return stop reasons, their meanings, and their shares in the first and the last
    quarter of the steps."""
    rows = [row for row in run.phase("train") if isinstance(row.get("stops"), Mapping)]
    quarter = max(1, len(rows) // 4)
    parts = [sum_tables(part, "stops") for part in (rows[:quarter], rows[-quarter:])]
    names = sorted({*parts[0], *parts[1]}, key=lambda name: -parts[1][name] - parts[0][name] / 1e6)
    shares = {name: [part[name] / (part.total() or 1) for part in parts] for name in names}
    return [
        (name, sentence_of(name), [(percent(share), small_bar(share)) for share in found])
        for name, found in shares.items()
    ]


def untrained_table(run: RunData) -> list[tuple[str, str, str]]:
    """Return the untrained sampled tokens as (reason, tokens, share)."""
    rows = run.phase("train")
    counts = sum_tables(rows, "untrained")
    sampled = sum(number(row.get("sampled_tokens")) or 0 for row in rows)
    positive = ((name, count) for name, count in counts.most_common() if count > 0)
    return [
        (name, f"{count:,.0f}", percent(count / sampled) if sampled else "-")
        for name, count in positive
    ]


def lag_table(run: RunData) -> list[tuple[str, str, str, str, str]]:
    """Return the trained tokens by lag as (lag, tokens, share, KL, effective sample share),
    each step by its tokens."""
    rows = run.phase("train")
    counts = sum_tables(rows, "tokens_by_lag")

    def mean(name: str, lag: str) -> float | None:
        pairs = [
            (number(mapping(row.get(name)).get(lag)), mapping(row.get("tokens_by_lag")).get(lag))
            for row in rows
        ]
        known = [(value, number(count) or 0.0) for value, count in pairs if value is not None]
        total = sum(count for _, count in known)
        return sum(value * count for value, count in known) / total if total else None

    made = []
    for lag in sorted(counts, key=lambda lag: (len(lag), lag)):
        figures = [
            (mean("mismatch_kl_by_lag", lag), _power),
            (mean("importance_ess_by_lag", lag), _percent0),
        ]
        kl, ess = ("-" if value is None else write(value) for value, write in figures)
        made.append(
            (lag, f"{counts[lag]:,.0f}", percent(counts[lag] / (counts.total() or 1)), kl, ess)
        )
    return made


def time_split(run: RunData) -> tuple[Markup, list[tuple[str, str, str]]]:
    """Return the split of wall time: the bar, and (label, duration, share) rows."""
    spent: dict[str, float] = {}
    clock = 0.0
    for row in run.rows:
        now = number(row.get("time_s"))
        if now is None or now < clock:  # a resumed run restarts its clock
            clock = now or clock
            continue
        passed, clock = now - clock, now
        phase = str(row.get("phase"))
        if phase == "train":
            rollout = min(passed, number(row.get("rollout_s")) or 0.0)
            train = min(passed - rollout, number(row.get("train_s")) or 0.0)
            for name, value in (
                ("rollout", rollout),
                ("training", train),
                ("rest of the steps", passed - rollout - train),
            ):
                spent[name] = spent.get(name, 0.0) + value
        else:
            name = {"warmup": "warmup", "eval": "evaluation"}.get(phase, phase)
            spent[name] = spent.get(name, 0.0) + passed
    order = ("warmup", "rollout", "training", "rest of the steps", "evaluation")
    parts = [(name, value) for name, value in spent.items() if value > 0]
    parts.sort(key=lambda part: order.index(part[0]) if part[0] in order else 9)
    total_s = sum(value for _, value in parts)
    if not total_s:
        return Markup(""), []
    times = (
        (name, value, duration(value) if value >= 1 else f"{value:.2f} s") for name, value in parts
    )
    return share_bar(parts), [(name, time, percent(value / total_s)) for name, value, time in times]


def _charts(rows: Sequence[Row], curves: Sequence[Curve]) -> list[Chart]:
    charts = []
    for title, key, write, note, bounds in curves:
        points = _points(rows, key)
        series = [Series(title, points)]
        if key == "reward" and len(points) > 5:
            series = [
                Series(title, points, "thin"),
                Series(f"{title}, mean of 5 steps", smooth(points, 5)),
            ]
        if points:
            charts.append((title, note, line_chart(title, series, write, bounds=bounds)))
    return charts


def _points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of a metric, or of one in a table (`reply_tokens.mean`)."""
    first, _, inside = key.partition(".")
    values = (mapping(row.get(first)).get(inside) if inside else row.get(first) for row in rows)
    found = [
        (number(row.get("step")), number(value)) for row, value in zip(rows, values, strict=True)
    ]
    return [(x, y) for x, y in found if x is not None and y is not None]


_TEMPLATES = Path(__file__).parent / "templates"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run, by default to `run_dir/report.html`, and return its path; missing
    files leave out parts."""
    path = out or run_dir / "report.html"
    page = render_report(run_dir).encode("utf-8")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(page)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        why = f"cannot be written ({error.strerror}); free space or choose another path with --html"
        raise TraceError(f"{path}: {why}") from error
    return path


@cache
def _template() -> jinja2.Template:
    """Return the compiled template of the page; compiling takes longer than
    rendering a short run."""
    import jinja2

    def finalize(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def render_report(run_dir: Path) -> str:
    """Render the page."""
    run = read_run(run_dir)
    problems = list(run.problems)
    trajectories = run_dir / "trajectories.jsonl"
    entries = index(trajectories, problems)
    style = (_TEMPLATES / "report.css.jinja").read_text(encoding="utf-8")
    bars = held_out(run)
    time_bar, time_rows = time_split(run)
    changed, defaults = settings(run)
    found = run.summary.get("machine")
    machine = found.items() if isinstance(found, Mapping) else [("machine", found)] if found else []
    gallery = Gallery(run_dir)
    prepared = list(conversations(trajectories, entries, problems, gallery, run.policies))
    images = " img-src data:;" if gallery.used else ""
    return _template().render(
        name=run_dir.resolve().name,
        style=Markup(style),  # the only unescaped text: part of this package
        policy=f"default-src 'none';{images} style-src 'sha256-{csp_digest(style)}'; base-uri "
        "'none'; form-action 'none'",
        sentence=sentence(run, bars, len(entries)),
        tiles=headline_metrics(run),
        bars=bars,
        blind=any(bar.label == BLIND for bar in bars),
        single_turn_best=number(run.summary.get("single_turn_best")),
        percent=percent,
        warmup=warmup_charts(run),
        reinforcement=_charts(run.phase("train"), _CURVES),
        stops=stop_table(run),
        untrained=untrained_table(run),
        lags=lag_table(run),
        time_bar=time_bar,
        time_rows=time_rows,
        trajectories=len(entries),
        conversations=prepared,
        changed=changed,
        defaults=defaults,
        facts=[(str(name), str(value)) for name, value in (*run.versions.items(), *machine)],
        diagnoses=diagnose(run.rows, run.summary),
        breaks=findings(run_dir, run.rows, problems),
        problems=problems,
    )


def settings(run: RunData) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return (key, value, origin) of the settings that were set, and of those at their defaults."""
    from turnwright.config.dump import toml_value

    changed: list[tuple[str, str, str]] = []
    defaults: list[tuple[str, str, str]] = []
    for key, value in _flat(run.config, ""):
        origin = str(run.origins.get(key, "default"))
        (defaults if origin == "default" else changed).append((key, toml_value(value), origin))
    return changed, defaults


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list) and all(isinstance(item, Mapping) for item in node):
        node = dict(enumerate(node)) or node
    if prefix and not (isinstance(node, Mapping) and node):
        yield prefix[:-1], node
    for key, value in mapping(node).items():
        yield from _flat(value, f"{prefix}{key}.")

"""`report.html`: one self-contained page about a run, which opens without a network and runs no script.

Everything that a model, a tool or a task wrote is escaped, and control and bidirectional characters are shown as signs. The
page forbids itself every script, every request, and every style but its own (content security policy by hash). Images stand
in the page itself.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from turnwise.errors import TraceError
from turnwise.view import figures
from turnwise.view.conversation import ConversationView, prepare
from turnwise.view.diagnosis import diagnose
from turnwise.view.pictures import Gallery
from turnwise.view.rundir import Pick, Row, RunData, choose, index, load_at, read_run
from turnwise.view.sanity import findings
from turnwise.view.text import visible

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run, in place of an earlier one, and return its path.

    Args:
        run_dir: the run; files that are missing leave their part of the page out.
        out: where to, `run_dir/report.html` unless told.

    Raises:
        TraceError: when the page cannot be written.
    """
    path = out if out is not None else run_dir / "report.html"
    page = render_report(run_dir).encode("utf-8")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(page)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise TraceError(
            f"{path}: cannot be written ({error.strerror}); make room or name another place with --html"
        ) from error
    return path


def render_report(run_dir: Path) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

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
    run = read_run(run_dir)
    problems = list(run.problems)
    trajectories = run_dir / "trajectories.jsonl"
    entries = index(trajectories, problems)
    style = (_TEMPLATES / "report.css.jinja").read_text(encoding="utf-8")
    bars = figures.held_out(run)
    time_bar, time_rows = figures.time_split(run)
    changed, defaults = settings(run)
    gallery = Gallery(run_dir)
    conversations = list(_conversations(trajectories, choose(entries), problems, gallery))
    images = " img-src data:;" if gallery.used else ""
    return environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        style=Markup(style),  # the only text that is not escaped: it is part of this package
        policy=f"default-src 'none';{images} style-src 'sha256-{_digest(style)}'; base-uri 'none'; form-action 'none'",
        sentence=figures.sentence(run, bars, len(entries)),
        tiles=figures.headline_metrics(run),
        bars=bars,
        blind=any(bar.label == figures.BLIND for bar in bars),
        single_turn_best=run.summary.get("single_turn_best"),
        percent=figures.percent,
        warmup=figures.warmup_charts(run),
        reinforcement=figures.reinforcement_charts(run),
        stops=figures.stop_table(run),
        untrained=figures.untrained_table(run),
        time_bar=time_bar,
        time_rows=time_rows,
        trajectories=len(entries),
        conversations=conversations,
        changed=changed,
        defaults=defaults,
        facts=list(_facts(run)),
        diagnoses=diagnose(run.rows, run.summary),
        breaks=findings(run_dir, run.rows, problems),
        problems=problems,
    )


def _conversations(path: Path, picks: list[Pick], problems: list[str], gallery: Gallery) -> Iterator[ConversationView]:
    for pick in picks:
        try:
            yield prepare(load_at(path, pick.entry.offset), pick.why, gallery)
        except (TypeError, ValueError, KeyError, AttributeError, OSError) as error:
            problems.append(
                f"trajectories.jsonl: one at byte {pick.entry.offset} cannot be shown ({type(error).__name__}: {error})"
            )


def settings(run: RunData) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """(key, value, origin) of the settings that somebody chose, and of those that nobody did."""
    from turnwise.config.show import toml_value

    changed: list[tuple[str, str, str]] = []
    defaults: list[tuple[str, str, str]] = []
    for key, value in _flat(run.config, ""):
        origin = str(run.origins.get(key, "default"))
        (defaults if origin == "default" else changed).append((key, toml_value(value), origin))
    return changed, defaults


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    if isinstance(node, Mapping):
        pairs = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, list) and node and all(isinstance(item, Mapping) for item in node):
        pairs = [(str(number), item) for number, item in enumerate(node)]
    if not pairs and prefix:
        yield prefix[:-1], node
    for key, value in pairs:
        yield from _flat(value, f"{prefix}{key}.")


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    """Versions and the machine."""
    for name, version in run.versions.items():
        yield str(name), str(version)
    machine: Row | Any = run.summary.get("machine")
    if isinstance(machine, Mapping):
        yield from ((str(name), str(value)) for name, value in machine.items())
    elif machine:
        yield "machine", str(machine)


def _digest(style: str) -> str:
    return b64encode(sha256(style.encode()).digest()).decode()

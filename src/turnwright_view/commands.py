"""Commands view, replay, export, track."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright import files
from turnwright.cli.options import Command, add_command
from turnwright.cli.trust import add_trust, confirm, confirm_run, is_in
from turnwright.errors import TurnwrightError, UsageError, did_you_mean

if TYPE_CHECKING:
    from turnwright.types import EpisodeKey
    from turnwright_view import ReplayResult
    from turnwright_view.replay.compare import EpisodeDifference


def add_export(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "export", "write a run's episodes as Parquet or JSON lines", run_export)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("out", metavar="FILE", type=Path, help="file to write, .parquet (for Hugging Face datasets) or .jsonl")
    layouts = ("samples", "sft", "trl", "verl", "dpo")
    parser.add_argument("--columns", "--format", choices=layouts, default="samples", help="column names (default: samples)")
    parser.add_argument("--phase", metavar="NAME", default="train", help="phase to export, or `all` (default: train)")
    parser.add_argument("--least-reward", metavar="R", type=float, help="skip episodes with a lower reward or none")


def run_export(args: argparse.Namespace) -> int:
    """Write the table."""
    from turnwright.records.episode_metrics import group_by_task
    from turnwright.records.serialization import using
    from turnwright.types import Trajectory
    from turnwright_view.export import ColumnLayout, pair_rows, rows_of, write
    from turnwright_view.recompute import steps_of

    if not args.out.parent.is_dir():
        raise UsageError(f"{args.out}: its directory does not exist; create it first")

    def chosen(trajectory: Trajectory) -> bool:
        reward, minimum = trajectory.reward, args.least_reward
        return args.phase in ("all", trajectory.key.phase) and (minimum is None or (reward is not None and reward >= minimum))

    def selected() -> Iterator[Trajectory]:
        return (one for _, _, played in steps_of(args.run_dir) for one in played if chosen(one))

    def rows_of_each() -> Iterator[dict[str, Any]]:
        for trajectory in selected():
            with using(args.run_dir, trajectory):
                rows = list(rows_of(trajectory, args.columns, args.run_dir / "media", layout))
            yield from rows

    def pairs_of_each() -> Iterator[dict[str, Any]]:
        for _, _, played in steps_of(args.run_dir):
            for group in group_by_task([one for one in played if chosen(one)]):
                with using(args.run_dir, group.trajectories[0]):
                    pairs = list(pair_rows(group, layout))
                yield from pairs

    layout = ColumnLayout.empty()
    for trajectory in selected():
        with using(args.run_dir, trajectory):
            layout |= ColumnLayout.of([trajectory])
    rows = pairs_of_each() if args.columns == "dpo" else rows_of_each()
    count = write(rows, args.columns, args.out, layout)
    print(f"{args.out}: {count} rows" + ("" if count else f"; no episode of phase {args.phase} matches"))
    return 0


MAX_DIFFERENCES = 20  # maximum number of differences printed


def add_replay(subparsers: Any) -> None:
    """Register the command."""
    help = "recompute a run from its record, or rerun the loop against it"
    parser = add_command(subparsers, "replay", help, run_replay, overrides=True)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--reward", metavar="FILE.py:FUNCTION", help="a reward function to apply to every finished trajectory")
    parser.add_argument("--loop", action="store_true", help="replay every episode with its sampled replies")
    env = "with --loop: an environment (a name, FILE.py:NAME, or `recipe`), not the recorded one"
    parser.add_argument("--env", metavar="ENV", help=env)
    parser.add_argument("--phase", metavar="NAME", help="with --loop: only this phase (`train`, `gate`, ...)")
    parser.add_argument("--step", metavar="N", type=int, help="with --loop: only this step, as the viewer counts")
    parser.add_argument("--trajectory", metavar="TASK[/N]", help="with --loop: only this task, or its sample N")
    add_trust(parser)


def run_replay(args: argparse.Namespace) -> int:
    """Recompute, compare and print differences; return 1 if there are any."""
    from turnwright.display.text import single_line
    from turnwright.envs.resolve import load_object

    if not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir}: no such run directory")
    for name in ("env", "phase", "step", "trajectory"):
        if not args.loop and vars(args)[name] is not None:
            raise UsageError(f"--{name} needs --loop; add it")
    if args.overrides and not args.loop:
        raise UsageError(f"{args.overrides[0]} needs --loop; add it")
    reward = load_object(args.reward) if args.reward else None
    if reward is not None and not callable(reward):
        raise UsageError(f"--reward {args.reward}: must be a function of a trajectory, not {type(reward).__name__}")
    ok, lines = (_loop if args.loop else _record)(args, reward)
    for line in lines:
        print(single_line(line, 1000))
    return 0 if ok else 1


def _record(args: argparse.Namespace, reward: Any) -> tuple[bool, list[str]]:
    from turnwright_view.recompute import lines, recompute

    found = recompute(args.run_dir, reward)
    return found.ok, [*lines(found), *(["masks and metrics match the record"] if found.ok else [])]


def _loop(args: argparse.Namespace, reward: Any) -> tuple[bool, Iterator[str]]:
    from turnwright.config.dump import load_run_config
    from turnwright_view.replay.runs import replay_run

    if (args.run_dir / "config.json").is_file():
        config = load_run_config(args.run_dir).config
        used = ("rollout.history",) if args.env is None and config.rollout.function is None else ()
        confirm_run(args.run_dir, config, args, only=used)

    def selected(key: EpisodeKey) -> bool:
        names = (None, key.task, f"{key.task}/{key.sample}")
        return args.trajectory in names and args.phase in (None, key.phase) and args.step in (None, key.metrics_step)

    found = replay_run(args.run_dir, env=args.env, overrides=args.overrides, reward=reward, only=selected)
    return found.ok, _differences(found)


def _differences(found: ReplayResult) -> Iterator[str]:
    """Yield the first difference of each episode, then totals."""
    first: dict[EpisodeKey, EpisodeDifference] = {}
    for one in found.differences:
        first.setdefault(one.key, one)
    for key, one in islice(first.items(), MAX_DIFFERENCES):
        where = f" at {one.where}" if one.where else ""
        yield f"{key.phase} {key.metrics_step} / {key.task} / {key.sample}: differs in {one.what}{where}"
        yield f"    recorded  {one.recorded}"
        yield f"    now       {one.now}"
    if len(first) > MAX_DIFFERENCES:
        yield f"... and {len(first) - MAX_DIFFERENCES} more"
    for reason, count in found.left_out.most_common():
        yield f"skipped {count}: {reason}"
    if not found.episodes:
        yield "no episode was replayed"
    elif not first:
        yield f"{found.episodes} episodes replayed, all match the record"
    else:
        kinds = Counter(one.what for one in first.values())
        totals = ", ".join(f"{count} in {what}" for what, count in kinds.most_common())
        yield f"{found.episodes} episodes replayed, {len(first)} differ: {totals}"


def add_track(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "track", "send the metrics of a run to trackio, wandb or tensorboard", run_track)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    to = "trackio, wandb, tensorboard or FILE.py:CLASS; repeatable (default: the run's own)"
    parser.add_argument("--to", metavar="TRACKER", action="append", help=to)
    parser.add_argument("--project", metavar="NAME", help="project name at the tracker (default: the run's own)")
    parser.add_argument("--name", metavar="NAME", help="run name at the tracker (default: the run's own)")
    add_trust(parser)


def run_track(args: argparse.Namespace) -> int:
    """Send the rows that were not sent before."""
    from turnwright.config.names import tracker_error
    from turnwright.trackers import TrackerProcesses

    try:
        config = files.read_json(args.run_dir / "config.json")["config"]
        track = dict(config.get("track", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "not a run directory (no readable config.json); name the directory that train printed"
        raise UsageError(f"{args.run_dir}: {why}") from error
    to = args.to or track.get("to") or []
    if not to:
        raise UsageError("no tracker: the run has none in track.to; name one, such as --to trackio")
    for one in to:
        if wrong := tracker_error(one):
            raise UsageError(f"--to {one}: {wrong}")
    code = [] if args.to else [one for one in to if ":" in one]
    if code:
        inside = any(is_in(args.run_dir, one) for one in code)
        confirm(args.run_dir, [f"track.to = {one}" for one in code], args, inside=inside)
    project, name = args.project or track.get("project", "turnwright"), args.name or track.get("name")
    if failed := TrackerProcesses(to, args.run_dir, project, name).close(patience_s=600.0):
        raise TurnwrightError("; ".join(failed))
    print(f"sent to {', '.join(to)}")
    return 0


def add_view(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "view", "view a run: curves, trajectories, tokens", run_view)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory; the run may be in progress")
    parser.add_argument("--against", metavar="RUN", type=Path, help="another run to compare with")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the viewer with the run as one self-contained file")
    parser.add_argument("--report", action="store_true", help="write the report (RUN/report.html) and print its path")
    parser.add_argument("--tui", action="store_true", help="view it in the terminal, for example over SSH")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port of the page (default: a free one)")
    host = "other than 127.0.0.1: needs TURNWRIGHT_VIEW_TOKEN"
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=host)
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run_view(args: argparse.Namespace) -> int:
    """Serve the viewer until Ctrl-C, or write a file and print its path."""
    run_dir: Path = args.run_dir
    runs = [_run_dir(path) for path in (run_dir, args.against) if path is not None]
    if args.html is not None and not args.html.parent.is_dir():
        raise UsageError(f"{args.html}: its directory does not exist; create it first")
    if not 0 <= args.port < 65536:
        raise UsageError(f"--port {args.port}: ports are from 1 to 65535")
    if args.html is not None:
        from turnwright_view.web import self_contained

        self_contained(runs, args.html)
        return _written(args.html, run_dir, args.open)
    if args.tui:
        from turnwright_view.tui import run_tui

        run_tui(run_dir)
        return 0
    if args.report:
        from turnwright_view.report import write_report

        return _written(write_report(run_dir), run_dir, args.open)
    from turnwright_view.web import ViewerServer

    token = os.environ.get("TURNWRIGHT_VIEW_TOKEN", "")
    server = ViewerServer(runs, args.port, host=args.host, token=token)
    try:
        access = "token required" if token else "local connections only"
        print(f"serving on {server.url} ({access}; press Ctrl-C to stop)", flush=True)
        _announce(run_dir, server.url if args.open else "")
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.release()
    return 0


def _written(path: Path, run_dir: Path, open_page: bool) -> int:
    print(path)
    _announce(run_dir, path.resolve().as_uri() if open_page else "")
    return 0


def _run_dir(run_dir: Path) -> Path:
    if not run_dir.is_dir():
        folder = run_dir.parent
        near = did_you_mean(run_dir.name, [p.name for p in folder.iterdir() if p.is_dir()]) if folder.is_dir() else ""
        raise UsageError(f"{run_dir}: no such run directory; {near or 'name the directory that `turnwright train` printed'}")
    if not any((run_dir / name).exists() for name in ("config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl")):
        why = "not a run directory (no config.json, no metrics.jsonl); name the directory that train printed"
        raise UsageError(f"{run_dir}: {why}")
    from turnwright.records.run_dir import check_version

    check_version(run_dir)
    return run_dir


def _announce(run_dir: Path, address: str) -> None:
    """Print the diagnoses of a run and the differences found by the sanity check, and open the page, if there is one."""
    import webbrowser

    from turnwright.display.diagnosis import findings, lines_of_run, table
    from turnwright.display.run_data import read_run

    found = findings(run_dir, read_run(run_dir).rows, [])
    sanity = ["", "sanity check: built ids differ from the chat template's render", *table(found)] if found else []
    diagnoses = [f"diagnosis: {line}" for line in lines_of_run(run_dir)]
    for line in (*diagnoses, *sanity):
        print(line, flush=True)
    if address:
        webbrowser.open(address)


def report_of(run_dir: Path, renew: bool) -> Path:
    """Return the report of a run, which is written where there is none, or if it is renewed."""
    from turnwright_view.report import write_report

    report = run_dir / "report.html"
    return write_report(run_dir) if renew or not report.exists() else report


VIEW = Command(add_view, report=report_of)
REPLAY = Command(add_replay)
EXPORT = Command(add_export)
TRACK = Command(add_track)

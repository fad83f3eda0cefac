"""View, replay, export, track."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.cli.options import add_command
from turnwise.errors import TurnwiseError, UsageError

if TYPE_CHECKING:
    from turnwise.rollouts import ReplayResult
    from turnwise.types import EpisodeKey


def add_export(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "export", "write a run's episodes as Parquet or JSON lines", run_export)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("out", metavar="FILE", type=Path, help="ends in .parquet (Hugging Face datasets load it) or .jsonl")
    parser.add_argument(
        "--columns", choices=("samples", "sft", "trl", "verl"), default="samples", help="named as whose columns"
    )
    parser.add_argument("--phase", metavar="NAME", default="train", help="`train` unless told; `all` for every phase")
    parser.add_argument("--least-reward", metavar="R", type=float, help="leave out episodes with less, or without a reward")


def run_export(args: argparse.Namespace) -> int:
    """Write the table."""
    from turnwise.records.export import ColumnLayout, rows_of, write
    from turnwise.types import Trajectory
    from turnwise.viewer.recompute import steps_of

    if not args.out.parent.is_dir():
        raise UsageError(f"{args.out}: its directory does not exist; make it first")

    def chosen() -> Iterator[Trajectory]:
        for trajectory in (one for _, _, played in steps_of(args.run_dir) for one in played):
            reward, least = trajectory.reward, args.least_reward
            if args.phase in ("all", trajectory.key.phase) and (least is None or (reward is not None and reward >= least)):
                yield trajectory

    shape = ColumnLayout.of(chosen())
    rows = (row for trajectory in chosen() for row in rows_of(trajectory, args.columns, args.run_dir / "media", shape))
    count = write(rows, args.columns, args.out, shape)
    print(f"{args.out}: {count} rows" + ("" if count else f"; no episode of phase {args.phase} fits"))
    return 0


SHOWN = 20
"""Differences that are printed."""


def add_replay(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "replay", "compute a run anew from its record, or run the loop again against it", run_replay, overrides=True
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument(
        "--reward", metavar="FILE.py:FUNCTION", help="a reward function of a finished trajectory, to try on all"
    )
    parser.add_argument("--loop", action="store_true", help="play every episode again against what its engine sampled")
    parser.add_argument(
        "--env", metavar="ENV", help="with --loop: an environment (a name, FILE.py:NAME, or `recipe`), not the recorded world"
    )
    parser.add_argument("--phase", metavar="NAME", help="with --loop: only this phase (`train`, `gate`, ...)")
    parser.add_argument("--step", metavar="N", type=int, help="with --loop: only this step")
    parser.add_argument("--trajectory", metavar="TASK[/N]", help="with --loop: only this task, or its sample N")


def run_replay(args: argparse.Namespace) -> int:
    """Compute, compare, and say what differs; status 1 where anything does."""
    if not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir}: no such run directory")
    if args.loop:
        return _loop(args)
    for name in ("env", "phase", "step", "trajectory"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for running the loop again: add --loop")
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is for running the loop again: add --loop")
    return _record(args)


def _record(args: argparse.Namespace) -> int:
    from turnwise.viewer.recompute import lines, recompute, success_of
    from turnwise.viewer.run_data import read_run
    from turnwise.viewer.text import single_line

    found = recompute(args.run_dir, _reward(args), success=success_of(read_run(args.run_dir).config))
    for line in lines(found):
        print(single_line(line, 1000))
    if found.ok:
        print("masks and figures are those of the record")
    return 0 if found.ok else 1


def _loop(args: argparse.Namespace) -> int:
    from turnwise.training.replay import replay_run
    from turnwise.viewer.text import single_line

    found = replay_run(args.run_dir, env=args.env, overrides=args.overrides, reward=_reward(args), only=_only(args))
    for line in lines(found):
        print(single_line(line, 1000))
    return 0 if found.ok else 1


def _reward(args: argparse.Namespace) -> Any:
    from turnwise.envs.resolve import load_object

    reward = load_object(args.reward) if args.reward else None
    if reward is not None and not callable(reward):
        raise UsageError(f"--reward {args.reward}: is {type(reward).__name__}, not a function of a trajectory")
    return reward


def _only(args: argparse.Namespace) -> Any:
    wanted = args.trajectory

    def chosen(key: EpisodeKey) -> bool:
        named = wanted is None or wanted in (key.task, f"{key.task}/{key.sample}")
        return named and args.phase in (None, key.phase) and args.step in (None, key.step)

    return chosen


def lines(found: ReplayResult) -> Iterator[str]:
    """What running the loop again came to: a line for the first difference of each episode, then the sums."""
    first = {one.key: one for one in reversed(found.differences)}
    for key in list(dict.fromkeys(one.key for one in found.differences))[:SHOWN]:
        one = first[key]
        where = f" at {one.where}" if one.where else ""
        yield f"{key.phase} {key.step} / {key.task} / {key.sample}: differs in {one.what}{where}"
        yield f"    recorded  {one.recorded}"
        yield f"    now       {one.now}"
    if len(first) > SHOWN:
        yield f"... and {len(first) - SHOWN} more"
    for why, count in found.left_out.most_common():
        yield f"{count} left out: {why}"
    if not found.episodes:
        yield "no episode was played again"
    elif not first:
        yield f"{found.episodes} episodes played again, all as recorded"
    else:
        kinds: dict[str, int] = {}
        for one in first.values():
            kinds[one.what] = kinds.get(one.what, 0) + 1
        told = ", ".join(f"{count} in {what}" for what, count in sorted(kinds.items(), key=lambda pair: -pair[1]))
        yield f"{found.episodes} episodes played again, {len(first)} differ: {told}"


def add_track(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "track", "send the figures of a run to trackio, wandb or tensorboard", run_track)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument(
        "--to",
        metavar="TRACKER",
        action="append",
        help="trackio, wandb, tensorboard or FILE.py:CLASS; several times for several",
    )
    parser.add_argument("--project", metavar="NAME", help="what the tracker calls the project; as the run has it unless told")
    parser.add_argument("--name", metavar="NAME", help="what it calls the run; likewise")


def run_track(args: argparse.Namespace) -> int:
    """Send what was not sent yet."""
    from turnwise.config.schema import tracker_error
    from turnwise.trackers import follow_once

    try:
        config = json.loads((args.run_dir / "config.json").read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{args.run_dir}: holds no run (no config.json that can be read); name what train printed") from error
    said = config.get("track", {})
    to = args.to or said.get("to") or []
    if not to:
        raise UsageError("no tracker: the run has none in track.to; name one with --to trackio, say")
    for one in to:
        if wrong := tracker_error(one):
            raise UsageError(f"--to {one}: {wrong}")
    failed = follow_once(to, args.run_dir, args.project or said.get("project", "turnwise"), args.name or said.get("name"))
    if failed:
        raise TurnwiseError("; ".join(failed))
    print(f"sent to {', '.join(to)}")
    return 0


def add_view(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "view", "look at a run: curves, trajectories, tokens", run_view)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory; it may still be written")
    parser.add_argument("--against", metavar="RUN", type=Path, help="another run to compare with")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the viewer with the run inside: one file to send")
    parser.add_argument("--report", action="store_true", help="write the report (RUN/report.html) and print its path")
    parser.add_argument("--tui", action="store_true", help="look at it in this terminal, over SSH say")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="of the page; a free one unless told")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="for others than this machine: needs TURNWISE_VIEW_TOKEN"
    )
    parser.add_argument("--open", action="store_true", help="open it in a browser")


def run_view(args: argparse.Namespace) -> int:
    """Serve the viewer until Ctrl-C, or write a file and print its path."""
    run_dir: Path = args.run_dir
    runs = [_run(path) for path in (run_dir, args.against) if path is not None]
    if args.html is not None and not args.html.parent.is_dir():
        raise UsageError(f"{args.html}: its directory does not exist; make it first")
    if not 0 <= args.port < 65536:
        raise UsageError(f"--port {args.port}: ports are from 1 to 65535")
    if args.html is not None:
        from turnwise.viewer.web import self_contained

        self_contained(runs, args.html)
        return _written(args.html, run_dir, args.open)
    if args.tui:
        from turnwise.viewer.tui import run_tui

        run_tui(run_dir)
        return 0
    if args.report:
        from turnwise.viewer.report import write_report

        return _written(write_report(run_dir), run_dir, args.open)
    return _serve(runs, args.port, args.host, args.open)


def _written(path: Path, run_dir: Path, show: bool) -> int:
    print(path)
    for line in (*diagnoses(run_dir), *_sanity(run_dir)):
        print(line)
    if show:
        _open(path.resolve().as_uri())
    return 0


def _serve(runs: list[Path], port: int, host: str, show: bool) -> int:
    from turnwise.viewer.web import ViewerServer

    token = os.environ.get("TURNWISE_VIEW_TOKEN", "")
    server = ViewerServer(runs, port, host=host, token=token)
    try:
        print(f"{server.url}  ({'who knows the token' if token else 'this machine'} alone; Ctrl-C ends it)", flush=True)
        for line in (*diagnoses(runs[0]), *_sanity(runs[0])):
            print(line, flush=True)
        if show:
            _open(server.url)
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.release()
    return 0


def _open(address: str) -> None:
    import webbrowser

    webbrowser.open(address)


def _run(run_dir: Path) -> Path:
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such run directory{_near(run_dir)}")
    if not any((run_dir / name).exists() for name in ("config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl")):
        raise UsageError(f"{run_dir}: holds no run (no config.json, no metrics.jsonl); name the directory that train printed")
    return run_dir


def diagnoses(run_dir: Path) -> list[str]:
    """What is wrong with a run, a line each."""
    from turnwise.viewer.diagnosis import diagnose
    from turnwise.viewer.run_data import read_run
    from turnwise.viewer.text import single_line

    found = read_run(run_dir)
    return [single_line(f"diagnosis: {one.text}", 1000) for one in diagnose(found.rows, found.summary)]


def _sanity(run_dir: Path) -> list[str]:
    """What the sanity check found, where it found anything."""
    from turnwise.viewer.diagnosis import findings, table
    from turnwise.viewer.run_data import read_run

    found = findings(run_dir, read_run(run_dir).rows, [])
    return ["", "sanity check: what was built is not what the chat template writes", *table(found)] if found else []


def _near(run_dir: Path) -> str:
    from turnwise.config.constraints import did_you_mean

    folder = run_dir.parent
    near = did_you_mean(run_dir.name, [p.name for p in folder.iterdir() if p.is_dir()]) if folder.is_dir() else ""
    return f"; {near}" if near else "; name the directory that `turnwise train` printed"

"""`turnwise view`: look at a run in a browser, write it as one file, or write its report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command
from turnwise.errors import UsageError


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
        from turnwise.view.web import self_contained

        self_contained(runs, args.html)
        return _written(args.html, run_dir, args.open)
    if args.tui:
        from turnwise.view.tui import run_tui

        run_tui(run_dir)
        return 0
    if args.report:
        from turnwise.view.report import write_report

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
    from turnwise.view.web import ViewerServer

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
    from turnwise.view.diagnosis import diagnose
    from turnwise.view.rundir import read_run
    from turnwise.view.text import single_line

    found = read_run(run_dir)
    return [single_line(f"diagnosis: {one.text}", 1000) for one in diagnose(found.rows, found.summary)]


def _sanity(run_dir: Path) -> list[str]:
    """What the sanity check found, where it found anything."""
    from turnwise.view.rundir import read_run
    from turnwise.view.sanity import findings, table

    found = findings(run_dir, read_run(run_dir).rows, [])
    return ["", "sanity check: what was built is not what the chat template writes", *table(found)] if found else []


def _near(run_dir: Path) -> str:
    from turnwise.config.needs import did_you_mean

    folder = run_dir.parent
    near = did_you_mean(run_dir.name, [p.name for p in folder.iterdir() if p.is_dir()]) if folder.is_dir() else ""
    return f"; {near}" if near else "; name the directory that `turnwise train` printed"

"""Command view: a run in a page, a file or a terminal; its report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command
from turnwright.errors import UsageError, did_you_mean


def add_view(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "view", "view a run: curves, trajectories, tokens", run_view)
    parser.add_argument(
        "run_dir", metavar="RUN", type=Path, help="a run directory; the run may be in progress"
    )
    parser.add_argument("--against", metavar="RUN", type=Path, help="another run to compare with")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write the viewer with the run as one self-contained file",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="write the report (RUN/report.html) and print its path",
    )
    parser.add_argument(
        "--tui", action="store_true", help="view it in the terminal, for example over SSH"
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="port of the page (default: a free one)"
    )
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
    """Print the path of a file, and open it if asked."""
    print(path)
    _announce(run_dir, path.resolve().as_uri() if open_page else "")
    return 0


def _run_dir(run_dir: Path) -> Path:
    """Return a run directory; raise `UsageError` where it is none, or of another version."""
    if not run_dir.is_dir():
        folder = run_dir.parent
        near = (
            did_you_mean(run_dir.name, [p.name for p in folder.iterdir() if p.is_dir()])
            if folder.is_dir()
            else ""
        )
        raise UsageError(
            f"{run_dir}: no such run directory; "
            f"{near or 'name the directory that `turnwright train` printed'}"
        )
    if not any(
        (run_dir / name).exists()
        for name in ("config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl")
    ):
        why = (
            "not a run directory (no config.json, no metrics.jsonl); name the directory that "
            "train printed"
        )
        raise UsageError(f"{run_dir}: {why}")
    from turnwright.records.run_dir import check_version

    check_version(run_dir)
    return run_dir


def _announce(run_dir: Path, address: str) -> None:
    """Print the diagnoses of a run and the differences found by the sanity check, and open the
    page, if there is one."""
    import webbrowser

    from turnwright.display.diagnosis import findings, lines_of_run, table
    from turnwright.display.run_data import read_run

    found = findings(run_dir, read_run(run_dir).rows, [])
    sanity = (
        ["", "sanity check: built ids differ from the chat template's render", *table(found)]
        if found
        else []
    )
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

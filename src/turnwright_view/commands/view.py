"""Command view: runs in a page, a file or a terminal; their reports."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command
from turnwright.errors import UsageError, did_you_mean


def add_view(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "view", "view runs: curves, episodes, tokens", run_view)
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=Path,
        nargs="+",
        help="a run directory, several, or a folder of runs; runs may be in progress",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write the page with its runs as one self-contained file",
    )
    parser.add_argument(
        "--episodes",
        metavar="N",
        type=int,
        help="episodes in the file of --html (default: 200)",
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
    paths: list[Path] = args.paths
    for path in paths:
        _check(path)
    if args.html is not None and not args.html.parent.is_dir():
        raise UsageError(f"{args.html}: its directory does not exist; create it first")
    if not 0 <= args.port < 65536:
        raise UsageError(f"--port {args.port}: ports are from 1 to 65535")
    if args.episodes is not None and args.episodes < 0:
        raise UsageError(f"--episodes {args.episodes}: needs a number of at least 0")

    if args.html is not None:
        from turnwright_view.web.one_file import EPISODES, write_page

        episodes = EPISODES if args.episodes is None else args.episodes
        write_page(paths, args.html, episodes=episodes, progress=sys.stderr)
        return _written(args.html, paths, args.open)
    if args.tui:
        from turnwright_view.tui import run_tui

        run_tui(_only(paths, "--tui"))
        return 0
    if args.report:
        from turnwright_view.web import write_report

        return _written(write_report(_only(paths, "--report")), paths, args.open)
    return _serve(args, paths)


def _serve(args: argparse.Namespace, paths: list[Path]) -> int:
    """Serve the page until Ctrl-C."""
    from turnwright_view.web import ViewerServer

    token = os.environ.get("TURNWRIGHT_VIEW_TOKEN", "")
    server = ViewerServer(paths, args.port, host=args.host, token=token)
    try:
        access = "token required" if token else "local connections only"
        print(f"serving on {server.url} ({access}; press Ctrl-C to stop)", flush=True)
        _announce(paths, server.url if args.open else "")
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.release()
    return 0


def _only(paths: list[Path], option: str) -> Path:
    """Return the only path, which must be a run."""
    from turnwright_view.run_rows import is_run_folder

    if len(paths) != 1 or not is_run_folder(paths[0]):
        raise UsageError(f"{option} takes one run directory; name the one that you want to see")
    return paths[0]


def _written(path: Path, paths: list[Path], open_page: bool) -> int:
    """Print the path of a file, and open it if asked."""
    print(path)
    _announce(paths, path.resolve().as_uri() if open_page else "")
    return 0


def _check(path: Path) -> None:
    """Raise `UsageError` for what is neither a run nor a folder with one, and for a run of another
    version."""
    if not path.is_dir():
        folder = path.parent
        near = ""
        if folder.is_dir():
            near = did_you_mean(path.name, [p.name for p in folder.iterdir() if p.is_dir()])
        raise UsageError(
            f"{path}: no such run directory; "
            f"{near or 'name the directory that `turnwright train` printed'}"
        )
    from turnwright.records.run_dir import check_version
    from turnwright_view.run_rows import find_runs, is_run_folder

    if is_run_folder(path):
        check_version(path)
    elif not find_runs([path]):
        why = (
            "not a run directory (no config.json, no metrics.jsonl), and none is in it; name the "
            "directory that train printed"
        )
        raise UsageError(f"{path}: {why}")


def _announce(paths: list[Path], address: str) -> None:
    """Print what is wrong with the run, where there is only one, and open the page, if there is
    one."""
    import webbrowser

    from turnwright_view.run_rows import is_run_folder

    if len(paths) == 1 and is_run_folder(paths[0]):
        _print_faults(paths[0])
    if address:
        webbrowser.open(address)


def _print_faults(run_dir: Path) -> None:
    """Print the diagnoses of a run and the differences found by the sanity check."""
    from turnwright.display.diagnosis import findings, lines_of_run, table
    from turnwright.display.run_data import read_run

    for line in lines_of_run(run_dir):
        print(f"diagnosis: {line}", flush=True)
    found = findings(run_dir, read_run(run_dir).rows, [])
    if found:
        print("\nsanity check: built ids differ from the chat template's render", flush=True)
        for line in table(found):
            print(line, flush=True)


def report_of(run_dir: Path, renew: bool) -> Path:
    """Return the report of a run, which is written where there is none, or if it is renewed."""
    from turnwright_view.web import write_report

    report = run_dir / "report.html"
    return write_report(run_dir) if renew or not report.exists() else report


VIEW = Command(add_view, report=report_of)

"""`turnwise view`: write a run's report and say where it is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_verb
from turnwise.errors import UsageError

NAME = "view"


def add(subparsers: Any) -> None:
    """Register the verb."""
    parser = add_verb(subparsers, NAME, "write the report of a run and open it", run)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report there: one file that can be sent")
    parser.add_argument("--open", action="store_true", help="open it in a browser")


def run(args: argparse.Namespace) -> int:
    """Write the report anew and print its path."""
    run_dir: Path = args.run_dir
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such run directory{_near(run_dir)}")
    if not any((run_dir / name).exists() for name in ("config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl")):
        raise UsageError(f"{run_dir}: holds no run (no config.json, no metrics.jsonl); name the directory that train printed")
    if args.html is not None and not args.html.parent.is_dir():
        raise UsageError(f"{args.html}: its directory does not exist; make it first")
    from turnwise.view.report import write_report

    path = write_report(run_dir, args.html)
    print(path)
    for line in _sanity(run_dir):
        print(line)
    if args.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


def _sanity(run_dir: Path) -> list[str]:
    """What the sanity check found, where it found anything."""
    from turnwise.view.rundir import read_run
    from turnwise.view.sanity import findings, table

    found = findings(run_dir, read_run(run_dir).rows, [])
    return ["", "sanity check: what was built is not what the chat template writes", *table(found)] if found else []


def _near(run_dir: Path) -> str:
    from turnwise.config.keys import did_you_mean

    folder = run_dir.parent
    near = did_you_mean(run_dir.name, [p.name for p in folder.iterdir() if p.is_dir()]) if folder.is_dir() else ""
    return f"; {near}" if near else "; name the directory that `turnwise train` printed"

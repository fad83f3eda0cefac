"""Command track: send the metrics of a run to trackers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwright import files
from turnwright.cli.options import Command, add_command
from turnwright.cli.trust import add_trust, confirm, is_in
from turnwright.errors import TurnwrightError, UsageError


def add_track(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "track", "send the metrics of a run to trackio, wandb or tensorboard", run_track
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    to = "trackio, wandb, tensorboard or FILE.py:CLASS; repeatable (default: the run's own)"
    parser.add_argument("--to", metavar="TRACKER", action="append", help=to)
    parser.add_argument(
        "--project", metavar="NAME", help="project name at the tracker (default: the run's own)"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="run name at the tracker (default: the run's own)"
    )
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

    # Those of the run's settings may be code of somebody else.
    code = [] if args.to else [one for one in to if ":" in one]
    if code:
        inside = any(is_in(args.run_dir, one) for one in code)
        confirm(args.run_dir, [f"track.to = {one}" for one in code], args, inside=inside)

    project = args.project or track.get("project", "turnwright")
    name = args.name or track.get("name")
    if failed := TrackerProcesses(to, args.run_dir, project, name).close(patience_s=600.0):
        raise TurnwrightError("; ".join(failed))
    print(f"sent to {', '.join(to)}")
    return 0


TRACK = Command(add_track)

"""`turnwise track`: send the figures of a run to a tracker, also afterwards."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command
from turnwise.errors import TurnwiseError, UsageError


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
    from turnwise.view.track import follow_once

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

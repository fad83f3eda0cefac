"""`turnwise replay`: compute a run anew from its record, without model or environment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_verb
from turnwise.errors import UsageError

NAME = "replay"


def add(subparsers: Any) -> None:
    """Register the verb."""
    parser = add_verb(subparsers, NAME, "compute masks, figures and rewards of a run anew from its record", run)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument(
        "--reward", metavar="FILE.py:FUNCTION", help="a reward function of a finished trajectory, to try on all"
    )


def run(args: argparse.Namespace) -> int:
    """Compute, compare, and say what differs; status 1 where masks or figures do."""
    from turnwise.env.resolve import load_object
    from turnwise.view.replay import lines, replay, success_of
    from turnwise.view.rundir import read_run
    from turnwise.view.text import plain

    if not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir}: no such run directory")
    reward = load_object(args.reward) if args.reward else None
    if reward is not None and not callable(reward):
        raise UsageError(f"--reward {args.reward}: is {type(reward).__name__}, not a function of a trajectory")
    found = replay(args.run_dir, reward, success=success_of(read_run(args.run_dir).config))
    for line in lines(found):
        print(plain(line, 1000))
    if found.good:
        print("masks and figures are those of the record")
    return 0 if found.good else 1

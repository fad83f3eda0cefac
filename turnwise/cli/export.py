"""`turnwise export`: a run as a table, for other trainers and for whoever works with tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command
from turnwise.errors import UsageError


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
    from turnwise.trace.export import ColumnLayout, rows_of, write
    from turnwise.types import Trajectory
    from turnwise.view.replay import steps_of

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

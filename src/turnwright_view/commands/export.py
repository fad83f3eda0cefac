"""Command export: a run's episodes as a table for other trainers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command
from turnwright.errors import UsageError


def add_export(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "export", "write a run's episodes as Parquet or JSON lines", run_export
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument(
        "out",
        metavar="FILE",
        type=Path,
        help="file to write, .parquet (for Hugging Face datasets) or .jsonl",
    )
    layouts = ("samples", "sft", "trl", "verl", "dpo")
    parser.add_argument(
        "--columns",
        "--format",
        choices=layouts,
        default="samples",
        help="column names (default: samples)",
    )
    parser.add_argument(
        "--phase",
        metavar="NAME",
        default="train",
        help="phase to export, or `all` (default: train)",
    )
    parser.add_argument(
        "--least-reward", metavar="R", type=float, help="skip episodes with a lower reward or none"
    )


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
        return args.phase in ("all", trajectory.key.phase) and (
            minimum is None or (reward is not None and reward >= minimum)
        )

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

    # The columns are known once every episode was read, and a file has them from its first row on.
    layout = ColumnLayout.empty()
    for trajectory in selected():
        with using(args.run_dir, trajectory):
            layout |= ColumnLayout.of([trajectory])

    rows = pairs_of_each() if args.columns == "dpo" else rows_of_each()
    count = write(rows, args.columns, args.out, layout)
    print(
        f"{args.out}: {count} rows"
        + ("" if count else f"; no episode of phase {args.phase} matches")
    )
    return 0


EXPORT = Command(add_export)

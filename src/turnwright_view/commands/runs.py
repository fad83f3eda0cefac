"""Command runs: the runs of a folder in a table, and what of them can be deleted."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import Command, add_command, interval, percent, table
from turnwright.errors import UsageError

if TYPE_CHECKING:
    from turnwright_view.clean import Leftover
    from turnwright_view.run_rows import RunRow, Success

FOLDER = Path("runs")
"""Folder that is listed where none is named; `turnwright train` writes there."""

SORTS = ("name", "size", "age", "success", "steps")
_EPILOG = """\
turnwright runs                    the runs in runs/
turnwright runs sweep --size       those in sweep/, the largest first
turnwright runs clean runs         what of them can be deleted, and how much that frees
turnwright runs clean runs --yes   delete it: checkpoints but the last and the best of each run,
                                   what servers left, traces
"""


def add_runs(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "runs", "list the runs in a folder, or clean them", run_runs, epilog=_EPILOG
    )
    parser.add_argument(
        "words",
        metavar="[clean] FOLDER",
        nargs="*",
        help="folders that are runs or have some below (default: runs); `clean` before them lists "
        "what can be deleted",
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--sort", choices=SORTS, default="name", help="order of the table")
    order.add_argument(
        "--size",
        action="store_const",
        const="size",
        dest="sort",
        help="the largest first, as --sort size",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--yes", action="store_true", help="with clean: delete what it lists")


def run_runs(args: argparse.Namespace) -> int:
    """List runs, or clean them."""
    if args.words[:1] == ["clean"]:
        return _clean([Path(word) for word in args.words[1:]], args)
    if args.yes:
        raise UsageError("--yes needs clean: turnwright runs clean FOLDER --yes")
    return _list([Path(word) for word in args.words], args)


def _list(folders: Sequence[Path], args: argparse.Namespace) -> int:
    from turnwright_view.run_rows import RunRows

    runs = _runs_in(folders or [FOLDER])
    rows = RunRows().rows(runs)
    rows.sort(key=_order(args.sort))
    if args.json:
        print(json.dumps([row.as_json() for row in rows], allow_nan=False))
    else:
        print("\n".join(_lines(rows)))
    return 0


def _runs_in(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the runs in folders by id; raise `UsageError` if there are none."""
    from turnwright_view.run_rows import find_runs

    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder; name the one that `turnwright train --out` wrote to"
            )
    runs = find_runs(folders)
    if not runs:
        names = ", ".join(map(str, folders))
        raise UsageError(f"{names}: no runs there; `turnwright train RECIPE --out DIR` makes one")
    return runs


def _order(name: str) -> Callable[[RunRow], Any]:
    """Return what rows are sorted by: names upwards, figures downwards, with ties by name."""

    def key(row: RunRow) -> Any:
        after = -1.0 if row.after is None else row.after.success
        figures = {
            "name": 0.0,
            "size": -float(row.size or 0),
            "age": -row.updated,
            "success": -after,
            "steps": -float(row.steps),
        }
        return figures[name], row.id

    return key


def _lines(rows: Sequence[RunRow]) -> list[str]:
    """Return the table."""
    from turnwright.display.text import single_line

    now = time.time()
    cells = [["run", "state", "held-out success", "steps", "episodes", "size", "age"]]
    for row in rows:
        cells.append(
            [
                single_line(row.id, 60),
                row.state,
                _learned(row.before, row.after),
                f"{row.steps}/{row.planned}" if row.planned else str(row.steps),
                "-" if row.episodes is None else f"{row.episodes:,}",
                size_text(row.size),
                _age(now - row.updated),
            ]
        )
    return table(cells)


def _learned(before: Success | None, after: Success | None) -> str:
    """Return "24.0% -> 97.3% [94.5, 98.7]"; without the interval while there is no second one."""
    if before is None and after is None:
        return "-"
    first = "?" if before is None else percent(before.success)
    if after is None:
        return f"{first} -> ?"
    return f"{first} -> {percent(after.success)} {interval((after.low, after.high))}"


def size_text(size: int | None) -> str:
    """Return a number of bytes: 840 B, 12.3 MB.

    Example::

        >>> from turnwright_view.commands.runs import size_text
        >>> size_text(840), size_text(12_300_000), size_text(None)
        ('840 B', '12.3 MB', '?')
    """
    if size is None:
        return "?"
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def _age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _clean(folders: Sequence[Path], args: argparse.Namespace) -> int:
    """Print what can be deleted; delete it with `--yes`."""
    from turnwright.records.run_dir import is_locked
    from turnwright_view.clean import leftovers, remove
    from turnwright_view.run_rows import has_settings

    if not folders:
        raise UsageError("turnwright runs clean needs a folder: turnwright runs clean runs")
    for folder in folders:
        if folder.is_symlink():
            raise UsageError(
                f"{folder}: is a symbolic link, behind which nothing is deleted; name the folder "
                "that it leads to"
            )

    cleaned: dict[str, list[Leftover]] = {}
    skipped: dict[str, str] = {}
    for path in _runs_in(folders).values():
        if not has_settings(path):
            skipped[str(path)] = "no run of training"
        elif args.yes:
            removed = remove(path)
            if removed is None:
                skipped[str(path)] = "running"
            else:
                cleaned[str(path)] = removed
        elif is_locked(path):
            skipped[str(path)] = "running"
        else:
            cleaned[str(path)] = leftovers(path)

    if args.json:
        print(json.dumps(_cleaned_json(cleaned, skipped, deleted=args.yes), allow_nan=False))
    else:
        print("\n".join(_cleaned_lines(cleaned, skipped, deleted=args.yes)))
    return 0


def _cleaned_json(
    cleaned: dict[str, list[Leftover]], skipped: dict[str, str], *, deleted: bool
) -> dict[str, Any]:
    rows = []
    for run, leftovers in cleaned.items():
        for leftover in leftovers:
            place = str(leftover.place)
            rows.append({"run": run, "path": place, "what": leftover.what, "size": leftover.size})
    return {"deleted": deleted, "leftovers": rows, "skipped": skipped}


def _cleaned_lines(
    cleaned: dict[str, list[Leftover]], skipped: dict[str, str], *, deleted: bool
) -> list[str]:
    from turnwright.display.text import single_line

    lines = []
    total = 0
    for run, leftovers in cleaned.items():
        for leftover in leftovers:
            path = single_line(str(Path(run) / leftover.place))
            lines.append(f"{size_text(leftover.size):>9}  {path}  ({leftover.what})")
            total += leftover.size or 0
    for run, why in skipped.items():
        lines.append(f"{'-':>9}  {single_line(run)}  (left alone: {why})")

    if not any(cleaned.values()):
        return [*lines, "nothing to delete"]
    if deleted:
        return [*lines, f"{size_text(total)} freed"]
    return [*lines, f"{size_text(total)} would be freed; nothing is deleted without --yes"]


RUNS = Command(add_runs)

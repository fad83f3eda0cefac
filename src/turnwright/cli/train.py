"""Command train: train an agent with a recipe, or resume a run, and print what it came to."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import (
    LOG_LEVELS,
    Command,
    add_command,
    add_display,
    add_recipe,
    display_of,
    import_training,
    interval,
    percent,
    requested,
    resolve,
)
from turnwright.cli.trust import add_trust, confirm_run
from turnwright.errors import UsageError

if TYPE_CHECKING:
    from turnwright.config import ResolvedConfig


def add_train(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "train", "train an agent with a recipe", run_train, overrides=True
    )
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", help="run directory")
    resume = "resume this run with its own settings; --train.steps and --warmup.steps extend it"
    parser.add_argument("--resume", metavar="RUN", type=Path, help=resume)
    parser.add_argument(
        "--profile", action="store_true", help="write a Chrome trace, RUN/profile.json"
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="least level of what is written to RUN/log.txt (default: info)",
    )
    add_display(parser)
    add_trust(parser)


def run_train(args: argparse.Namespace) -> int:
    """Train, or print the settings."""
    read = partial(resolve, training=True) if args.resume is None else _resumed
    resolved = requested(args, read)
    if resolved is None:
        return 0

    from turnwright.config.launch import is_rank_zero
    from turnwright.display.progress import ProfileListener, make_display
    from turnwright.runs import run_training

    began = (time.time(), time.process_time())
    import_training()
    watch = make_display(display_of(args) if is_rank_zero() else "none")
    run_dir = args.resume or Path(resolved.config.out)
    if args.profile and is_rank_zero():
        watch = ProfileListener(watch, run_dir)
    with closing(watch):
        run_dir = run_training(
            resolved, resume=args.resume, watch=watch, began=began, log_level=args.log_level
        )

    if is_rank_zero():
        again = next_run(resolved.recipe, args.overrides, resolved.config.seed)
        print("\n".join(closing_lines(Path(run_dir), again)))
    return 0


def _resumed(args: argparse.Namespace) -> ResolvedConfig:
    """Return the settings of a run that is resumed, with those that extend it."""
    from turnwright.config.dump import extend_run

    changed = [str(args.recipe)] if args.recipe is not None else []
    for key in ("out", "seed"):
        if getattr(args, key) is not None:
            changed.append(f"--{key} {getattr(args, key)}")
    if changed:
        why = f"--resume {args.resume} uses the run's own settings"
        raise UsageError(f"{why}; leave out {changed[0]}, or start a new run")
    resolved = extend_run(args.resume, args.overrides)
    confirm_run(args.resume, resolved.config, args)
    return resolved


def next_run(recipe: Path | None, overrides: Sequence[str], seed: int) -> str:
    """Return the command that trains once more, with the same settings and the next seed."""
    if recipe is None:
        return "turnwright init my_env"
    return shlex.join(["turnwright", "train", str(recipe), *overrides, "--seed", str(seed + 1)])


def closing_lines(run_dir: Path, again: str) -> list[str]:
    """Return the run's results, the path of its report, and three commands to try next.

    `again` is the last of the commands.
    """
    from turnwright.display.diagnosis import lines_of_run
    from turnwright.display.reports import reports_of
    from turnwright.display.run_data import read_run

    summary = read_run(run_dir).summary
    rows = [*_success_rows(summary), *_other_rows(summary)]
    rows += [("report", str(path)) for path in reports_of(run_dir, renew=False)]
    rows += [("diagnosis", line) for line in lines_of_run(run_dir)]
    commands = [
        f"turnwright view {run_dir} --open",
        f"turnwright eval --run {run_dir} --samples 4",
        again,
    ]
    return [
        *(f"{label:<10} {text}" for label, text in rows),
        "next:",
        *(f"  {command}" for command in commands),
    ]


def _success_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return success before and after, and what it was measured on."""
    from turnwright.display.run_data import number

    rows = []
    for label in ("success", "greedy"):
        before = number(summary.get(f"{label}_before"))
        after = number(summary.get(f"{label}_after"))
        if before is not None and after is not None:
            ci_before = interval(summary.get(f"{label}_before_ci"))
            ci_after = interval(summary.get(f"{label}_after_ci"))
            started = _joined(percent(before), ci_before, "before,")
            ended = _joined(percent(after), ci_after, "after")
            rows.append((label, f"{started} {ended}"))

    n_episodes = summary.get("n_eval")
    n_tasks = number(summary.get("eval_tasks"))
    if summary.get("overlap") == "allowed":
        kind = "episodes of tasks that were trained too"
    elif n_tasks and n_episodes and n_tasks < n_episodes:
        kind = f"episodes of {n_tasks:.0f} held-out tasks"
    else:
        kind = "held-out tasks"
    if rows and n_episodes:
        label, text = rows[0]
        rows[0] = (label, f"{text} reinforcement, on {n_episodes} {kind}")
    return rows


def _other_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what success is compared with, the turns, and the times."""
    from turnwright.display.progress import duration
    from turnwright.display.run_data import number

    rows = []
    blind = number(summary.get("success_blind"))
    if blind is not None:
        ci = interval(summary.get("success_blind_ci"))
        rows.append(("blind", _joined(percent(blind), ci, "after, with every image gray")))
    best = number(summary.get("single_turn_best"))
    if best is not None:
        rows.append(("one reply", f"{percent(best)} at best"))
    turns_before = number(summary.get("turns_before"))
    turns_after = number(summary.get("turns_after"))
    if turns_before is not None and turns_after is not None:
        rows.append(("turns", f"{turns_before:.2f} before, {turns_after:.2f} after"))

    times = []
    for key, name in (("wall_s", "wall"), ("cpu_s", "CPU")):
        seconds = number(summary.get(key))
        if seconds is not None:
            times.append(f"{duration(seconds)} {name}")
    if times:
        rows.append(("time", ", ".join(times)))
    return rows


def _joined(*texts: str) -> str:
    """Join texts by spaces, without those that are empty."""
    return " ".join(filter(None, texts))


COMMAND = Command(add_train)

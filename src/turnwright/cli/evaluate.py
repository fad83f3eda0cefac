"""Command eval: success and pass@k of a model, a checkpoint or a run on held-out tasks.

`run_evaluate` reads the settings, of a recipe or of a run; `turnwright.evaluation` plays the tasks,
as `turnwright.evaluate` does; `evaluation_lines` makes the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import (
    Command,
    add_command,
    add_display,
    add_recipe,
    display_of,
    import_training,
    interval,
    percent,
    positive,
    requested,
    resolve,
    table,
)
from turnwright.cli.trust import add_trust, confirm_file, confirm_run
from turnwright.errors import UsageError

if TYPE_CHECKING:
    from turnwright.config import ResolvedConfig


def add_evaluate(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers,
        "eval",
        "measure success and pass@k on held-out tasks",
        run_evaluate,
        overrides=True,
    )
    add_recipe(parser)

    run = "a run directory; uses its settings and last checkpoint"
    parser.add_argument("--run", dest="of_run", metavar="RUN", type=Path, help=run)
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint or model directory instead of the recipe's model",
    )

    parser.add_argument("--samples", type=positive, metavar="K", help="sampled episodes per task")
    parser.add_argument("--tasks", type=positive, metavar="N", help="held-out tasks")
    parser.add_argument(
        "--engine", default="local", help="local (configured by [engine]) or scripted"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON object")
    add_display(parser)
    add_trust(parser)


def run_evaluate(args: argparse.Namespace) -> int:
    """Evaluate and print the result."""
    for key in ("samples", "tasks"):
        value = getattr(args, key)
        if value is not None:
            args.overrides.append(f"--eval.{key}={value}")

    resolved = requested(args, _of_recipe if args.of_run is None else _of_run)
    if resolved is None:
        return 0

    from turnwright.display.progress import make_display
    from turnwright.evaluation import evaluate_config

    import_training()
    # With --json the metrics are all that is shown, unless a display is asked for.
    display = "none" if args.json and args.display == "auto" else display_of(args)
    checkpoint = args.checkpoint or None
    if checkpoint is None and args.of_run is not None:
        checkpoint = str(args.of_run)
    with closing(make_display(display)) as watch:
        evaluation = evaluate_config(
            resolved, checkpoint=checkpoint, engine=args.engine, watch=watch
        )

    result = evaluation.row()
    print(json.dumps(result) if args.json else "\n".join(evaluation_lines(result)))
    return 0


def _of_recipe(args: argparse.Namespace) -> ResolvedConfig:
    resolved = resolve(args, training=False)
    if args.recipe is not None:
        confirm_file(args.recipe, resolved.config, args)
    return resolved


def _of_run(args: argparse.Namespace) -> ResolvedConfig:
    from turnwright.config.dump import load_run_config
    from turnwright.config.recipe import override

    if args.recipe is not None:
        raise UsageError(f"--run {args.of_run} has its own recipe; leave out {args.recipe}")

    overrides = list(args.overrides)
    if args.seed is not None:
        overrides.append(f"--seed={args.seed}")
    resolved = override(load_run_config(args.of_run), overrides, training=False)
    confirm_run(args.of_run, resolved.config, args)
    return resolved


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """Format an evaluation as a table.

    Its rows are `sampled`, `greedy` (each with `success`, `ci`, `n`, `turns`) and `pass_at_k`.
    """
    rows: list[list[str]] = [["", "success", "95% interval", "episodes", "turns"]]
    modes = {mode: result[mode] for mode in ("sampled", "greedy") if result.get(mode)}
    for mode, metrics in modes.items():
        success = percent(metrics.get("success"))
        ci = interval(metrics.get("ci"))
        episodes = str(metrics.get("n", "-"))
        turns = "-" if metrics.get("turns") is None else f"{metrics['turns']:.2f}"
        rows.append([mode, success, ci, episodes, turns])
    for k, metrics in (result.get("pass_at_k") or {}).items():
        rows.append([f"pass@{k}", percent(metrics["value"]), interval(metrics.get("ci"))])

    lines = table(rows)
    for mode, metrics in modes.items():
        failed = metrics.get("failed")
        if failed:
            lines.append(f"{failed} {mode} episodes failed and are not counted")
    return lines


COMMAND = Command(add_evaluate)

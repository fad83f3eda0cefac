"""`turnwise eval`: success and pass@k on held-out tasks, with 95% intervals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command, add_display, add_recipe, dry_run, handled_early, interval, percent, resolve, table
from turnwise.errors import UsageError


def add_evaluate(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "eval", "measure success and pass@k on held-out tasks", run_evaluate, overrides=True)
    add_recipe(parser)
    parser.add_argument(
        "--run", dest="of_run", metavar="RUN", type=Path, help="a run directory: its settings, its last checkpoint"
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="a checkpoint or model directory in place of the recipe's model")
    parser.add_argument("--samples", type=_positive, metavar="K", help="sampled episodes per task")
    parser.add_argument("--tasks", type=_positive, metavar="N", help="held-out tasks")
    parser.add_argument("--engine", default="local", help="what generates: local, what [engine] says; or scripted")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    add_display(parser)


def run_evaluate(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    if handled_early(args):
        return 0
    if args.samples is not None:
        args.overrides.append(f"--eval.samples={args.samples}")
    if args.tasks is not None:
        args.overrides.append(f"--eval.tasks={args.tasks}")
    resolved = _of_run(args) if args.of_run is not None else resolve(args, training=False)
    if args.dry_run:
        return dry_run(resolved)
    from turnwise import verbs
    from turnwise.view.display import make_display

    watch = make_display("none" if args.json and args.display == "auto" else args.display)
    try:
        result = verbs.run_evaluation(
            resolved,
            checkpoint=args.checkpoint or (str(args.of_run) if args.of_run else None),
            engine=args.engine,
            samples=resolved.config.eval.samples,
            watch=watch,
        )
    finally:
        watch.close()
    print(json.dumps(with_pass_at_k(result)) if args.json else "\n".join(evaluation_lines(with_pass_at_k(result))))
    return 0


def with_pass_at_k(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with `pass_at_k` (k -> value and interval) worked out of `counts`, (episodes, successes) per task; tasks none
    of whose episodes could be judged have no part in it."""
    found = dict(result)
    counts = [(int(n), int(c)) for n, c in result.get("counts") or () if n]
    if counts and "pass_at_k" not in found:
        from turnwise.trace.stats import mean_interval, pass_at_k

        fewest = min(n for n, _ in counts)
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < fewest] + [fewest]
        found["pass_at_k"] = {}
        for k in ks:
            values = [pass_at_k(n, c, k) for n, c in counts]
            found["pass_at_k"][str(k)] = {"value": sum(values) / len(values), "ci": list(mean_interval(values))}
    return found


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """The figures of `verbs.run_evaluation` as a table.

    Understood: `sampled` and `greedy` (each with `success`, `ci`, `n`, `turns`), or the same figures flat; `pass_at_k`.
    """
    rows: list[list[str]] = [["", "success", "95% interval", "episodes", "turns"]]
    flat = {} if "sampled" in result or "greedy" in result else {"sampled": result}
    for mode in ("sampled", "greedy"):
        figures = result.get(mode) or flat.get(mode)
        if figures:
            turns = figures.get("turns")
            n = str(figures.get("n", "-"))
            rows.append(
                [
                    mode,
                    percent(figures.get("success")),
                    interval(figures.get("ci")),
                    n,
                    "-" if turns is None else f"{turns:.2f}",
                ]
            )
    for k, figures in (result.get("pass_at_k") or {}).items():
        rows.append([f"pass@{k}", percent(figures["value"]), interval(figures.get("ci"))])
    failed = {mode: (result.get(mode) or {}).get("failed") for mode in ("sampled", "greedy")}
    told = [f"{count} {mode} episodes failed, and count neither way" for mode, count in failed.items() if count]
    return [*table(rows), *told]


def _of_run(args: argparse.Namespace) -> Any:
    from turnwise.config.load import override
    from turnwise.config.show import load_run_config

    if args.recipe is not None:
        raise UsageError(f"--run {args.of_run} has a recipe of its own; leave out {args.recipe}")
    words = [*args.overrides, *([f"--seed={args.seed}"] if args.seed is not None else [])]
    return override(load_run_config(args.of_run), words, training=False)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return value

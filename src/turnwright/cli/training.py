"""Commands train, eval and rollout."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import (
    add_command,
    add_display,
    add_recipe,
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
    from turnwright.types import Trajectory


def add_evaluate(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "eval", "measure success and pass@k on held-out tasks", run_evaluate, overrides=True)
    add_recipe(parser)
    run = "a run directory; uses its settings and last checkpoint"
    parser.add_argument("--run", dest="of_run", metavar="RUN", type=Path, help=run)
    parser.add_argument("--checkpoint", metavar="DIR", help="a checkpoint or model directory instead of the recipe's model")
    parser.add_argument("--samples", type=positive, metavar="K", help="sampled episodes per task")
    parser.add_argument("--tasks", type=positive, metavar="N", help="held-out tasks")
    parser.add_argument("--engine", default="local", help="local (configured by [engine]) or scripted")
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON object")
    add_display(parser)
    add_trust(parser)


def run_evaluate(args: argparse.Namespace) -> int:
    """Evaluate and print the result."""
    args.overrides.extend(f"--eval.{key}={vars(args)[key]}" for key in ("samples", "tasks") if vars(args)[key] is not None)
    resolved = requested(args, _of_recipe if args.of_run is None else _of_run)
    if resolved is None:
        return 0
    from turnwright import commands
    from turnwright.display.progress import make_display

    import_training()
    with closing(make_display("none" if args.json and args.display == "auto" else args.display)) as watch:
        checkpoint = args.checkpoint or (str(args.of_run) if args.of_run else None)
        result = commands.run_evaluation(resolved, checkpoint=checkpoint, engine=args.engine, watch=watch)
    result = with_pass_at_k(result)
    print(json.dumps(result) if args.json else "\n".join(evaluation_lines(result)))
    return 0


def with_pass_at_k(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with `pass_at_k` (k -> value and interval), from `counts` of (episodes, successes) per task."""
    from turnwright.records.episode_metrics import mean_interval, pass_at_k

    counts = [(int(n), int(c)) for n, c in result.get("counts") or () if n]
    if not counts:
        return dict(result)
    fewest = min(n for n, _ in counts)
    values = {k: [pass_at_k(n, c, k) for n, c in counts] for k in (1, 2, 4, 8, 16, 32, 64, 128, fewest) if k <= fewest}
    found = {str(k): {"value": sum(own) / len(own), "ci": list(mean_interval(own))} for k, own in values.items()}
    return {**result, "pass_at_k": found}


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """Format `sampled`, `greedy` (each with `success`, `ci`, `n`, `turns`) and `pass_at_k` of an evaluation as a table."""
    rows: list[list[str]] = [["", "success", "95% interval", "episodes", "turns"]]
    modes = {mode: result[mode] for mode in ("sampled", "greedy") if result.get(mode)}
    for mode, metrics in modes.items():
        length = "-" if metrics.get("turns") is None else f"{metrics['turns']:.2f}"
        rows.append([mode, percent(metrics.get("success")), interval(metrics.get("ci")), str(metrics.get("n", "-")), length])
    for k, metrics in (result.get("pass_at_k") or {}).items():
        rows.append([f"pass@{k}", percent(metrics["value"]), interval(metrics.get("ci"))])
    failed = {mode: metrics.get("failed") for mode, metrics in modes.items()}
    return [*table(rows), *(f"{count} {mode} episodes failed and are not counted" for mode, count in failed.items() if count)]


def _of_recipe(args: argparse.Namespace) -> Any:
    resolved = resolve(args, training=False)
    if args.recipe is not None:
        confirm_file(args.recipe, resolved.config, args)
    return resolved


def _of_run(args: argparse.Namespace) -> Any:
    from turnwright.config.dump import load_run_config
    from turnwright.config.recipe import override

    if args.recipe is not None:
        raise UsageError(f"--run {args.of_run} has its own recipe; leave out {args.recipe}")
    seed = [] if args.seed is None else [f"--seed={args.seed}"]
    resolved = override(load_run_config(args.of_run), [*args.overrides, *seed], training=False)
    confirm_run(args.of_run, resolved.config, args)
    return resolved


def add_rollout(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "rollout", "play a few tasks and print the trajectories", run_rollout, overrides=True)
    add_recipe(parser)
    parser.add_argument("-n", "--tasks", type=positive, default=4, metavar="N", help="tasks to play (default: 4)")
    save = "also write the trajectories to this file, one JSON object per line"
    parser.add_argument("--save", metavar="FILE", type=Path, help=save)
    parser.add_argument("--quiet", action="store_true", help="print one line per trajectory")
    add_display(parser)


def run_rollout(args: argparse.Namespace) -> int:
    """Play tasks and print their trajectories."""
    resolved = requested(args, partial(resolve, training=False))
    if resolved is None:
        return 0
    from turnwright import commands
    from turnwright.display.progress import make_display

    import_training()
    with closing(make_display(args.display)) as watch:
        trajectories = commands.preview_rollouts(resolved, n=args.tasks, out=args.save, watch=watch)
    for line in trajectory_lines(trajectories, short=args.quiet):
        print(line)
    if args.save is not None:
        print(f"wrote {args.save}")
    return 0


def trajectory_lines(trajectories: Iterable[Trajectory], *, short: bool = False) -> Iterable[str]:
    """Yield each trajectory as text: a head line, then its failure and its conversation."""
    from turnwright.display.text import single_line

    for trajectory in trajectories:
        lines = list(trajectory.describe())
        yield from map(single_line, lines[: 1 + (trajectory.error is not None)] if short else [*lines, ""])


def add_train(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "train", "train an agent with a recipe", run_train, overrides=True)
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", help="run directory")
    resume = "resume this run with its own settings; --train.steps and --warmup.steps extend it"
    parser.add_argument("--resume", metavar="RUN", type=Path, help=resume)
    parser.add_argument("--profile", action="store_true", help="write a Chrome trace, RUN/profile.json")
    add_display(parser)
    add_trust(parser)


def run_train(args: argparse.Namespace) -> int:
    """Train, or print the settings."""
    resolved = requested(args, partial(resolve, training=True) if args.resume is None else _resumed)
    if resolved is None:
        return 0
    from turnwright import commands
    from turnwright.config.launch import is_rank_zero
    from turnwright.display.progress import ProfileListener, make_display

    began = (time.time(), time.process_time())
    import_training()
    display = make_display(args.display if is_rank_zero() else "none")
    profiled = args.profile and is_rank_zero()
    with closing(ProfileListener(display, args.resume or Path(resolved.config.out)) if profiled else display) as watch:
        run_dir = commands.run_training(resolved, resume=args.resume, watch=watch, began=began)
    if is_rank_zero():
        again = next_run(resolved.recipe, args.overrides, resolved.config.seed)
        print("\n".join(closing_lines(Path(run_dir), again)))
    return 0


def next_run(recipe: Path | None, overrides: Sequence[str], seed: int) -> str:
    """Return the command that trains once more, with the same settings and the next seed."""
    if recipe is None:
        return "turnwright init my_env"
    return shlex.join(["turnwright", "train", str(recipe), *overrides, "--seed", str(seed + 1)])


def closing_lines(run_dir: Path, again: str) -> list[str]:
    """Return the run's results, the path of its report, and three commands to try next, of which `again` is the last."""
    from turnwright.display.diagnosis import lines_of_run
    from turnwright.display.progress import duration
    from turnwright.display.reports import reports_of
    from turnwright.display.run_data import number, read_run

    summary = read_run(run_dir).summary
    rows: list[tuple[str, str]] = []
    for label in ("success", "greedy"):
        before, after = number(summary.get(f"{label}_before")), number(summary.get(f"{label}_after"))
        if before is not None and after is not None:
            cis = [interval(summary.get(f"{label}_{when}_ci")) for when in ("before", "after")]
            text = " ".join(filter(None, (percent(before), cis[0], "before,", percent(after), cis[1], "after")))
            rows.append((label, text))
    best, n = number(summary.get("single_turn_best")), summary.get("n_eval")
    kind = "episodes of tasks that were trained too" if summary.get("overlap") == "allowed" else "held-out tasks"
    tasks = number(summary.get("eval_tasks"))
    if tasks and n and tasks < n and kind == "held-out tasks":
        kind = f"episodes of {tasks:.0f} held-out tasks"
    if rows and n:
        rows[0] = (rows[0][0], f"{rows[0][1]} reinforcement, on {n} {kind}")
    if (blind := number(summary.get("success_blind"))) is not None:
        text = " ".join(filter(None, (percent(blind), interval(summary.get("success_blind_ci")))))
        rows.append(("blind", f"{text} after, with every image gray"))
    if best is not None:
        rows.append(("one reply", f"{percent(best)} at best"))
    turns = [number(summary.get(f"turns_{when}")) for when in ("before", "after")]
    if turns[0] is not None and turns[1] is not None:
        rows.append(("turns", f"{turns[0]:.2f} before, {turns[1]:.2f} after"))
    times = [(number(summary.get(key)), name) for key, name in (("wall_s", "wall"), ("cpu_s", "CPU"))]
    if known := [f"{duration(seconds)} {name}" for seconds, name in times if seconds is not None]:
        rows.append(("time", ", ".join(known)))
    rows += [("report", str(path)) for path in reports_of(run_dir, renew=False)]
    rows += [("diagnosis", line) for line in lines_of_run(run_dir)]
    following = [f"turnwright view {run_dir} --open", f"turnwright eval --run {run_dir} --samples 4", again]
    return [*(f"{label:<10} {text}" for label, text in rows), "next:", *(f"  {command}" for command in following)]


def _resumed(args: argparse.Namespace) -> Any:
    from turnwright.config.dump import extend_run

    changed = [str(args.recipe)] if args.recipe is not None else []
    changed += [f"--{key} {getattr(args, key)}" for key in ("out", "seed") if getattr(args, key) is not None]
    if changed:
        raise UsageError(f"--resume {args.resume} uses the run's own settings; leave out {changed[0]}, or start a new run")
    resolved = extend_run(args.resume, args.overrides)
    confirm_run(args.resume, resolved.config, args)
    return resolved

"""`turnwise train`: train what a recipe describes, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command, add_display, add_recipe, dry_run, handled_early, interval, percent, resolve
from turnwise.errors import UsageError


def add_train(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "train", "train an agent by a recipe", run_train, overrides=True)
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", help="run directory")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with this run, with the settings that it has")
    parser.add_argument("--profile", action="store_true", help="write a Chrome trace, RUN/profile.json")
    add_display(parser)


def run_train(args: argparse.Namespace) -> int:
    """Train, or print the settings."""
    if handled_early(args):
        return 0
    resolved = _resumed(args) if args.resume is not None else resolve(args, training=True)
    if args.dry_run:
        return dry_run(resolved)
    from turnwise import verbs
    from turnwise.config.launch import is_rank_zero
    from turnwise.view.display import make_display

    watch = make_display(args.display if is_rank_zero() else "none")
    if args.profile and is_rank_zero():
        from turnwise.view.profile import ProfileListener

        watch = ProfileListener(watch, args.resume or Path(resolved.config.out))
    try:
        run_dir = verbs.run_training(resolved, resume=args.resume, watch=watch)
    finally:
        watch.close()
    if is_rank_zero():
        print("\n".join(closing_lines(Path(run_dir), resolved.recipe)))
    return 0


def closing_lines(run_dir: Path, recipe: Path | None) -> list[str]:
    """What the run came to, where its report is, and three commands to try next."""
    from turnwise.cli.view import diagnoses
    from turnwise.view.report import write_report
    from turnwise.view.rundir import number, read_run
    from turnwise.view.state import duration

    report = run_dir / "report.html"
    if not report.exists():
        write_report(run_dir)
    summary = read_run(run_dir).summary
    rows: list[tuple[str, str]] = []
    for label, key in (("success", "success"), ("greedy", "greedy")):
        before, after = number(summary.get(f"{key}_before")), number(summary.get(f"{key}_after"))
        if before is not None and after is not None:
            cis = [interval(summary.get(f"{key}_{when}_ci")) for when in ("before", "after")]
            said = " ".join(filter(None, (percent(before), cis[0], "before,", percent(after), cis[1], "after")))
            rows.append((label, said))
    best, n = number(summary.get("single_turn_best")), summary.get("n_eval")
    if rows and n:
        rows[0] = (rows[0][0], f"{rows[0][1]} reinforcement, on {n} held-out tasks")
    if (blind := number(summary.get("success_blind"))) is not None:
        said = " ".join(filter(None, (percent(blind), interval(summary.get("success_blind_ci")))))
        rows.append(("blind", f"{said} after, with every image grey"))
    if best is not None:
        rows.append(("one reply", f"{percent(best)} at best"))
    turns = [number(summary.get(f"turns_{when}")) for when in ("before", "after")]
    if turns[0] is not None and turns[1] is not None:
        rows.append(("turns", f"{turns[0]:.2f} before, {turns[1]:.2f} after"))
    times = [(number(summary.get(key)), name) for key, name in (("wall_s", "wall"), ("cpu_s", "CPU"))]
    if any(seconds is not None for seconds, _ in times):
        rows.append(("time", ", ".join(f"{duration(seconds)} {name}" for seconds, name in times if seconds is not None)))
    rows.append(("report", str(report)))
    rows += [("diagnosis", line.removeprefix("diagnosis: ")) for line in diagnoses(run_dir)]
    again = f"turnwise train {recipe} --seed 1" if recipe is not None else "turnwise init my_env"
    following = [f"turnwise view {run_dir} --open", f"turnwise eval --run {run_dir} --samples 4", again]
    return [*(f"{label:<10} {text}" for label, text in rows), "next:", *(f"  {command}" for command in following)]


def _resumed(args: argparse.Namespace) -> Any:
    from turnwise.config.show import load_run_config

    changed = [str(word) for word in (args.recipe, *args.overrides) if word is not None]
    changed += [f"--{key} {getattr(args, key)}" for key in ("out", "seed") if getattr(args, key) is not None]
    if changed:
        raise UsageError(f"--resume {args.resume} keeps the run's own settings; leave out {changed[0]}, or start a new run")
    return load_run_config(args.resume)

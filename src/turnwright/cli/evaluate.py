"""Command eval: success and pass@k of a model, a checkpoint or a run on held-out tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import (
    Command,
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
from turnwright.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from turnwright.config import ResolvedConfig
    from turnwright.records import ProgressListener


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

    import_training()
    display = "none" if args.json and args.display == "auto" else args.display
    with closing(make_display(display)) as watch:
        checkpoint = args.checkpoint or (str(args.of_run) if args.of_run else None)
        result = run_evaluation(resolved, checkpoint=checkpoint, engine=args.engine, watch=watch)

    result = with_pass_at_k(result)
    print(json.dumps(result) if args.json else "\n".join(evaluation_lines(result)))
    return 0


def _of_recipe(args: argparse.Namespace) -> ResolvedConfig:
    """Return the settings of a recipe."""
    resolved = resolve(args, training=False)
    if args.recipe is not None:
        confirm_file(args.recipe, resolved.config, args)
    return resolved


def _of_run(args: argparse.Namespace) -> ResolvedConfig:
    """Return the settings of a run."""
    from turnwright.config.dump import load_run_config
    from turnwright.config.recipe import override

    if args.recipe is not None:
        raise UsageError(f"--run {args.of_run} has its own recipe; leave out {args.recipe}")
    seed = [] if args.seed is None else [f"--seed={args.seed}"]
    resolved = override(load_run_config(args.of_run), [*args.overrides, *seed], training=False)
    confirm_run(args.of_run, resolved.config, args)
    return resolved


def run_evaluation(
    resolved: ResolvedConfig,
    *,
    checkpoint: str | None = None,
    engine: str = "local",
    watch: ProgressListener | None = None,
) -> dict[str, Any]:
    """Return success on held-out tasks, `sampled` and `greedy`, and `counts`.

    These are (episodes, successes) per task. `checkpoint` may be a model directory or a run (its
    last one); `engine` `scripted` is the environments' own solvers.
    """
    from turnwright.records import NullListener
    from turnwright.rollouts.standalone import run_sync

    return run_sync(_evaluate(resolved, checkpoint, engine, watch or NullListener()))


async def _evaluate(
    resolved: ResolvedConfig,
    checkpoint: str | None,
    engine: str,
    watch: ProgressListener,
) -> dict[str, Any]:
    from turnwright.engines import Sampling
    from turnwright.training.configured_rollout import make_rollout, play_with_retries
    from turnwright.training.evaluation import play_evaluation, summarize
    from turnwright.training.task_plan import TaskPlan, check_failures, eval_samples, make_env_specs

    config = resolved.config
    specs = make_env_specs(config)
    overlap = config.eval.overlap == "allowed"
    plan = TaskPlan(
        specs,
        steps=1,
        groups=1,
        held_out=config.eval.tasks,
        seed=config.seed,
        overlap=overlap,
    )
    if not plan.held_out:
        remedy = "set eval_tasks in [[env]], or provide more tasks"
        raise ConfigError(f"there are no held-out tasks; {remedy}")

    rollout = make_rollout(resolved, specs, checkpoint, engine, watch.note)
    chosen = plan.held_out
    if config.limits.prompt_tokens is not None:
        first_episodes = [choice.episodes("prompt", 0, 1)[0] for choice in chosen]
        fits, _ = await rollout.within_prompt_limit(first_episodes)
        chosen = [choice for choice in chosen if choice.task.id in fits]

    # Each pass: the episodes per task and how they are sampled.
    own = Sampling(
        config.eval.temperature,
        config.eval.top_p,
        config.eval.top_k,
        min_p=config.eval.min_p,
    )
    passes = {"sampled": (eval_samples(len(chosen), config.eval.tasks, config.eval.samples), own)}
    if config.eval.greedy and engine == "local":
        passes["greedy"] = (1, Sampling(temperature=0.0))

    result: dict[str, Any] = {}
    watch.phase("evaluate", len(passes), "passes")
    try:
        for number, (mode, (samples, sampling)) in enumerate(passes.items(), 1):
            played = await play_evaluation(
                rollout,
                chosen,
                name=f"eval-{mode}",
                step=0,
                samples=samples,
                sampling=sampling,
                play=partial(play_with_retries, rollout, max_retries=config.rollout.max_retries),
            )
            check_failures(played, f"the {mode} pass", None, config.rollout.max_failed)
            summary = summarize(played, config.eval.success)
            result[mode] = summary.row()
            if mode == "sampled":
                result["counts"] = [list(pair) for pair in summary.counts]
            watch.progress(number, {"success": summary.success, "turns": summary.turns})
    finally:
        await rollout.engine.close()
    return result


def with_pass_at_k(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with `pass_at_k` (k -> value and interval), computed from its `counts`."""
    from turnwright.records.episode_metrics import mean_interval, pass_at_k

    counts = [(int(n), int(c)) for n, c in result.get("counts") or () if n]
    if not counts:
        return dict(result)

    fewest = min(n for n, _ in counts)
    estimates = {}
    for k in (1, 2, 4, 8, 16, 32, 64, 128, fewest):
        if k <= fewest:
            by_task = [pass_at_k(n, c, k) for n, c in counts]
            estimates[str(k)] = {
                "value": sum(by_task) / len(by_task),
                "ci": list(mean_interval(by_task)),
            }
    return {**result, "pass_at_k": estimates}


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """Format an evaluation as a table.

    Its rows are `sampled`, `greedy` (each with `success`, `ci`, `n`, `turns`) and `pass_at_k`.
    """
    rows: list[list[str]] = [["", "success", "95% interval", "episodes", "turns"]]
    modes = {mode: result[mode] for mode in ("sampled", "greedy") if result.get(mode)}
    for mode, metrics in modes.items():
        success, ci = percent(metrics.get("success")), interval(metrics.get("ci"))
        turns = "-" if metrics.get("turns") is None else f"{metrics['turns']:.2f}"
        rows.append([mode, success, ci, str(metrics.get("n", "-")), turns])
    for k, metrics in (result.get("pass_at_k") or {}).items():
        rows.append([f"pass@{k}", percent(metrics["value"]), interval(metrics.get("ci"))])

    lines = table(rows)
    for mode, metrics in modes.items():
        if failed := metrics.get("failed"):
            lines.append(f"{failed} {mode} episodes failed and are not counted")
    return lines


COMMAND = Command(add_evaluate)

"""Command eval: success and pass@k of a model, a checkpoint or a run on held-out tasks.

`run_evaluate` reads the settings, of a recipe or of a run; `run_evaluation` plays the passes, one
sampled and one greedy; `with_pass_at_k` and `evaluation_lines` make the table. How episodes are
played and counted is in `turnwright.training.evaluation`, which training uses too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
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
from turnwright.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from turnwright.config import ResolvedConfig
    from turnwright.engines import Sampling
    from turnwright.records import ProgressListener


@dataclass(frozen=True, slots=True)
class _Pass:
    """One way of playing each task: how it is called, how often, and how replies are sampled."""

    mode: str
    samples: int
    sampling: Sampling


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
    # With --json the metrics are all that is shown, unless a display is asked for.
    display = "none" if args.json and args.display == "auto" else display_of(args)
    checkpoint = args.checkpoint or None
    if checkpoint is None and args.of_run is not None:
        checkpoint = str(args.of_run)
    with closing(make_display(display)) as watch:
        result = run_evaluation(resolved, checkpoint=checkpoint, engine=args.engine, watch=watch)

    result = with_pass_at_k(result)
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


def run_evaluation(
    resolved: ResolvedConfig,
    *,
    checkpoint: str | None = None,
    engine: str = "local",
    watch: ProgressListener | None = None,
) -> dict[str, Any]:
    """Return success on held-out tasks, `sampled` and `greedy`, and `counts`.

    Counts are (episodes, successes) of each task in the sampled pass. `checkpoint` may be a model
    directory or a run (its last one); `engine` `scripted` is the environments' own solvers.

    Raises `ConfigError` where the settings hold no tasks out.
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
    from turnwright.training.configured_rollout import make_rollout, play_with_retries
    from turnwright.training.evaluation import play_evaluation, summarize
    from turnwright.training.task_plan import TaskPlan, check_failures, make_env_specs

    config = resolved.config
    specs = make_env_specs(config)
    plan = TaskPlan(
        specs,
        steps=1,
        groups=1,
        held_out=config.eval.tasks,
        seed=config.seed,
        overlap=config.eval.overlap == "allowed",
    )
    if not plan.held_out:
        remedy = "set eval_tasks in [[env]], or provide more tasks"
        raise ConfigError(f"there are no held-out tasks; {remedy}")

    rollout = make_rollout(resolved, specs, checkpoint, engine, watch.note)
    choices = plan.held_out
    if config.limits.prompt_tokens is not None:
        first_episodes = [choice.episodes("prompt", 0, 1)[0] for choice in choices]
        fits, _ = await rollout.within_prompt_limit(first_episodes)
        choices = [choice for choice in choices if choice.task.id in fits]

    passes = _passes(resolved, len(choices), engine)
    result: dict[str, Any] = {}
    watch.phase("evaluate", len(passes), "passes")
    try:
        for number, this_pass in enumerate(passes, 1):
            played = await play_evaluation(
                rollout,
                choices,
                name=f"eval-{this_pass.mode}",
                step=0,
                samples=this_pass.samples,
                sampling=this_pass.sampling,
                play=partial(play_with_retries, rollout, max_retries=config.rollout.max_retries),
            )
            max_failed = config.rollout.max_failed
            check_failures(played, f"the {this_pass.mode} pass", None, max_failed)

            summary = summarize(played, config.eval.success)
            result[this_pass.mode] = summary.row()
            if this_pass.mode == "sampled":
                result["counts"] = [list(pair) for pair in summary.counts]
            watch.progress(number, {"success": summary.success, "turns": summary.turns})
    finally:
        await rollout.engine.close()
    return result


def _passes(resolved: ResolvedConfig, tasks: int, engine: str) -> list[_Pass]:
    """Return the passes that the settings ask for; greedy replies are those of the local engine
    only."""
    from turnwright.engines import Sampling
    from turnwright.training.task_plan import eval_samples

    settings = resolved.config.eval
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k, min_p=settings.min_p)
    samples = eval_samples(tasks, settings.tasks, settings.samples)
    passes = [_Pass("sampled", samples, sampling)]
    if settings.greedy and engine == "local":
        passes.append(_Pass("greedy", 1, Sampling(temperature=0.0)))
    return passes


def with_pass_at_k(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with `pass_at_k` (k -> value and interval), computed from its `counts`."""
    from turnwright.records.episode_metrics import mean_interval, pass_at_k

    counts = [
        (int(episodes), int(successes))
        for episodes, successes in result.get("counts") or ()
        if episodes
    ]
    if not counts:
        return dict(result)

    # Of a task that was played n times, pass@k has an estimate for k up to n.
    fewest = min(episodes for episodes, _ in counts)
    estimates = {}
    for k in (1, 2, 4, 8, 16, 32, 64, 128, fewest):
        if k > fewest:
            continue
        by_task = [pass_at_k(episodes, successes, k) for episodes, successes in counts]
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

"""Replay a run's episodes from its directory, with its settings or changed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turnwright.config import EnvConfig
from turnwright.config.dump import load_run_config
from turnwright.config.names import HISTORY_OBJECT
from turnwright.config.recipe import override
from turnwright.envs.resolve import resolve_env
from turnwright.errors import UsageError
from turnwright.rollouts.render_check import recorded_settings
from turnwright.training.model.directory import base_model_of, renderer_of, row_count, token_count
from turnwright.training.task_plan import TaskPlan, make_env_specs
from turnwright.types import EpisodeKey, Trajectory
from turnwright_view.replay.loop import ReplayResult, replay_loop


def replay_run(
    run: Path,
    *,
    env: str | None = None,
    overrides: Sequence[str] = (),
    reward: Callable[[Trajectory], Any] | None = None,
    only: Callable[[EpisodeKey], bool] | None = None,
) -> ReplayResult:
    """Run the rollout loop again on a run's recorded data.

    Args:
        env: environment that replaces the recorded one: a name or `file.py:Name`, with the settings
            of the run's only environment; `recipe` uses the run's own.
        overrides: command-line overrides of the run's settings.
        reward: reward function that replaces the recorded reward.
        only: filter of episodes by key.

    Raises `UsageError` for invalid arguments; a run of `turnwright.rollout` has no settings to
    override; `TraceError` when the record is missing or unreadable.
    """
    options: dict[str, Any] = {"reward": reward, "only": only}
    if not (run / "config.json").is_file():
        if overrides or env == "recipe":
            raise UsageError(
                f"{run}: contains no config.json, so it has no settings; use tw.replay_loop(...) "
                "with its original arguments"
            )
        return replay_loop(run, env=None if env is None else resolve_env(env), **options)
    original = load_run_config(run)
    config = override(original, overrides).config if overrides else original.config
    source = run / "model" if (run / "model").is_dir() else config.model.directory or Path()
    renderer, root = (
        renderer_of(source, config.model, config.rollout.control_text),
        base_model_of(source) or source,
    )
    renderer.ban(range(token_count(root), row_count(root)))  # ids without text, as for sampling
    options |= {"renderer": renderer}
    if not config.rollout.history.startswith(HISTORY_OBJECT):
        options["history"] = config.rollout.history
    rollout = original.config.rollout
    options["settings"] = {  # for a journal that has none
        "seed": original.config.seed,
        "limits": asdict(original.config.limits),
        "stop": rollout.stop,
        "sanity": recorded_settings(rollout.sanity, rollout.sanity_share),
    }
    options |= {"limits": config.limits} if config.limits != original.config.limits else {}
    options |= (
        {"stop": config.rollout.stop} if config.rollout.stop != original.config.rollout.stop else {}
    )
    if env is None and config.rollout.function is None:
        return replay_loop(run, **options)
    if env not in (None, "recipe"):
        settings = config.env[0] if len(config.env) == 1 else EnvConfig()
        config = replace(
            config, env=(replace(settings, use=env or "", name=settings.name or settings.use),)
        )
    env_specs = make_env_specs(config)
    plan = TaskPlan(
        env_specs,
        steps=(*original.extended.get("train.steps", ()), config.train.steps),
        groups=config.rollout.groups,
        held_out=config.eval.tasks,
        seed=config.seed,
        overlap=config.eval.overlap == "allowed",
    )
    tasks = {choice.task.id: choice.task for choice in (*plan.train, *plan.held_out)}
    return replay_loop(
        run,
        env={env_spec.name: env_spec for env_spec in env_specs},
        tasks=tasks.values(),
        **options,
    )

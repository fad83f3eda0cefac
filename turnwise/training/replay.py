"""The episodes of a run played again from its directory, with its own settings or with some that were changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turnwise.config import EnvConfig, RunConfig
from turnwise.config.dump import load_run_config
from turnwise.config.load import override
from turnwise.config.schema import HISTORY_OBJECT
from turnwise.envs.resolve import resolve_env
from turnwise.errors import UsageError
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.rollouts.replay.loop import ReplayResult, replay_loop
from turnwise.training.model.directory import base_model_of, renderer_of, row_count, token_count
from turnwise.training.task_plan import TaskPlan, make_env_specs
from turnwise.types import EpisodeKey, Trajectory


def replay_run(
    run: Path,
    *,
    env: str | None = None,
    overrides: Sequence[str] = (),
    reward: Callable[[Trajectory], Any] | None = None,
    only: Callable[[EpisodeKey], bool] | None = None,
) -> ReplayResult:
    """Run the loop of a run again against what it recorded.

    Args:
        env: an environment in place of the recorded world: a name or `file.py:Name`, with the settings of the run's own where
            it has one; `recipe` takes the run's own.
        overrides: command-line words that change settings of the run.
        reward: a reward function in place of the recorded reward.
        only: chooses episodes by their keys.

    Raises:
        UsageError: for a mistake in what is given; a run of `turnwise.rollout` has no settings to be overridden.
        TraceError: when there is no record, or it cannot be read.
    """
    options: dict[str, Any] = {"reward": reward, "only": only}
    if not (run / "config.json").is_file():
        if overrides or env == "recipe":
            raise UsageError(
                f"{run}: holds no config.json, so it has no settings; use tw.replay_loop(...) with what it began with"
            )
        return replay_loop(run, env=None if env is None else resolve_env(env), **options)
    begun = load_run_config(run)
    config = override(begun, overrides).config if overrides else begun.config
    options |= {"renderer": _renderer_of(run, config)}
    if not config.rollout.history.startswith(HISTORY_OBJECT):
        options["history"] = config.rollout.history
    names = ("sanity", "sanity_every", "sanity_share")
    options["settings"] = {  # of a journal that does not have them
        "seed": begun.config.seed,
        "limits": asdict(begun.config.limits),
        "stop": begun.config.rollout.stop,
        "sanity": tuple(getattr(begun.config.rollout, name) for name in names),
    }
    options |= {"limits": config.limits} if config.limits != begun.config.limits else {}
    options |= {"stop": config.rollout.stop} if config.rollout.stop != begun.config.rollout.stop else {}
    if env is None and config.rollout.function is None:
        return replay_loop(run, **options)
    if env not in (None, "recipe"):
        one = config.env[0] if len(config.env) == 1 else EnvConfig()
        config = replace(config, env=(replace(one, use=env or "", name=one.name or one.use),))
    worlds = make_env_specs(config)
    plan = TaskPlan(
        worlds, steps=config.train.steps, groups=config.rollout.groups, held_out=config.eval.tasks, seed=config.seed
    )
    tasks = {choice.task.id: choice.task for choice in (*plan.train, *plan.held_out)}
    return replay_loop(run, env={world.name: world for world in worlds}, tasks=tasks.values(), **options)


def _renderer_of(run: Path, config: RunConfig) -> ChatRenderer:
    """The renderer of a run's model, without its weights."""
    source = run / "model" if (run / "model").is_dir() else Path(config.model.path or "")
    found, root = renderer_of(source, config.model, config.rollout.control_text), base_model_of(source) or source
    found.ban(range(token_count(root), row_count(root)))  # as for sampling: they have no text
    return found

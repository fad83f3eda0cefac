"""Rollouts outside training: with the model that settings, a run or a checkpoint name.

Evaluations, previews of rollouts and the recording proxy play with them (`make_rollout`). A run of
training builds its own (`TrainingRun`). torch is imported where a model is loaded: solvers and
services of text need none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config import ResolvedConfig, RunConfig
from turnwright.engines import Engine, HasRenderer, Sampling, ScriptedEngine
from turnwright.errors import ConfigError, ModelError
from turnwright.records import RunDir
from turnwright.renderers import Renderer, byte_renderer
from turnwright.renderers.history import History
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.play_again import play_again
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import Trajectory

if TYPE_CHECKING:
    from turnwright.envs.spec import EnvSpec


def make_rollout(
    resolved: ResolvedConfig,
    specs: Sequence[EnvSpec],
    checkpoint: str | None,
    engine: Engine | str,
    note: Callable[[str], None],
    *,
    run: RunDir | None = None,
    stop_on_bugs: bool = True,
    history: History | None = None,
    on_finished: Callable[[Trajectory], None] | None = None,
) -> Rollout:
    """Return a rollout of a configuration.

    Args:
        resolved: the settings.
        specs: the environments.
        checkpoint: a model directory or a run (its last checkpoint), not the settings' model.
        engine: an engine; `local` is what `[engine]` configures, `scripted` the environment's own
            solver.
        note: receives what the user should know, a line each.
        run: run directory in which every turn is recorded.
        stop_on_bugs: whether the same bug in user code, in several tasks, stops the rollout.
        history: a history policy that replaces the one in the settings.
        on_finished: receives each finished episode.
    """
    config = resolved.config
    settings = RolloutSettings.of(config, stop_on_bugs=stop_on_bugs)
    if history is not None:
        settings = replace(settings, history=history)
    made = partial(Rollout, run=run, on_finished=on_finished)
    if isinstance(engine, Engine):
        renderer = engine.renderer if isinstance(engine, HasRenderer) else None
        return made(engine, renderer or byte_renderer(config.rollout.control_text), settings)
    if engine == "scripted":
        solver, renderer = _scripted(config, specs)
        return made(solver, renderer, replace(settings, sampling=Sampling()))
    if engine != "local":
        choices = "local (configured by [engine]) or scripted"
        raise ConfigError(f"--engine {engine}: unknown engine; choose {choices}")

    if config.scale.listen is not None or config.scale.ray is not None:
        whose = "workers ([scale]) play those of turnwright train"
        note(f"episodes are played in this process: {whose}")
    if config.engines_on_ray and config.policy:
        raise ConfigError(
            "scale.ray: only turnwright train starts the servers of several policies there; "
            "set engine.urls to running servers, or leave scale.ray out"
        )

    model = config.model
    if config.engine.kind == "chat" and checkpoint is None and model.path is None:
        from turnwright.training.servers import connect_fixed_servers

        renderer = byte_renderer(config.rollout.control_text)
        return made(connect_fixed_servers(config, renderer), renderer, settings)

    named = checkpoint or model.directory
    if named is None:
        remedy = "set --run RUN, --checkpoint or --model.path"
        raise ModelError(f"no model: a tiny one exists only after training; {remedy}")
    sampler, renderer = _with_model(resolved, Path(named), note, is_checkpoint=bool(checkpoint))
    return made(sampler, renderer, settings)


def _scripted(config: RunConfig, specs: Sequence[EnvSpec]) -> tuple[Engine, Renderer]:
    """Return an environment's own solver as an engine, and a renderer for it."""
    solvers = [spec.solver for spec in specs]
    if len(solvers) != 1 or solvers[0] is None:
        raise ConfigError("--engine scripted needs exactly one environment, with a solver")
    return ScriptedEngine(solvers[0]), byte_renderer(config.rollout.control_text)


def _with_model(
    resolved: ResolvedConfig,
    named: Path,
    note: Callable[[str], None],
    *,
    is_checkpoint: bool,
) -> tuple[Engine, Renderer]:
    """Return the engine and the renderer of a model directory, or of the last checkpoint of a
    run."""
    from turnwright.training.checkpoint import last_checkpoint
    from turnwright.training.checkpoint_files import read_checkpoint
    from turnwright.training.components import make_eval_policies
    from turnwright.training.model.packed import quant_of
    from turnwright.training.servers import ray_placer

    config = resolved.config
    origins = resolved.origins
    source = last_checkpoint(named)

    # A run's checkpoint uses the template and arguments it was trained with, unless the command
    # line names others.
    template_given = any(
        key.startswith("model.template") and origin == "command line"
        for key, origin in origins.items()
    )
    if is_checkpoint and not template_given and read_checkpoint(source) is not None:
        config = replace(config, model=replace(config.model, template=None, template_args={}))

    # A checkpoint plays as it was trained.
    quant_given = origins.get("quant.kind", "default") != "default"
    if config.engine.kind not in ("chat", "llamacpp") and not quant_given:
        config = replace(config, quant=quant_of(source))

    return make_eval_policies(config, source, ray_placer(config, note))


async def play_with_retries(
    rollout: Rollout,
    episodes: Sequence[EpisodeSpec],
    *,
    max_retries: int,
    **options: Any,
) -> list[Trajectory]:
    """Play episodes, those again that failed and may pass; `options` are of `Rollout.play`."""

    def play(some: Sequence[EpisodeSpec]) -> Awaitable[list[Trajectory]]:
        return rollout.play(some, **options)

    return await play_again(episodes, play(episodes), play, max_retries=max_retries)

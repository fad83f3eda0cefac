"""Rollouts outside training: with the model that settings, a run or a checkpoint name.

Evaluations, previews of rollouts and the recording proxy play with them. torch is imported where a
model is loaded: solvers and services of text need none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config import ResolvedConfig, RunConfig
from turnwright.engines import ScriptedEngine
from turnwright.errors import ConfigError, ModelError
from turnwright.renderers import byte_renderer
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.play_again import play_again
from turnwright.types import Trajectory

if TYPE_CHECKING:
    from turnwright.envs.spec import EnvSpec

SETTINGS = (
    "concurrency",
    "environments",
    "stop",
    "history",
    "watchdog_s",
    "sanity",
    "sanity_every",
    "sanity_share",
)
"""Keys of `[rollout]` that `Rollout` takes under the same names."""


def make_rollout(
    resolved: ResolvedConfig,
    specs: Sequence[EnvSpec],
    checkpoint: str | None,
    engine: str,
    note: Callable[[str], None],
    **more: Any,
) -> Rollout:
    """Return a rollout of a configuration.

    Args:
        resolved: the settings.
        specs: the environments.
        checkpoint: a model directory or a run (its last checkpoint), not the settings' model.
        engine: `local` is what `[engine]` configures, `scripted` the environment's own solver.
        note: receives what the user should know, a line each.
        more: further arguments of `Rollout`, which replace those of the settings.
    """
    config = resolved.config
    options: dict[str, Any] = {
        "limits": config.limits,
        "seed": config.seed,
        "stop_on_bugs": True,
        **{name: getattr(config.rollout, name) for name in SETTINGS},
        **more,
    }
    if engine == "scripted":
        return _scripted(config, specs, options)
    if engine != "local":
        choices = "local (configured by [engine]) or scripted"
        raise ConfigError(f"--engine {engine}: unknown engine; choose {choices}")

    from turnwright.training.setup import sampling_of

    options["sampling"] = sampling_of(config.rollout)
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
        return Rollout(connect_fixed_servers(config, renderer), renderer, **options)

    named = checkpoint or model.directory
    if named is None:
        remedy = "set --run RUN, --checkpoint or --model.path"
        raise ModelError(f"no model: a tiny one exists only after training; {remedy}")
    return _with_model(resolved, Path(named), note, options, is_checkpoint=bool(checkpoint))


def _scripted(config: RunConfig, specs: Sequence[EnvSpec], options: dict[str, Any]) -> Rollout:
    """Return a rollout of an environment's own solver."""
    solvers = [spec.solver for spec in specs]
    if len(solvers) != 1 or solvers[0] is None:
        raise ConfigError("--engine scripted needs exactly one environment, with a solver")
    renderer = byte_renderer(config.rollout.control_text)
    return Rollout(ScriptedEngine(solvers[0]), renderer, **options)


def _with_model(
    resolved: ResolvedConfig,
    named: Path,
    note: Callable[[str], None],
    options: dict[str, Any],
    *,
    is_checkpoint: bool,
) -> Rollout:
    """Return a rollout of a model directory, or of the last checkpoint of a run."""
    from turnwright.training.checkpoint import last_checkpoint, read_checkpoint
    from turnwright.training.components import make_eval_policies
    from turnwright.training.model.packed import quant_of
    from turnwright.training.servers import ray_placer

    config, origins = resolved.config, resolved.origins
    source = last_checkpoint(named)

    given = [key for key, origin in origins.items() if origin == "command line"]
    template_given = any(key.startswith("model.template") for key in given)
    if is_checkpoint and not template_given and read_checkpoint(source) is not None:
        # A run's checkpoint uses the template and arguments it was trained with.
        config = replace(config, model=replace(config.model, template=None, template_args={}))

    quant_given = origins.get("quant.kind", "default") != "default"
    if config.engine.kind not in ("chat", "llamacpp") and not quant_given:
        config = replace(config, quant=quant_of(source))  # a checkpoint plays as it was trained

    policy_engine, renderer = make_eval_policies(config, source, ray_placer(config, note))
    return Rollout(policy_engine, renderer, **options)


async def play_with_retries(
    rollout: Rollout,
    episodes: Sequence[EpisodeSpec],
    *,
    max_retries: int,
    **options: Any,
) -> list[Trajectory]:
    """Play episodes, those again that failed and may pass; `options` are of `Rollout.play`."""

    def play(these: Sequence[EpisodeSpec]) -> Awaitable[list[Trajectory]]:
        return rollout.play(these, **options)

    return await play_again(episodes, play(episodes), play, max_retries=max_retries)

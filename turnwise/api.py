"""`turnwise.train`: a run from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config import EnvRules, ModelConfig, ResolvedConfig, RunConfig, tiny
from turnwise.config.constraints import changed, check_section
from turnwise.config.load import from_python
from turnwise.config.schema import HISTORY_OBJECT
from turnwise.errors import ConfigError, missing_training
from turnwise.types import Task

if TYPE_CHECKING:
    from turnwise.renderers.history import History


def train(
    *,
    env: Any,
    tasks: Iterable[Task] | None = None,
    eval_tasks: Iterable[Task] | None = None,
    model: ModelConfig | str | Path | None = None,
    out: str | Path = "runs/run",
    seed: int = 0,
    history: History = "append",
    rules: EnvRules | None = None,
    display: str = "auto",
    resume: bool = False,
    **settings: Any,
) -> Path:
    """Train an agent; as `turnwise train`, with objects in place of names.

    Args:
        env: an `Env` class, another factory of environments, or a play function.
        tasks: what to train on; none asks the environment itself.
        eval_tasks: held-out tasks; none asks the environment, or holds out about a fifth of `tasks`
            (chosen by their content; of fewer than five none).
        model: a Hugging Face model directory, or `turnwise.tiny(...)`, which is the default.
        out: the run directory.
        seed: names every random draw.
        history: what the model sees of earlier turns, as in `turnwise.rollout`; a policy as an object is given again to go on.
        rules: what becomes of the model's mistakes and the world's failures, as in `turnwise.rollout`; given again to go on.
        display: `auto`, `rich`, `plain` or `none`.
        resume: go on with the run in `out`, with the settings that it has; `env` and the tasks are given again.
        settings: sections of the configuration as dicts or dataclasses, such as `train={"steps": 20}`.

    Returns:
        The run directory.

    Raises:
        UsageError: for a mistake in what is given.
        TurnwiseError: when the run cannot go on.
    """
    from turnwise.commands import run_training as run
    from turnwise.config.dump import load_run_config
    from turnwise.envs.resolve import as_env_spec
    from turnwise.renderers.history import policy_name
    from turnwise.viewer.progress import make_display

    listed = None if tasks is None else list(tasks)
    policy = None if isinstance(history, str) else history
    said = history if isinstance(history, str) else f"{HISTORY_OBJECT}{policy_name(history)}"
    resolved = load_run_config(Path(out)) if resume else _resolve(settings, out, seed, model, said)
    held = None if eval_tasks is None else list(eval_tasks)
    world = as_env_spec(env, tasks=listed, eval_tasks=held)
    if rules is not None:
        check_section(rules, "tw.train(rules=...)")
        world = replace(world, rules=rules)
    config = resolved.config
    if listed is not None and len(listed) < config.rollout.groups and not resume:
        resolved = replace(resolved, config=replace(config, rollout=replace(config.rollout, groups=len(listed))))
    watch = make_display(display)
    try:
        path = run(resolved, resume=Path(out) if resume else None, watch=watch, worlds=[world], history=policy)
        watch.note(f"report: {path / 'report.html'}")
        return path
    except ModuleNotFoundError as error:
        raise (missing_training(error) or error) from None
    finally:
        watch.close()


def _resolve(
    settings: Mapping[str, Any], out: str | Path, seed: int, model: ModelConfig | str | Path | None, history: str
) -> ResolvedConfig:
    sections = [name for name in RunConfig.__dataclass_fields__ if name not in ("env", "out", "seed", "model")]
    for name in settings:
        if name not in sections:
            raise ConfigError(f"train() has no setting {name!r}; sections are {', '.join(sections[:-1])} and {sections[-1]}")
    chosen = tiny() if model is None else model if isinstance(model, ModelConfig) else ModelConfig(path=str(model))
    given = {"out": str(out), "seed": seed, "model": chosen, **settings}
    if history != "append":
        rollout = given.get("rollout", {})
        given["rollout"] = (dict(rollout) if isinstance(rollout, Mapping) else changed(rollout)) | {"history": history}
    return from_python(given, "tw.train()")

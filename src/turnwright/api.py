"""`turnwright.train`: training from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config import EnvRules, ModelConfig, RunConfig, tiny
from turnwright.config.fields import keys_by_name
from turnwright.config.names import HISTORY_OBJECT
from turnwright.config.recipe import from_python
from turnwright.config.values import changed, check_section
from turnwright.errors import ConfigError, did_you_mean, missing_training
from turnwright.types import Task

if TYPE_CHECKING:
    from turnwright.renderers.history import History


def train(
    env: Any,
    *,
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
    """Train an agent, like `turnwright train`, with objects instead of names.

    Args:
        env: an `Env` class, another factory of environments, a play function, or what a recipe
            names: a built-in environment, `file.py:Name`.
        tasks: training tasks; None asks the environment.
        eval_tasks: held-out tasks; None asks the environment, or holds out about a fifth of `tasks`
            (selected by content; none of fewer than five).
        model: a Hugging Face model directory or `turnwright.tiny(...)`;
            None is `turnwright.tiny()`.
        out: the run directory.
        seed: seed of every random draw.
        history: earlier turns in the prompt, as in `turnwright.rollout`; a policy object must
            be passed again to resume.
        rules: handling of invalid actions and failures, as in `turnwright.rollout`;
            must be passed again to resume.
        display: `auto`, `rich`, `plain` or `none`.
        resume: resume the run in `out` with its own settings; `env` and the tasks must be passed
            again, and more steps (`train={"steps": 200}`) extend it.
        settings: sections of the configuration as dicts or dataclasses,
            such as `train={"steps": 20}`.

    Returns:
        The run directory.

    Raises:
        UsageError: for an invalid argument.
        TurnwrightError: if the run cannot continue.
    """
    from turnwright.config.dump import extend_run
    from turnwright.display.progress import make_display
    from turnwright.envs.resolve import as_env_spec, load_object
    from turnwright.renderers.history import policy_name
    from turnwright.runs import run_training

    listed = None if tasks is None else list(tasks)
    policy = None if isinstance(history, str) else history
    history_key = history if isinstance(history, str) else f"{HISTORY_OBJECT}{policy_name(history)}"
    if resume:
        sections = {
            name: value if isinstance(value, Mapping) else changed(value)
            for name, value in settings.items()
        }
        words = [
            f"--{name}.{key}={value}"
            for name, section in sections.items()
            for key, value in section.items()
        ]
        resolved = extend_run(Path(out), words)
    else:
        names = [
            name
            for name in RunConfig.__dataclass_fields__
            if name not in ("env", "out", "seed", "model")
        ]
        if unknown := [name for name in settings if name not in names]:
            raise ConfigError(
                f"train() has no setting {unknown[0]!r}; {_likely_section(unknown[0], names)}"
            )
        chosen = (
            tiny()
            if model is None
            else model
            if isinstance(model, ModelConfig)
            else ModelConfig(path=str(model))
        )
        given = {"out": str(out), "seed": seed, "model": chosen, **settings}
        if history_key != "append":
            rollout = given.get("rollout", {})
            given["rollout"] = (
                dict(rollout) if isinstance(rollout, Mapping) else changed(rollout)
            ) | {"history": history_key}
        resolved = from_python(given, "tw.train()")
    target, name = (load_object(env), env) if isinstance(env, str) else (env, "")
    spec = as_env_spec(
        target,
        name=name,
        where=name,
        tasks=listed,
        eval_tasks=None if eval_tasks is None else list(eval_tasks),
    )
    if rules is not None:
        check_section(rules, "tw.train(rules=...)")
        spec = replace(spec, rules=rules)
    with closing(make_display(display)) as watch:
        try:
            resumed = Path(out) if resume else None
            path = run_training(
                resolved, resume=resumed, watch=watch, env_specs=[spec], history=policy
            )
        except ModuleNotFoundError as error:
            raise (missing_training(error) or error) from None
        watch.note(f"report: {path / 'report.html'}")
        return path


def _likely_section(name: str, sections: Sequence[str]) -> str:
    """Return what an unknown setting of `train` probably is: a misspelled
    section, or a key of one."""
    if near := did_you_mean(name, sections, 0.6):
        return near
    key = name.rpartition(".")[2]
    if owners := [dotted.rpartition(".")[0] for dotted in keys_by_name().get(key, ())]:
        return f"write {' or '.join(f'{section}={{{key!r}: ...}}' for section in owners[:3])}"
    return f"sections are {', '.join(sections[:-1])} and {sections[-1]}"

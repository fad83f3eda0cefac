"""`turnwright.train`: training from Python.

It reads settings, makes an environment's specification of an object, and calls `run_training` of
`runs.py`, as the command line does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.config import EnvRules, ModelConfig, ResolvedConfig, RunConfig, tiny
from turnwright.config.fields import keys_by_name
from turnwright.config.names import HISTORY_OBJECT
from turnwright.config.recipe import as_toml, from_python
from turnwright.config.values import changed, check_section
from turnwright.errors import ConfigError, did_you_mean, missing_training
from turnwright.types import Task

if TYPE_CHECKING:
    from turnwright.display.run_log import LogLevel
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
    log_level: LogLevel = "info",
    **settings: Any,
) -> Path:
    """Train an agent, like `turnwright train`, with objects instead of names.

    Example::

        run = tw.train(
            "hop",
            model=tw.tiny(),
            out="runs/hop",
            warmup={"demos": 4000, "gate_success": 0.15},
            train={"steps": 60, "lr": 1e-3},
        )
        print((run / "summary.json").read_text())

    Args:
        env: an `Env` class, another factory of environments, a play function, or what a recipe
            names: a built-in environment, `file.py:Name`.
        tasks: training tasks; None asks the environment.
        eval_tasks: held-out tasks; None asks the environment, or holds out about a fifth of `tasks`
            (selected by content; none of fewer than five).
        model: a Hugging Face model directory or `turnwright.tiny(...)`; None is
            `turnwright.tiny()`.
        out: the run directory.
        seed: seed of every random draw.
        history: earlier turns in the prompt, as in `turnwright.rollout`; a policy object must be
            passed again to resume.
        rules: handling of invalid actions and failures, as in `turnwright.rollout`; must be passed
            again to resume.
        display: `auto`, `rich`, `plain` or `none`.
        resume: resume the run in `out` with its own settings; `env` and the tasks must be passed
            again, and more steps (`train={"steps": 200}`) extend it.
        log_level: least level of what is written to RUN/log.txt: `debug`, `info`, `warning`,
            `error`, or `off`.
        settings: sections of the configuration as dicts or dataclasses, such as
            `train={"steps": 20}`.

    Returns:
        The run directory.

    Raises:
        UsageError: for an invalid argument.
        TurnwrightError: if the run cannot continue.
    """
    from turnwright.display.progress import make_display
    from turnwright.envs.resolve import as_env_spec, load_object
    from turnwright.runs import run_training

    train_tasks = None if tasks is None else list(tasks)
    if resume:
        resolved = _resumed_settings(Path(out), settings)
    else:
        resolved = new_settings(model, out, seed, history, settings, "tw.train()")

    is_named = isinstance(env, str)
    spec = as_env_spec(
        load_object(env) if is_named else env,
        name=env if is_named else "",
        where=env if is_named else "",
        tasks=train_tasks,
        eval_tasks=None if eval_tasks is None else list(eval_tasks),
    )
    if rules is not None:
        check_section(rules, "tw.train(rules=...)")
        spec = replace(spec, rules=rules)

    with closing(make_display(display)) as watch:
        try:
            path = run_training(
                resolved,
                resume=Path(out) if resume else None,
                watch=watch,
                env_specs=[spec],
                history=None if isinstance(history, str) else history,
                log_level=log_level,
            )
        except ModuleNotFoundError as error:
            raise (missing_training(error) or error) from None
        watch.note(f"report: {path / 'report.html'}")
        return path


def _resumed_settings(run: Path, settings: Mapping[str, Any]) -> ResolvedConfig:
    """Return the settings of a run that is resumed, with those that extend it."""
    from turnwright.config.dump import extend_run

    return extend_run(run, as_overrides(settings))


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return sections that were given in Python as options of the command line."""
    from turnwright.config.dump import toml_value

    words = []
    for name, section in settings.items():
        for key, value in as_mapping(section).items():
            words.append(f"--{name}.{key}={toml_value(as_toml(value))}")
    return words


def new_settings(
    model: ModelConfig | str | Path | None,
    out: str | Path,
    seed: int,
    history: History,
    settings: Mapping[str, Any],
    place: str,
    *,
    training: bool = True,
) -> ResolvedConfig:
    """Return settings that were given in Python, checked; `place` names the call in errors."""
    from turnwright.renderers.history import policy_name

    check_sections(settings, place)
    if model is None:
        model = tiny()
    elif not isinstance(model, ModelConfig):
        model = ModelConfig(path=str(model))
    given = {"out": str(out), "seed": seed, "model": model, **settings}

    # A policy object is no value of a recipe: the settings have its name.
    history_name = history
    if not isinstance(history, str):
        history_name = f"{HISTORY_OBJECT}{policy_name(history)}"
    if history_name != "append":
        given["rollout"] = {**as_mapping(given.get("rollout", {})), "history": history_name}
    return from_python(given, place, training=training)


def check_sections(settings: Mapping[str, Any], place: str) -> None:
    """Raise `ConfigError` for what is no section of the configuration; `place` names the call."""
    arguments = ("env", "out", "seed", "model")
    sections = [name for name in RunConfig.__dataclass_fields__ if name not in arguments]
    for name in settings:
        if name not in sections:
            function = place.removeprefix("tw.")
            likely = _likely_section(name, sections)
            raise ConfigError(f"{function} has no setting {name!r}; {likely}")


def as_mapping(section: Any) -> Mapping[str, Any]:
    """Return a section, a dict or a dataclass, as its keys that are set."""
    return section if isinstance(section, Mapping) else changed(section)


def _likely_section(name: str, sections: Sequence[str]) -> str:
    """Return what an unknown setting of `train` probably is: a misspelled section, or a key of
    one."""
    near = did_you_mean(name, sections, 0.6)
    if near:
        return near
    key = name.rpartition(".")[2]
    owners = [dotted.rpartition(".")[0] for dotted in keys_by_name().get(key, ())]
    if owners:
        written = [f"{section}={{{key!r}: ...}}" for section in owners[:3]]
        return f"write {' or '.join(written)}"
    return f"sections are {', '.join(sections[:-1])} and {sections[-1]}"

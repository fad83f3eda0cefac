"""Write a resolved configuration, and read the one of a run.

`to_toml` writes it as a recipe with origins, `to_json_dict` as `config.json`, and `help_keys` as
the help of `--keys`. `load_run_config` reads `config.json`, and `extend_run` does so for a run that
is resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from turnwright import files
from turnwright.config.fields import field_docs, field_type, table_lists
from turnwright.config.recipe import (
    ConfigMerge,
    ResolvedConfig,
    build,
    flatten,
    override,
    parse_overrides,
)
from turnwright.config.recorded import with_keys_of_today
from turnwright.config.schema import RunConfig
from turnwright.config.validation import DEFAULT
from turnwright.config.values import describe_type
from turnwright.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Line:
    """One value of a configuration, as a line of TOML."""

    section: list[str]
    """Parts of its section's name; those of a list of tables begin with name and number."""
    setting: str
    """`name = value`."""
    origin: str


def to_toml(resolved: ResolvedConfig) -> str:
    """Return the configuration as TOML, a valid recipe with each value's origin as a comment."""
    rows: list[_Line] = []
    for key, value in flatten(resolved.config):
        section, name = _place(key)
        origin = resolved.origins.get(key, "default")
        rows.append(_Line(section, f"{name} = {toml_value(value)}", origin))

    # A table's own keys come before its nested tables, which would end it.
    for list_name in table_lists():
        numbers = [number for number, row in enumerate(rows) if row.section[:1] == [list_name]]
        if numbers:
            tables = [rows[number] for number in numbers]
            tables.sort(key=lambda row: (int(row.section[1]), row.section[2:]))
            rows[numbers[0] : numbers[0] + len(tables)] = tables

    width = min(48, max((len(row.setting) for row in rows), default=0))
    lines: list[str] = []
    last_section: list[str] = []
    for row in rows:
        if row.section != last_section:
            lines += ["", _header(row.section)]
            last_section = row.section
        lines.append(f"{row.setting.ljust(width)}  # {row.origin}")
    return "\n".join(lines).strip() + "\n"


def _header(section: list[str]) -> str:
    if section[0] not in table_lists():
        return f"[{'.'.join(section)}]"
    if len(section) == 2:
        return f"[[{section[0]}]]"
    return f"[{section[0]}.{section[-1]}]"


def placement(config: RunConfig) -> list[str]:
    """Describe where each part of a run would run, one line each."""
    scale = config.scale
    hosts = []
    if scale.listen is not None:
        hosts.append(f"workers that join at {scale.listen} (turnwright worker --join)")
    if scale.ray is not None:
        workers = "one worker a node"
        if scale.ray_workers is not None:
            workers = f"{scale.ray_workers} workers"
        hosts.append(f"{workers} of {scale.ray_cpus:g} CPUs on the Ray cluster {scale.ray}")

    return [
        "trainer: this process, or those of torchrun",
        f"engine: {_engine_placement(config)}",
        f"environments and rewards: {' and '.join(hosts) or 'this process'}",
        f"journal and checkpoints: {config.out}",
    ]


def _engine_placement(config: RunConfig) -> str:
    engine = config.engine
    scale = config.scale
    if engine.kind == "local":
        return "this process"

    running = []
    if engine.urls:
        running.append(f"{len(engine.urls)} at {', '.join(engine.urls)}")
    if engine.urls_file is not None:
        running.append(f"those that {engine.urls_file} lists")
    where = " and ".join(running) or f"{engine.servers} started by the run"
    if config.engines_on_ray:
        gpus = f" and {scale.ray_engine_gpus:g} GPUs" if scale.ray_engine_gpus else ""
        where += f" on the Ray cluster {scale.ray}, each with {scale.ray_engine_cpus:g} CPUs{gpus}"
    return f"{engine.kind} servers, {where}"


def to_json_dict(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the configuration and its origins as plain values for `config.json`."""
    row: dict[str, Any] = {
        "config": asdict(resolved.config),
        "origins": dict(resolved.origins),
        "recipe": str(resolved.recipe) if resolved.recipe is not None else None,
        "seed": resolved.config.seed,
    }
    if resolved.extended:
        row["extended"] = dict(resolved.extended)
    return row


def load_run_config(run: Path) -> ResolvedConfig:
    """Load the configuration of a run directory, as written by `to_json_dict`.

    Raises `ConfigError` if there is none to read.

    Example::

        load_run_config(Path("runs/first")).config.train.lr
    """
    path = run / "config.json"
    if not run.is_dir():
        raise ConfigError(
            f"{run}: no such run directory; name the one that `turnwright train` printed"
        )

    try:
        row = files.read_json(path)
        config = row["config"]
        origins = dict(row.get("origins", {}))
        extended = {
            str(key): tuple(map(int, totals)) for key, totals in row.get("extended", {}).items()
        }
    except FileNotFoundError:
        why = (
            f"{path}: missing, so {run} is not a run directory; name the one that `turnwright "
            "train` printed"
        )
        if (run / "journal.jsonl").exists():
            why = (
                f"{run}: the run was stopped before its first step, so there is nothing to "
                "resume; restart it with the original command"
            )
        raise ConfigError(why) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (
            f"cannot be read as a run's configuration ({error!r:.80}); restore it or start a "
            "new run"
        )
        raise ConfigError(f"{path}: {why}") from None

    merged = ConfigMerge()
    merged.add(with_keys_of_today(config, str(path)), "config.json", where=str(path))
    where = dict.fromkeys(merged.origins, str(path))
    config = build(merged.tree, where)

    origin_of_keys = {key: origins.get(key, DEFAULT) for key, _ in flatten(config)}
    recipe = row.get("recipe")
    return ResolvedConfig(config, origin_of_keys, Path(recipe) if recipe else None, extended)


EXTENDABLE = (
    "train.steps",
    "warmup.steps",
    "warmup.gate_success",
    "train.stop_success",
    "train.patience",
    "scale.*",
)
"""Keys that a resumed run accepts: they change nothing that it has done."""


def extend_run(run: Path, overrides: Sequence[str]) -> ResolvedConfig:
    """Load the configuration of a run that is resumed, with more steps or as it is.

    Raises `ConfigError` for fewer steps, or other keys than `EXTENDABLE`.
    """
    for key, _ in parse_overrides(overrides):
        if not any(fnmatchcase(key, pattern) for pattern in EXTENDABLE):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in EXTENDABLE)
            raise ConfigError(
                f"--resume {run} uses the run's own settings; leave out --{key.replace('_', '-')}, "
                f"or start a new run (a resumed run accepts {flags})"
            )

    resolved = load_run_config(run)
    if not overrides:
        return resolved

    longer = override(resolved, overrides)
    extended = {key: tuple(totals) for key, totals in resolved.extended.items()}
    for section in ("train", "warmup"):
        steps_before = getattr(resolved.config, section).steps
        steps = getattr(longer.config, section).steps
        if steps < steps_before:
            raise ConfigError(
                f"--resume {run}: {section}.steps = {steps}: the run has {steps_before} steps; "
                "more extend it"
            )
        if steps > steps_before:
            key = f"{section}.steps"
            extended[key] = (*extended.get(key, ()), steps_before)
    return replace(longer, extended=extended)


def help_keys() -> Iterator[str]:
    """Yield one line per key of a recipe: name, type, default, help."""
    docs = field_docs()
    tables: dict[str, Any] = {name: (kind(),) for name, kind in table_lists().items()}
    for key, value in flatten(RunConfig(**tables)):
        plain = key.replace(".0.", ".")
        kind = f"{describe_type(field_type(key))}; default {toml_value(value)}"
        yield f"--{plain.replace('_', '-')} ({kind}): {docs.get(plain, '')}"


def toml_value(value: Any) -> str:
    """Return a plain value as TOML; None is `"none"`."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        settings = [f"{_key(str(name))} = {toml_value(item)}" for name, item in value.items()]
        return f"{{ {', '.join(settings)} }}" if settings else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def _place(dotted: str) -> tuple[list[str], str]:
    """Return the section of a key and its name there."""
    parts = dotted.split(".")
    # Parts before a key of a table of settings, which may contain dots.
    depth = 3 if parts[0] in table_lists() else 2
    section = parts[:depth] if len(parts) > depth else parts[:-1]
    return section, _key(".".join(parts[len(section) :]))


def _key(name: str) -> str:
    """Return a key of TOML, in quotes where its characters need them."""
    is_bare = re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
    return name if is_bare else json.dumps(name, ensure_ascii=False)

"""Write a resolved configuration as TOML with origins, as `config.json` and as `--keys`
help; read `config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
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


def to_toml(resolved: ResolvedConfig) -> str:
    """Return the configuration as TOML that is a valid recipe, with each
    value's origin as a comment."""
    rows = [
        (*_place(key), toml_value(value), resolved.origins.get(key, "default"))
        for key, value in flatten(resolved.config)
    ]
    for (
        name
    ) in table_lists():  # a table's own keys come before its nested tables, which would end it
        tables = [row for row in rows if row[0][:1] == [name]]
        tables.sort(key=lambda row: (int(row[0][1]), row[0][2:]))
        first = next((number for number, row in enumerate(rows) if row[0][:1] == [name]), 0)
        rows[first : first + len(tables)] = tables
    width = min(48, max((len(name) + len(value) + 3 for _, name, value, _ in rows), default=0))
    lines: list[str] = []
    last: list[str] = []
    for section, name, value, origin in rows:
        if section != last:
            table = f"[[{section[0]}]]" if len(section) == 2 else f"[{section[0]}.{section[-1]}]"
            lines += ["", table if section[0] in table_lists() else f"[{'.'.join(section)}]"]
            last = section
        lines.append(f"{name} = {value}".ljust(width) + f"  # {origin}")
    return "\n".join(lines).strip() + "\n"


def placement(config: RunConfig) -> list[str]:
    """Describe where each part of a run would run, one line each."""
    engine, scale = config.engine, config.scale
    found = [f"{len(engine.urls)} at {', '.join(engine.urls)}"] if engine.urls else []
    found += [f"those that {engine.urls_file} lists"] if engine.urls_file is not None else []
    where = " and ".join(found) or f"{engine.servers} started by the run"
    if config.engines_on_ray:
        gpus = f" and {scale.ray_engine_gpus:g} GPUs" if scale.ray_engine_gpus else ""
        where += f" on the Ray cluster {scale.ray}, each with {scale.ray_engine_cpus:g} CPUs{gpus}"
    lines = [
        "trainer: this process, or those of torchrun",
        f"engine: {'this process' if engine.kind == 'local' else f'{engine.kind} servers, {where}'}",  # noqa: E501
    ]
    places = (
        [f"workers that join at {scale.listen} (turnwright worker --join)"]
        if scale.listen is not None
        else []
    )
    if scale.ray is not None:
        workers = (
            "one worker a node" if scale.ray_workers is None else f"{scale.ray_workers} workers"
        )
        places.append(f"{workers} of {scale.ray_cpus:g} CPUs on the Ray cluster {scale.ray}")
    return [
        *lines,
        f"environments and rewards: {' and '.join(places) or 'this process'}",
        "journal and checkpoints: " + config.out,
    ]


def to_json_dict(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the configuration and its origins as plain values for `config.json`."""
    config = asdict(resolved.config)
    recipe = str(resolved.recipe) if resolved.recipe is not None else None
    row = {
        "config": config,
        "origins": dict(resolved.origins),
        "recipe": recipe,
        "seed": resolved.config.seed,
    }
    return row | ({"extended": dict(resolved.extended)} if resolved.extended else {})


def load_run_config(run: Path) -> ResolvedConfig:
    """Load the configuration of a run directory, as written by `to_json_dict`; a ConfigError if
    there is none to read."""
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
                "resume; restart it with the "
            )
            why += "original command"
        raise ConfigError(why) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = (
            f"cannot be read as a run's configuration ({error!r:.80}); restore it or start a "
            "new run"
        )
        raise ConfigError(f"{path}: {why}") from None
    recipe = row.get("recipe")
    merged = ConfigMerge()
    merged.add(with_keys_of_today(config, str(path)), "config.json", where=str(path))
    where = dict.fromkeys(merged.origins, str(path))
    config = build(merged.tree, where)
    known = {key: origins.get(key, DEFAULT) for key, _ in flatten(config)}
    return ResolvedConfig(config, known, Path(recipe) if recipe else None, extended)


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
    """Load the configuration of a run that is resumed, with more steps or as it is; a `ConfigError`
    for fewer or other keys."""
    for key, _ in parse_overrides(overrides):
        if not any(fnmatchcase(key, one) for one in EXTENDABLE):
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
        was, now = (getattr(one.config, section).steps for one in (resolved, longer))
        if now < was:
            raise ConfigError(
                f"--resume {run}: {section}.steps = {now}: the run has {was} steps; more extend it"
            )
        if now > was:
            extended[f"{section}.steps"] = (*extended.get(f"{section}.steps", ()), was)
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
        inside = ", ".join(
            f"{_key(str(name))} = {toml_value(item)}" for name, item in value.items()
        )
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def _place(dotted: str) -> tuple[list[str], str]:
    """Return the section of a key and its name there."""
    parts = dotted.split(".")
    depth = (
        3 if parts[0] in table_lists() else 2
    )  # parts before a key of a table of settings, which may contain dots
    section = parts[:depth] if len(parts) > depth else parts[:-1]
    return section, _key(".".join(parts[len(section) :]))


def _key(name: str) -> str:
    bare = bool(name) and all(c.isascii() and (c.isalnum() or c in "_-") for c in name)
    return name if bare else json.dumps(name, ensure_ascii=False)

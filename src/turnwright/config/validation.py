"""Rules of a whole configuration, which must hold before anything is loaded.

Values of single keys were checked when the configuration was built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwright.config.fields import known_keys, table_lists
from turnwright.config.names import no_such_file
from turnwright.config.rules import Context, Need, Section
from turnwright.config.schema import NOT_OF_PLAY, EnvConfig, EnvRules, RunConfig
from turnwright.config.values import PathKind, changed, path_kinds
from turnwright.errors import ConfigError

DEFAULT = "default"
COMMAND_LINE = "command line"


def wrong_value(place: str, file: str, key: str, value: Any, why: str) -> ConfigError:
    """Return the error about a value.

    Args:
        place: where the value is from: a file, `command line`, or `default`.
        file: what to name in place of `default`: the value would fit without that file.
        key: dotted key.
        value: its value.
        why: what is wrong with it.
    """
    if isinstance(value, tuple):
        value = list(value)
    if place == COMMAND_LINE:
        return ConfigError(f"{COMMAND_LINE}: --{key.replace('_', '-')} {value}: {why}")
    shown = f'"{value}"' if isinstance(value, str) else value
    if place == DEFAULT:
        return ConfigError(f"{file}: {key} = {shown} (the default): {why}")
    return ConfigError(f"{place}: {key} = {shown}: {why}")


def validate(
    config: RunConfig,
    where: Mapping[str, str],
    file: str,
    context: Context,
    *,
    given: Collection[str] | None = None,
) -> None:
    """Raise `ConfigError` for the first rule that a configuration breaks.

    Args:
        config: what to check.
        where: dotted key -> file or `command line`, for values that are not defaults.
        file: source to name in an error about a default.
        context: what is known besides the configuration.
        given: keys to refuse if they have no effect; None is the keys of `where`.
    """
    if not config.env and not context.has_objects:
        tasks = " and tasks" if config.rollout.function else ""
        add = f'add [[env]] with use = "hop" or "file.py:Name"{tasks}'
        raise ConfigError(f"{file}: no environment; {add}")

    for key, why in _broken_rules(config, context):
        raise wrong_value(where.get(key, DEFAULT), file, key, _value(config, key), why)

    given_keys = where if given is None else given
    for key, value, need in _unmet_needs(config):
        is_given = any(_is_under(given_key, key) for given_key in given_keys)
        if is_given and not _switched_off(key, need, where):
            why = f"has no effect: it needs {need.words}; set that, or leave this out"
            raise wrong_value(where.get(key, DEFAULT), file, key, value, why)


def without_effect(section: Section, config: RunConfig) -> Iterator[tuple[str, Any, Need]]:
    """Yield (name, value, need) for fields of a section that differ from their defaults and have no
    effect."""
    for name, value in changed(section).items():
        for need in section.needs(config):
            if name in need.keys and not need.holds:
                yield name, value, need


def check_rules_of_play(rules: EnvRules, where: str) -> None:
    """Raise `ConfigError` for the first of an environment's rules that has no effect on a play
    function.

    `where` names the rules in the error.
    """
    for name, value in changed(rules).items():
        if name in NOT_OF_PLAY:
            why = "has no effect on a play function, which handles this itself; leave it out"
            raise ConfigError(f"{where}: {name} = {value!r} {why}")


def _broken_rules(config: RunConfig, context: Context) -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration that break a rule, and why."""
    for prefix, section in config.sections():
        for name, why in section.check(config, context):
            yield _dotted(prefix, name), why
    for prefix, section in config.sections():
        for name, why in _missing_files(section):
            yield _dotted(prefix, name), why


def _missing_files(section: Section) -> Iterator[tuple[str, str]]:
    """Yield the keys that name data or an object that there is not, and why."""
    cls: Any = section.__class__
    for name, kind in path_kinds(cls).items():
        value = getattr(section, name)
        if not value or kind not in (PathKind.DATA, PathKind.OBJECT):
            continue

        path, colon, function = value.rpartition(":") if ".py:" in value else (value, "", "")
        is_python = path.endswith(".py")
        if is_python and not colon:
            yield name, f"say which function of the file: {value}:name"
        if (is_python or kind is PathKind.DATA) and not Path(path).exists():
            yield name, no_such_file(path)
        if is_python and not function.isidentifier():
            yield name, f"'{function}' is not a name; write {path}:Name"


def _unmet_needs(config: RunConfig) -> Iterator[tuple[str, Any, Need]]:
    """Yield (dotted key, value, need) for each key without effect, and the need."""
    for prefix, section in config.sections():
        for name, value, need in without_effect(section, config):
            yield _dotted(prefix, name), value, need


def _switched_off(key: str, need: Need, where: Mapping[str, str]) -> bool:
    """Return whether the command line made a recipe's key ineffective.

    That is no mistake of the recipe.
    """
    if where.get(key) == COMMAND_LINE:
        return False

    section, _, rest = key.partition(".")
    index = rest.partition(".")[0]
    # The words name the keys that decide; `env.` in them is the table that the key is in.
    for decisive in set(known_keys()).intersection(need.words.split()):
        if section in table_lists() and decisive.startswith(f"{section}."):
            decisive = decisive.replace(section, f"{section}.{index}", 1)
        if where.get(decisive) == COMMAND_LINE:
            return True
    return False


def _is_under(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _value(config: Any, dotted: str) -> Any:
    """Return the value of a dotted key; the name of an environment without one is what it uses."""
    value = config
    parts = dotted.split(".")
    for number, part in enumerate(parts):
        if isinstance(value, Mapping):
            # Keys of a table of settings may contain dots.
            return value[".".join(parts[number:])]
        if isinstance(value, tuple):
            value = value[int(part)]
        elif isinstance(value, EnvConfig) and part == "name":
            value = value.label
        else:
            value = getattr(value, part)
    return value

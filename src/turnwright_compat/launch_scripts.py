"""Recipes from the launch scripts and configurations of slime, SkyRL, verl, ms-swift and TRL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from turnwright import files
from turnwright.errors import ConfigError, did_you_mean
from turnwright_compat.convert.engine import Account, Converted, System, convert_source
from turnwright_compat.convert.sources import Source, read_source
from turnwright_compat.skyrl import convert as skyrl
from turnwright_compat.slime import convert as slime
from turnwright_compat.swift import convert as swift
from turnwright_compat.trl import convert as trl
from turnwright_compat.verl import convert as verl

SYSTEMS: Mapping[str, System] = {
    one.SYSTEM.name: one.SYSTEM for one in (slime, skyrl, verl, swift, trl)
}

__all__ = ["SYSTEMS", "Account", "Converted", "convert", "convert_file"]


def convert(
    text: str, *, name: str = "arguments.txt", system: str | None = None, folder: Path | None = None
) -> Converted:
    """Return a recipe from a launch script, an argument list, a YAML file or a Python launcher;
    nothing of it is executed.

    Args:
        text: its content.
        name: its file name, whose ending tells the kind (`.yaml`, `.yml`, `.py`; anything else
            is a script or arguments).
        system: `slime`, `skyrl`, `verl`, `swift` or `trl`; None is the one that
            knows most of the settings.
        folder: folder in which files of the user are looked for; None looks for none.

    Raises `ConfigError` for a text without settings, for one of an unknown system, and for a
    training that no recipe does.
    """
    source = read_source(text, name, folder)
    if system is not None and system not in SYSTEMS:
        near = did_you_mean(system, SYSTEMS)
        raise ConfigError(f"{system}: unknown system; {near or 'there are ' + ', '.join(SYSTEMS)}")
    return convert_source(
        source, SYSTEMS[system] if system else _detect(source, name), name, folder
    )


def convert_file(path: Path, system: str | None = None) -> Converted:
    """Return a recipe from a file; raise `ConfigError` as `convert`, and for a
    file that cannot be read."""
    try:
        text = files.read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    return convert(text, name=path.name, system=system, folder=files.resolved(path).parent)


def _detect(source: Source, name: str) -> System:
    """Return the system that knows most settings; raise `ConfigError` if none knows one."""

    def known(system: System) -> tuple[int, int]:
        keys = [system.normalize(setting.key) for setting in source.settings]
        endings = {one.rpartition(".")[2] for one in system.known()} if system.hydra else set()
        full = sum(key in system.rules or key in system.none for key in keys)
        starts = any(re.search(one, source.program) for one in (system.programs, *system.refused))
        distinct = re.match(r"swift |verl\.|skyrl|[A-Z]\w*Trainer$", source.program) is not None
        score = 10 * full + sum(key.rpartition(".")[2] in endings for key in keys)
        return score + (1_000_000 if starts and distinct else 0), int(starts)

    found = max(SYSTEMS.values(), key=known)
    if not known(found)[0]:
        raise ConfigError(
            f"{name}: no known setting of {', '.join(SYSTEMS)}; name the system with --system"
        )
    return found

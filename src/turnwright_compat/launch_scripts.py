"""Make recipes from the launch scripts and configurations of slime, SkyRL, verl, ms-swift and TRL.

`convert` reads a text (`convert.sources.read_source`), finds the system whose settings it has, and
looks them up in that system's table (`convert.engine.convert_source`; a table is `SYSTEM` in the
`convert.py` of each framework's folder). Nothing of a script is executed.
"""

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
    module.SYSTEM.name: module.SYSTEM for module in (slime, skyrl, verl, swift, trl)
}
"""Tables by the name of their system, in the order in which the first of equals is chosen."""

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
        system: `slime`, `skyrl`, `verl`, `swift` or `trl`; None is the one that knows most of the
            settings.
        folder: folder in which files of the user are looked for; None looks for none.

    Raises `ConfigError` for a text without settings, for one of an unknown system, and for a
    training that no recipe does.
    """
    source = read_source(text, name, folder)
    if system is not None and system not in SYSTEMS:
        near = did_you_mean(system, SYSTEMS)
        raise ConfigError(f"{system}: unknown system; {near or 'there are ' + ', '.join(SYSTEMS)}")

    table = SYSTEMS[system] if system else _detect(source, name)
    return convert_source(source, table, name, folder)


def convert_file(path: Path, system: str | None = None) -> Converted:
    """Return a recipe from a file; raise `ConfigError` as `convert`, and for a file that cannot be
    read."""
    try:
        text = files.read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None

    return convert(text, name=path.name, system=system, folder=files.resolved(path).parent)


def _detect(source: Source, name: str) -> System:
    """Return the system that knows most settings; raise `ConfigError` if none knows one."""
    system = max(SYSTEMS.values(), key=lambda candidate: _evidence(source, candidate))
    score, _ = _evidence(source, system)
    if not score:
        raise ConfigError(
            f"{name}: no known setting of {', '.join(SYSTEMS)}; name the system with --system"
        )
    return system


_DISTINCT_PROGRAM = re.compile(r"swift |verl\.|skyrl|[A-Z]\w*Trainer$")
"""Programs that belong to one system; `train.py` may be anyone's."""


def _evidence(source: Source, system: System) -> tuple[int, int]:
    """Return the points of a system, and whether the program is one of its own (of equals, it
    wins)."""
    keys = [system.normalize(setting.key) for setting in source.settings]
    known_keys = sum(key in system.rules or key in system.none for key in keys)

    # A part of a YAML file has keys without their tables.
    endings = {key.rpartition(".")[2] for key in system.known()} if system.hydra else set()
    known_endings = sum(key.rpartition(".")[2] in endings for key in keys)
    score = 10 * known_keys + known_endings

    programs = (system.programs, *system.refused)
    starts_program = any(re.search(pattern, source.program) for pattern in programs)
    if starts_program and _DISTINCT_PROGRAM.match(source.program):
        score += 1_000_000
    return score, int(starts_program)

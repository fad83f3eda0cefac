"""Compose the configuration that `--config-name` names, as Hydra does, from files beside the
script; nothing is executed.

`compose` follows the lists of defaults of YAML files, and puts each file's settings under its
package. A file that is not there is named in `Composed.missing`, unless it is one that the system
ships: its values are the defaults in the system's table. Of interpolations,
`resolve_interpolations` replaces those by key, `oc.select`, and `oc.env` with a default; structured
configurations and other resolvers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError

MAX_FILE = 1_000_000
"""Characters of a file that are read at most."""

MAX_DEPTH = 30
"""Files that may build on each other; a list of defaults that names itself has no end."""

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)
_INTERPOLATION = re.compile(r"\$\{([^${}]+)\}")

Belongs = Callable[[str], bool]
"""Whether an entry of a list of defaults is the system's own (`ppo_trainer`, `actor/dp_actor`),
whose values are known."""


@dataclass(slots=True)
class Composed:
    """What a configuration sets, and what of it was not read."""

    tree: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complete_base: bool = True
    """Whether all that it builds on was read or is the system's own."""

    def lack(self, what: str) -> None:
        """Account for a file that is not read."""
        self.missing.append(what)
        self.complete_base = False


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the table of a YAML file; raise `ConfigError` for one that cannot be read."""
    return _table(read_document(path), str(path))


def read_document(path: Path) -> Any:
    """Return the content of a YAML file; raise `ConfigError` for one that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise ConfigError(f"{path}: cannot be read") from None
    return _document(text, str(path))


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Return the table of a YAML text; raise `ConfigError` for another one, and for aliases."""
    return _table(_document(text, name), name)


def _table(document: Any, name: str) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise ConfigError(f"{name}: holds no table of settings")
    return dict(document)


def _document(text: str, name: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(f"{name}: reading YAML needs PyYAML: pip install pyyaml") from None

    if len(text) > MAX_FILE:
        raise ConfigError(f"{name}: has {len(text)} characters; at most {MAX_FILE} are read")

    try:
        # A short text with aliases of aliases can expand to more than memory holds.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ConfigError(
                f"{name}: has aliases (*name), which are not read; write their values"
            )
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        cause = " ".join(str(error).split())[:120]
        raise ConfigError(f"{name}: is no YAML file ({cause})") from None


def compose(path: Path, belongs: Belongs) -> Composed:
    """Return what a configuration file and the files of its defaults set."""
    composed = Composed()
    try:
        _add(path, path.parent, "", composed, belongs, 0)
    except ConfigError as error:
        composed.lack(str(error))
    return composed


def compose_table(table: dict[str, Any], folder: Path | None, belongs: Belongs) -> Composed:
    """Return what the table of a configuration sets, whose defaults are in a folder.

    A folder of None finds none of them.
    """
    composed = Composed()
    _add_table(table, folder, "", "", composed, belongs, 0)
    return composed


def _add(
    path: Path, root: Path, package: str, composed: Composed, belongs: Belongs, depth: int
) -> None:
    """Add a file and the files of its defaults, under the package that its header names."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: is part of a list of defaults that has no end")

    text = path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_FILE else ""
    header = _PACKAGE.search(text)
    if header is not None and header[1] == "_global_":
        package = ""
    elif header is not None and header[1] != "_group_":
        package = header[1]

    group = path.parent.relative_to(root).as_posix() if path.is_relative_to(root) else ""
    if group == ".":
        group = ""
    _add_table(read_yaml(path), root, group, package, composed, belongs, depth)


def _add_table(
    table: dict[str, Any],
    root: Path | None,
    group: str,
    package: str,
    composed: Composed,
    belongs: Belongs,
    depth: int,
) -> None:
    """Add a table and the files of its defaults, in the order of its list: later ones win."""
    entries = table.pop("defaults", None)
    entries = list(entries) if isinstance(entries, list) else []
    if "_self_" not in entries:
        entries.append("_self_")

    for entry in entries:
        if entry == "_self_":
            _merge(composed.tree, _under(package, table))
            continue
        if isinstance(entry, Mapping) and not all(str(key).split() for key in entry):
            composed.lack(f"an entry of defaults names no group ({entry!r:.80}): it is not read")
            continue

        for name, entry_package in _named(entry, group, package):
            path = None if root is None else _file(root, name)
            if path is not None and root is not None:
                _add(path, root, entry_package, composed, belongs, depth + 1)
            elif not belongs(name):
                composed.lack(
                    f"{name}.yaml, which the configuration builds on, was not found: its settings "
                    "are not read"
                )


def _named(entry: Any, group: str, package: str) -> list[tuple[str, str]]:
    """Return the files of an entry of a list of defaults, each with its package.

    Files are relative to the folder of the configurations. An entry is a name, or a table of a
    group and the names in it; a group may start with words (`override /model`) and end in
    `@package`.
    """
    if isinstance(entry, str):
        file, _, entry_package = _in_group(entry, group).partition("@")
        return [(file.removesuffix(".yaml"), entry_package or package)]
    if not isinstance(entry, Mapping):
        return []

    files = []
    for key, value in entry.items():
        words = str(key).split()
        entry_group, _, entry_package = words[-1].partition("@")
        folder = _in_group(entry_group, group)

        if entry_package == "_global_":
            place = ""
        else:
            place = _place(entry_package, folder)
            if package and not entry_group.startswith("/"):
                place = f"{package}.{place}".rstrip(".")

        for name in value if isinstance(value, list) else [value]:
            if name is not None:
                files.append((f"{folder}/{str(name).removesuffix('.yaml')}", place))
    return files


def _in_group(name: str, group: str) -> str:
    """Return a name relative to the folder of the configurations; one that starts with `/` is."""
    if name.startswith("/") or not group:
        return name.lstrip("/")
    return f"{group}/{name}"


def _place(entry_package: str, folder: str) -> str:
    """Return the package that an entry names: without one, the dotted name of its group."""
    if entry_package == "_here_":
        return ""
    return entry_package or folder.replace("/", ".")


def _file(root: Path, name: str) -> Path | None:
    path = root / f"{name}.yaml"
    return path if path.is_file() else None


def _under(package: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return a table under the dotted name of a package."""
    parts = [part for part in package.split(".") if part]
    for part in reversed(parts):
        table = {part: table}
    return table


def _merge(tree: dict[str, Any], added: Mapping[str, Any]) -> None:
    for key, value in added.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def resolve_interpolations(settings: dict[str, Any]) -> None:
    """Replace `${a.b}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}` by values, in
    place; others stay."""
    # A value may hold further interpolations, and two may name each other without an end.
    for _ in range(8):
        changed = False
        for key, value in settings.items():
            if isinstance(value, str) and "${" in value:
                resolved = _resolved(value, settings)
                changed = changed or resolved != value
                settings[key] = resolved
        if not changed:
            return


def _resolved(text: str, settings: Mapping[str, Any]) -> Any:
    # A text that is one interpolation takes the value's type.
    single = _INTERPOLATION.fullmatch(text)
    if single is not None:
        return _lookup(single[1], settings, text)

    return _INTERPOLATION.sub(lambda match: str(_lookup(match[1], settings, match[0])), text)


def _lookup(inside: str, settings: Mapping[str, Any], text: str) -> Any:
    """Return the value of an interpolation, or its text where it has none."""
    name, colon, rest = inside.partition(":")
    if not colon:
        return settings.get(name, text)

    key, comma, default = rest.partition(",")
    if name == "oc.select":
        return settings.get(key.strip(), default.strip() if comma else None)
    # The environment of the run is not known here: its variables are taken as not set.
    if name == "oc.env" and comma:
        return default.strip()
    return text

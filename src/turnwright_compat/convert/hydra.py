"""Compose the configuration that `--config-name` names, as Hydra does, from files beside the
script; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError

MAX_FILE = 1_000_000
MAX_DEPTH = 30
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
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ConfigError(
                f"{name}: has aliases (*name), which are not read; write their values"
            )
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: is no YAML file ({' '.join(str(error).split())[:120]})"
        ) from None


def compose(path: Path, belongs: Belongs) -> Composed:
    """Return what a configuration file and the files of its defaults set."""
    found = Composed()
    try:
        _add(path, path.parent, "", found, belongs, 0)
    except ConfigError as error:
        found.lack(str(error))
    return found


def compose_table(table: dict[str, Any], folder: Path | None, belongs: Belongs) -> Composed:
    """Return what the table of a configuration sets, whose defaults are in a
    folder; None finds none."""
    found = Composed()
    _add_table(table, folder, "", "", found, belongs, 0)
    return found


def _add(
    path: Path, root: Path, package: str, found: Composed, belongs: Belongs, depth: int
) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: is part of a list of defaults that has no end")
    text = path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_FILE else ""
    if (header := _PACKAGE.search(text)) is not None:
        package = (
            "" if header[1] == "_global_" else package if header[1] == "_group_" else header[1]
        )
    relative = path.parent.relative_to(root).as_posix() if path.is_relative_to(root) else ""
    _add_table(
        read_yaml(path), root, "" if relative == "." else relative, package, found, belongs, depth
    )


def _add_table(
    table: dict[str, Any],
    root: Path | None,
    group: str,
    package: str,
    found: Composed,
    belongs: Belongs,
    depth: int,
) -> None:
    entries = table.pop("defaults", None)
    entries = list(entries) if isinstance(entries, list) else []
    if "_self_" not in entries:
        entries.append("_self_")
    for entry in entries:
        if entry == "_self_":
            _merge(found.tree, _under(package, table))
            continue
        for name, place in _named(entry, group, package):
            path = None if root is None else _file(root, name)
            if path is not None and root is not None:
                _add(path, root, place, found, belongs, depth + 1)
            elif not belongs(name):
                found.missing.append(
                    f"{name}.yaml, which the configuration builds on, was not found: its settings "
                    "are not read"
                )
                found.complete_base = False


def _named(entry: Any, group: str, package: str) -> list[tuple[str, str]]:
    """Return the file, relative to the configurations, and the package of an entry
    of a list of defaults."""
    if isinstance(entry, str):
        inner = entry.lstrip("/") if entry.startswith("/") or not group else f"{group}/{entry}"
        name, _, place = inner.partition("@")
        return [(name.removesuffix(".yaml"), place or package)]
    if not isinstance(entry, Mapping):
        return []
    found = []
    for key, value in entry.items():
        words = str(key).split()
        place_of, _, place = words[-1].partition("@")
        for one in value if isinstance(value, list) else [value]:
            if one is None or not words:
                continue
            inner = (
                place_of.lstrip("/")
                if place_of.startswith("/") or not group
                else f"{group}/{place_of}"
            )
            own = (
                place
                if place not in ("", "_here_")
                else ""
                if place == "_here_"
                else inner.replace("/", ".")
            )
            own = own if not package or place_of.startswith("/") else f"{package}.{own}".rstrip(".")
            found.append(
                (f"{inner}/{str(one).removesuffix('.yaml')}", "" if place == "_global_" else own)
            )
    return found


def _file(root: Path, name: str) -> Path | None:
    path = root / f"{name}.yaml"
    return path if path.is_file() else None


def _under(package: str, table: dict[str, Any]) -> dict[str, Any]:
    for part in reversed([one for one in package.split(".") if one]):
        table = {part: table}
    return table


def _merge(tree: dict[str, Any], added: Mapping[str, Any]) -> None:
    for key, value in added.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def resolve_interpolations(settings: dict[str, Any]) -> None:
    """Replace `${a.b}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}` by values,
    in place; others stay."""
    for _ in range(8):
        changed = False
        for key, value in settings.items():
            if isinstance(value, str) and "${" in value:
                made = _resolved(value, settings)
                changed = changed or made != value
                settings[key] = made
        if not changed:
            return


def _resolved(text: str, settings: Mapping[str, Any]) -> Any:
    single = _INTERPOLATION.fullmatch(text)
    if single is not None:
        return _lookup(single[1], settings, text)
    return _INTERPOLATION.sub(lambda found: str(_lookup(found[1], settings, found[0])), text)


def _lookup(inside: str, settings: Mapping[str, Any], kept: str) -> Any:
    name, colon, rest = inside.partition(":")
    if not colon:
        return settings.get(name, kept)
    key, comma, default = rest.partition(",")
    if name == "oc.select":
        return settings.get(key.strip(), default.strip() if comma else None)
    if name == "oc.env" and comma:
        return default.strip()
    return kept

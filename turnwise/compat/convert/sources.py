"""Settings of a launch script, an argument list, a YAML file or a Python launcher, in the order in which they are given."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from turnwise.compat.convert.shell import MAX_CHARACTERS, read_script, split_words
from turnwise.errors import ConfigError

MAX_DEPTH = 30


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it is given: texts of the command line, or a value of YAML."""

    key: str
    value: Any
    """A text, a list of texts (a flag with several values), True (a flag without one), or a value of YAML."""


@dataclass(slots=True)
class Source:
    """Settings of one text."""

    settings: list[Setting] = field(default_factory=list)
    launched: str = ""
    """Words of the command before its settings."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script sets."""
    unresolved: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_source(text: str, name: str) -> Source:
    """Read settings by the kind of `name` (`.yaml`, `.py`, anything else is a script or an argument list); nothing is executed.

    Raises `ConfigError` with what cannot be read, and for a text without settings.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{name}: has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if name.endswith((".yaml", ".yml")):
        source = _from_yaml(text, name)
    else:
        source = _from_python(text, name) if name.endswith(".py") else _from_script(text, name)
    if not source.settings:
        raise ConfigError(f"{name}: no settings found; expected flags (--key value), overrides (a.b=value) or a YAML table")
    return source


def _from_yaml(text: str, name: str) -> Source:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(f"{name}: reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ConfigError(f"{name}: has aliases (*name), which are not read; write their values")
        table = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is no YAML file ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: holds no table of settings")
    return Source(list(_flat(table)))


def _flat(table: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[Setting]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value and depth < MAX_DEPTH:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield Setting(f"{prefix}{key}", value)


_SPACED = re.compile(r"^[ \t]*([A-Za-z_]\w*(?:\.\w+)+)[ \t]+=[ \t]+(\S+)[ \t]*$", re.MULTILINE)
"""An override as documents write it, with spaces."""


def _from_script(text: str, name: str) -> Source:
    notes = []
    if server := _commented_server(text):
        text = f"{server}\n{text}"
        notes.append("the command `swift rollout` in its comments is read too: the server has the scheduler")
    try:
        script = read_script(_SPACED.sub(r"\1=\2", text))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    settings: list[Setting] = []
    launched: list[str] = []
    for command in _launches(script.commands):
        start, hydra = _start(command)
        launched += command[:start]
        settings += _overrides(command[start:]) if hydra else _flags(command[start:])
    unresolved = _used(script.unresolved, settings)
    return Source(settings, " ".join(launched), script.variables, unresolved, [*notes, *script.notes])


def _commented_server(text: str) -> str:
    """Return the command `swift rollout` that a script has in its comments, where it has none of its own."""
    lines = [line.strip() for line in text.splitlines()]
    if any(line.startswith("swift rollout") for line in lines):
        return ""
    plain = [line.lstrip("#").strip() if line.startswith("#") else "" for line in lines]
    start = next((at for at, line in enumerate(plain) if line.startswith("swift rollout")), None)
    if start is None:
        return ""
    end = next((at for at in range(start, len(plain)) if not plain[at].endswith("\\")), len(plain) - 1)
    return "\n".join(plain[start : end + 1])


def _used(unresolved: Sequence[str], settings: Sequence[Setting]) -> list[str]:
    """Return what occurs in a setting."""
    texts = [f"{setting.key} {setting.value}" for setting in settings]
    return [one for one in dict.fromkeys(unresolved) if any(one in text for text in texts)]


_LAUNCH = re.compile(r"(^|/)train(_async)?\.py$|^verl\.|^skyrl|^verl$")
_HYDRA = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*\.[\w.]+=|~[A-Za-z_][\w.]+$")


def _launches(commands: Sequence[list[str]]) -> list[list[str]]:
    """Return the commands that start a training or a rollout server; if there are none, the longest one with settings, or all
    lines of a text that has nothing else."""
    given = [one for one in commands if _count(one)]
    found = [one for one in given if _swift(one) is not None or any(_LAUNCH.search(word) for word in one)]
    if not found and given and all(_count(one[:1]) for one in given):
        return [[word for one in given for word in one]]
    return found or sorted(given, key=_count)[-1:]


def _count(command: Sequence[str]) -> int:
    return sum(word.startswith("--") or _HYDRA.match(word) is not None for word in command)


def _swift(command: Sequence[str]) -> int | None:
    """Return the position of `rlhf` in `swift rlhf`, or None."""
    for at, (first, second) in enumerate(pairwise(command)):
        if first in ("swift", "megatron") and second.isidentifier():
            return at + 1
    return None


def _start(command: Sequence[str]) -> tuple[int, bool]:
    """Return where the settings start, and whether they are overrides."""
    at = _swift(command)
    if at is None:
        at = next((at for at, word in enumerate(command) if _LAUNCH.search(word)), -1)
    rest = command[at + 1 :]
    overrides = [place for place, word in enumerate(rest, at + 1) if _HYDRA.match(word)]
    if len(overrides) > sum(word.startswith("--") for word in rest):
        return overrides[0], True  # options of the launcher come first
    return at + 1, False


def _overrides(words: Sequence[str]) -> Iterator[Setting]:
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            yield Setting(key, value or True)
        elif key.startswith("~"):
            yield Setting(key.lstrip("~"), None)
        elif equals and re.fullmatch(r"\+{0,2}[\w./@-]+", key):
            yield Setting(key.lstrip("+"), value)


def _flags(words: Sequence[str]) -> Iterator[Setting]:
    key, values = "", []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if key:
            yield Setting(key, True if not values else values[0] if len(values) == 1 else list(values))
        name, equals, value = word[2:].partition("=")
        key, values = name, [value] if equals else []


def _from_python(text: str, name: str) -> Source:
    """Read the flags in the texts of a launcher: strings, concatenations and f-strings of constants, in their order."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{name}: is no Python file ({error})") from None
    settings: list[Setting] = []
    unresolved: list[str] = []
    known: dict[str, str] = {}
    for node in _statements(tree.body):
        for target in node.targets:
            found = _text(node.value, known, unresolved)
            if isinstance(target, ast.Name) and found is not None:
                known[target.id] = found
                if found.lstrip().startswith("--") and not _is_joined(node.value, known):
                    settings += _flags(split_words(found))
    return Source(settings, "slime", unresolved=_used(unresolved, settings))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.Assign]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield node
        elif isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.With):
            yield from _statements(node.body)


def _is_joined(node: ast.expr, known: Mapping[str, str]) -> bool:
    """Return whether a text consists of variables with flags, which were read already."""
    names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    return any(known.get(name, "").lstrip().startswith("--") for name in names)


def _text(node: ast.expr, known: Mapping[str, str], unresolved: list[str], depth: int = 0) -> str | None:
    """Return the text of an expression, with `${source}` for what is no constant; None for another expression."""
    if depth > MAX_DEPTH:
        return None
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pair = [_text(one, known, unresolved, depth + 1) for one in (left, right)]
            return None if None in pair else "".join(one or "" for one in pair)
        case ast.IfExp(body=body):
            return _text(body, known, unresolved, depth + 1)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(), default]):  # os.environ.get("NAME", default)
            return _text(default, known, unresolved, depth + 1)
        case ast.Call(func=ast.Attribute(attr="join"), args=parts) if len(parts) > 1:
            joined = [_text(one, known, unresolved, depth + 1) for one in parts]
            return None if None in joined else "/".join(one or "" for one in joined)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.JoinedStr(values=values):
            return "".join(_piece(one, known, unresolved, depth) for one in values)
    return None


def _piece(node: ast.expr, known: Mapping[str, str], unresolved: list[str], depth: int) -> str:
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    found = _text(inner, known, unresolved, depth + 1)
    if found is not None:
        return found
    raw = "${" + re.sub(r"\W+", "_", ast.unparse(inner))[:40].strip("_") + "}"
    unresolved.append(raw)
    return raw


def plain_value(value: Any) -> Any:
    """Return a text of the command line as a value: a number, a truth value, None, a list, a table, or the text itself."""
    if isinstance(value, list):
        return [plain_value(one) for one in value]
    if not isinstance(value, str):
        return value
    text = value.strip()
    known = {"true": True, "false": False, "null": None, "none": None, "~": None}
    if text.lower() in known:
        return known[text.lower()]
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        pass
    if text[:1] in "[{(" and len(text) < 100_000:
        for read in (json.loads, ast.literal_eval, _loose_list):
            try:
                return read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                continue
    return value


def _loose_list(text: str) -> list[Any]:
    """Read Hydra's lists of bare words: `[a,b]`."""
    if not (text.startswith("[") and text.endswith("]")) or any(mark in text[1:-1] for mark in "[]{}"):
        raise ValueError(text)
    return [plain_value(one.strip()) for one in text[1:-1].split(",") if one.strip()]

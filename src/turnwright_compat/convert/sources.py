"""Settings of a launch script, an argument list, a YAML file or a Python launcher, in the order in
which they are given."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError
from turnwright_compat.convert.hydra import (
    Composed,
    compose,
    compose_table,
    parse_yaml,
    read_yaml,
    resolve_interpolations,
)
from turnwright_compat.convert.launcher import Launch, Launcher
from turnwright_compat.convert.shell import MAX_CHARACTERS, Script, read_script, split_words
from turnwright_compat.convert.trainers import read_trainer, trainer_calls

MAX_DEPTH = 30


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it is given: texts of the command line, or a value of YAML."""

    key: str
    value: Any
    """A text, a list of texts (a flag with several values), True (a flag without
    one), or a value of YAML."""


@dataclass(slots=True)
class Source:
    """Settings of one text."""

    settings: list[Setting] = field(default_factory=list)
    program: str = ""
    """What is started: a module, a file, or two words (`swift rlhf`); empty
    if that is not known."""
    programs: list[str] = field(default_factory=list)
    """All that is started, servers of the training included."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script sets."""
    unresolved: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What could not be read, each a clause."""
    base_known: bool = True
    """Whether what is not set has the system's defaults: false if a file of settings, or a part
    of them, was not read."""
    processes: int | None = None
    """Processes that the command starts, where it tells."""
    bases: list[str] = field(default_factory=list)
    """Configurations of a system by name (`ppo_megatron_trainer`), which no file
    beside the script has."""

    def start(self, programs: Sequence[str], program: str) -> None:
        """Set what is started."""
        self.programs = list(programs)
        self.program = program

    def launch_processes(self, words: Sequence[str]) -> None:
        """Read the number of processes from the words before the program
        (`accelerate launch`, `torchrun`)."""
        found = re.search(
            r"--(?:num[-_]processes|nproc[-_]per[-_]node)[= ](\d{1,6})\b", " ".join(words)
        )
        if found is not None:
            self.processes = int(found[1])

    def lack(self, what: str) -> None:
        """Account for settings that are not read."""
        self.missing.append(what)
        self.doubt_base()

    def doubt_base(self) -> None:
        """Take what is not set as unknown."""
        self.base_known = False

    def add(self, composed: Composed) -> None:
        """Add the settings of a configuration, with what of it was not read."""
        self.settings.extend(_flat(composed.tree))
        self.missing.extend(composed.missing)
        self.base_known = self.base_known and composed.complete_base

    def put_under(self, inner: Source) -> None:
        """Take the settings of the program that is started, below those of its command."""
        self.settings[:0] = inner.settings
        self.missing.extend(one for one in inner.missing if "come from the command line" not in one)
        self.unresolved.extend(inner.unresolved)
        self.notes.extend(inner.notes)
        self.start(inner.programs, inner.program)

    def override(self, overrides: Sequence[Setting]) -> None:
        """Apply overrides, of which `~key` takes a setting away."""
        self.settings = _overridden(self.settings, overrides)


def read_source(text: str, name: str, folder: Path | None = None) -> Source:
    """Read settings by the kind of `name` (`.yaml`, `.py`, anything else is a script or an argument
    list); nothing is executed.

    Args:
        text: the content.
        name: its file name.
        folder: where it is; files that it names are looked for there and in the folders above.
            None reads no other file.

    Raises `ConfigError` with what cannot be read, and for a text without settings.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{name}: has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if name.endswith((".yaml", ".yml")):
        source = _from_yaml(text, name, folder)
    else:
        source = (
            _from_python(text, name, folder)
            if name.endswith(".py")
            else _from_script(text, name, folder)
        )
    if not (source.settings or source.missing or source.bases):
        raise ConfigError(
            f"{name}: no settings found; expected flags (--key value), overrides (a.b=value) or a "
            "YAML table"
        )
    return source


# YAML

_OWN_CONFIG = re.compile(
    r"(?:.*/)?(?:_generated_)?(?:fully_async_|one_step_off_|separate_)?(?:ppo_\w*trainer|ppo_base_config)(?:\.yaml)?"
)
"""Names of configurations that verl and SkyRL have themselves."""
_OWN_GROUPS = {
    *(
        "actor",
        "algorithm",
        "critic",
        "data",
        "distillation",
        "engine",
        "model",
        "model_engine",
        "npu_profile",
        "optim",
    ),
    *(
        "profiler",
        "ref",
        "reward",
        "reward_manager",
        "reward_model",
        "rollout",
        "transfer_queue",
        "legacy_reward_impl",
    ),
    *("hydra", "override", "deepspeed_config", "megatron_config"),
}
"""Groups of such configurations."""


def _is_own_config(name: str) -> bool:
    return (
        _OWN_CONFIG.fullmatch(name) is not None
        or name.partition("/")[0].partition("@")[0] in _OWN_GROUPS
    )


def _from_yaml(text: str, name: str, folder: Path | None) -> Source:
    composed = compose_table(parse_yaml(text, name), folder, _is_own_config)
    source = Source()
    source.add(composed)
    source.override(())
    source.unresolved.extend(_interpolations(source.settings))
    return source


def _settings_of(tree: Mapping[Any, Any]) -> list[Setting]:
    table = {one.key: one.value for one in _flat(tree)}
    resolve_interpolations(table)
    return [Setting(key, value) for key, value in table.items()]


def _interpolations(settings: Sequence[Setting]) -> list[str]:
    texts = [one.value for one in settings if isinstance(one.value, str)]
    return list(
        dict.fromkeys(found for text in texts for found in re.findall(r"\$\{[^{}]*\}", text))
    )


def _flat(table: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[Setting]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value and depth < MAX_DEPTH:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield Setting(f"{prefix}{key}", value)


# Shell scripts

_SPACED = re.compile(r"^[ \t]*([A-Za-z_]\w*(?:\.\w+)+)[ \t]+=[ \t]+(\S+)[ \t]*$", re.MULTILINE)
"""An override as documents write it, with spaces."""


def _from_script(text: str, name: str, folder: Path | None) -> Source:
    notes = []
    if server := _commented_server(text):
        text = f"{server}\n{text}"
        notes.append(
            "the command `swift rollout` in its comments is read too: the server has the scheduler"
        )
    try:
        script = read_script(_SPACED.sub(r"\1=\2", text), folder)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    source = Source(variables=script.variables, notes=notes)
    _add_commands(source, script, folder)
    _add_trainer_script(source, folder)
    used_files = [
        one
        for one in script.not_found
        if not one.rpartition("/")[2].startswith(("env", "activate", ".env"))
    ]
    if used_files and (source.unresolved or source.missing):
        source.missing.append(
            f"{', '.join(dict.fromkeys(used_files))}, which the script sources, was not found"
        )
    return source


def _add_trainer_script(source: Source, folder: Path | None) -> None:
    """Add what the program gives to TRL's trainer, where it is a file beside the
    script; flags are above it."""
    path = find_file(source.program, folder) if source.program.endswith(".py") else None
    if path is None or path.stat().st_size > MAX_CHARACTERS:
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"\b(?:GRPO|RLOO)Trainer\(", text) is None:
        return
    try:
        inner = _from_python(text, path.name, path.parent)
    except ConfigError as error:
        source.lack(str(error))
        return
    if inner.program.endswith("Trainer"):
        source.put_under(inner)


def _commented_server(text: str) -> str:
    """Return the command `swift rollout` that a script has in its comments, where
    it has none of its own."""
    lines = [line.strip() for line in text.splitlines()]
    if any(line.startswith("swift rollout") for line in lines):
        return ""
    plain = [line.lstrip("#").strip() if line.startswith("#") else "" for line in lines]
    start = next((at for at, line in enumerate(plain) if line.startswith("swift rollout")), None)
    if start is None:
        return ""
    end = next(
        (at for at in range(start, len(plain)) if not plain[at].endswith("\\")), len(plain) - 1
    )
    return "\n".join(plain[start : end + 1])


@dataclass(frozen=True, slots=True)
class _Command:
    """Command that starts something."""

    words: Sequence[str]
    doubts: Sequence[frozenset[str]]
    program: str
    start: int
    """Where its settings start."""


def _add_commands(source: Source, script: Script, folder: Path | None) -> None:
    """Add the settings of the commands that start a training or a rollout server."""
    commands = [
        _command(words, doubts)
        for words, doubts in zip(*_unwrapped(script.commands, script.doubts, folder), strict=True)
    ]
    chosen = _launches(commands)
    if not chosen:
        return
    servers = [one for one in chosen if one.program == "swift rollout"]
    trainings = [one for one in chosen if one.program != "swift rollout"]
    if len({tuple(one.words[one.start :]) for one in trainings}) > 1:
        others = ", ".join(dict.fromkeys(one.program or one.words[0] for one in trainings[1:]))
        source.missing.append(
            f"the script starts {len(trainings)} trainings; the first is read, not the others "
            f"({others})"
        )
    source.start([one.program for one in chosen], (trainings or servers)[0].program)
    for command in (*servers, *trainings[:1]):
        _add_command(source, command, script.unresolved, folder)
    source.unresolved.extend(_used(script.unresolved, source.settings))


def _unwrapped(
    commands: Sequence[list[str]],
    doubts: Sequence[list[frozenset[str]]],
    folder: Path | None,
    depth: int = 0,
) -> tuple[list[list[str]], list[list[frozenset[str]]]]:
    """Return the commands, those of `bash -c "..."` in place of it."""
    found: list[list[str]] = []
    found_doubts: list[list[frozenset[str]]] = []
    for words, own in zip(commands, doubts, strict=True):
        at = next((at for at, word in enumerate(words[:-1]) if _is_shell(words, at)), None)
        if at is None or depth > 3:
            found.append(words)
            found_doubts.append(own)
            continue
        inner = read_script(words[at + 1], folder)
        more, more_doubts = _unwrapped(inner.commands, inner.doubts, folder, depth + 1)
        found += more
        found_doubts += more_doubts
    return found, found_doubts


def _is_shell(words: Sequence[str], at: int) -> bool:
    """Return whether the word at a position is the `-c` of `bash -c TEXT`."""
    if re.fullmatch(r"-[a-z]*c", words[at]) is None or at == 0:
        return words[at] == "--wrap"
    return any(re.fullmatch(r"(?:.*/)?(?:ba|z)?sh", word) for word in words[max(0, at - 3) : at])


def _used(unresolved: Sequence[str], settings: Sequence[Setting]) -> list[str]:
    """Return what occurs in a setting."""
    texts = [f"{setting.key} {setting.value}" for setting in settings]
    return [one for one in dict.fromkeys(unresolved) if any(one in text for text in texts)]


_LAUNCH = re.compile(
    r"(^|/)train(_async)?\.py$|^verl\.(?!.*preprocess)|^skyrl|^verl$|(^|/)(main_ppo|fully_async_main)\.py$"
)
_HYDRA = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*\.[\w.]+=|~[A-Za-z_][\w.]+$")
_PROGRAM = re.compile(r"[\w./${}-]+\.py")
_NOT_TRAININGS = re.compile(
    r"(^|[/.])(convert|prepare|preprocess|download|data_?process|tools?/)|_to_|checkpoint|retriev|server\.py"
)


_TOOLS = {
    *(
        "pgrep",
        "pkill",
        "ps",
        "grep",
        "kill",
        "killall",
        "ls",
        "cat",
        "rm",
        "cp",
        "mv",
        "mkdir",
        "sleep",
        "curl",
        "wget",
        "test",
    )
}
"""Programs whose arguments may name a trainer and start none."""


def _command(words: Sequence[str], doubts: Sequence[frozenset[str]]) -> _Command:
    """Find the program of a command, and where its settings start."""
    at = _swift(words)
    if at is not None:
        return _Command(words, doubts, f"swift {words[at]}", at + 1)
    place = next((at for at, word in enumerate(words) if _LAUNCH.search(word)), None)
    if place is None:
        place = next(
            (
                at + 1
                for at, word in enumerate(words[:-1])
                if word == "-m" and _is_dotted(words[at + 1])
            ),
            None,
        )
    if words and words[0].rpartition("/")[2] in _TOOLS:
        return _Command(words, doubts, "", len(words))
    if place is not None and words[place] == "torch.distributed.run":
        place = None
    if place is None:
        place = next((at for at, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    if place is None:
        first = next(
            (at for at, word in enumerate(words) if word.startswith("--") or _HYDRA.match(word)),
            len(words),
        )
        return _Command(words, doubts, "", first)
    return _Command(words, doubts, words[place], place + 1)


def _is_dotted(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*", word) is not None


def _launches(commands: Sequence[_Command]) -> list[_Command]:
    """Return the commands that start a training or a rollout server; if there are none, the longest
    one with settings, or all lines of a text that has nothing else."""
    given = [one for one in commands if _count(one.words)]
    if swift := [one for one in commands if one.program.startswith("swift ")]:
        chosen = [one for one in swift if one.program in ("swift rlhf", "swift rollout")]
        trainings = [
            one for one in swift if one.program.removeprefix("swift ") in ("sft", "pt", "rlhf")
        ]
        return chosen or trainings[:1] or swift[:1]
    known = [one for one in commands if _LAUNCH.search(one.program)]
    if known:
        return known
    if given and all(_count(one.words[:1]) for one in given):
        words = [word for one in given for word in one.words]
        doubts = [doubt for one in given for doubt in one.doubts]
        return [_Command(words, doubts, "", 0)]
    own = [one for one in given if one.program and not _NOT_TRAININGS.search(one.program)]
    return sorted(own or given, key=lambda one: _count(one.words))[-1:]


def _count(words: Sequence[str]) -> int:
    return sum(word.startswith("--") or _HYDRA.match(word) is not None for word in words)


def _swift(command: Sequence[str]) -> int | None:
    """Return the position of `rlhf` in `swift rlhf` or `python .../swift/cli/rlhf.py`, or None."""
    for at, (first, second) in enumerate(pairwise(command)):
        if first in ("swift", "megatron") and second.isidentifier():
            return at + 1
    return None


def _add_command(
    source: Source, command: _Command, unresolved: Sequence[str], folder: Path | None
) -> None:
    words, start = command.words, command.start
    source.launch_processes(words[:start])
    rest = words[start:]
    overrides = [place for place, word in enumerate(rest, start) if _HYDRA.match(word)]
    flags = sum(word.startswith("--") for word in rest)
    hidden: list[str] = []
    if len(overrides) > flags or (not flags and any(_is_override(word) for word in rest)):
        options, values = _hydra_words(rest)
        _add_config(source, options, command.program, folder)
        source.override(list(_overrides(values, unresolved, hidden)))
    else:
        made = list(_flags(rest, unresolved, hidden))
        for one in made:
            if (
                one.key == "config"
                and isinstance(one.value, str)
                and one.value.endswith((".yaml", ".yml"))
            ):
                _add_yaml(source, one.value, folder)
        if rest and rest[0].endswith((".yaml", ".yml")):
            _add_yaml(source, rest[0], folder)
        source.settings.extend(made)
    for word in hidden:
        _add_hidden(source, word)
    conditions: dict[str, list[str]] = {}
    key = ""
    for word, doubt in zip(rest, command.doubts[start:], strict=True):
        key = word if word.startswith("--") or _HYDRA.match(word) else key
        for condition in doubt:
            conditions.setdefault(condition, []).append(key.partition("=")[0])
    for condition, keys in conditions.items():
        named = ", ".join(list(dict.fromkeys(one for one in keys if one))[:4])
        source.missing.append(
            f"`{condition}` is known only when the script runs; all branches are read, check "
            f"{named or 'them'}"
        )


def _add_hidden(source: Source, word: str) -> None:
    """Account for settings that are made elsewhere; those of a model's
    shape are not needed here."""
    if re.search(r"MODEL_(CONFIG_)?ARGS", word):
        source.notes.append(f"{word} is not read: the shape of the model comes from model.path")
        return
    source.lack(f"{word} is not known here, and the settings in it are not read")


def _add_yaml(source: Source, value: str, folder: Path | None) -> None:
    path = find_file(value, folder)
    if path is None:
        source.lack(f"{value}, which --config names, was not found: its settings are not read")
        return
    try:
        source.settings.extend(_settings_of(read_yaml(path)))
    except ConfigError as error:
        source.lack(str(error))


_WORKING_FOLDER = re.compile(r"^\$(?:PWD|\{PWD\}|\(pwd\.*\))/")


def find_file(name: str, folder: Path | None) -> Path | None:
    """Return a file that a script names, from its folder or one of those above;
    None if it is not there."""
    if folder is None or not name or "\0" in name:
        return None
    name = _WORKING_FOLDER.sub("", name)  # usually one of the folders above
    for one in (folder, *folder.parents)[:6]:
        path = one / name
        try:
            if path.is_file():
                return path
        except OSError:
            return None
    return None


_CONFIG_OPTIONS = {
    "--config-name": "name",
    "-cn": "name",
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "dir",
    "-cd": "dir",
}


def _hydra_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of Hydra that name files, and the other words."""
    options: dict[str, str] = {}
    kept: list[str] = []
    pending = ""
    for word in words:
        name, equals, value = word.partition("=")
        if pending:
            options[pending], pending = word, ""
        elif name in _CONFIG_OPTIONS and equals:
            options[_CONFIG_OPTIONS[name]] = value.strip("'\"")
        elif name in _CONFIG_OPTIONS:
            pending = _CONFIG_OPTIONS[name]
        else:
            kept.append(word)
    return options, kept


def _add_config(
    source: Source, options: Mapping[str, str], program: str, folder: Path | None
) -> None:
    """Add the settings of the file that Hydra's options name."""
    name = options.get("name", "").removesuffix(".yaml")
    if not name and not options:
        return
    where = options.get("path") or options.get("dir") or ""
    if not name:
        source.lack(
            f"the configuration in {where} is not named (--config-name): its settings are not read"
        )
        return
    places = [f"{where}/{name}.yaml" if where else f"{name}.yaml"]
    if where and program and not program.endswith(".py"):  # relative to the program's module
        places.insert(0, f"{'/'.join(program.split('.')[:-1])}/{where}/{name}.yaml")
    path = next((found for one in places if (found := find_file(one, folder)) is not None), None)
    if path is None and _is_own_config(name) and re.match(r"verl[./]|skyrl|$", program):
        source.bases.append(name)
        return
    if path is None and (path := find_file(f"{name}.yaml", folder)) is not None:
        source.missing.append(
            f"{where}/{name}.yaml (--config-path) was not found; {path.name} beside the script is "
            "read: check it"
        )
    if path is None:
        source.lack(
            f"{places[-1]}, which --config-name names, was not found: its settings are not read"
        )
        return
    composed = compose(path, _is_own_config)
    source.add(composed)
    source.notes.append(f"the settings of {path.name} are read")


def _overridden(base: Sequence[Setting], overrides: Sequence[Setting]) -> list[Setting]:
    """Return settings of a file after overrides, of which `~key` takes one away."""
    kept = list(base)
    added: list[Setting] = []
    for one in overrides:
        if one.key.startswith("~"):
            gone = one.key[1:]
            kept = [old for old in kept if old.key != gone and not old.key.startswith(f"{gone}.")]
            added = [old for old in added if old.key != gone and not old.key.startswith(f"{gone}.")]
        else:
            added.append(one)
    table = {one.key: one.value for one in (*kept, *added)}
    resolve_interpolations(table)
    return [Setting(key, value) for key, value in table.items()]


def _is_override(word: str) -> bool:
    return re.match(r"\+{0,2}[A-Za-z_][\w./@-]*=", word) is not None


def _overrides(
    words: Sequence[str], unresolved: Sequence[str], hidden: list[str]
) -> Iterator[Setting]:
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            yield Setting(key, value or True)
        elif key.startswith("~"):
            yield Setting(f"~{key.lstrip('~')}", None)
        elif equals and re.fullmatch(r"\+{0,2}[\w./@-]+", key):
            yield Setting(key.lstrip("+"), value)
        elif word in unresolved and not word.startswith("$("):
            hidden.append(word)


def _flags(
    words: Sequence[str], unresolved: Sequence[str] = (), hidden: list[str] | None = None
) -> Iterator[Setting]:
    """Yield the flags of a command; a word that is not known here and follows a complete flag
    may hold further flags."""
    key = ""
    values: list[str] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            if (
                word in unresolved
                and not word.startswith("$(")
                and (values or not key)
                and hidden is not None
            ):
                hidden.append(word)
            else:
                values.append(word)
            continue
        if key:
            yield Setting(
                key, True if not values else values[0] if len(values) == 1 else list(values)
            )
        name, equals, value = word[2:].partition("=")
        key, values = name, [value] if equals else []


# Python launchers


def _from_python(text: str, name: str, folder: Path | None) -> Source:
    """Read what a launcher starts: the flags of a command, or the arguments of a trainer."""
    launcher = Launcher(text, name, folder)
    launcher.follow()
    source = Source(missing=list(launcher.missing))
    script = Script(unresolved=list(launcher.unresolved))
    for launch in launcher.launches:
        _add_launch(script, launch, folder)
    script.unresolved.extend(launcher.unresolved)
    trainings = [
        one
        for one in script.commands
        if _LAUNCH.search(_command(one, ()).program) or _swift(one) is not None
    ]
    if trainings or not (calls := trainer_calls(launcher)):
        if not trainings:
            for words in _assigned(launcher):
                script.add(words)
        _add_commands(source, script, folder)
    else:
        made = read_trainer(launcher, calls, name, folder)
        source.settings.extend(Setting(key, value) for key, value in made.settings)
        source.start([made.program], made.program)
        source.missing.extend(made.missing)
        if not made.base_known:
            source.doubt_base()
        source.unresolved.extend(_used([*script.unresolved, *made.unresolved], source.settings))
    if source.settings and launcher.defaults:
        decided = ", ".join(
            f"{key} = {str(value)[:30]}" for key, value in list(launcher.decided.items())[:12]
        )
        source.notes.append(
            f"the launcher's own arguments have their defaults{f': {decided}' if decided else ''}"
        )
    if source.settings and launcher.environment:
        named = ", ".join(launcher.environment[:8]) + (
            ", ..." if len(launcher.environment) > 8 else ""
        )
        source.notes.append(f"variables of the process environment are taken as not set ({named})")
    return source


def _add_launch(script: Script, launch: Launch, folder: Path | None) -> None:
    if launch.program:
        script.add(["python", launch.program, *split_words(launch.text or "")])
    elif launch.text is None:
        script.add(list(launch.words))
    else:
        try:
            inner = read_script(launch.text, folder)
        except ConfigError:
            return
        for words, doubts in zip(inner.commands, inner.doubts, strict=True):
            script.add(words, doubts)
        script.unresolved.extend(inner.unresolved)


def _assigned(launcher: Launcher) -> list[list[str]]:
    """Return the flags in the texts of a launcher that starts nothing which is known:
    those of no other text."""
    names = {**launcher.scope.names, **launcher.last_names}
    texts = [
        value
        for value in names.values()
        if isinstance(value, str) and value.lstrip().startswith("--")
    ]
    own = [
        one
        for one in dict.fromkeys(texts)
        if not any(one != other and one.strip() in other for other in texts)
    ]
    words = [word for text in own for word in split_words(text)]
    return [["python", "train.py", *words]] if words else []


def plain_value(value: Any) -> Any:
    """Return a text of the command line as a value: a number, a truth value, None, a list, a
    table, or the text itself."""
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
    if not (text.startswith("[") and text.endswith("]")) or any(
        mark in text[1:-1] for mark in "[]{}"
    ):
        raise ValueError(text)
    return [plain_value(one.strip()) for one in text[1:-1].split(",") if one.strip()]

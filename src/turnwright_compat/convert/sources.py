"""Read the settings of a launch script, an argument list, a YAML file or a Python launcher.

`read_source` chooses the reader by the file's name, and returns a `Source`: the settings in the
order in which they are given, what is started, and what could not be read. A setting is not
understood here: its key and its text stay as they are, and `engine.convert_source` looks them up
in the table of a system.

Nothing is executed. `shell.read_script` follows the shell, `launcher.Launcher` follows Python,
`trainers.read_trainer` reads the arguments of a trainer, and `hydra.compose` reads the files that
a configuration builds on.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """A text, a list of texts (a flag with several values), True (a flag without one), or a value
    of YAML."""


_PROCESSES = re.compile(r"--(?:num[-_]processes|nproc[-_]per[-_]node)[= ](\d{1,6})\b")


@dataclass(slots=True)
class Source:
    """Settings of one text."""

    settings: list[Setting] = field(default_factory=list)
    program: str = ""
    """What is started: a module, a file, or two words (`swift rlhf`); empty if that is not
    known."""
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
    """Configurations of a system by name (`ppo_megatron_trainer`), which no file beside the script
    has."""

    def start(self, programs: Sequence[str], program: str) -> None:
        """Set what is started."""
        self.programs = list(programs)
        self.program = program

    def launch_processes(self, words: Sequence[str]) -> None:
        """Read the number of processes from the words before the program
        (`accelerate launch`, `torchrun`)."""
        match = _PROCESSES.search(" ".join(words))
        if match is not None:
            self.processes = int(match[1])

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
        # The flags of the command are read, so a program that takes them lacks nothing.
        self.missing.extend(
            clause for clause in inner.missing if "come from the command line" not in clause
        )
        self.unresolved.extend(inner.unresolved)
        self.notes.extend(inner.notes)
        self.start(inner.programs, inner.program)

    def override(self, overrides: Sequence[Setting]) -> None:
        """Apply overrides, of which `~key` takes a setting away."""
        self.settings = _overridden(self.settings, overrides)


def read_source(text: str, name: str, folder: Path | None = None) -> Source:
    """Return the settings of a text, read by the ending of its name.

    `.yaml` and `.yml` are configurations, `.py` is a launcher, and anything else is a script or an
    argument list. Nothing is executed.

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
    elif name.endswith(".py"):
        source = _from_python(text, name, folder)
    else:
        source = _from_script(text, name, folder)

    if not (source.settings or source.missing or source.bases):
        raise ConfigError(
            f"{name}: no settings found; expected flags (--key value), overrides (a.b=value) or a "
            "YAML table"
        )
    return source


# YAML

_SHIPPED_CONFIG = re.compile(
    r"(?:.*/)?(?:_generated_)?(?:fully_async_|one_step_off_|separate_)?(?:ppo_\w*trainer|ppo_base_config)(?:\.yaml)?"
)
"""Names of configurations that verl and SkyRL ship."""

_SHIPPED_GROUPS = {
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
    "profiler",
    "ref",
    "reward",
    "reward_manager",
    "reward_model",
    "rollout",
    "transfer_queue",
    "legacy_reward_impl",
    "hydra",
    "override",
    "deepspeed_config",
    "megatron_config",
}
"""Groups of such configurations."""


def _is_shipped_config(name: str) -> bool:
    group = name.partition("/")[0].partition("@")[0]
    return _SHIPPED_CONFIG.fullmatch(name) is not None or group in _SHIPPED_GROUPS


def _from_yaml(text: str, name: str, folder: Path | None) -> Source:
    composed = compose_table(parse_yaml(text, name), folder, _is_shipped_config)
    source = Source()
    source.add(composed)
    # Without overrides, this replaces interpolations by values.
    source.override(())
    source.unresolved.extend(_interpolations(source.settings))
    return source


def _settings_of(tree: Mapping[Any, Any]) -> list[Setting]:
    return _resolved(_flat(tree))


def _resolved(settings: Iterable[Setting]) -> list[Setting]:
    """Return the last value of each key, with interpolations replaced by values."""
    table = {setting.key: setting.value for setting in settings}
    resolve_interpolations(table)
    return [Setting(key, value) for key, value in table.items()]


def _interpolations(settings: Sequence[Setting]) -> list[str]:
    """Return the interpolations that are left in settings, each once."""
    left: list[str] = []
    for setting in settings:
        if isinstance(setting.value, str):
            left += re.findall(r"\$\{[^{}]*\}", setting.value)
    return list(dict.fromkeys(left))


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
    server = _commented_server(text)
    if server:
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

    # Files that only prepare the environment hold no settings.
    used_files = [
        file
        for file in script.not_found
        if not file.rpartition("/")[2].startswith(("env", "activate", ".env"))
    ]
    if used_files and (source.unresolved or source.missing):
        source.missing.append(
            f"{', '.join(dict.fromkeys(used_files))}, which the script sources, was not found"
        )
    return source


def _add_trainer_script(source: Source, folder: Path | None) -> None:
    """Add what the program gives to TRL's trainer, where it is a file beside the script; flags
    are above it."""
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
    """Return the command `swift rollout` that a script has in its comments, where it has none of
    its own."""
    lines = [line.strip() for line in text.splitlines()]
    if any(line.startswith("swift rollout") for line in lines):
        return ""

    comments = [line.lstrip("#").strip() if line.startswith("#") else "" for line in lines]
    start = _first(comments, lambda comment: comment.startswith("swift rollout"))
    if start is None:
        return ""

    # The command goes on while its lines end in a backslash.
    end = start
    while comments[end].endswith("\\") and end + 1 < len(comments):
        end += 1
    return "\n".join(comments[start : end + 1])


def _first(words: Sequence[str], matches: Callable[[str], bool]) -> int | None:
    """Return the position of the first word that matches."""
    return next((index for index, word in enumerate(words) if matches(word)), None)


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
        for words, doubts in _unwrapped(script.commands, script.doubts, folder)
    ]
    launches = _launches(commands)
    if not launches:
        return

    servers = [command for command in launches if command.program == "swift rollout"]
    trainings = [command for command in launches if command.program != "swift rollout"]
    different_settings = {tuple(command.words[command.start :]) for command in trainings}
    if len(different_settings) > 1:
        names = [command.program or command.words[0] for command in trainings[1:]]
        source.missing.append(
            f"the script starts {len(trainings)} trainings; the first is read, not the others "
            f"({', '.join(dict.fromkeys(names))})"
        )

    first = (trainings or servers)[0]
    source.start([command.program for command in launches], first.program)
    for command in (*servers, *trainings[:1]):
        _add_command(source, command, script.unresolved, folder)
    source.unresolved.extend(_used(script.unresolved, source.settings))


def _unwrapped(
    commands: Sequence[list[str]],
    doubts: Sequence[list[frozenset[str]]],
    folder: Path | None,
    depth: int = 0,
) -> Iterator[tuple[list[str], list[frozenset[str]]]]:
    """Yield the words and doubts of each command, those of `bash -c "..."` in place of it."""
    for words, word_doubts in zip(commands, doubts, strict=True):
        positions = range(len(words) - 1)
        option = next((position for position in positions if _is_shell(words, position)), None)
        if option is None or depth > 3:
            yield words, word_doubts
            continue

        inner = read_script(words[option + 1], folder)
        yield from _unwrapped(inner.commands, inner.doubts, folder, depth + 1)


def _is_shell(words: Sequence[str], position: int) -> bool:
    """Return whether the word at a position is the `-c` of `bash -c TEXT`, or a `--wrap`."""
    if position == 0 or re.fullmatch(r"-[a-z]*c", words[position]) is None:
        return words[position] == "--wrap"

    words_before = words[max(0, position - 3) : position]
    return any(re.fullmatch(r"(?:.*/)?(?:ba|z)?sh", word) for word in words_before)


def _used(unresolved: Sequence[str], settings: Sequence[Setting]) -> list[str]:
    """Return the unresolved texts that occur in a setting, each once."""
    texts = [f"{setting.key} {setting.value}" for setting in settings]
    return [
        variable
        for variable in dict.fromkeys(unresolved)
        if any(variable in text for text in texts)
    ]


_LAUNCH = re.compile(
    r"(^|/)train(_async)?\.py$|^verl\.(?!.*preprocess)|^skyrl|^verl$|(^|/)(main_ppo|fully_async_main)\.py$"
)
_HYDRA = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*\.[\w.]+=|~[A-Za-z_][\w.]+$")
_PROGRAM = re.compile(r"[\w./${}-]+\.py")
_NOT_TRAININGS = re.compile(
    r"(^|[/.])(convert|prepare|preprocess|download|data_?process|tools?/)|_to_|checkpoint|retriev|server\.py"
)

_TOOLS = {
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
}
"""Programs whose arguments may name a trainer and start none."""


def _command(words: Sequence[str], doubts: Sequence[frozenset[str]]) -> _Command:
    """Find the program of a command, and where its settings start."""
    swift = _swift(words)
    if swift is not None:
        return _Command(words, doubts, f"swift {words[swift]}", swift + 1)
    if words and words[0].rpartition("/")[2] in _TOOLS:
        return _Command(words, doubts, "", len(words))

    program = _first(words, lambda word: _LAUNCH.search(word) is not None)
    if program is None:
        program = _module(words)
    # `python -m torch.distributed.run` starts a file that stands behind its own options.
    if program is None or words[program] == "torch.distributed.run":
        program = _first(words, lambda word: _PROGRAM.fullmatch(word) is not None)
    if program is not None:
        return _Command(words, doubts, words[program], program + 1)

    first_setting = _first(words, _is_setting)
    return _Command(words, doubts, "", len(words) if first_setting is None else first_setting)


def _module(words: Sequence[str]) -> int | None:
    """Return the position of the module of `-m MODULE`, or None."""
    for position, (option, module) in enumerate(pairwise(words)):
        if option == "-m" and _is_dotted(module):
            return position + 1
    return None


def _is_dotted(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*", word) is not None


def _launches(commands: Sequence[_Command]) -> list[_Command]:
    """Return the commands that start a training or a rollout server; if there are none, the longest
    one with settings, or all lines of a text that has nothing else."""
    swift_commands = [command for command in commands if command.program.startswith("swift ")]
    if swift_commands:
        return _swift_launches(swift_commands)

    launches = [command for command in commands if _LAUNCH.search(command.program)]
    if launches:
        return launches

    with_settings = [command for command in commands if _count_settings(command.words)]
    if with_settings and all(_count_settings(command.words[:1]) for command in with_settings):
        words = [word for command in with_settings for word in command.words]
        doubts = [doubt for command in with_settings for doubt in command.doubts]
        return [_Command(words, doubts, "", 0)]

    programs = [
        command
        for command in with_settings
        if command.program and not _NOT_TRAININGS.search(command.program)
    ]
    candidates = programs or with_settings
    return sorted(candidates, key=lambda command: _count_settings(command.words))[-1:]


def _swift_launches(commands: Sequence[_Command]) -> list[_Command]:
    """Return reinforcement and its servers; else the first training, else the first command."""
    launches = [
        command for command in commands if command.program in ("swift rlhf", "swift rollout")
    ]
    if launches:
        return launches

    trainings = [command for command in commands if command.program in ("swift sft", "swift pt")]
    return [(trainings or commands)[0]]


def _is_setting(word: str) -> bool:
    return word.startswith("--") or _HYDRA.match(word) is not None


def _count_settings(words: Sequence[str]) -> int:
    return sum(_is_setting(word) for word in words)


def _swift(words: Sequence[str]) -> int | None:
    """Return the position of `rlhf` in `swift rlhf` or `megatron rlhf`, or None."""
    for position, (program, subcommand) in enumerate(pairwise(words)):
        if program in ("swift", "megatron") and subcommand.isidentifier():
            return position + 1
    return None


def _add_command(
    source: Source, command: _Command, unresolved: Sequence[str], folder: Path | None
) -> None:
    """Add the settings of a command: overrides as Hydra takes them, or flags."""
    source.launch_processes(command.words[: command.start])
    words = command.words[command.start :]
    hydra_words = sum(_HYDRA.match(word) is not None for word in words)
    flags = sum(word.startswith("--") for word in words)

    hidden: list[str] = []
    if hydra_words > flags or (not flags and any(_is_override(word) for word in words)):
        options, overrides = _hydra_words(words)
        _add_config(source, options, command.program, folder)
        source.override(list(_overrides(overrides, unresolved, hidden)))
    else:
        settings = list(_flags(words, unresolved, hidden))
        for setting in settings:
            if setting.key == "config" and _is_yaml(setting.value):
                _add_yaml(source, setting.value, folder)
        if words and _is_yaml(words[0]):
            _add_yaml(source, words[0], folder)
        # Flags are above the files.
        source.settings.extend(settings)

    for word in hidden:
        _add_hidden(source, word)
    _add_conditions(source, words, command.doubts[command.start :])


def _is_yaml(value: Any) -> bool:
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def _add_conditions(source: Source, words: Sequence[str], doubts: Sequence[frozenset[str]]) -> None:
    """Account for settings that stand under a condition of the script."""
    keys_of: dict[str, list[str]] = {}
    key = ""
    for word, conditions in zip(words, doubts, strict=True):
        if _is_setting(word):
            key = word
        for condition in conditions:
            keys_of.setdefault(condition, []).append(key.partition("=")[0])

    for condition, keys in keys_of.items():
        named = list(dict.fromkeys(key for key in keys if key))[:4]
        source.missing.append(
            f"`{condition}` is known only when the script runs; all branches are read, check "
            f"{', '.join(named) or 'them'}"
        )


def _add_hidden(source: Source, word: str) -> None:
    """Account for settings that are made elsewhere; those of a model's shape are not needed
    here."""
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
    """Return a file that a script names, from its folder or one of those above; None if it is not
    there."""
    if folder is None or not name or "\0" in name:
        return None

    # Scripts are started from the repository's root, which is usually one of the folders above.
    name = _WORKING_FOLDER.sub("", name)
    for parent in (folder, *folder.parents)[:6]:
        path = parent / name
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
    if not options:
        return
    name = options.get("name", "").removesuffix(".yaml")
    where = options.get("path") or options.get("dir") or ""
    if not name:
        source.lack(
            f"the configuration in {where} is not named (--config-name): its settings are not read"
        )
        return

    file = f"{where}/{name}.yaml" if where else f"{name}.yaml"
    path = None
    if where and program and not program.endswith(".py"):
        # Hydra takes the folder as relative to the program's module.
        package = "/".join(program.split(".")[:-1])
        path = find_file(f"{package}/{file}", folder)
    if path is None:
        path = find_file(file, folder)

    if path is None and _is_shipped_config(name) and re.match(r"verl[./]|skyrl|$", program):
        source.bases.append(name)
        return

    if path is None:
        path = find_file(f"{name}.yaml", folder)
        if path is not None:
            source.missing.append(
                f"{where}/{name}.yaml (--config-path) was not found; {path.name} beside the script "
                "is read: check it"
            )
    if path is None:
        source.lack(f"{file}, which --config-name names, was not found: its settings are not read")
        return

    composed = compose(path, _is_shipped_config)
    source.add(composed)
    source.notes.append(f"the settings of {path.name} are read")


def _overridden(base: Sequence[Setting], overrides: Sequence[Setting]) -> list[Setting]:
    """Return settings of a file after overrides, of which `~key` takes one away."""
    kept = list(base)
    added: list[Setting] = []
    for override in overrides:
        if override.key.startswith("~"):
            removed = override.key[1:]
            kept = [setting for setting in kept if not _is_under(setting.key, removed)]
            added = [setting for setting in added if not _is_under(setting.key, removed)]
        else:
            added.append(override)

    return _resolved([*kept, *added])


def _is_under(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


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


def _flags(words: Sequence[str], unresolved: Sequence[str], hidden: list[str]) -> Iterator[Setting]:
    """Yield the flags of a command.

    A word that is not known here and follows a complete flag may hold further flags: it is added
    to `hidden`.
    """
    key = ""
    values: list[str] = []
    # The last word ends the last flag.
    for word in [*words, "--"]:
        if not word.startswith("--"):
            is_variable = word in unresolved and not word.startswith("$(")
            if is_variable and (values or not key):
                hidden.append(word)
            else:
                values.append(word)
            continue

        if key and not values:
            yield Setting(key, True)
        elif key:
            yield Setting(key, values[0] if len(values) == 1 else list(values))

        key, equals, value = word[2:].partition("=")
        values = [value] if equals else []


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

    starts_training = any(
        _LAUNCH.search(_command(words, ()).program) or _swift(words) is not None
        for words in script.commands
    )
    calls = [] if starts_training else trainer_calls(launcher)
    if calls:
        trainer = read_trainer(launcher, calls, name, folder)
        source.settings.extend(Setting(key, value) for key, value in trainer.settings)
        source.start([trainer.program], trainer.program)
        source.missing.extend(trainer.missing)
        if not trainer.base_known:
            source.doubt_base()
        source.unresolved.extend(_used([*script.unresolved, *trainer.unresolved], source.settings))
    else:
        if not starts_training:
            for words in _assigned(launcher):
                script.add(words)
        _add_commands(source, script, folder)

    if source.settings:
        _note_assumptions(source, launcher)
    return source


def _note_assumptions(source: Source, launcher: Launcher) -> None:
    """Note the values that a launcher would take from its command line and environment."""
    if launcher.defaults:
        first_decided = list(launcher.decided.items())[:12]
        decided = [f"{key} = {str(value)[:30]}" for key, value in first_decided]
        listed = f": {', '.join(decided)}" if decided else ""
        source.notes.append(f"the launcher's own arguments have their defaults{listed}")

    if launcher.environment:
        named = ", ".join(launcher.environment[:8])
        if len(launcher.environment) > 8:
            named += ", ..."
        source.notes.append(f"variables of the process environment are taken as not set ({named})")


def _add_launch(script: Script, launch: Launch, folder: Path | None) -> None:
    """Add the commands of what a launcher starts: a program, words, or a text for the shell."""
    if launch.program:
        script.add(["python", launch.program, *split_words(launch.text or "")])
        return
    if launch.text is None:
        script.add(list(launch.words))
        return

    try:
        inner = read_script(launch.text, folder)
    except ConfigError:
        return
    for words, doubts in zip(inner.commands, inner.doubts, strict=True):
        script.add(words, doubts)
    script.unresolved.extend(inner.unresolved)


def _assigned(launcher: Launcher) -> list[list[str]]:
    """Return the flags in the texts of a launcher that starts nothing which is known: those of no
    other text."""
    names = {**launcher.scope.names, **launcher.last_names}
    texts = [
        value
        for value in names.values()
        if isinstance(value, str) and value.lstrip().startswith("--")
    ]

    words: list[str] = []
    for text in dict.fromkeys(texts):
        part_of_another = any(text != other and text.strip() in other for other in texts)
        if not part_of_another:
            words += split_words(text)
    return [["python", "train.py", *words]] if words else []


def plain_value(value: Any) -> Any:
    """Return a text of the command line as a value: a number, a truth value, None, a list, a
    table, or the text itself."""
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if not isinstance(value, str):
        return value

    text = value.strip()
    constants = {"true": True, "false": False, "null": None, "none": None, "~": None}
    if text.lower() in constants:
        return constants[text.lower()]
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]

    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        pass

    # JSON and Python write lists and tables differently, and Hydra's lists have bare words.
    if text[:1] in "[{(" and len(text) < 100_000:
        for read in (json.loads, ast.literal_eval, _loose_list):
            try:
                return read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                continue

    return value


def _loose_list(text: str) -> list[Any]:
    """Read Hydra's lists of bare words: `[a,b]`."""
    inside = text[1:-1]
    is_list = text.startswith("[") and text.endswith("]")
    if not is_list or any(mark in inside for mark in "[]{}"):
        raise ValueError(text)

    items = [item.strip() for item in inside.split(",")]
    return [plain_value(item) for item in items if item]

"""Turn another system's settings into a recipe, and account for every one of them.

A `System` is the table of one trainer: for each of its settings a recipe key, a rule, or the
reason why there is no equivalent, and the defaults that differ from those of a recipe.
`convert_source` applies a table to the settings of a script, and returns the recipe as text with
an `Account` of each setting.

Nothing here reads a script: `sources.read_source` does. The tables are in the `convert.py` of
each framework's folder, and `launch_scripts.convert` chooses one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from turnwright.config.dump import toml_value
from turnwright.config.fields import field_type, sections
from turnwright.config.recipe import ConfigMerge, OutOfBounds, build
from turnwright.config.schema import RunConfig
from turnwright.config.validation import without_effect
from turnwright.config.values import describe_type, union_members
from turnwright.errors import ConfigError, did_you_mean
from turnwright_compat.convert.sources import Setting, Source, plain_value

Kind = Literal["mapped", "machine", "none", "unknown"]
Rule = Callable[["Draft", Any], str | None]
"""Puts a setting into the draft and returns None, or returns why it has no equivalent."""

TO_DO = "REPLACE"
"""Start of values that the user must fill in."""

NO_EFFECT = "no effect"
"""Start of the reason of a setting that changes nothing at its value."""


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one setting."""

    key: str
    value: Any
    kind: Kind
    text: str
    """Recipe keys, or the reason."""


@dataclass(slots=True)
class Draft:
    """Recipe in progress."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted recipe key -> value; those of the environment start with `env.`."""
    origins: dict[str, str] = field(default_factory=dict)
    """Recipe key -> the setting that gave it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Every setting of the source by its plain key, the last value of each; under keys that start
    with `$` the script's variables, its program and its number of processes."""
    tasks: list[str] = field(default_factory=list)
    """Further training data, each an environment of its own."""
    notes: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    """What could not be read or has to be decided by the user, each a clause."""
    base_known: bool = True
    """Whether what is not set has the system's defaults; false if a part of the settings was not
    read."""
    teacher: dict[str, Any] = field(default_factory=dict)
    """Keys of a `[[teacher]]`."""
    teacher_settings: set[str] = field(default_factory=set)
    """Settings of the source that the teacher was made of."""
    left_out: set[str] = field(default_factory=set)
    """Recipe keys that do not take the system's default, because of the other settings."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Setting -> why it has no equivalent, for those that `finish` reads."""
    folder: Path | None = None
    """Folder of the launch script."""
    source: str = ""
    """Key of the setting being read."""

    def read(self, key: str) -> None:
        """Name the setting from which the recipe keys that follow come."""
        self.source = key

    def put(self, key: str, value: Any, *, origin: str | None = None) -> None:
        """Set a recipe key; its origin is the setting being read, unless one is named."""
        self.values[key] = value
        self.origins[key] = self.source if origin is None else origin

    def doubt_base(self) -> None:
        """Take what is not set as unknown."""
        self.base_known = False

    def number(self, key: str, default: float) -> float:
        """Return a number of the source, or the system's default."""
        value = self.settings.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            return float(value)

        return default

    def isset(self, key: str) -> bool:
        """Return whether a switch of the source is on."""
        return self.settings.get(key) is True


@dataclass(frozen=True, slots=True)
class System:
    """Table of one system."""

    name: str
    rules: Mapping[str, str | Rule]
    """Setting -> the recipe key of the same meaning, or a rule."""
    none: Mapping[str, tuple[str, tuple[Any, ...]]]
    """Settings without an equivalent: the reason, and values with no effect."""
    machine: Sequence[str]
    """Patterns of settings of machines, memory, parallelism, logging."""
    defaults: Mapping[str, Any]
    """Recipe keys whose default is another value there."""
    finish: Callable[[Draft], None]
    """Rules over several settings."""
    normalize: Callable[[str], str] = lambda key: key
    hydra: bool = False
    patterns: Sequence[tuple[str, Callable[[Draft, str, Any], str | None]]] = ()
    """Rules of all settings that a pattern matches; they receive the setting's key."""
    programs: str = ""
    """Regular expression of the programs that are the system's own trainers."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Regular expression of a program -> what it does, which no recipe does."""

    def known(self) -> list[str]:
        """Return every setting with a rule or a reason."""
        return [*self.rules, *self.none]


@dataclass(frozen=True, slots=True)
class Converted:
    """Recipe and account."""

    system: str
    recipe: str
    accounts: tuple[Account, ...]
    notes: tuple[str, ...]
    incomplete: tuple[str, ...] = ()
    """What of the source is not in the recipe because it could not be read, each a clause."""

    @property
    def complete(self) -> bool:
        """Whether every setting was read, and is in the recipe or in its account."""
        return not self.incomplete and not self.count("unknown")

    def dropped(self) -> list[Account]:
        """Return the settings without an equivalent that have an effect at their value."""
        return [
            account
            for account in self.accounts
            if account.kind == "none" and not account.text.startswith(NO_EFFECT)
        ]

    def lines(self) -> list[str]:
        """Return the account for a terminal."""
        incomplete = [f"incomplete: {clause}" for clause in self.incomplete]
        unknown = [
            f"unknown setting {account.key}: {account.text}"
            for account in self.accounts
            if account.kind == "unknown"
        ]
        dropped = [
            f"not converted: {account.key} = {_shown_value(account)}: {account.text}"
            for account in self.dropped()
        ]
        return [self.summary(), *incomplete, *unknown, *self.notes, *dropped]

    def count(self, kind: Kind) -> int:
        """Return the number of settings of a kind."""
        return sum(account.kind == kind for account in self.accounts)

    def summary(self) -> str:
        """Return the counts in one line."""
        words = ("mapped", "machine settings dropped", "without an equivalent", "unknown")
        kinds: tuple[Kind, ...] = ("mapped", "machine", "none", "unknown")
        counts = [f"{self.count(kind)} {word}" for kind, word in zip(kinds, words, strict=True)]
        return f"{len(self.accounts)} settings of {self.system}: " + ", ".join(counts)


def same(key: str, **choices: Any) -> Rule:
    """Return a rule: the value itself, or with choices the one that they have for it.

    Choices are looked up by the value's lower-case text with `_` for `-`.
    """

    def rule(draft: Draft, value: Any) -> str | None:
        if not choices:
            draft.put(key, value)
            return None

        name = str(value).lower().replace("-", "_")
        if name not in choices:
            # A field of an environment is found under the number of its `[[env]]`.
            choice_type = describe_type(field_type(key.replace("env.", "env.0.")))
            return f"no such choice here; {key} takes {choice_type}"

        draft.put(key, choices[name])
        return None

    return rule


def switch(key: str, on: Any = True, off: Any = None) -> Rule:
    """Return a rule of a switch: the recipe key's values if it is on and if it is off.

    A value of None leaves the key out.
    """

    def rule(draft: Draft, value: Any) -> str | None:
        is_off = value in (False, None, 0)
        chosen = off if is_off else on
        if chosen is not None:
            draft.put(key, chosen)
        return None

    return rule


def noted(draft: Draft, value: Any) -> None:
    """Rule of a setting that `finish` reads together with others."""


def argument(name: str) -> Rule:
    """Return a rule: a setting of the environment, `[env.args]`."""
    return lambda draft, value: draft.put(f"env.args.{name}", value)


def list_argument(name: str) -> Rule:
    """Return a rule: a setting of the environment, a list also where it is one value."""
    return lambda draft, value: draft.put(f"env.args.{name}", _as_list(value))


def lists(key: str) -> Rule:
    """Return a rule: a value or several as a list."""

    def rule(draft: Draft, value: Any) -> str | None:
        if value not in (None, [], ""):
            draft.put(key, [str(item) for item in _as_list(value)])
        return None

    return rule


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def linear_layers(draft: Draft, value: Any) -> str | None:
    """Rule of the layers with an adapter: all of them unless some are named."""
    if value in ("all-linear", None):
        return None

    return lists("lora.targets")(draft, value)


def unless_off(key: str, off: Iterable[Any] = (None, -1, 0)) -> Rule:
    """Return a rule: the value, unless it is one that means none."""

    def rule(draft: Draft, value: Any) -> str | None:
        if value not in tuple(off):
            draft.put(key, value)
        return None

    return rule


def router_replay(draft: Draft, value: Any) -> None:
    """Rule of the replay of routes: on in each of its modes."""
    if value not in ("disabled", None):
        draft.put("train.routing_replay", "replay")


def template_arguments(draft: Draft, value: Any) -> None:
    """Rule of the variables of the chat template, a table of them."""
    for name, argument_value in (value or {}).items():
        draft.put(f"model.template_args.{name}", argument_value)


def template_argument(draft: Draft, key: str, value: Any) -> None:
    """Put one variable of the chat template."""
    draft.put(f"model.template_args.{key.rpartition('.')[2]}", value)


def top_k(key: str) -> Rule:
    """Return a rule of top-k, which -1 disables there and 0 here."""
    return lambda draft, value: draft.put(key, max(0, int(value)))


def temperature_of_eval(draft: Draft, value: Any) -> None:
    """Rule of the temperature of evaluations: 0 is greedy, which is `eval.greedy` here."""
    if value:
        draft.put("eval.temperature", value)
    else:
        draft.put("eval.greedy", True)
        draft.notes.append(
            "its evaluation is greedy: eval.greedy is that pass; the sampled one is played too"
        )


def trackers(draft: Draft, value: Any) -> str | None:
    """Rule of loggers: those that exist here; the console is always there."""
    names = [str(name).lower() for name in _as_list(value) if name is not None]
    trackers_here = [name for name in names if name in ("wandb", "tensorboard", "trackio")]
    if trackers_here:
        draft.put("track.to", trackers_here)
        return None

    missing = [name for name in names if name not in ("console", "none", "all")]
    if missing:
        return f"no such tracker: {', '.join(missing)}; write your own (track.to)"
    return None


def train_data(draft: Draft, value: Any) -> None:
    """Rule of training data: the first source is `env.tasks`, each further one an
    environment of its own."""
    paths = [str(path) for path in _as_list(value)]
    first, *further = paths or [""]
    draft.put("env.tasks", data_path(draft, first))
    draft.tasks[:] = [data_path(draft, path) for path in further]


def eval_data(draft: Draft, value: Any) -> str | None:
    """Rule of held-out data: one source."""
    paths = [str(path) for path in _as_list(value) if path not in (None, "")]
    if not paths:
        return None

    first, *further = paths
    draft.put("env.eval_tasks", data_path(draft, first))
    if further:
        draft.notes.append(
            f"one source of held-out tasks for each environment; left out: {', '.join(further)}"
        )
    return None


def data_path(draft: Draft, text: str) -> str:
    """Return a path without the part of the rows to take (`file@[0:100]`, `name#100`)."""
    path, mark, rows = text.partition("@[")
    if not mark:
        path, mark, rows = text.partition("#")

    if mark:
        draft.notes.append(
            f"{text}: takes a part of the rows ({mark}{rows}); all rows are used here: cut the file"
        )
    return path


def python_name(draft: Draft, dotted: str) -> str:
    """Return `file.py:name` of a dotted Python name whose file is near the script, else
    `package.module:name`."""
    if ":" in dotted:
        return dotted
    module, _, name = dotted.rpartition(".")
    if not module:
        return dotted

    if draft.folder is not None:
        module_file = Path(*module.split(".")).with_suffix(".py")
        # The script's own folder and its five nearest parents.
        for folder in (draft.folder, *draft.folder.parents)[:6]:
            if (folder / module_file).is_file():
                return f"{folder / module_file}:{name}"

    return f"{module}:{name}"


def own_function(key: str) -> Rule:
    """Return a rule: a function of the user, written to another interface."""

    def rule(draft: Draft, value: Any) -> str | None:
        if not value:
            return None
        return (
            f"{value}: written to its trainer's arguments; rewrite it to {key} (docs/training.md)"
        )

    return rule


def minibatches(draft: Draft, size: float, batch: float, origin: str) -> None:
    """Set the optimizer steps per batch: `batch` over `size`, in the same unit."""
    if not (size > 0 and batch > 0):
        return

    steps = max(1, round(batch / size))
    draft.put("train.minibatches", steps, origin=origin)
    if not math.isclose(steps * size, batch):
        draft.notes.append(
            f"{batch:g} is no multiple of {size:g}: train.minibatches = {steps} is rounded"
        )


def in_steps(draft: Draft, key: str, count: float, updates: int, origin: str) -> None:
    """Set a number of steps from a number of optimizer steps, of which a step has `updates`."""
    steps = max(1, math.ceil(count / updates))
    draft.put(key, steps, origin=origin)
    if updates > 1:
        draft.notes.append(
            f"{origin} = {count:g} counts optimizer steps, {updates} in a step: {key} = {steps}"
        )


def convert_source(
    source: Source, system: System, name: str, folder: Path | None = None
) -> Converted:
    """Return the recipe of a source's settings in a system's table.

    Raises `ConfigError` for a source that would train otherwise.
    """
    settings = _last_settings(source, system)
    draft = _new_draft(source, settings, folder)
    _check_program(draft, system, source.program, name)

    try:
        accounts = [_account(draft, system, setting) for setting in settings]
        draft.read("")
        system.finish(draft)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    accounts = [_without_effect(draft, account) for account in accounts]

    for key, value in system.defaults.items():
        if key not in draft.values and key not in draft.left_out:
            draft.put(key, value, origin=f"{system.name}'s default")
    _mark_guesses(draft)
    _ask_for_environment(draft)
    _fit_context(draft)

    accounts = _checked(draft, accounts)
    _add_code(draft, accounts)
    _add_unresolved(draft, system, source.unresolved, accounts)

    # The recipe's opening comment holds the summary of the accounts, so it is written last.
    converted = Converted(
        system.name,
        "",
        tuple(accounts),
        tuple(dict.fromkeys(draft.notes)),
        tuple(dict.fromkeys(draft.incomplete)),
    )
    return replace(converted, recipe=_write(draft, converted, name))


def _last_settings(source: Source, system: System) -> list[Setting]:
    """Return the settings by their keys in the table, with the last value of each."""
    last_values = {
        _known_key(system, setting.key): plain_value(setting.value) for setting in source.settings
    }
    return [Setting(key, value) for key, value in last_values.items()]


def _new_draft(source: Source, settings: Sequence[Setting], folder: Path | None) -> Draft:
    """Return a draft that knows the source's settings, and whose recipe is empty."""
    draft = Draft(folder=folder, base_known=source.base_known)
    for key, value in source.variables.items():
        draft.settings[f"${key}"] = plain_value(value)

    if source.processes is not None:
        draft.settings["$num_processes"] = source.processes
        draft.settings["$NPROC_PER_NODE"] = source.processes
    draft.settings["$program"] = source.program
    draft.settings["$programs"] = source.programs

    for setting in settings:
        draft.settings[setting.key] = setting.value
    draft.notes.extend(source.notes)
    draft.incomplete.extend(source.missing)
    return draft


def _check_program(draft: Draft, system: System, program: str, name: str) -> None:
    """Refuse a program that trains otherwise, and account for one of the user's own."""
    for pattern, what_it_does in system.refused.items():
        if re.search(pattern, program):
            raise ConfigError(
                f"{name}: {program} {what_it_does}; recipes are for reinforcement: convert the "
                "script that starts that"
            )

    if program and not re.search(system.programs, program):
        draft.incomplete.append(
            f"the script starts {program}, a program of its own: what it sets, registers or "
            "replaces is not read"
        )
        draft.doubt_base()


def _mark_guesses(draft: Draft) -> None:
    """Where a part of the settings was not read, leave out an environment that nothing names,
    and mark other defaults."""
    if draft.base_known:
        return

    for key in list(draft.values):
        origins = draft.origins[key].split(", ")
        if any(origin in draft.settings for origin in origins):
            continue

        if key.startswith(("env.", "limits.turns")):
            del draft.values[key]
        else:
            draft.origins[key] += ", unless a part that was not read sets it"


def _ask_for_environment(draft: Draft) -> None:
    """Leave the environment for the user to fill in, where the settings name none."""
    if "env.use" in draft.values:
        return

    draft.put(
        "env.use",
        f"{TO_DO}.py:Env",
        origin=f"{TO_DO}: the environment, which these settings do not name",
    )
    draft.incomplete.append(f"the settings name no environment: set use, now {TO_DO}.py:Env")


_CODE = re.compile(r"[-_.](path|func|fn)$")
"""End of the name of a setting whose value is a file or a function of the user."""


def _add_code(draft: Draft, accounts: Sequence[Account]) -> None:
    """Name the user's code and files that are not in the recipe: without them it trains
    otherwise."""
    for account in accounts:
        has_effect = account.kind == "none" and not account.text.startswith(NO_EFFECT)
        if not has_effect or not isinstance(account.value, str):
            continue

        key = account.key
        named = any(clause.startswith(f"{key} = ") for clause in draft.incomplete)
        if _CODE.search(key) and "log" not in key and not named:
            draft.incomplete.append(f"{key} = {account.value} is not in the recipe: {account.text}")


def _add_unresolved(
    draft: Draft, system: System, unresolved: Sequence[str], accounts: Sequence[Account]
) -> None:
    """Account for variables that are in the recipe, or in a value that it lacks for them."""
    value_texts = {
        account.key: str(account.value)
        for account in accounts
        if account.kind != "machine" and account.key not in system.none
    }

    for variable in dict.fromkeys(unresolved):
        settings = [key for key, text in value_texts.items() if variable in text]
        if not settings:
            continue

        recipe_keys = [key for key, value in draft.values.items() if variable in str(value)]
        message = (
            f"{variable} is not set in the script; replace it in the recipe "
            f"({', '.join(recipe_keys or settings)})"
        )

        # A folder or a tracker of another name does not change what is trained.
        affected_keys = recipe_keys or _rule_keys(system, settings)
        names_only = all(key == "out" or key.startswith("track.") for key in affected_keys)
        if names_only:
            draft.notes.append(message)
        else:
            draft.incomplete.append(message)


def _rule_keys(system: System, settings: Sequence[str]) -> list[str]:
    """Return the recipe keys of settings, as far as their rules name them."""
    recipe_keys = []
    for setting in settings:
        rule = system.rules.get(setting)
        recipe_keys.append(rule if isinstance(rule, str) else setting)
    return recipe_keys


def _fit_context(draft: Draft) -> None:
    """Bring limits under the context: a request holds a prompt and at least one token of a
    reply."""
    context = draft.values.get("limits.context")
    for key in ("limits.turn_tokens", "limits.prompt_tokens"):
        value = draft.values.get(key)
        if isinstance(context, int) and isinstance(value, int) and value >= context > 1:
            draft.values[key] = context - 1
            draft.notes.append(
                f"{key} = {value} does not fit into limits.context = {context}; it is one less here"
            )


def _without_effect(draft: Draft, account: Account) -> Account:
    """Return the account of a setting that was read, but that gave the recipe nothing, as one
    without an equivalent."""
    if account.key in draft.teacher_settings:
        return Account(account.key, account.value, "mapped", "teacher")
    if account.kind != "mapped":
        return account

    # A rule over several settings gives all of them as one origin, separated by commas.
    used_settings = ", ".join(draft.origins[key] for key in draft.values).split(", ")
    if account.key in used_settings:
        return account
    if any(key in draft.values for key in account.text.split(", ")):
        return account

    default = f"{NO_EFFECT} at this value, with the other settings"
    return Account(account.key, account.value, "none", draft.reasons.get(account.key, default))


def _known_key(system: System, key: str) -> str:
    """Return the key as the table has it; one of a part of a YAML file by its unique ending."""
    key = system.normalize(key)
    in_table = key in system.rules or key in system.none or _is_machine(system, key)
    if in_table or not system.hydra:
        return key

    candidates = [known for known in system.known() if known.endswith(f".{key}")]
    if len(candidates) > 1:
        # A part that does not name the critic is of the policy.
        candidates = [known for known in candidates if "critic" not in known.split(".")]
    return candidates[0] if len(candidates) == 1 else key


def _is_machine(system: System, key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in system.machine)


def _account(draft: Draft, system: System, setting: Setting) -> Account:
    """Apply the table to one setting: its rule, a pattern, a reason, or none of them."""
    key = setting.key
    value = setting.value
    draft.read(key)

    rule = system.rules.get(key)
    if rule is not None:
        return _account_of_rule(draft, setting, same(rule) if isinstance(rule, str) else rule)

    for pattern, handle in system.patterns:
        if fnmatchcase(key, pattern):
            old_keys = set(draft.values)
            reason = handle(draft, key, value)
            if reason:
                return Account(key, value, "none", reason)
            new_keys = [new for new in draft.values if new not in old_keys]
            return Account(key, value, "mapped", ", ".join(new_keys))

    entry = system.none.get(key)
    if entry is not None:
        reason, neutral_values = entry
        if value in neutral_values:
            reason = f"{NO_EFFECT} at this value ({reason})"
        return Account(key, value, "none", reason)

    if _is_machine(system, key):
        return Account(key, value, "machine", "")

    near = did_you_mean(key, system.known())
    return Account(key, value, "unknown", near or f"no setting of {system.name} that is known here")


def _account_of_rule(draft: Draft, setting: Setting, rule: Rule) -> Account:
    """Apply a rule to a setting, and account for the recipe keys that it put."""
    old_values = dict(draft.values)
    try:
        reason = rule(draft, setting.value)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):
        # A rule converts without a look at the type: a table where a number belongs raises.
        reason = f"a value of another form was expected, not {str(setting.value)[:60]!r}"
    if reason is not None:
        return Account(setting.key, setting.value, "none", reason)

    put_keys = [
        key
        for key, value in draft.values.items()
        if key not in old_values or old_values[key] is not value
    ]
    return Account(setting.key, setting.value, "mapped", ", ".join(put_keys))


_DEFAULT_ORIGINS = tuple(f"{name}'s default" for name in ("slime", "skyrl", "verl", "swift", "trl"))
"""Starts of the origins of values that no setting gave, and that are left out without a note."""


def _checked(draft: Draft, accounts: list[Account]) -> list[Account]:
    """Leave out recipe values that are invalid or have no effect, and say so in the accounts."""
    _fit_types(draft)

    faults = []
    for key in draft.values:
        why = _value_error(draft, key)
        if why:
            faults.append((key, why))

    # Whether a value has an effect depends on the others: after each one that is left out, the
    # rest is looked at again.
    while True:
        fault = faults.pop() if faults else _first_fault(draft)
        if fault is None:
            return accounts
        _leave_out(draft, accounts, *fault)


def _fit_types(draft: Draft) -> None:
    """Leave out keys that no recipe has, and write as text what a key takes as text."""
    for key in list(draft.values):
        hint = field_type(key.replace("env.", "env.0.", 1))
        if hint is None:
            draft.notes.append(f"{key} is no key of a recipe; its value is left out")
            del draft.values[key]
            continue

        value = draft.values[key]
        if str in union_members(hint) and value is not None and not isinstance(value, str):
            draft.values[key] = str(value)


def _value_error(draft: Draft, key: str) -> str:
    """Return why a value by itself is invalid; empty if it is valid."""
    types = union_members(field_type(key.replace("env.", "env.0.", 1)))
    if draft.values[key] is None and NoneType not in types and Any not in types:
        return "must have a value"

    try:
        _built({key: draft.values[key]})
    except OutOfBounds as error:
        return error.why
    except ConfigError as error:
        return "is invalid: " + str(error).partition(": ")[2]

    return ""


def _first_fault(draft: Draft) -> tuple[str, str] | None:
    """Return the first key that names nothing, conflicts with another or has no effect, and why."""
    config = _built(draft.values, draft.teacher)
    for name, why in (*config.train.wrong_names(), *config.train.conflicts()):
        if f"train.{name}" in draft.values:
            return f"train.{name}", why

    for prefix, section in config.sections():
        table = prefix.removesuffix(".0")
        for name, _, need in without_effect(section, config):
            key = f"{table}.{name}"
            if key in draft.values:
                return key, f"has no effect: it needs {need.words}"

    return None


def _leave_out(draft: Draft, accounts: list[Account], key: str, why: str) -> None:
    """Take a key from the recipe, and say why in the accounts of its settings, or else in a
    note."""
    origin = draft.origins[key]
    value = draft.values.pop(key)

    is_told = False
    for index, account in enumerate(accounts):
        keys = [name for name in account.text.split(", ") if name]
        # The account of a setting that `finish` reads with others names no keys.
        if account.key not in origin.split(", ") or (keys and key not in keys):
            continue
        is_told = True

        other_keys = ", ".join(other for other in keys if other != key)
        if other_keys:
            accounts[index] = Account(account.key, account.value, "mapped", other_keys)
        else:
            text = f"{key} = {toml_value(value)} {why}"
            accounts[index] = Account(account.key, account.value, "none", text)

    if not is_told and not origin.startswith(_DEFAULT_ORIGINS):
        draft.notes.append(f"{key} = {toml_value(value)} ({origin}) is left out: it {why}")


def _built(values: Mapping[str, Any], teacher: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration of recipe values, as if a recipe file set them."""
    tables: dict[str, Any] = {"env": [{}]}
    if teacher:
        tables["teacher"] = [dict(teacher)]
    merged = ConfigMerge()
    merged.add(tables, "recipe", where="recipe")

    for key, value in values.items():
        if value is None:
            continue
        # What follows the table is one name, which may hold dots: those of `env.args` are another
        # system's.
        splits = 3 if key.startswith("env.") else 2
        path = key.replace("env.", "env.0.", 1).split(".", splits)
        merged.set_value(path, value, "recipe")

    return build(merged.tree, {})


_INNER_TABLES = ("env.columns", "env.args", "model.template_args")
"""Tables inside a section, whose keys are names of the user or of a template."""

Rows = list[tuple[str, str]]
"""For each line of a table, the name in it and the recipe key."""


def _write(draft: Draft, converted: Converted, name: str) -> str:
    """Return the recipe with its account as comments."""
    lines = [
        f"# Converted from {_comment(name)} by `turnwright convert`.",
        f"# {converted.summary()}.",
    ]
    lines += [f"# Incomplete: {_comment(clause)}." for clause in converted.incomplete]
    lines += [f"# Note: {_comment(note)}." for note in converted.notes]

    tables = _tables(draft)
    for table, rows in tables.items():
        if table.startswith("env"):
            continue
        lines.append("")
        if table:
            lines.append(f"[{table}]")
        lines += [_line(draft, row_name, key) for row_name, key in rows]

    if draft.teacher:
        lines += ["", "[[teacher]]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in draft.teacher.items()]

    for index, tasks in enumerate([None, *draft.tasks]):
        lines += _environment(draft, tables, index, tasks)

    lines += _left_out_lines(converted.accounts)
    return "\n".join(lines) + "\n"


def _tables(draft: Draft) -> dict[str, Rows]:
    """Return the rows of each table, in the order in which a recipe has its tables."""
    tables: dict[str, Rows] = {}
    for key in draft.values:
        table = key.rpartition(".")[0]
        for inner_table in _INNER_TABLES:
            if key.startswith(f"{inner_table}."):
                table = inner_table
                break
        row_name = key.removeprefix(f"{table}.") if table else key
        tables.setdefault(table, []).append((row_name, key))

    order = ["", *(section for section in sections() if section != "env"), "env", *_INNER_TABLES]
    # A section in a section (`train.critic`) follows it.
    places = {table: (order.index(table.partition(".")[0]), order.index(table)) for table in tables}
    return {table: tables[table] for table in sorted(tables, key=lambda table: places[table])}


def _environment(
    draft: Draft, tables: Mapping[str, Rows], index: int, tasks: str | None
) -> list[str]:
    """Return the lines of one `[[env]]`; those after the first differ in name and tasks only."""
    lines = ["", "[[env]]"]
    for row_name, key in tables["env"]:
        if tasks is None or row_name not in ("tasks", "eval_tasks", "name"):
            lines.append(_line(draft, row_name, key))

    if tasks is not None:
        lines.append(f"name = {toml_value(f'data_{index + 1}')}")
        lines.append(f"tasks = {toml_value(tasks)}")
    elif draft.tasks:
        lines.append(f"name = {toml_value('data_1')}")

    for table in ("env.columns", "env.args"):
        if table in tables:
            lines.append(f"[{table}]")
            lines += [_line(draft, row_name, key) for row_name, key in tables[table]]
    return lines


def _left_out_lines(accounts: Sequence[Account]) -> list[str]:
    """Return the comments on settings that are not in the recipe, by kind."""
    titles: dict[Kind, str] = {
        "none": "Without an equivalent",
        "unknown": "Unknown settings",
        "machine": "Machine settings, dropped",
    }

    lines = []
    for kind, title in titles.items():
        left_out = [account for account in accounts if account.kind == kind]
        if left_out:
            lines += ["", f"# {title}:"]
        for account in left_out:
            reason = f": {account.text}" if account.text else ""
            lines.append(_comment(f"#   {account.key} = {_shown_value(account)}{reason}"))
    return lines


def _line(draft: Draft, name: str, key: str) -> str:
    """Return a line of a table, with the setting that gave it as a comment."""
    is_bare = name != "" and name.isascii() and all(one.isalnum() or one in "_-" for one in name)
    quoted = name if is_bare else toml_value(name)

    line = f"{quoted} = {toml_value(draft.values[key])}"
    origin = draft.origins[key]
    return f"{line}  # {_comment(origin)}" if origin else line


SECRETS = re.compile(
    r"(api|wandb|swanlab|hub|access)[-_.]?(key|token)|password|secret", re.IGNORECASE
)
"""Names of settings whose values are never shown."""


def _shown_value(account: Account) -> str:
    text = "(hidden)" if SECRETS.search(account.key) else str(account.value)
    return text if len(text) <= 80 else text[:77] + "..."


def _comment(text: str) -> str:
    """Return a text of the source for a comment: one line of printable characters."""
    return "".join(character if character.isprintable() else " " for character in text)

"""Turn another system's settings into a recipe, and account for every one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
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
    given: dict[str, Any] = field(default_factory=dict)
    """Every setting of the source by its plain key, the last value of each."""
    tasks: list[str] = field(default_factory=list)
    """Further training data, each an environment of its own."""
    notes: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    """What could not be read or has to be decided by the user, each a clause."""
    base_known: bool = True
    """Whether what is not set has the system's defaults; false if a part of the
    settings was not read."""
    teacher: dict[str, Any] = field(default_factory=dict)
    """Keys of a `[[teacher]]`."""
    teachers_of: set[str] = field(default_factory=set)
    """Settings that it was made of."""
    left_out: set[str] = field(default_factory=set)
    """Recipe keys that have no default of the system, with the other settings."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Setting -> why it has no equivalent, for those that `finish` reads."""
    folder: Path | None = None
    """Folder of the launch script."""
    source: str = ""
    """Key of the setting being read."""

    def read(self, key: str) -> None:
        """Set the setting whose recipe keys follow."""
        self.source = key

    def put(self, key: str, value: Any, *, origin: str | None = None) -> None:
        """Set a recipe key."""
        self.values[key] = value
        self.origins[key] = self.source if origin is None else origin

    def doubt_base(self) -> None:
        """Take what is not set as unknown."""
        self.base_known = False

    def number(self, key: str, default: float) -> float:
        """Return a number of the source, or the system's default."""
        value = self.given.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            return float(value)
        return default

    def isset(self, key: str) -> bool:
        """Return whether a switch of the source is on."""
        return self.given.get(key) is True


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
            one
            for one in self.accounts
            if one.kind == "none" and not one.text.startswith(NO_EFFECT)
        ]

    def lines(self) -> list[str]:
        """Return the account for a terminal."""
        unknown = [
            f"unknown setting {one.key}: {one.text}"
            for one in self.accounts
            if one.kind == "unknown"
        ]
        dropped = [
            f"not converted: {one.key} = {_short(one.key, one.value)}: {one.text}"
            for one in self.dropped()
        ]
        incomplete = [f"incomplete: {one}" for one in self.incomplete]
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
    """Return a rule: the value, or the one that `choices` has for it (by its
    lower-case text with `_`)."""

    def rule(draft: Draft, value: Any) -> str | None:
        if choices:
            name = str(value).lower().replace("-", "_")
            if name not in choices:
                return (
                    f"no such choice here; {key} takes "
                    f"{describe_type(field_type(key.replace('env.', 'env.0.')))}"
                )
            value = choices[name]
        draft.put(key, value)
        return None

    return rule


def switch(key: str, on: Any = True, off: Any = None) -> Rule:
    """Return a rule of a switch: the recipe key's value if it is on, and if it is off
    (None: leaves the key out)."""

    def rule(draft: Draft, value: Any) -> str | None:
        chosen = on if value not in (False, None, 0) else off
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
    return lambda draft, value: draft.put(
        f"env.args.{name}", value if isinstance(value, list) else [value]
    )


def lists(key: str) -> Rule:
    """Return a rule: a value or several as a list."""

    def rule(draft: Draft, value: Any) -> str | None:
        if value in (None, [], ""):
            return None
        draft.put(key, [str(one) for one in value] if isinstance(value, list) else [str(value)])
        return None

    return rule


def linear_layers(draft: Draft, value: Any) -> str | None:
    """Rule of the layers with an adapter: all of them unless some are named."""
    return None if value in ("all-linear", None) else lists("lora.targets")(draft, value)


def unless_off(key: str, off: Iterable[Any] = (None, -1, 0)) -> Rule:
    """Return a rule: the value, unless it is one that means none."""

    def rule(draft: Draft, value: Any) -> str | None:
        if value not in tuple(off):
            draft.put(key, value)
        return None

    return rule


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
    given = value if isinstance(value, list) else [value]
    names = [str(one).lower() for one in given if one is not None]
    found = [one for one in names if one in ("wandb", "tensorboard", "trackio")]
    if found:
        draft.put("track.to", found)
    missing = [one for one in names if one not in (*found, "console", "none", "all")]
    return (
        None
        if found or not missing
        else f"no such tracker: {', '.join(missing)}; write your own (track.to)"
    )


def train_data(draft: Draft, value: Any) -> None:
    """Rule of training data: the first source is `env.tasks`, each further one an
    environment of its own."""
    first, *rest = [str(one) for one in (value if isinstance(value, list) else [value])] or [""]
    draft.put("env.tasks", data_path(draft, first))
    draft.tasks[:] = [data_path(draft, one) for one in rest]


def eval_data(draft: Draft, value: Any) -> str | None:
    """Rule of held-out data: one source."""
    given = [
        str(one) for one in (value if isinstance(value, list) else [value]) if one not in (None, "")
    ]
    if not given:
        return None
    draft.put("env.eval_tasks", data_path(draft, given[0]))
    if rest := given[1:]:
        draft.notes.append(
            f"one source of held-out tasks for each environment; left out: {', '.join(rest)}"
        )
    return None


def data_path(draft: Draft, text: str) -> str:
    """Return a path without the part of the rows to take (`file@[0:100]`,
    `name#100`, `name:split`)."""
    path, mark, part = text.partition("@[")
    if not mark:
        path, mark, part = text.partition("#")
    if mark:
        draft.notes.append(
            f"{text}: takes a part of the rows ({mark}{part}); all rows are used here: cut the file"
        )
    return path


def python_name(draft: Draft, dotted: str) -> str:
    """Return `file.py:name` of a dotted Python name whose file is near the script, else
    `package.module:name`."""
    if ":" in dotted:
        return dotted
    module, _, name = dotted.rpartition(".")
    if draft.folder is not None and module:
        inner = Path(*module.split(".")).with_suffix(".py")
        for folder in (draft.folder, *draft.folder.parents)[:6]:
            if (folder / inner).is_file():
                return f"{folder / inner}:{name}"
    return f"{module}:{name}" if module else dotted


def own_function(key: str) -> Rule:
    """Return a rule: a function of the user, written to another interface."""

    def rule(draft: Draft, value: Any) -> str | None:
        return (
            f"{value}: written to its trainer's arguments; rewrite it to {key} (docs/training.md)"
            if value
            else None
        )

    return rule


def minibatches(draft: Draft, size: float, batch: float, origin: str) -> None:
    """Set the optimizer steps per batch: `batch` over `size`, in the same unit."""
    if size > 0 and batch > 0:
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
    """Return the recipe of a source's settings in a system's table; raise `ConfigError` for one
    that would train otherwise."""
    draft = Draft(folder=folder, base_known=source.base_known)
    last = {_known_key(system, one.key): plain_value(one.value) for one in source.settings}
    settings = [Setting(key, value) for key, value in last.items()]
    draft.given.update((f"${key}", plain_value(value)) for key, value in source.variables.items())
    if source.processes is not None:
        draft.given.update(
            {"$num_processes": source.processes, "$NPROC_PER_NODE": source.processes}
        )
    draft.given["$program"] = source.program
    draft.given["$programs"] = source.programs
    draft.given.update((one.key, one.value) for one in settings)
    draft.notes.extend(source.notes)
    draft.incomplete.extend(source.missing)
    _check_program(draft, system, source.program, name)
    try:
        accounts = [_account(draft, system, setting) for setting in settings]
        draft.read("")
        system.finish(draft)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    accounts = [_without_effect(draft, one) for one in accounts]
    for key, value in system.defaults.items():
        if key not in draft.values and key not in draft.left_out:
            draft.put(key, value, origin=f"{system.name}'s default")
    _mark_guesses(draft)
    if "env.use" not in draft.values:
        draft.put(
            "env.use",
            f"{TO_DO}.py:Env",
            origin=f"{TO_DO}: the environment, which these settings do not name",
        )
        draft.incomplete.append(f"the settings name no environment: set use, now {TO_DO}.py:Env")
    _fit_context(draft)
    accounts = _checked(draft, accounts)
    _add_code(draft, accounts)
    _add_unresolved(draft, system, source.unresolved, accounts)
    found = Converted(
        system.name,
        "",
        tuple(accounts),
        tuple(dict.fromkeys(draft.notes)),
        tuple(dict.fromkeys(draft.incomplete)),
    )
    return replace(found, recipe=_write(draft, found, name))


def _check_program(draft: Draft, system: System, program: str, name: str) -> None:
    """Refuse a program that trains otherwise, and account for one of the user's own."""
    for pattern, what in system.refused.items():
        if re.search(pattern, program):
            raise ConfigError(
                f"{name}: {program} {what}; recipes are for reinforcement: convert the script that "
                "starts that"
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
        if any(one in draft.given for one in draft.origins[key].split(", ")):
            continue
        if key.startswith(("env.", "limits.turns")):
            del draft.values[key]
        else:
            draft.origins[key] += ", unless a part that was not read sets it"


_CODE = re.compile(r"[-_.](path|func|fn)$")


def _add_code(draft: Draft, accounts: Sequence[Account]) -> None:
    """Name the user's code and files that are not in the recipe: without
    them it trains otherwise."""
    for one in accounts:
        if one.kind != "none" or one.text.startswith(NO_EFFECT) or not isinstance(one.value, str):
            continue
        named = any(line.startswith(f"{one.key} = ") for line in draft.incomplete)
        if _CODE.search(one.key) and "log" not in one.key and not named:
            draft.incomplete.append(f"{one.key} = {one.value} is not in the recipe: {one.text}")


def _add_unresolved(
    draft: Draft, system: System, unresolved: Sequence[str], accounts: Sequence[Account]
) -> None:
    """Account for variables that are in the recipe, or in a value that it lacks for them."""
    texts = {
        one.key: str(one.value)
        for one in accounts
        if one.kind != "machine" and one.key not in system.none
    }
    for one in dict.fromkeys(unresolved):
        keys = [key for key, text in texts.items() if one in text]
        if not keys:
            continue
        placed = [key for key, value in draft.values.items() if one in str(value)]
        message = (
            f"{one} is not set in the script; replace it in the recipe "
            f"({', '.join(placed or keys)})"
        )
        names_only = all(
            key == "out" or key.startswith("track.") for key in placed or _rule_keys(system, keys)
        )
        (draft.notes if names_only else draft.incomplete).append(message)


def _rule_keys(system: System, keys: Sequence[str]) -> list[str]:
    """Return the recipe keys of settings, as far as their rules name them."""
    return [str(rule) if isinstance(rule := system.rules.get(key), str) else key for key in keys]


def _fit_context(draft: Draft) -> None:
    """Bring limits under the context: a request holds a prompt and at least
    one token of a reply."""
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
    if account.key in draft.teachers_of:
        return Account(account.key, account.value, "mapped", "teacher")
    used = account.key in ", ".join(draft.origins[key] for key in draft.values).split(", ")
    if (
        account.kind != "mapped"
        or used
        or any(key in draft.values for key in account.text.split(", "))
    ):
        return account
    default = f"{NO_EFFECT} at this value, with the other settings"
    return Account(account.key, account.value, "none", draft.reasons.get(account.key, default))


def _known_key(system: System, key: str) -> str:
    """Return the key as the table has it; one of a part of a YAML file by its unique ending."""
    key = system.normalize(key)
    if key in system.rules or key in system.none or _is_machine(system, key) or not system.hydra:
        return key
    found = [one for one in system.known() if one.endswith(f".{key}")]
    return found[0] if len(found) == 1 else key


def _is_machine(system: System, key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in system.machine)


def _account(draft: Draft, system: System, setting: Setting) -> Account:
    key, value = setting.key, setting.value
    draft.read(key)
    if (rule := system.rules.get(key)) is not None:
        before = dict(draft.values)
        try:
            reason = (same(rule) if isinstance(rule, str) else rule)(draft, value)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):
            reason = f"a value of another form was expected, not {str(value)[:60]!r}"
        if reason is not None:
            return Account(key, value, "none", reason)
        made = [
            one
            for one, found in draft.values.items()
            if one not in before or before[one] is not found
        ]
        return Account(key, value, "mapped", ", ".join(made))
    for pattern, handle in system.patterns:
        if fnmatchcase(key, pattern):
            old = set(draft.values)
            reason = handle(draft, key, value)
            return Account(
                key,
                value,
                "none" if reason else "mapped",
                reason or ", ".join(set(draft.values) - old),
            )
    if (entry := system.none.get(key)) is not None:
        reason, neutral = entry
        return Account(
            key,
            value,
            "none",
            f"{NO_EFFECT} at this value ({reason})" if value in neutral else reason,
        )
    if _is_machine(system, key):
        return Account(key, value, "machine", "")
    near = did_you_mean(key, system.known())
    return Account(key, value, "unknown", near or f"no setting of {system.name} that is known here")


def _checked(draft: Draft, accounts: list[Account]) -> list[Account]:
    """Leave out recipe values that are invalid or have no effect, and say so in the accounts."""
    for key in list(draft.values):
        plain = key.replace("env.", "env.0.", 1)
        hint = field_type(plain)
        if hint is None:
            draft.notes.append(f"{key} is no key of a recipe; its value is left out")
            del draft.values[key]
        elif (
            str in union_members(hint)
            and draft.values[key] is not None
            and not isinstance(draft.values[key], str)
        ):
            draft.values[key] = str(draft.values[key])
    faults = [(key, why) for key in draft.values if (why := _value_error(draft, key))]
    while faults or (fault := _first_fault(draft)) is not None:
        key, why = faults.pop() if faults else fault  # type: ignore[misc]
        origin, value = draft.origins[key], draft.values.pop(key)
        for index, account in enumerate(accounts):
            if account.key == origin and key in account.text.split(", "):
                left = ", ".join(one for one in account.text.split(", ") if one != key)
                text = f"{key} = {toml_value(value)} {why}"
                accounts[index] = Account(
                    account.key, account.value, "mapped" if left else "none", left or text
                )
                break
        else:
            if not origin.startswith(
                tuple(f"{one}'s default" for one in ("slime", "skyrl", "verl", "swift", "trl"))
            ):
                draft.notes.append(f"{key} = {toml_value(value)} ({origin}) is left out: it {why}")
    return accounts


def _value_error(draft: Draft, key: str) -> str:
    try:
        _built({key: draft.values[key]})
    except OutOfBounds as error:
        return error.why
    except ConfigError as error:
        return "is invalid: " + str(error).partition(": ")[2]
    return ""


def _first_fault(draft: Draft) -> tuple[str, str] | None:
    """Return the first key that names nothing or has no effect, and why."""
    config = _built(draft.values, draft.teacher)
    for name, why in config.train.wrong_names():
        if f"train.{name}" in draft.values:
            return f"train.{name}", why
    for prefix, section in config.sections():
        table = prefix.removesuffix(".0")
        for name, _, need in without_effect(section, config):
            key = f"{table}.{name}"
            if key in draft.values:
                return key, f"has no effect: it needs {need.words}"
    return None


def _built(values: Mapping[str, Any], teacher: Mapping[str, Any] | None = None) -> RunConfig:
    merged = ConfigMerge()
    merged.add(
        {"env": [{}]} | ({"teacher": [dict(teacher)]} if teacher else {}), "recipe", where="recipe"
    )
    for key, value in values.items():
        if value is not None:
            merged.set_value(
                key.replace("env.", "env.0.", 1).split(".", 3 if key.startswith("env.") else 2),
                value,
                "recipe",
            )
    return build(merged.tree, {})


def _write(draft: Draft, found: Converted, name: str) -> str:
    """Return the recipe with its account as comments."""
    accounts = found.accounts
    lines = [f"# Converted from {_comment(name)} by `turnwright convert`.", f"# {found.summary()}."]
    lines += [f"# Incomplete: {_comment(one)}." for one in found.incomplete]
    lines += [f"# Note: {_comment(note)}." for note in found.notes]
    order = [
        "",
        *(one for one in sections() if one != "env"),
        "env",
        "env.columns",
        "env.args",
        "model.template_args",
    ]
    by_section: dict[str, list[tuple[str, str]]] = {}
    for key in draft.values:
        head = next(
            (
                one
                for one in ("env.columns", "env.args", "model.template_args")
                if key.startswith(f"{one}.")
            ),
            "",
        )
        head = head or key.rpartition(".")[0]
        by_section.setdefault(head, []).append((key.removeprefix(f"{head}.") if head else key, key))
    for head in sorted(by_section, key=order.index):
        if head.startswith("env"):
            continue
        lines += [
            "",
            *([f"[{head}]"] if head else []),
            *(_line(draft, one, key) for one, key in by_section[head]),
        ]
    if draft.teacher:
        lines += [
            "",
            "[[teacher]]",
            *(f"{key} = {toml_value(value)}" for key, value in draft.teacher.items()),
        ]
    for index, tasks in enumerate([None, *draft.tasks]):
        lines += _environment(draft, by_section, index, tasks)
    for kind, title in (
        ("none", "Without an equivalent"),
        ("unknown", "Unknown settings"),
        ("machine", "Machine settings, dropped"),
    ):
        rows = [account for account in accounts if account.kind == kind]
        if rows:
            lines += ["", f"# {title}:"]
            lines += [
                _comment(
                    f"#   {one.key} = "
                    f"{_short(one.key, one.value)}{': ' + one.text if one.text else ''}"
                )
                for one in rows
            ]
    return "\n".join(lines) + "\n"


def _environment(
    draft: Draft, by_section: Mapping[str, list[tuple[str, str]]], index: int, tasks: str | None
) -> list[str]:
    lines = ["", "[[env]]"]
    for name, key in by_section["env"]:
        if tasks is None or name not in ("tasks", "eval_tasks", "name"):
            lines.append(_line(draft, name, key))
    if tasks is not None:
        lines += [f"name = {toml_value(f'data_{index + 1}')}", f"tasks = {toml_value(tasks)}"]
    elif draft.tasks:
        lines.append(f"name = {toml_value('data_1')}")
    for head in ("env.columns", "env.args"):
        if head in by_section:
            lines += [f"[{head}]", *(_line(draft, one, key) for one, key in by_section[head])]
    return lines


def _line(draft: Draft, name: str, key: str) -> str:
    quoted = (
        name
        if all(one.isalnum() or one in "_-" for one in name) and name.isascii() and name
        else toml_value(name)
    )
    text = f"{quoted} = {toml_value(draft.values[key])}"
    return f"{text}  # {_comment(draft.origins[key])}" if draft.origins[key] else text


SECRETS = re.compile(
    r"(api|wandb|swanlab|hub|access)[-_.]?(key|token)|password|secret", re.IGNORECASE
)


def _short(key: str, value: Any) -> str:
    text = "(hidden)" if SECRETS.search(key) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _comment(text: str) -> str:
    """Return a text of the source for a comment: one line of printable characters."""
    return "".join(one if one.isprintable() else " " for one in text)

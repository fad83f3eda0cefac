"""Read a recipe: a TOML file and command-line overrides become a validated `RunConfig`.

`load` reads a recipe, `from_python` the settings of `turnwright.train`, and `override` changes a
configuration that there is. All three fill a `ConfigMerge`, which keeps the origin of each value.
`ConfigMerge.resolved` then checks values (`build`, with pydantic) and rules across keys
(`validation.py:validate`). `dump.py` writes what was read.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from turnwright import files
from turnwright.config.fields import (
    field_annotation,
    field_type,
    known_keys,
    path_kind,
    table_lists,
    unknown_key,
    without_index,
)
from turnwright.config.rules import Context
from turnwright.config.schema import PolicyConfig, RunConfig
from turnwright.config.snapshots import is_hub_id, local_model
from turnwright.config.validation import COMMAND_LINE, DEFAULT, validate, wrong_value
from turnwright.config.values import (
    changed,
    describe_type,
    is_of_another_type,
    reader,
    union_members,
    why_refused,
)
from turnwright.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError

MINIMAL_RECIPE_HINT = 'a minimal recipe is: [[env]] with a line use = "hop"'


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Configuration with the origin of each value."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted key (`train.lr`, `env.0.args.depth`) -> `default`, the recipe's file name, or
    `command line`."""
    recipe: Path | None = None
    """File that was read, if any."""
    extended: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Earlier values of `train.steps` and `warmup.steps` of a run that was resumed with more."""


def load(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    envs: Collection[str] | None = None,
    templates: Collection[str] | None = None,
    training: bool = True,
) -> ResolvedConfig:
    """Read a recipe and apply the overrides.

    Raises `ConfigError`, one line that names file, key and remedy.

    Args:
        path: a TOML file; None starts from the defaults.
        overrides: command-line words, `--section.key value` or `--section.key=value`.
        defaults: values that the recipe overrides, nested like it.
        envs: names of the built-in environments; None does not check names.
        templates: names of the built-in chat templates; None does not check names.
        training: whether the run trains; evaluation alone needs no groups of two.

    Example::

        >>> resolved = load(None, ["--env.0.use", "hop", "--train.lr", "1e-4"])
        >>> resolved.config.train.lr, resolved.origins["train.lr"]
        (0.0001, 'command line')
    """
    merged = ConfigMerge()
    merged.add(defaults or {}, DEFAULT, where="defaults")
    if path is not None:
        table = read_toml(path)
        _make_absolute(table, path.parent)
        merged.add(table, path.name, where=str(path))
    for dotted, text in parse_overrides(overrides):
        merged.override(dotted, text)

    # An environment of a file is named by its class alone: paths are too long for metrics and
    # differ between machines.
    for env in merged.tree.get("env", ()):
        use = env.get("use")
        if not env.get("name") and isinstance(use, str) and ":" in use:
            env["name"] = use.rpartition(":")[2]

    # Errors name the path of the recipe, origins only its file name.
    where = {}
    for key, origin in merged.origins.items():
        where[key] = origin if origin in (DEFAULT, COMMAND_LINE) else str(path)
    file = str(path) if path is not None else COMMAND_LINE
    return merged.resolved(where, file, Context(training, envs=envs, templates=templates), path)


def override(
    resolved: ResolvedConfig, overrides: Sequence[str], *, training: bool = True
) -> ResolvedConfig:
    """Return a configuration with command-line overrides applied; a ConfigError is one line."""
    merged = ConfigMerge()
    merged.add(to_tree(resolved.config), DEFAULT, where="run")
    merged.origins = dict(resolved.origins)

    overridden = set()
    for dotted, text in parse_overrides(overrides):
        overridden.add(merged.override(dotted, text))

    # A run of `turnwright.train()` was given its environments as objects.
    context = Context(training, has_objects=not resolved.config.env)
    return merged.resolved(merged.origins, COMMAND_LINE, context, resolved.recipe, given=overridden)


def from_python(
    settings: Mapping[str, Any], place: str, *, training: bool = True
) -> ResolvedConfig:
    """Build a configuration from settings in Python, validated like a recipe.

    Environments are given as objects. `settings` are sections by name, as dicts or dataclasses
    (values that differ from their defaults count as given), and plain values (`out`, `seed`).
    `place` names the source in a ConfigError, which is one line. What only training needs is
    checked for `training`.

    Example::

        >>> from_python({"train": {"steps": 20}}, "turnwright.train()").config.train.steps
        20
    """
    merged = ConfigMerge()
    for name, value in settings.items():
        is_section = is_dataclass(value) and not isinstance(value, type)
        table = {name: as_toml(changed(value) if is_section else value)}
        _make_absolute(table, Path())
        merged.add(table, place, where=place)
    return merged.resolved(merged.origins, place, Context(training, has_objects=True))


def as_toml(value: Any) -> Any:
    """Convert a Python value to the types of TOML."""
    if isinstance(value, Mapping):
        return {str(key): as_toml(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_toml(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a ConfigError states why it cannot be read."""
    try:
        table = tomllib.loads(files.read_bytes(path).decode("utf-8-sig"))
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        near = did_you_mean(path.name, [recipe.name for recipe in folder.glob("*.toml")])
        hint = near or "name a recipe that exists, or write one with `turnwright init NAME`"
        raise ConfigError(f"{path}: no such recipe; {hint}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: is a directory; name the recipe in it, such as {path / 'recipe.toml'}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); save the recipe as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        hint = "a recipe has lines `key = value`, strings in quotes, sections in []"
        raise ConfigError(f"{path}: not TOML: {error}; {hint}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep; a recipe has tables of keys") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from None

    if not table:
        raise ConfigError(f"{path}: the recipe is empty; {MINIMAL_RECIPE_HINT}")
    return table


def parse_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Split command-line words into pairs of dotted key and text of the value.

    Raises `ConfigError` for other words.

    Example::

        >>> parse_overrides(["--train.lr", "1e-4", "--train.max-mismatch=0.1"])
        [('train.lr', '1e-4'), ('train.max_mismatch', '0.1')]
    """
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or len(name) == 2:
            raise ConfigError(
                f"{COMMAND_LINE}: {word!r} is not an option; write overrides as --section.key value"
            )

        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{COMMAND_LINE}: {name} needs a value; write {name} VALUE")
            text = rest.pop(0)
        pairs.append((name[2:].replace("-", "_"), text))
    return pairs


def build(tree: Mapping[str, Any], where: Mapping[str, str]) -> RunConfig:
    """Build a `RunConfig` from plain values, checking each of them.

    `tree` is nested like a recipe, with known keys. `where` is dotted key -> the file (or
    `command line`) to name in an error.
    """
    from pydantic import ValidationError

    # Strict mode accepts lists for tuples and tables for dataclasses only from JSON.
    text = json.dumps(tree, default=_reject_time)
    try:
        config: RunConfig = reader(RunConfig).validate_json(text, strict=True)
    except ValidationError as failure:
        raise _wrong_values(failure, tree, where) from None
    return config


class OutOfBounds(ConfigError):
    """A value has its key's type, and is none that the key accepts.

    `why` is what is wrong with it.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def _wrong_values(
    failure: ValidationError, tree: Mapping[str, Any], where: Mapping[str, str]
) -> ConfigError:
    """Return the error about the first wrong value.

    It is the first of another type than its key, or where there is none, the first that is out of
    bounds.
    """
    errors = failure.errors(include_url=False)
    of_another_type = [error for error in errors if is_of_another_type(error)]
    first = (of_another_type or errors)[0]
    dotted = _key_at(first["loc"])
    if not dotted:
        return ConfigError(f"{next(iter(where.values()), DEFAULT)}: cannot be read: {first['msg']}")

    value: Any = tree
    for part in dotted.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)

    place = where.get(dotted, DEFAULT)
    if not of_another_type:
        why = why_refused(first, field_annotation(dotted))
        number = _as_number(value, field_type(dotted))
        return OutOfBounds(str(wrong_value(place, DEFAULT, dotted, number, why)), why)

    # A key that takes one of several types has an error for each.
    others = len({_key_at(error["loc"]) for error in of_another_type}) - 1
    more = f" (and {others} more)" if others else ""
    return ConfigError(_wrong_type(dotted, value, place) + more)


def _key_at(location: Sequence[int | str]) -> str:
    """Return the dotted key of a location.

    The location may go deeper: to items of a list, to members of a union.
    """
    dotted = ""
    for part in location:
        deeper = f"{dotted}.{part}".removeprefix(".")
        if field_type(deeper) is None:
            break
        dotted = deeper
    return dotted


def _as_number(value: Any, hint: Any) -> Any:
    """Return an integer as the float that its key has, in a pair too."""
    if isinstance(value, list):
        return [_as_number(item, get_args(hint)[0]) for item in value]
    is_float = float in union_members(hint) and isinstance(value, int)
    return float(value) if is_float else value


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value of a configuration, in the schema's order."""
    for name in node.__dataclass_fields__:
        value = getattr(node, name)
        key = prefix + name
        if name in table_lists() and not prefix:
            for index, table in enumerate(value):
                yield from flatten(table, f"{name}.{index}.")
        elif is_dataclass(value):
            yield from flatten(value, f"{key}.")
        elif isinstance(value, Mapping) and value:
            for setting, item in value.items():
                yield f"{key}.{setting}", item
        else:
            yield key, value


def to_tree(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as plain values, nested like a recipe."""
    tree = asdict(config)
    for name in table_lists():
        tree[name] = [asdict(table) for table in getattr(config, name)]
    return tree


def config_of(config: RunConfig, policy: PolicyConfig, where: Mapping[str, str] = {}) -> RunConfig:
    """Return the configuration of one of a run's policies: `[train]` has its own keys.

    `where` is that of `build`.
    """
    if not config.policy:
        return config
    for key in policy.train:
        if field_type(f"train.{key}") is None:
            raise ConfigError(f"policy {policy.name}: {unknown_key(f'train.{key}')}")

    tree = to_tree(config)
    tree["policy"] = []
    tree["train"] |= policy.train
    tree["teacher"] = [
        teacher
        for teacher in tree["teacher"]
        if not teacher["policies"] or policy.name in teacher["policies"]
    ]
    return build(tree, where)


class ConfigMerge:
    """Plain values merged from several sources; later ones override earlier ones."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def add(self, recipe: Mapping[str, Any], origin: str, *, where: str) -> None:
        """Merge a recipe's tables."""
        for name, value in recipe.items():
            hint = field_type(name)
            if hint is None:
                raise ConfigError(f"{where}: {unknown_key(name)}")
            if name in table_lists():
                self._add_tables(name, value, origin, where)
            elif not is_dataclass(hint):
                self.set_value([name], value, origin)
            elif not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {name} = {_show(value)} is a section; write [{name}] and its keys "
                    "under it"
                )
            else:
                self._add_section([name], value, origin, where)

    def _add_tables(self, name: str, value: Any, origin: str, where: str) -> None:
        """Replace a list of tables; one table is a list of one."""
        tables = [value] if isinstance(value, dict) else value
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            under = f"use = {_show(value)}" if name == "env" else "its keys"
            raise ConfigError(
                f"{where}: {name} = {_show(value)} is a section; write [[{name}]] and "
                f"under it {under}"
            )
        self.tree[name] = [{} for _ in tables]
        for index, table in enumerate(tables):
            self._add_section([name, str(index)], table, origin, where)

    def resolved(
        self,
        where: Mapping[str, str],
        file: str,
        context: Context,
        recipe: Path | None = None,
        *,
        given: Collection[str] | None = None,
    ) -> ResolvedConfig:
        """Build and validate the configuration; the arguments are those of `build` and
        `validate`."""
        model = self.tree.get("model", {})
        if isinstance(model, dict) and isinstance(model.get("path"), str):
            model["path"] = str(local_model(model["path"], model.get("revision")))

        config = build(self.tree, where)
        validate(config, where, file, context, given=given)

        # Each policy that learns has a configuration of its own, which must hold too.
        for policy in config.policy:
            if policy.learns:
                place = {f"train.{key}": f"{file}: policy {policy.name}" for key in policy.train}
                policy_config = config_of(config, policy, place)
                validate(policy_config, place, file, context, given=given)
                has_signal = policy_config.teacher or policy_config.train.reward_weight
                if config.teacher and not has_signal:
                    raise ConfigError(
                        f"{file}: policy {policy.name}: train.reward_weight = 0: trains by "
                        "teachers alone, and none of them teaches it; see teacher.policies"
                    )

        origins = {key: self.origin(key) for key, _ in flatten(config)}
        return ResolvedConfig(config, origins, recipe)

    def origin(self, dotted: str) -> str:
        """Return the origin of a value.

        That of a table of arguments is the latest origin of any of its keys.
        """
        inside = [origin for key, origin in self.origins.items() if key.startswith(f"{dotted}.")]
        return inside[-1] if inside else self.origins.get(dotted, DEFAULT)

    def set_value(self, parts: Sequence[str], value: Any, origin: str) -> None:
        """Set one value; `parts` are the components of its dotted key."""
        node: Any = self.tree
        dotted = ".".join(parts)
        for index, section in enumerate(parts[:-1]):
            node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
            if not isinstance(node, (dict, list)):
                above = ".".join(parts[: index + 1])
                raise ConfigError(
                    f"{origin}: {dotted}: {above} is {_show(node)}, not a table; leave one out"
                )

        # TOML has no null, so keys that may be none accept the word.
        is_none = isinstance(value, str) and value.lower() == "none"
        if is_none and type(None) in union_members(field_type(dotted)):
            value = None
        node[parts[-1]] = value
        self.origins[dotted] = origin

    def override(self, dotted: str, text: str) -> str:
        """Set one value from the command line and return its dotted key."""
        flag = "--" + dotted.replace("_", "-")
        if dotted == "env":
            raise ConfigError(
                f"{COMMAND_LINE}: {flag}: say what of it, --env.use NAME or --env.args.KEY VALUE"
            )
        section, _, key = dotted.partition(".")
        if key and section in table_lists():
            dotted = ".".join([section, *self._index(section, key.split("."), flag)])

        # Python reads bytes that are no UTF-8 as halves of surrogate pairs.
        if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
            raise ConfigError(
                f"{COMMAND_LINE}: {flag}: the value is not UTF-8 text; write it in UTF-8"
            )
        if field_type(dotted) is None:
            raise ConfigError(f"{COMMAND_LINE}: {unknown_key(dotted, flags=True)}")
        if is_dataclass(field_type(dotted)):
            first = next(known_keys(without_index(dotted)))
            raise ConfigError(
                f"{COMMAND_LINE}: {flag} is a section; say which key of it, --{first} say"
            )

        value = _absolute(without_index(dotted), _parse(dotted, text), Path())
        self.set_value(dotted.split("."), value, COMMAND_LINE)
        return dotted

    def _index(self, section: str, parts: list[str], flag: str) -> list[str]:
        """Return the parts of a key within a list of tables, with the number of its table first.

        The number may be missing where there is only one table; the next number adds a table.
        """
        tables: list[Any] = self.tree.setdefault(section, [])
        noun = "environment" if section == "env" else f"[[{section}]]"
        if not parts[0].isdecimal():
            if len(tables) > 1:
                raise _which_table(section, tables, flag)
            parts = ["0", *parts]

        index = int(parts[0])
        if index > len(tables) or len(parts) < 2:
            have = f"those from 0 to {len(tables) - 1}" if tables else f"no {noun} in the recipe"
            raise ConfigError(f"{COMMAND_LINE}: {flag}: no such {noun}; there are {have}")
        if index == len(tables):
            tables.append({})

        if len(parts) == 2 and get_origin(field_type(f"{section}.0.{parts[1]}")) is Mapping:
            raise ConfigError(
                f"{COMMAND_LINE}: {flag}: set its keys by --{section}.{parts[1]}.KEY VALUE"
            )
        return [str(index), *parts[1:]]

    def _add_section(
        self, parts: list[str], table: dict[str, Any], origin: str, where: str
    ) -> None:
        """Set the values of a section.

        A table of settings (`[env.args]`, `[model.template_args]`) is set key by key.
        """
        for key, item in table.items():
            dotted = ".".join([*parts, key])
            if field_type(dotted) is None:
                raise ConfigError(f"{where}: {unknown_key(dotted)}")
            if is_dataclass(field_type(dotted)):
                if not isinstance(item, dict):
                    plain = without_index(dotted)
                    why = f"is a section; write [{plain}] and its keys under it"
                    raise ConfigError(f"{where}: {plain} = {_show(item)} {why}")
                self._add_section([*parts, key], item, origin, where)
            elif isinstance(item, dict) and item and field_type(f"{dotted}.any") is Any:
                for name, setting in item.items():
                    self.set_value([*parts, key, name], setting, origin)
            else:
                self.set_value([*parts, key], item, origin)


def _which_table(section: str, tables: Sequence[Mapping[str, Any]], flag: str) -> ConfigError:
    """Return the error about an option that says not which of several tables it means."""
    names = [table.get("name") or table.get("use", "?") for table in tables]
    choices = ", ".join(f"--{section}.{number} ({name})" for number, name in enumerate(names))
    if section == "env":
        several = f"{len(tables)} environments"
    else:
        several = f"{len(tables)} tables [[{section}]]"
    return ConfigError(f"{COMMAND_LINE}: {flag}: this run has {several}; choose one: {choices}")


def _parse(dotted: str, text: str) -> Any:
    """Parse a command-line word as TOML, or return the word itself."""
    hint = field_type(dotted)
    try:
        table = tomllib.loads(f"value = {text}")
        value = table["value"] if len(table) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text

    if not isinstance(value, str):
        # Such as `--env.use 7`, for a key that takes texts.
        return text if str in union_members(hint) else value
    if hint is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _is_numeric(hint) and hint is not int and not text.startswith(('"', "'")):
        try:
            return float(value)  # `.5` and `1.` are not numbers in TOML
        except ValueError:
            return value
    return value


def _make_absolute(table: Mapping[str, Any], folder: Path) -> None:
    """Make the paths of a recipe absolute, so that a run does not depend on the working directory.

    Another one may resume it, and code of an environment may change it.
    """
    for name, value in table.items():
        sections = value if isinstance(value, list) else [value]
        for section in sections:
            if isinstance(section, dict):
                for key in section:
                    section[key] = _absolute(f"{name}.{key}", section[key], folder)


def _absolute(key: str, value: Any, folder: Path) -> Any:
    if key == "env.args":
        return _absolute_files(value, folder)
    if key == "policy.train" and isinstance(value, Mapping):
        return {inner: _absolute(f"train.{inner}", item, folder) for inner, item in value.items()}
    if key.startswith("policy.train."):
        key = key.removeprefix("policy.")
    if key == "env.use" and isinstance(value, str) and ":" in value:
        framework, _, file = value.partition(":")
        if "." not in framework:  # else `file.py:Name`
            return f"{framework}:{_absolute_files(file, folder)}"
    return _absolute_path(key, value, folder)


def _absolute_path(key: str, value: Any, folder: Path) -> Any:
    kind = path_kind(key)
    if kind is None or not isinstance(value, str) or value.lower() == "none":
        return value
    if not kind.is_path(value):
        return value
    if key == "model.path" and is_hub_id(value, folder):
        return value
    return str(files.resolved(value, folder))


def _absolute_files(value: Any, folder: Path) -> Any:
    """Make the names of files next to the recipe absolute; other settings stay.

    `file.py:Name` and `{recipe}/...` are such names too.
    """
    if isinstance(value, Mapping):
        return {key: _absolute_files(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_absolute_files(inner, folder) for inner in value]
    if not isinstance(value, str):
        return value

    value = value.replace("{recipe}", str(files.resolved(folder)))  # the recipe is not known later
    name, colon, rest = value.rpartition(":") if ".py:" in value else (value, "", "")
    try:
        is_file = bool(Path(name).suffix) and (folder / name).is_file()
    except (OSError, ValueError):  # a text that no file system takes for a name
        return value
    return f"{files.resolved(folder / name)}{colon}{rest}" if is_file else value


def _wrong_type(dotted: str, value: Any, where: str) -> str:
    """Word the error about a value of another type than its key."""
    hint = field_type(dotted)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    near = did_you_mean(str(value), choices)
    if where == COMMAND_LINE:
        flag = f"--{dotted.replace('_', '-')}"
        setting = f"{flag} {value if isinstance(value, str) else _show(value)}"
        remedy = near or f"`{flag} VALUE`"
    else:
        setting = f"{dotted} = {_show(value)}"
        remedy = near or _remedy(dotted.rpartition(".")[2], hint, value)
    return f"{where}: {setting}: must be {describe_type(hint)}; {remedy}"


def _is_numeric(hint: Any) -> bool:
    return any(word in describe_type(hint) for word in ("number", "integer"))


def _remedy(key: str, hint: Any, value: Any) -> str:
    """Return how to write a value of another type than its key, or what the value is."""
    if isinstance(value, str) and _is_numeric(hint):
        try:
            number = float(value)
        except ValueError:
            return f"write {key} = 1 without quotes, for example"
        if math.isfinite(number) and (hint is not int or number == int(number)):
            return f"write {key} = {value.strip()} without quotes"
    if isinstance(value, str) and value.lower() in ("true", "false") and hint is bool:
        return f"write {key} = {value.lower()} without quotes"
    if isinstance(value, float) and "integer" in describe_type(hint) and math.isfinite(value):
        return f"write {key} = {round(value)}"

    names: dict[type, str] = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
        type(None): "nothing",
    }
    return f"it is {names.get(type(value), type(value).__name__)}"


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _reject_time(value: Any) -> Any:
    raise ConfigError(f"recipe: {value} is a date or time, which no key accepts; put it in quotes")

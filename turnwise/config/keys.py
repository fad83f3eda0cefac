"""What keys a recipe may have: their types in words, their help texts, and what was probably meant."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from turnwise.config import engines, schema
from turnwise.config.needs import declared
from turnwise.config.schema import EnvConfig, RunConfig


@cache
def hints(cls: type) -> dict[str, Any]:
    """The fields of a configuration class with their types."""
    return get_type_hints(cls)


def hint_of(dotted: str) -> Any | None:
    """The type of a dotted key (a dataclass for a section), None where there is no such key.

    Example: ``hint_of("rollout.groups") is int``, ``hint_of("env.0.args.depth") is Any``
    """
    first, *rest = dotted.split(".")
    if first == "env" and rest:
        if not rest[0].isdecimal():
            return None
        if len(rest) == 1:
            return EnvConfig
        if len(rest) > 2 and get_origin(hints(EnvConfig).get(rest[1])) is Mapping:
            return Any
        rest = rest[1:]
        return hints(EnvConfig).get(rest[0]) if len(rest) == 1 else None
    hint: Any = hints(RunConfig).get(first)
    for part in rest:
        if get_origin(hint) is Mapping:  # a table of settings: any key, one level deep
            return Any if part is rest[-1] and part else None
        hint = hints(hint).get(part) if is_dataclass(hint) and isinstance(hint, type) else None
    return hint


def known_keys(section: str = "") -> Iterator[str]:
    """Every dotted key, those of environments without an index (`env.use`)."""
    for name, hint in hints(RunConfig).items():
        nested = EnvConfig if name == "env" else hint
        if section and name != section.partition(".")[0]:
            continue
        if is_dataclass(nested) and isinstance(nested, type):
            yield from (f"{name}.{key}" for key in hints(nested))
        else:
            yield name


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def accepts_none(dotted: str) -> bool:
    """Whether `"none"` stands for no value at this key."""
    return NoneType in members(hint_of(dotted))


def accepts_string(hint: Any) -> bool:
    """Whether any text is a value of this type."""
    return str in members(hint)


def in_words(hint: Any) -> str:
    """A type for people: `a whole number`, `one of "linear", "cosine"`."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        words = [in_words(member) for member in get_args(hint) if member is not NoneType]
        return " or ".join([*words, '"none"'] if NoneType in get_args(hint) else words)
    if get_origin(hint) is tuple:
        return "a list of strings" if get_args(hint)[-1] is Ellipsis else f"a list of {len(get_args(hint))} numbers"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a string in quotes"}
    return plain.get(hint, "a table")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest choice, or nothing."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.55)
    return f"did you mean '{near[0]}'?" if near else ""


def wrong_history(said: str) -> str:
    """What is wrong with a value of `rollout.history`; empty for a mode, a policy by name, a file's or an object's."""
    name, _, number = said.partition(":")
    if said in schema.HISTORY_MODES or said.startswith(schema.HISTORY_OBJECT) or ".py" in said:
        return ""
    if name not in schema.HISTORY_POLICIES:
        near = did_you_mean(name, (*schema.HISTORY_MODES, *schema.HISTORY_POLICIES))
        policies = (f"{policy}:N" for policy in schema.HISTORY_POLICIES)
        known = ", ".join((*schema.HISTORY_MODES, *policies, "file.py:policy"))
        return f"{near + ' ' if near else ''}there are {known}"
    return "" if number.isdecimal() else f"say how many, as in {name}:2"


def wrong_tracker(said: str) -> str:
    """What is wrong with a value of `track.to`; empty for a name, a file's class or a module's."""
    return "" if ":" in said else _not_named(said, schema.TRACKERS).replace("file.py:function", "file.py:Class")


def wrong_algorithm(said: str) -> str:
    """What is wrong with a value of `train.algorithm`; empty for a name or a file's function."""
    return _not_named(said, schema.ALGORITHMS)


def wrong_loss_scale(said: str) -> str:
    """What is wrong with a value of `train.loss_scale`; empty for a name or a file's function."""
    return _not_named(said, schema.LOSS_SCALES)


def _not_named(said: str, names: Iterable[str]) -> str:
    if said in names or ".py" in said:
        return ""
    near = did_you_mean(said, names)
    return f"{near + ' ' if near else ''}there are {', '.join(names)}; your own is file.py:function"


def unknown_key(dotted: str, *, flags: bool = False) -> str:
    """What to say of a key that does not exist: what was probably meant, or which keys there are."""
    plain = ".".join(part for part in dotted.split(".") if not part.isdecimal())
    section, _, key = plain.rpartition(".")

    def show(name: str) -> str:
        return "--" + name.replace("_", "-") if flags else name

    said = f"unknown key '{show(plain)}'"
    sections = [name for name, hint in hints(RunConfig).items() if name == "env" or is_dataclass(hint)]
    if section and section.partition(".")[0] not in sections:
        said, section = f"unknown section [{section}]", ""
        near = difflib.get_close_matches(plain, list(known_keys()), n=1, cutoff=0.7)
        if not near:
            return f"{said}; {did_you_mean(plain.partition('.')[0], sections) or 'sections are ' + ', '.join(sections)}"
        return f"{said}; did you mean '{show(near[0])}'?"
    if section.startswith("env."):  # `env.arg.depth`: the middle word is what is wrong
        section, key = "env", section.split(".")[1]
    siblings = {k.rpartition(".")[2]: k for k in known_keys(section)} if section else {k: k for k in (*known_keys(), *sections)}
    elsewhere = {k.rpartition(".")[2]: k for k in known_keys()}
    if key not in siblings and key in elsewhere:  # the very word, in another place
        return f"{said}; did you mean '{show(elsewhere[key])}'?"
    for table in (siblings, elsewhere):
        near = difflib.get_close_matches(key, list(table), n=1, cutoff=0.6 if table is siblings else 0.75)
        if near:
            head = table[near[0]]
            return f"{said}; did you mean '{'[' + head + ']' if head in sections and not flags else show(head)}'?"
    return f"{said}; " + (f"[{section}] has {', '.join(siblings)}" if section else f"sections are {', '.join(sections)}")


@cache
def field_docs() -> dict[str, str]:
    """Dotted key -> the docstring under the field, for every key that has one, and what the key needs to have an effect."""
    by_class: dict[str, dict[str, str]] = {}
    for module in (schema, engines):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                by_class[node.name] = _docs_of(node)
    found = dict(by_class["RunConfig"])
    for name, hint in hints(RunConfig).items():
        nested = EnvConfig if name == "env" else hint
        if is_dataclass(nested) and isinstance(nested, type):
            for kind in reversed(nested.__mro__):
                found |= {f"{name}.{key}": text for key, text in by_class.get(kind.__name__, {}).items()}
            for key, needs in declared(nested).items():
                found[f"{name}.{key}"] += f" Needs {' and '.join(f'`{need}`' for need in needs)}."
            found.setdefault(name, (nested.__doc__ or "").strip())
    return found


def _docs_of(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[field.target.id] = " ".join(value.value.split())
    return docs

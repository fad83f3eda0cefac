"""Keys of a recipe: their types, help texts and spelling suggestions.

All of it is read from the dataclasses of `schema.py`: `field_type` finds the type of a dotted key,
`known_keys` lists the keys, `field_docs` has their help texts and `unknown_key` words the error
about any other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from turnwright.config.rules import Section
from turnwright.config.schema import EnvRules, RunConfig
from turnwright.config.values import PathKind, hints_of, path_kinds, reader
from turnwright.errors import did_you_mean


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a configuration class's fields."""
    return get_type_hints(cls)


def field_type(dotted: str) -> Any | None:
    """Return the type of a dotted key, a dataclass for a section; None if the key is unknown.

    Example: a table of settings accepts any key::

        >>> field_type("env.0.args.depth")
        typing.Any
        >>> print(field_type("train.stepz"))
        None
    """
    first, *rest = dotted.split(".")
    hint: Any = field_types(RunConfig).get(first)
    in_env = first == "env"
    if rest and first in table_lists():
        hint = table_lists()[first] if rest.pop(0).isdecimal() else None

    for part in rest:
        if get_origin(hint) is Mapping:
            # A table of settings accepts any key, outside environments one level deep.
            return Any if in_env or (part is rest[-1] and part) else None
        if not (is_dataclass(hint) and isinstance(hint, type)):
            return None
        hint = field_types(hint).get(part)
    return hint


@cache
def table_lists() -> dict[str, Any]:
    """Return the sections that are lists of tables (`[[env]]`), with the class of one table."""
    lists = {}
    for name, hint in field_types(RunConfig).items():
        if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
            lists[name] = get_args(hint)[0]
    return lists


@cache
def sections() -> dict[str, Any]:
    """Return the class of each section, for a list of tables that of one table.

    Sections in them come last (`env.retries`).
    """
    classes: dict[str, Any] = {}
    for name, kind in (field_types(RunConfig) | table_lists()).items():
        if is_dataclass(kind):
            classes[name] = kind
    for name, kind in list(classes.items()):
        for key, hint in field_types(kind).items():
            if is_dataclass(hint):
                classes[f"{name}.{key}"] = hint
    return classes


def known_keys(section: str = "") -> Iterator[str]:
    """Yield every dotted key, or those of a section and of sections in it.

    Keys of tables have no index (`env.use`).
    """
    for name in _keys_under("", RunConfig):
        if not section or name.startswith(f"{section}."):
            yield name


def _keys_under(prefix: str, kind: Any) -> Iterator[str]:
    for key in field_types(kind):
        inner = sections().get(f"{prefix}{key}")
        if inner is None:
            yield f"{prefix}{key}"
        else:
            yield from _keys_under(f"{prefix}{key}.", inner)


def without_index(dotted: str) -> str:
    """Return a dotted key without the number of its table (`env.0.use`: `env.use`)."""
    return ".".join(part for part in dotted.split(".") if not part.isdecimal())


def keys_by_name() -> dict[str, list[str]]:
    """Return the dotted keys of all sections by their last part."""
    keys: dict[str, list[str]] = {}
    for key in known_keys():
        keys.setdefault(key.rpartition(".")[2], []).append(key)
    return keys


def _by_last_word(keys: Iterable[str]) -> dict[str, str]:
    """Return the dotted key of each last part: of a section rather than of a part of one, and the
    last of several."""
    by_word: dict[str, str] = {}
    for key in sorted(reversed(list(keys)), key=lambda dotted: dotted.count(".")):
        by_word.setdefault(key.rpartition(".")[2], key)
    return by_word


MOST_LISTED = 16
"""Most keys that an error lists."""


def unknown_key(dotted: str, *, flags: bool = False) -> str:
    """Describe an unknown key: the probably intended one, or the keys that exist."""
    plain = without_index(dotted)
    section, _, key = plain.rpartition(".")

    def spelled(name: str) -> str:
        return "--" + name.replace("_", "-") if flags else name

    error = f"unknown key '{spelled(plain)}'"
    heads = list(sections())
    listed_sections = f"sections are {', '.join(heads)}"

    # An unknown section: the whole key may be spelled wrong, or the section alone.
    if section and section.partition(".")[0] not in heads:
        error = f"unknown section [{section}]"
        near_keys = difflib.get_close_matches(plain, list(known_keys()), n=1, cutoff=0.7)
        if near_keys:
            return f"{error}; did you mean '{spelled(near_keys[0])}'?"
        near_section = did_you_mean(plain.partition(".")[0], heads)
        return f"{error}; {near_section or listed_sections}"

    in_table = section.partition(".")[0] in table_lists() and "." in section
    if in_table and section not in heads:  # in `env.arg.depth`, the middle word is unknown
        section, key = section.split(".")[:2]

    # Keys by the word that a user writes: of this section, and of others.
    if section:
        siblings = _by_last_word(known_keys(section))
    else:
        siblings = {name: name for name in (*known_keys(), *heads)}
    elsewhere = _by_last_word(known_keys())

    if key not in siblings and key in elsewhere:
        return f"{error}; did you mean '{spelled(elsewhere[key])}'?"
    for names, cutoff in ((siblings, 0.6), (elsewhere, 0.75)):
        near = difflib.get_close_matches(key, list(names), n=1, cutoff=cutoff)
        if near:
            meant = names[near[0]]
            is_section = meant in heads and not flags
            return f"{error}; did you mean '{f'[{meant}]' if is_section else spelled(meant)}'?"

    if not section:
        return f"{error}; {listed_sections}"
    if len(siblings) > MOST_LISTED:
        return f"{error}; `turnwright train --keys` lists the {len(siblings)} keys of [{section}]"
    return f"{error}; [{section}] has {', '.join(siblings)}"


@cache
def field_docs() -> dict[str, str]:
    """Return the docstring of each key that has one, with what the key needs to have an effect."""
    docs = {name: " ".join((kind.__doc__ or "").split()) for name, kind in sections().items()}
    docs |= _docstrings(RunConfig)
    for section, kind in sections().items():
        for name, text in _docstrings(kind).items():
            docs[f"{section}.{name}"] = text
    for section, kind in sections().items():
        for name, words in needs_in_words(kind).items():
            needs = " and ".join(f"`{need}`" for need in words)
            docs[f"{section}.{name}"] += f" Needs {needs}."
    return docs


def needs_in_words(kind: type[Section]) -> dict[str, list[str]]:
    """Return what each key of a section needs to have an effect, for those that need something."""
    words: dict[str, list[str]] = {}
    for need in kind().needs(RunConfig()):
        for name in need.keys:
            words.setdefault(name, []).append(need.words)
    return words


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings under the fields of a section and its bases."""
    schemas = _documented_schemas()
    texts = {}
    for base in reversed(cls.__mro__):
        for name, schema in schemas.get(base.__name__, {}).get("properties", {}).items():
            if "description" in schema:
                texts[name] = " ".join(schema["description"].split())
    return texts


@cache
def _documented_schemas() -> dict[str, Any]:
    """Return the JSON schemas of the sections by class."""
    # pydantic reads the docstrings of one class, without its bases.
    documented = reader(RunConfig | EnvRules, with_docstrings=True)
    schemas: dict[str, Any] = documented.json_schema()["$defs"]
    return schemas


def field_annotation(dotted: str) -> Any:
    """Return the annotation of a dotted key of a section, with bounds (`env.0.weight`)."""
    section, _, name = without_index(dotted).rpartition(".")
    return hints_of(sections()[section] if section else RunConfig)[name]


def path_kind(dotted: str) -> PathKind | None:
    """Return the path kind of a dotted key without an index (`env.use`); None if it holds no
    path."""
    section, _, name = dotted.rpartition(".")
    if section not in sections():
        return None
    return path_kinds(sections()[section]).get(name)

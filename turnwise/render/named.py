"""Chat templates that have a name, and files of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from turnwise.config.needs import did_you_mean, is_template_file
from turnwise.errors import ConfigError
from turnwise.render.template import ChatTemplate

_NAMED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chatml": ("chatml.jinja", {}),
    "qwen_vl": ("qwen_vl.jinja", {}),
    "qwen3_with_thinking": ("qwen3.jinja", {"keep_thinking": True}),
    "qwen3_without_thinking": ("qwen3.jinja", {"keep_thinking": False}),
}
"""Name -> the file of this package, and the variables that are set in it."""


def template_names() -> list[str]:
    """The names that `model.template` may be."""
    return sorted(_NAMED)


def template_source(name: str) -> str:
    """The Jinja source of a named template.

    Raises:
        ConfigError: for a name that there is not.
    """
    if name not in _NAMED:
        near = did_you_mean(name, _NAMED)
        raise ConfigError(
            f"model.template = {json.dumps(name)}: no such template; {near + ' ' if near else ''}named ones are "
            f"{', '.join(template_names())}; your own is a file, template.jinja say"
        )
    file, variables = _NAMED[name]
    return with_preset_variables(files("turnwise.render").joinpath("templates", file).read_text(encoding="utf-8"), variables)


def find_source(name: str) -> tuple[str, str]:
    """The source of a template by its name or file, and what errors call it.

    Raises:
        ConfigError: when there is no such template, or its file cannot be read.
    """
    if name in _NAMED or not (is_template_file(name) or Path(name).exists()):
        return template_source(name), f"template {name}"
    try:
        return Path(name).read_text(encoding="utf-8"), name
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f'model.template = "{name}": cannot be read ({reason}); name a Jinja file in UTF-8') from None


def with_preset_variables(source: str, variables: Mapping[str, Any]) -> str:
    """A source that sets variables itself where nobody else does, so that it says the same wherever it is used.

    Chat templates are run with `trim_blocks`, which takes away the one newline behind each line that is put before.

    Example: ``preset("{{ x }}", {"x": True})`` begins with ``{%- if x is not defined %}{% set x = true %}{% endif %}``
    """
    lines = [
        f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in variables.items()
    ]
    return "".join(lines) + source


def check_arguments(template: ChatTemplate, arguments: Mapping[str, Any]) -> None:
    """Hold `model.template_args` to the variables that a template uses.

    Raises:
        ConfigError: for one that it does not use, or a value that a template cannot hold.
        TemplateError: when it is no template.
    """
    for name, value in arguments.items():
        if name not in template.parameters:
            near = did_you_mean(name, template.parameters)
            known = "it uses " + ", ".join(sorted(template.parameters)) if template.parameters else "it uses none"
            raise ConfigError(f"model.template_args.{name}: {template.origin} has no such variable; {near or known}")
        try:
            _literal(value)
        except (TypeError, ValueError):
            raise ConfigError(f"model.template_args.{name} = {value!r:.80}: not a value that JSON can say") from None


def _literal(value: Any) -> str:
    """A JSON value as a Jinja expression."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)

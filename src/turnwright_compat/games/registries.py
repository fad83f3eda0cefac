"""What registries of environments in other libraries share."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from turnwright.envs.foreign import ForeignObject
from turnwright.envs.resolve import load_object
from turnwright.errors import ConfigError


def library(name: str, package: str) -> Any:
    """Import the library of a registry."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name}: cannot be imported ({error}); pip install {package}") from error


def with_functions(
    args: Mapping[str, Any], names: tuple[str, ...], found: ForeignObject
) -> dict[str, Any]:
    """Load those of the arguments that name a function, `file.py:function`."""
    loaded = dict(args)
    for name in names:
        value = loaded.get(name)
        if isinstance(value, str) and ".py:" in value:
            loaded[name] = load_object(value, base=found.base)
    return loaded


def call_with_args(make: Callable[..., Any], args: Mapping[str, Any], where: str) -> Any:
    """Call a maker of the library with `[env.args]`; its objection is a ConfigError."""
    try:
        return make(**args)
    except ConfigError:
        raise
    except Exception as error:
        # A library has no common error for arguments that it does not take.
        message = " ".join(f"{type(error).__name__}: {error}".split())
        hint = _argument_names(make) if isinstance(error, TypeError) else ""
        raise ConfigError(f"{where} cannot be made: {message}{hint}") from error


def _argument_names(make: Callable[..., Any]) -> str:
    """Return a clause on the arguments that a maker takes by name; empty if it has none."""
    names = [
        parameter.name
        for parameter in inspect.signature(make).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    return f"; [env.args] may have {', '.join(names)}" if names else ""

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
    given = dict(args)
    for name in names:
        if isinstance(value := given.get(name), str) and ".py:" in value:
            given[name] = load_object(value, base=found.base)
    return given


def call_with_args(make: Callable[..., Any], args: Mapping[str, Any], where: str) -> Any:
    """Call a maker of the library with `[env.args]`; its objection is a ConfigError."""
    try:
        return make(**args)
    except ConfigError:
        raise
    except Exception as error:
        known = ""
        if isinstance(error, TypeError):
            parameters = inspect.signature(make).parameters.values()
            named = [
                one.name
                for one in parameters
                if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            ]
            known = f"; [env.args] may have {', '.join(named)}" if named else ""
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where} cannot be made: {message}{known}") from error

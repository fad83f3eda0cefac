"""Functions by path, and classes with one object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from turnwright.envs.foreign import import_object
from turnwright.envs.user_imports import STAND_INS
from turnwright_compat.slime.engine import EPISODE


class SingletonMeta(type):
    """Metaclass of classes with one object."""

    _only: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Return the one object, made by the first call."""
        if "_only" not in vars(cls):
            cls._only = super().__call__(*args, **options)
        return cls._only


def load_function(path: Any) -> Any:
    """Return what `module.name` names, of the caller's own tree too; a function as it is, and None for no path."""
    if callable(path) or not path:
        return path or None
    caller = sys._getframe(1).f_globals
    near = Path(caller["__file__"]) if "__file__" in caller else None
    server = EPISODE.get()
    if server is not None and server.base is not None and str(caller.get("__name__")).startswith(STAND_INS):
        near = server.base / "_"  # for a loop of slime's or Miles' own, the recipe names the function
    return import_object(str(path), "load_function", near=near)

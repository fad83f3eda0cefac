"""Names of a package that are loaded when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package whose names are loaded when they are first used.

    Args:
        modules: names, separated by spaces, by the module that has them, relative to the package.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return sorted(home), load

"""Names of a package that are loaded when they are first used, and that type checkers know all the
same."""

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, moved: Mapping[str, str] = {}
) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package whose names are loaded when they are first
    used.

    The names are those that `file`, the package's `__init__.py`, imports under `TYPE_CHECKING`. So
    they are written once, a type checker sees ordinary imports, and `import` of the package loads
    none of them.

    Args:
        moved: names that another package has -> that package.
    """
    home: dict[str, str] = {}  # the module of each name
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Name):
            continue
        if node.test.id != "TYPE_CHECKING":
            continue
        for statement in node.body:
            if not isinstance(statement, ast.ImportFrom) or statement.module is None:
                continue
            for alias in statement.names:
                if alias.asname == alias.name:  # `import X as X` exports it
                    home[alias.name] = statement.module

    def load(name: str) -> Any:
        if name in moved:
            raise AttributeError(f"{package}.{name} is {moved[name]}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return sorted(home), load

"""Interfaces of other frameworks, which user code imports under their names where the framework is
not installed.

A framework (`turnwright.plugins`) has a table of them, `stand_ins.py` beside its module::

    MODULES = {"verl.tools.base_tool": {"my_package.tools": "BaseTool ToolResponse"}}

So `verl.tools.base_tool` has `BaseTool` and `ToolResponse` of `my_package.tools` to user code. A
name may be another one there (`compute_score=gsm8k_score`). In place of a module of ours there may
be one of a framework, whose names are the installed one's where there is one. There may be the
module itself: then it is a package, and the names are modules that its `__init__.py` imports.
`SAME` has modules that are others under another name, and `ALWAYS` the frameworks whose stand-ins
come first where they are installed too. See `turnwright.envs.user_imports`.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from turnwright import plugins
from turnwright.envs import user_imports as _user_imports  # noqa: F401  # makes the modules below


def _tables() -> Iterator[dict[str, Any]]:
    """Read the table of each installed framework, without its package, which may need what is not
    installed."""
    modules = [point.module for point in plugins.installed("frameworks").values()]
    packages = dict.fromkeys(module.rpartition(".")[0] for module in modules)
    for package in packages:
        if not package:
            continue  # a module without a folder of its own
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:  # a package that was removed, but not uninstalled
            continue
        if spec is None:
            continue
        for place in spec.submodule_search_locations or ():
            file = Path(place, "stand_ins.py")
            if not file.is_file():
                continue
            table = spec_from_file_location(f"{package}.stand_ins", file)
            assert table is not None
            assert table.loader is not None
            module = module_from_spec(table)
            table.loader.exec_module(module)
            yield vars(module)


MODULES: dict[str, Mapping[str, str]] = {}
"""Modules of frameworks: for each, names by the module that has them."""

SAME: dict[str, str] = {}
"""Modules that are another one, where they are not in `MODULES`, and so are the modules below
them."""

ALWAYS: list[str] = []
"""Frameworks whose stand-ins are used where they are installed too."""

for _table in _tables():
    MODULES |= _table["MODULES"]
    SAME |= _table.get("SAME", {})
    ALWAYS += _table.get("ALWAYS", ())

"""Interfaces of other frameworks, which user code imports under their names where the framework is not installed.

A framework (`turnwright.plugins`) has them in the folder `stand_ins` beside its module: `stand_ins/verl/tools/base_tool.py` is
`verl.tools.base_tool` to user code and to the files there. `stand_ins.toml` may say which names are `always` those of the
stand-ins, and which modules are the `same`. See `turnwright.envs.user_imports`.
"""

import tomllib
from importlib.util import find_spec
from pathlib import Path

from turnwright import plugins
from turnwright.envs import user_imports as _user_imports  # noqa: F401  # finds the modules below


def _folders() -> list[Path]:
    folders = []
    for point in plugins.installed("frameworks").values():
        parent = point.module.rpartition(".")[0]
        if not parent:
            continue  # a module without a folder of its own
        try:
            package = find_spec(parent)
        except ModuleNotFoundError:  # a package that was removed, but not uninstalled
            continue
        places = [] if package is None else list(package.submodule_search_locations or ())
        folders += [Path(place, "stand_ins") for place in places]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


_FOLDERS = _folders()
__path__ = [str(folder) for folder in _FOLDERS]

SAME: dict[str, str] = {}
"""Modules whose names another module has, for which there is no file, and so for the modules below them."""
ALWAYS: list[str] = []
"""Frameworks whose stand-ins are used where they are installed too."""

for _folder in _FOLDERS:
    if (_file := _folder / "stand_ins.toml").is_file():
        _settings = tomllib.loads(_file.read_text(encoding="utf-8"))
        SAME |= _settings.get("same", {})
        ALWAYS += _settings.get("always", [])

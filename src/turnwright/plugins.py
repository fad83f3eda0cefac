"""What packages add to turnwright, found by their entry points.

Our own packages beside the core and those of strangers use the same mechanism. A package adds a
thing by an entry point of the group of its kind, whose name is the name that recipes and commands
use::

    [project.entry-points."turnwright.environments"]
    maze = "my_package:Maze"          # use = "maze"

| group | an entry point is | loaded by |
|---|---|---|
| `turnwright.environments` | a `tw.Env` class, or what else `tw.as_env_spec` takes | `envs.resolve` |
| `turnwright.commands` | a `turnwright.cli.options.Command` | `cli.main` |
| `turnwright.engines` | a function of (config, model, renderer) that returns an engine (`engine.kind`) | `training.setup` |
| `turnwright.parsers` | a reply parser, see `turnwright.renderers.parsers` | `renderers.parsers.detect` |
| `turnwright.trackers` | a class with `start`, `log` and `finish` | `trackers` |
| `turnwright.frameworks` | a `turnwright.envs.foreign.Framework` | `envs.foreign` |
| `turnwright.notebooks` | a function that returns the HTML of a trajectory, a group, an evaluation or a run, or None | `types.notebook` |
| `turnwright.transports` | ours: groups (`[scale]`) or weights (`engine.tree`) elsewhere | `runs`, `training.servers` |
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from turnwright.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal[
    "environments",
    "commands",
    "engines",
    "parsers",
    "trackers",
    "frameworks",
    "notebooks",
    "transports",
]

PACKAGES = ("turnwright_view", "turnwright_serve", "turnwright_cluster", "turnwright_compat")
"""Packages beside the core in this distribution."""
_SOURCES = Path(__file__).parents[1]
FOLDERS = tuple(f"{_SOURCES / package}{os.sep}" for package in ("turnwright", *PACKAGES))
"""Folders of the core and of these packages, as the paths of their files begin."""
OURS: Mapping[Kind, Mapping[str, str]] = {
    "commands": {
        "view": "turnwright_view",
        "export": "turnwright_view",
        "replay": "turnwright_view",
        "runs": "turnwright_view",
        "track": "turnwright_view",
        "record": "turnwright_serve",
        "serve": "turnwright_serve",
        "worker": "turnwright_cluster",
        "convert": "turnwright_compat",
    },
    "transports": {
        "tree": "turnwright_serve",
        "relay": "turnwright_serve",
        "workers": "turnwright_cluster",
        "ray": "turnwright_cluster",
    },
    "trackers": {
        "tensorboard": "turnwright_view",
        "trackio": "turnwright_view",
        "wandb": "turnwright_view",
    },
    "notebooks": {"html": "turnwright_view"},
    "frameworks": {
        "program": "turnwright_serve",
        "gym": "turnwright_compat",
        "reasoning_gym": "turnwright_compat",
        "skyrl": "turnwright_compat",
        "slime": "turnwright_compat",
        "swift": "turnwright_compat",
        "textarena": "turnwright_compat",
        "textworld": "turnwright_compat",
        "trl": "turnwright_compat",
        "verl": "turnwright_compat",
    },
}
"""What those packages add, so that an installation without one of them can say what is missing."""


@cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points of a kind by name, in order of their names."""
    from importlib.metadata import entry_points  # 30 ms, which most commands do not need

    points = {point.name: point for point in entry_points(group=f"turnwright.{kind}")}
    return dict(sorted(points.items()))


def names(kind: Kind) -> list[str]:
    """Return the names of a kind, of what is installed and of ours."""
    return sorted({*installed(kind), *OURS.get(kind, {})})


def load(kind: Kind, name: str) -> Any:
    """Return a thing by its kind and name.

    Raises `ConfigError` where it is missing, or cannot be imported.

    Example::

        load("environments", "maze")  # the class `my_package.Maze`
    """
    what = f"{kind.removesuffix('s')} {name!r}"
    package = OURS.get(kind, {}).get(name)
    point = installed(kind).get(name)
    if package is not None:
        if point is None or find_spec(package) is None:
            raise ConfigError(
                f"the {what} is part of {package}, which is not in this installation; install all "
                "of turnwright again"
            )
        return point.load()  # where an extra of ours is missing, its error says which

    if point is None:
        raise ConfigError(f"no {what} is installed; there are {', '.join(names(kind)) or 'none'}")
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # of a stranger's package, which may raise anything
        raise ConfigError(f"the {what} of {point.value} cannot be imported ({error})") from error


def importable(kind: Kind) -> Iterator[Any]:
    """Yield the installed things of a kind, in order of their names.

    One that cannot be imported is left out: `load` tells why to who names it.
    """
    for name in installed(kind):
        try:
            thing = load(kind, name)
        except ConfigError:
            continue
        yield thing

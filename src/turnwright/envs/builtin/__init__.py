"""Built-in environments."""

from typing import Any

from turnwright.envs.builtin.calculator import CALCULATOR
from turnwright.envs.builtin.code import Code
from turnwright.envs.builtin.frozen_lake import FrozenLake
from turnwright.envs.builtin.geometry import Geometry
from turnwright.envs.builtin.hinted_math import HintedMath
from turnwright.envs.builtin.hop import Hop, HopJson
from turnwright.envs.builtin.radar import Radar
from turnwright.envs.builtin.search import Search
from turnwright.envs.builtin.sokoban import Sokoban
from turnwright.envs.builtin.zoom import Zoom

BUILTIN: dict[str, Any] = {
    "hop": Hop,
    "hop_json": HopJson,
    "calculator": CALCULATOR,
    "search": Search,
    "code": Code,
    "frozen_lake": FrozenLake,
    "sokoban": Sokoban,
    "hinted_math": HintedMath,
    "radar": Radar,
    "geometry": Geometry,
    "zoom": Zoom,
}
"""Env class or factory by name in recipes."""

__all__ = [
    "BUILTIN",
    "CALCULATOR",
    "Code",
    "FrozenLake",
    "Geometry",
    "HintedMath",
    "Hop",
    "HopJson",
    "Radar",
    "Search",
    "Sokoban",
    "Zoom",
]

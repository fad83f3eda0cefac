"""Built-in environments."""

from typing import Any

from turnwise.envs.builtin.calculator import CALCULATOR
from turnwise.envs.builtin.code import Code
from turnwise.envs.builtin.frozen_lake import FrozenLake
from turnwise.envs.builtin.geometry import Geometry
from turnwise.envs.builtin.hinted_math import HintedMath
from turnwise.envs.builtin.hop import Hop, HopJson
from turnwise.envs.builtin.radar import Radar
from turnwise.envs.builtin.search import Search
from turnwise.envs.builtin.zoom import Zoom

BUILTIN: dict[str, Any] = {
    "hop": Hop,
    "hop_json": HopJson,
    "calculator": CALCULATOR,
    "search": Search,
    "code": Code,
    "frozen_lake": FrozenLake,
    "hinted_math": HintedMath,
    "radar": Radar,
    "geometry": Geometry,
    "zoom": Zoom,
}
"""Env class or factory by name in recipes."""

__all__ = ["BUILTIN", "CALCULATOR", "Code", "FrozenLake", "Geometry", "HintedMath", "Hop", "HopJson", "Radar", "Search", "Zoom"]

"""The worlds that come with Turnwise."""

from typing import Any

from turnwise.env.builtin.calculator import CALCULATOR
from turnwise.env.builtin.code import Code
from turnwise.env.builtin.geometry import Geometry
from turnwise.env.builtin.hinted_math import HintedMath
from turnwise.env.builtin.hop import Hop
from turnwise.env.builtin.hop_json import HopJson
from turnwise.env.builtin.lake import FrozenLake
from turnwise.env.builtin.radar import Radar
from turnwise.env.builtin.search import Search
from turnwise.env.builtin.zoom import Zoom

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
"""Names that a recipe may use; each an Env class or a factory."""

__all__ = ["BUILTIN", "CALCULATOR", "Code", "FrozenLake", "Geometry", "HintedMath", "Hop", "HopJson", "Radar", "Search", "Zoom"]

"""The worlds that come with Turnwise."""

from turnwise.env.builtin.hop import Hop
from turnwise.env.builtin.hop_json import HopJson

BUILTIN: dict[str, type] = {"hop": Hop, "hop_json": HopJson}
"""Names that a recipe may use."""

__all__ = ["BUILTIN", "Hop", "HopJson"]

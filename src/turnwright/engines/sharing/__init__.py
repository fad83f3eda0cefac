"""Weights to many servers: each node gets them once, from a peer, and every chunk is verified."""

from turnwright.engines.sharing.manifest import Manifest
from turnwright.engines.sharing.relay import WeightRelay
from turnwright.engines.sharing.tree import WeightTree

__all__ = ["Manifest", "WeightRelay", "WeightTree"]

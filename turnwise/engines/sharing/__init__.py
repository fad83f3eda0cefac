"""Weights to many servers: each node gets them once, from a peer, and every chunk is verified."""

from turnwise.engines.sharing.manifest import Manifest
from turnwise.engines.sharing.relay import WeightRelay
from turnwise.engines.sharing.tree import WeightTree

__all__ = ["Manifest", "WeightRelay", "WeightTree"]

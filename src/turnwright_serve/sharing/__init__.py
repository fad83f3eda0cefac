"""Weights to many servers: each node gets them once, from a peer, and every chunk is verified."""

from turnwright_serve.sharing.manifest import Manifest
from turnwright_serve.sharing.relay import WeightRelay
from turnwright_serve.sharing.tree import WeightTree

__all__ = ["Manifest", "WeightRelay", "WeightTree"]

"""A real engine in torch, for Hugging Face causal models, with no server."""

from turnwise.engines.local.engine import LocalEngine
from turnwise.engines.local.weights import fingerprint

__all__ = ["LocalEngine", "fingerprint"]

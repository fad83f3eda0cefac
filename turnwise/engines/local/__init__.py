"""In-process engine in torch for Hugging Face causal models."""

from turnwise.engines.local.engine import AdapterEngine, LocalEngine
from turnwise.engines.local.weights import fingerprint

__all__ = ["AdapterEngine", "LocalEngine", "fingerprint"]

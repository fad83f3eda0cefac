"""In-process engine in torch for Hugging Face causal models."""

from turnwright.engines.local.engine import AdapterEngine, LocalEngine
from turnwright.engines.local.weights import fingerprint

__all__ = ["AdapterEngine", "LocalEngine", "fingerprint"]

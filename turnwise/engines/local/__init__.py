"""In-process engine in torch for Hugging Face causal models."""

from turnwise.engines.local.engine import LocalEngine
from turnwise.engines.local.weights import fingerprint

__all__ = ["LocalEngine", "fingerprint"]

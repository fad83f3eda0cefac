"""A real engine in torch, for Hugging Face causal models, with no server."""

from turnwise.engine.local.engine import LocalEngine
from turnwise.engine.local.fingerprint import fingerprint

__all__ = ["LocalEngine", "fingerprint"]

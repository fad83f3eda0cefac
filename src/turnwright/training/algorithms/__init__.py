"""Algorithms: from rewards to a loss.

Each is a file that starts with its formula and its source.
"""

from turnwright.training.algorithms.settings import BUILT_IN, resolve_settings
from turnwright.training.loss import Algorithm, AlgorithmSettings, TokenBatch, TokenLoss, clipped

__all__ = [
    "BUILT_IN",
    "Algorithm",
    "AlgorithmSettings",
    "TokenBatch",
    "TokenLoss",
    "clipped",
    "resolve_settings",
]

"""Algorithms: from rewards to a loss. Each is a file that starts with its formula and its source."""

from turnwise.training.algorithms.base import Algorithm, TokenBatch, TokenLoss, clipped
from turnwise.training.algorithms.settings import BUILT_IN, AlgorithmSettings, resolve_settings

__all__ = ["BUILT_IN", "Algorithm", "AlgorithmSettings", "TokenBatch", "TokenLoss", "clipped", "resolve_settings"]

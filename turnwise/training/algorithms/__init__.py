"""Algorithms: from rewards to a loss. Each is a file that starts with its formula and its source."""

from turnwise.training.algorithms.settings import BUILT_IN, resolve_settings
from turnwise.training.loss import Algorithm, AlgorithmSettings, TokenBatch, TokenLoss, clipped

__all__ = ["BUILT_IN", "Algorithm", "AlgorithmSettings", "TokenBatch", "TokenLoss", "clipped", "resolve_settings"]

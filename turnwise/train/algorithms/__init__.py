"""How rewards become a loss; each algorithm is a file that opens with its formula and its source."""

from turnwise.train.algorithms.base import Algorithm, TokenBatch, TokenLoss, clipped
from turnwise.train.algorithms.choose import BUILT_IN, AlgorithmSettings, resolve_settings

__all__ = ["BUILT_IN", "Algorithm", "AlgorithmSettings", "TokenBatch", "TokenLoss", "clipped", "resolve_settings"]

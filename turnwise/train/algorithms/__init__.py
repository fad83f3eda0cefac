"""How rewards become a loss; each algorithm is a file that opens with its formula and its source."""

from turnwise.train.algorithms.base import Algorithm, TokenLoss, Tokens, clipped
from turnwise.train.algorithms.choose import BUILT_IN, Settings, settle

__all__ = ["BUILT_IN", "Algorithm", "Settings", "TokenLoss", "Tokens", "clipped", "settle"]

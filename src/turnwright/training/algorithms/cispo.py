"""CISPO: clip the importance weight, never drop a token.

::

    A_i  = (R_i - mean(R)) / (std(R) + 1e-4)
    L    = 1 / sum_i |y_i| * sum_i sum_t -sg[clip(r_t, 1 - low, 1 + high)] * A_i * logp_t

MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5: every token keeps a gradient, also a rare one
with a large ratio. As in the paper, weights have no lower bound (low = 1) and a tuned upper
bound, here 5 (high = 4).
"""

from turnwright.training.loss import Algorithm, TokenBatch, TokenLoss


def loss(tokens: TokenBatch) -> TokenLoss:
    """Compute REINFORCE with the clipped ratio as a weight."""
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high)
    return TokenLoss(-weight * tokens.advantage * tokens.logp, ratio, weight != ratio)


ALGORITHM = Algorithm("cispo", loss, clip_low=1.0, clip_high=4.0, defining=())

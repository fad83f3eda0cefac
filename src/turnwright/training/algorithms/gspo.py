"""GSPO: group sequence policy optimization, one ratio per trajectory.

::

    A_i  = (R_i - mean(R)) / (std(R) + 1e-4)
    s_i  = exp(1 / |y_i| * sum_t (logp_t - old_t))
    s_t  = sg[s_i] * exp(logp_t - sg[logp_t])                    sg: no gradient through it
    L    = 1 / N * sum_i 1 / |y_i| * sum_t -min(s_t A_i, clip(s_t, 1 - 3e-4, 1 + 4e-4) A_i)

Zheng et al., arXiv 2507.18071, eqs. 5 and 7, in the form of section 4.3 (GSPO-token): its value
and gradient equal those of eq. 5 if all tokens of a trajectory have one advantage. y_i are all
trained tokens of a trajectory, over all turns and branches. They may be in several rows and
passes, so the mean comes from a scored pass of the complete batch before each update. At the
first update of a step, s_i is 1.
"""

import torch

from turnwright.training.loss import Algorithm, TokenBatch, TokenLoss, clipped


def loss(tokens: TokenBatch) -> TokenLoss:
    """Compute the clipped surrogate with the trajectory's ratio; the gradient flows through
    each token's own logprob."""
    return clipped(tokens, torch.exp(tokens.sequence + (tokens.logp - tokens.logp.detach())))


ALGORITHM = Algorithm(
    "gspo",
    loss,
    aggregation="trajectory",
    clip_low=3e-4,
    clip_high=4e-4,
    sequence=True,
    defining=("aggregation",),
)

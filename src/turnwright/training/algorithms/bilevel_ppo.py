"""Bi-level PPO: generalized advantages over turns, then over the tokens of each turn.

::

    d_k  = reward_k + discount * V_{k+1} - V_k                   V_k: before turn k ends
    D_k  = d_k + discount * gae_lambda * D_{k+1}
    D_kt = D_k                                                   t the last token of turn k
    D_kt = token_discount * V_{k,t+1} - V_kt + token_discount * token_lambda * D_{k,t+1}
    A_t  = (D_t - mean(D)) / (std(D) + 1e-4)                     over all tokens of the batch
    L    = 1 / sum_i |y_i| * sum_i sum_t -min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.2) A_t)

VAGEN, arXiv 2510.16907: what a turn is worth is told by the environment's rewards and the values
between turns; the values inside the turn share it among its tokens. Discount and lambda of turns
are Turn-PPO's (0.99 and 0.9), those of tokens 1. KL is a term of the loss.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "bilevel_ppo",
    clipped,
    advantage="gae_bilevel",
    credit="turn",
    discount=0.99,
    gae_lambda=0.9,
    clip_high=0.2,
    defining=("advantage",),
)

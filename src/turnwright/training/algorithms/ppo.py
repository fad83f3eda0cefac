"""PPO: proximal policy optimization with a critic, by token.

::

    d_t  = reward_t - kl * (old_t - ref_t) + token_discount * V_{t+1} - V_t
    D_t  = d_t + token_discount * token_lambda * D_{t+1}
    A_t  = (D_t - mean(D)) / (std(D) + 1e-4)                     over all tokens of the batch
    L    = 1 / sum_i |y_i| * sum_i sum_t -min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.2) A_t)

Schulman et al., arXiv 1707.06347, eq. 7, with generalized advantages (arXiv 1506.02438, eq. 16). A
turn's reward is that of its last token, and the next token of a turn's last one is the first that
the policy samples in the next turn; V after the end is 0. Discount and lambda are 1 here: as others
found for long replies (VAPO, arXiv 2504.05118), smaller ones lose the reward on the
way to a reply's first tokens. A group may have one trajectory. The critic is
`training/trainer/critic.py`.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "ppo",
    clipped,
    advantage="gae",
    credit="turn",
    clip_high=0.2,
    kl_estimator="k1",
    kl_in="reward",
    defining=("advantage",),
)

"""REINFORCE++: PPO's loss with advantages normalized over the batch instead of a critic.

::

    G_t  = reward_i - kl * sum_{s >= t} (old_s - ref_s)
    A_t  = (G_t - mean(G)) / (std(G) + 1e-4)                     over all tokens of the batch
    L    = 1 / sum_i |y_i| * sum_i sum_t -min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.2) A_t)

Hu et al., arXiv 2501.03262: advantages are normalized over the batch, not over the trajectories of
a task, so a group may have one trajectory. KL (k1) is subtracted from the reward of each token.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "reinforce_pp",
    clipped,
    advantage="batch",
    clip_high=0.2,
    kl_estimator="k1",
    kl_in="reward",
    defining=("advantage",),
)

"""REINFORCE++ with baseline: subtract the group's mean, then normalize over the batch.

::

    D_i  = reward_i - mean(reward)                               over the trajectories of a task
    A_i  = (D_i - mean(D)) / (std(D) + 1e-4)                     over all tokens of the batch
    L    = 1 / sum_i |y_i| * sum_i sum_t (-min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i)
                                          + kl * k2_t)

Hu et al., arXiv 2501.03262, the variant with several samples per task: the group mean is the
baseline, the deviation is that of the batch; KL is a term of the loss (k2).
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "reinforce_pp_baseline",
    clipped,
    advantage="group_batch",
    clip_high=0.2,
    kl_estimator="k2",
    defining=("advantage",),
)

"""RLOO: REINFORCE with the mean of the others as the baseline.

::

    R_i  = reward_i - kl * sum_t (old_t - ref_t)
    A_i  = R_i - mean of R_j over the other trajectories of the task
    L    = 1 / (N * fixed_length) * sum_i sum_t -min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i)

Ahmadian et al., "Back to basics", arXiv 2402.14740, eq. 7 (baseline) and section 2 (KL inside the
reward); Kool et al. 2019. The paper uses ``-A_i * sum_t logp_t``, which has the same gradient at
the first update of a step. Later ratios are clipped as in PPO. `fixed_length` scales the sum over
tokens and is not in the paper.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "rloo",
    clipped,
    advantage="rloo",
    aggregation="fixed",
    clip_high=0.2,
    kl_estimator="k1",
    kl_in="reward",
    defining=("advantage",),
)

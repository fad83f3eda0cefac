"""State RLOO: RLOO by turn, against the other episodes that were in the same state.

::

    V_ik = mean of G_j over the other trajectories j of the task that met state s_ik, each from its
           first turn there on
    T_ik = r_ik + discount * (l T_i,k+1 + (1 - l) V_i,k+1)       l = 1 / (1 + how many there are)
    A_ik = T_ik - V_ik
    L    = 1 / (N * fixed_length) * sum_t -min(r_t A_ik, clip(r_t, 1 - 0.2, 1 + 0.2) A_ik)

Where nobody else met a state, l is 1, and the baseline of the turn is RLOO's: the mean of G_jk over
the other trajectories, 0 after their ends.

Ours. Neither V_ik nor which others there are depends on what trajectory i does in the state, so
the policy gradient is unbiased, as that of RLOO (Kool et al. 2019) is; GiGPO and GAGPO have the
trajectory itself in their baselines. What follows the next state is averaged over all returns from
there, its own included, each with the same weight: of unbiased estimates with equal variance, the
one with the least. `gae_lambda` sets another l. With `state = "history"` states are prefixes that
episodes share, and the estimate is that of a tree of rollouts.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "state_rloo",
    clipped,
    advantage="state_rloo",
    credit="turn",
    aggregation="fixed",
    clip_high=0.2,
    kl_estimator="k2",
    defining=("advantage", "aggregation"),
)

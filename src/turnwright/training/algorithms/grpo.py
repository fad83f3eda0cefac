"""GRPO: group relative policy optimization.

::

    A_i  = (R_i - mean(R)) / (std(R) + 1e-4)                     over the G trajectories of a task
    r_t  = exp(logp_t - old_t)
    L    = sum_t w_t * (-min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i) + kl * k3_t)

DeepSeekMath, arXiv 2402.03300, eq. 3 and section 4.1.2. The paper averages over the tokens of each
trajectory first (``aggregation = "trajectory"``) and clips both sides at 0.2. Here, as in most
trainers, each token counts the same and the upper bound is DAPO's.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm("grpo", clipped)

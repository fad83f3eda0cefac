"""MaxRL: the gradient of the likelihood of success instead of that of its probability.

::

    A_i  = (R_i - mean(R)) / mean(R)                             over the G trajectories of a task
    L    = 1 / (N * fixed_length) * sum_i sum_t -min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i)

Tajwar et al., "Maximum likelihood reinforcement learning", arXiv 2602.02710. With rewards 0 and 1,
the mean over G trajectories estimates the gradient of the first G terms of log p = -sum_k
(1 - p)^k / k, where plain policy gradients have the first: a task that succeeds once in G weighs G
times as much as one that always does. A task without a success has no signal. Rewards must not be
negative. With credit by turn, G_ik less the mean of the turn is divided by the mean of the whole.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "maxrl",
    clipped,
    advantage="maxrl",
    aggregation="fixed",
    clip_high=0.2,
    defining=("advantage", "aggregation"),
)

"""Dr. GRPO: GRPO without its bias towards long wrong replies and nearly solved
or nearly hopeless tasks.

::

    A_i  = R_i - mean(R)                                         not divided by the deviation
    L    = 1 / (N * fixed_length) * sum_i sum_t -min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i)

Liu et al., "Understanding R1-Zero-like training", arXiv 2503.20783, section 3.2: no denominator
has the trajectory's length or the group's deviation, so the policy gradient is unbiased (up to
the factor (G - 1) / G).
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "dr_grpo",
    clipped,
    advantage="mean",
    aggregation="fixed",
    clip_high=0.2,
    defining=("advantage", "aggregation"),
)

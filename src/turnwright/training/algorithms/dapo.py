"""DAPO: decoupled clip and dynamic sampling.

::

    R_i  = reward_i + overlong(|y_i|)
    A_i  = (R_i - mean(R)) / (std(R) + 1e-4)
    L    = 1 / sum_i |y_i| * sum_i sum_t -min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.28) A_i)

    overlong(n) = 0                               n <= max - buffer
                  (max - buffer - n) / buffer     in between
                  -1                              n > max

Yu et al., arXiv 2503.14476: the upper bound is higher than the lower (section 3.1), every token
counts the same (3.3), and trajectories near the maximum length lose reward (3.4, eq. 13).
Zero-variance groups are replaced by further tasks before training (dynamic sampling, 3.2), at most
`train.refill` times; those that remain are filtered out. `|y|` counts sampled tokens of all turns;
`max` is `train.overlong_tokens`, by default what the limits let an episode sample. No KL term.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "dapo", clipped, overlong=True, refill=3, defining=("aggregation", "clip_high")
)

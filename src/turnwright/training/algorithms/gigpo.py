"""GiGPO: group in group policy optimization. Episodes of a task are compared as in GRPO, and their
turns once more with those that began in the same state.

::

    A_i  = (R_i - mean(R)) / (std(R) + 1e-4)                     over the G trajectories of a task
    B_ik = (G_ik - mean(G)) / (std(G) + 1e-4)                    over the turns in the state of ik
    A_ik = A_i + step_weight * B_ik                              for all tokens of turn k
    L    = sum_t w_t * -min(r_t A_ik, clip(r_t, 1 - 0.2, 1 + 0.28) A_ik)

G_ik = sum_{l >= k} discount^(l - k) r_il. Feng et al., "Group-in-group policy optimization for LLM
agent training", arXiv 2505.10978, eqs. 3, 6, 7 and 8, with a discount of 0.95 as there. A state
that one turn alone began in adds nothing. States are those of `training/step_groups.py`.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "gigpo",
    clipped,
    advantage="gigpo",
    credit="turn",
    discount=0.95,
    defining=("advantage",),
)

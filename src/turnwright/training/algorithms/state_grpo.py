"""State GRPO: the advantages of State RLOO in the units of GRPO.

::

    D_ik = T_ik - V_ik                                           as in state_rloo.py
    A_ik = D_ik / (s + 1e-4)                                     s^2 = sum_ik D_ik^2 / (K - 1)
    L    = sum_t w_t * -min(r_t A_ik, clip(r_t, 1 - 0.2, 1 + 0.28) A_ik)

K is the number of turns of the task's trajectories. Ours. Divided by their deviation, the turns of
a task that seldom succeeds, or whose episodes differ little, weigh as much as those of any other;
without it such a task is learned last.
"""

from turnwright.training.loss import Algorithm, clipped

ALGORITHM = Algorithm(
    "state_grpo",
    clipped,
    advantage="state_std",
    credit="turn",
    defining=("advantage",),
)

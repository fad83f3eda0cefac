"""GAGPO: generalized advantages whose values are means over equal states, in place of a critic.

::

    V_s  = mean of G_jl over the turns jl of the task's trajectories that began in state s
    d_ik = r_ik + discount * V_{s_i,k+1} - V_{s_ik}              V after the end is 0
    D_ik = d_ik + discount * gae_lambda * D_i,k+1
    A_ik = (D_ik - mean(D)) / (std(D) + 1e-4)                    over all turns of the task
    u_k  = exp(sum of logp_t - old_t over the tokens t of turn k)
    L    = sum_t w_t * -min(u_t A_ik, clip(u_t, 1 - 0.2, 1 + 0.28) A_ik)

Zhu et al., "Generalized advantage grouped policy optimization", arXiv 2605.13217, which gives every
token of a turn the ratio of the turn. Written from its abstract and summaries: the discount (0.95),
the lambda (0.95) and the ratio as a product are ours. A state that one turn alone began in has that
turn's own return as its value, so its turn is credited with nothing: all credit is at turns where
trajectories part.
"""

from turnwright.training.loss import Algorithm, by_turn

ALGORITHM = Algorithm(
    "gagpo",
    by_turn,
    advantage="gagpo",
    credit="turn",
    discount=0.95,
    gae_lambda=0.95,
    turn=True,
    defining=("advantage",),
)

"""Turn-PPO: PPO whose actions are turns.

::

    d_k  = reward_k + discount * V_{k+1} - V_k                   V_k: before turn k begins
    D_k  = d_k + discount * gae_lambda * D_{k+1}
    A_k  = (D_k - mean(D)) / (std(D) + 1e-4)                     over all tokens of the batch
    u_k  = exp(sum of logp_t - old_t over the tokens t of turn k)
    L    = 1 / sum_i |y_i| * sum_k sum_{t in k} -min(u_k A_k, clip(u_k, 1 - 0.2, 1 + 0.2) A_k)

Turn-PPO, arXiv 2512.17008, with its discount of 0.99 and lambda of 0.9 a turn. The critic is
asked once a turn, so it need not know what half a reply is worth. A group may have one trajectory.
KL is a term of the loss.
"""

from turnwright.training.loss import Algorithm, by_turn

ALGORITHM = Algorithm(
    "turn_ppo",
    by_turn,
    advantage="gae_turn",
    credit="turn",
    discount=0.99,
    gae_lambda=0.9,
    clip_high=0.2,
    turn=True,
    defining=("advantage",),
)

"""Turn-PPO (arXiv 2512.17008): does a critic of turns beat a critic of tokens, and GRPO?

    python benchmarks/papers/turn_ppo.py --out DIR [--seeds N] [--worlds W ...] [--table]

The claim: on WebShop and Sokoban, PPO whose actions are turns (gamma 0.99, lambda 0.9) is above PPO
whose actions are tokens, and both are above GRPO. Scaled down: a model of 130 thousand weights
after a warm-up on weak demonstrations, Sokoban 6 x 6 (40 steps) and FrozenLake 4 x 4 (60 steps), 16
groups of 8 a step; replies are of two to four tokens, where the paper's have thoughts, so that a
turn is few tokens and the two critics are nearer to each other than there. The arms of a seed begin
with the same policy, and differ in `train.algorithm` alone; critics have the defaults.

It holds in a world if the 95% interval over seeds of the difference in held-out success after the
last step is above 0; `not shown`, if it has 0 in it. The last line is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arms import Arm
from arms_tables import compare
from worlds import FROZEN_LAKE, SOKOBAN

WORLDS = (SOKOBAN, FROZEN_LAKE)
ARMS = (
    Arm("grpo", {"train.algorithm": "grpo"}),
    Arm("ppo", {"train.algorithm": "ppo"}),
    Arm("turn_ppo", {"train.algorithm": "turn_ppo"}),
)
CLAIMS = [("turn_ppo", "ppo"), ("turn_ppo", "grpo"), ("ppo", "grpo")]


if __name__ == "__main__":
    sys.exit(bool(compare(__doc__, WORLDS, ARMS, CLAIMS)))

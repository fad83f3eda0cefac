"""GiGPO (arXiv 2505.10978): do groups of turns that began in equal states beat whole episodes?

    python benchmarks/papers/step_groups.py --out DIR [--seeds N] [--worlds W ...] [--table]

The claim: over GRPO, at the same number of episodes, GiGPO gains more than 12 points of success on
ALFWorld and more than 9 on WebShop (Qwen2.5 1.5B and 7B). Scaled down: a model of 130 thousand
weights after a warm-up on weak demonstrations, FrozenLake 4 x 4 (60 steps) and Sokoban 6 x 6 (40
steps), 16 groups of 8 a step. Both name their states. The arms of a seed begin with the same
policy, and differ in `train.algorithm` alone. `state_rloo` is ours.

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

WORLDS = (FROZEN_LAKE, SOKOBAN)
ARMS = (
    Arm("grpo", {"train.algorithm": "grpo"}),
    Arm("gigpo", {"train.algorithm": "gigpo"}),
    Arm("state_rloo", {"train.algorithm": "state_rloo"}),
)
CLAIMS = [("gigpo", "grpo"), ("state_rloo", "grpo")]


if __name__ == "__main__":
    sys.exit(bool(compare(__doc__, WORLDS, ARMS, CLAIMS)))

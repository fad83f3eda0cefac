"""RAGEN (arXiv 2504.20073): does multi-turn training collapse, and does its variance filter help?

    python benchmarks/papers/collapse.py --out DIR [--seeds N] [--worlds W ...] [--table]

The claims: trained long enough on a bandit, FrozenLake and Sokoban, plain GRPO and PPO fall into an
"echo trap": rewards within a group cease to differ, entropy falls, and then success does; training
only the groups whose rewards vary most (`train.keep_groups = 0.25`) delays or avoids it. Scaled
down: GRPO alone, a model of 130 thousand weights after a warm-up on weak demonstrations, 16 groups
of 8 a step, four updates a step, no KL term, no entropy bonus, and a constant learning rate of
three times the recipe's: with the recipe's own, FrozenLake with seed 100 ended in windows without
variance at its peak, and with three times as much it fell. The arm `evidence` is not the paper's: a
learning rate scaled by the agreement of gradients, which `turnwright init` writes.

Levels are success in training episodes, or for the bandit the mean reward over that of the better
arm, and means of ten steps. `peak` is the highest, `end` the last. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arms import Arm, Mean, Rows, arguments, play_grid, rows_of
from arms_tables import cpu, percent, print_arms
from bandit import CHANCE
from worlds import BANDIT, FROZEN_LAKE, SOKOBAN

PLAIN = {"train.schedule": "constant", "train.minibatches": 4}
WORLDS = (
    replace(BANDIT, changes={"train.lr": 3e-3}),
    replace(FROZEN_LAKE, steps=200, changes=dict(FROZEN_LAKE.changes) | {"train.lr": 3e-3}),
    replace(SOKOBAN, steps=60, changes={"train.lr": 1.8e-3}),
)
ARMS = (
    Arm("plain", PLAIN),
    Arm("filter", PLAIN | {"train.keep_groups": 0.25}),
    Arm("evidence", PLAIN | {"train.gradient_signal_steps": 20}),
)
WINDOW = 10
FALL = 0.1
"""Loss of level after the peak that is a collapse."""
TIED = 0.9
"""Share of groups without signal that is an end of variance."""


def levels(row: Mapping[str, Any]) -> list[float]:
    """Return the level of each window of ten steps."""
    is_bandit = row["world"] == BANDIT.name
    values = row["curve"]["reward" if is_bandit else "success"]
    scale = CHANCE if is_bandit else 1.0
    return [value / scale for value in windows(values)]


def windows(values: Sequence[float | None]) -> list[float]:
    """Return the mean of each ten steps; what a step did not have is 0."""
    means = []
    for first in range(0, len(values) - WINDOW + 1, WINDOW):
        means.append(statistics.fmean(value or 0.0 for value in values[first : first + WINDOW]))
    return means


def end(row: Mapping[str, Any]) -> float:
    """Return the level of the last window."""
    return levels(row)[-1]


def fall(row: Mapping[str, Any]) -> float:
    """Return how far the last window is below the best."""
    return max(levels(row)) - end(row)


def entropy_left(row: Mapping[str, Any]) -> float:
    """Return the entropy of the last window over that of the first."""
    entropies = windows(row["curve"]["entropy"])
    return entropies[-1] / entropies[0]


def tied(row: Mapping[str, Any]) -> float:
    """Return the share of groups without signal in the last window."""
    return windows(row["curve"]["groups_tied"])[-1]


COLUMNS = {
    "first, %": percent(lambda row: levels(row)[0]),
    "peak, %": percent(lambda row: max(levels(row))),
    "end, %": percent(end),
    "entropy left, %": percent(entropy_left),
    "groups tied, %": percent(tied),
    "CPU s": cpu,
}


def verdicts(rows: Rows) -> dict[str, Any]:
    """Return, for each world, what became of the claims."""
    found = {}
    for world in WORLDS:
        plain = rows.by_seed(world.name, "plain")
        if not plain:
            continue
        entry: dict[str, Any] = {
            "seeds": len(plain),
            "variance_ends": sum(tied(row) >= TIED for row in plain),
            "entropy_falls_to_a_tenth": sum(entropy_left(row) <= 0.1 for row in plain),
            "level_falls": sum(fall(row) > FALL for row in plain),
        }
        for arm in ("filter", "evidence"):
            differences = rows.pairs(world.name, arm, "plain", end)
            if differences:
                mean = Mean.of(differences)
                entry[f"{arm}_over_plain"] = {"end": str(mean), "verdict": mean.verdict}
                falls = [fall(row) > FALL for row in rows.by_seed(world.name, arm)]
                entry[f"{arm}_level_falls"] = sum(falls)
        found[world.name] = entry
    return found


def main() -> int:
    """Play and compare; return how many runs failed."""
    args = arguments(__doc__)
    failed = play_grid(WORLDS, ARMS, args)
    rows = rows_of(WORLDS, ARMS, args.out)
    print_arms(rows, WORLDS, ARMS, COLUMNS)
    print(json.dumps(verdicts(rows)))
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))

"""Which algorithm `turnwright init` should write: small tasks of `examples/`, each reinforced by
several from the same weak policy.

    python benchmarks/first_algorithm.py --out DIR [--seeds N] [--worlds TASK ...] [--table]

The recipe is the one that `init` writes, apart from the keys of an arm, and ends a run when 97% of
a step's episodes succeed. The tasks are text, of two to eight turns, and none is a world of
`credit.py`. None names its states: a state is all that was read, or the last observation (`_seen`).
Arms may be chosen by `--arms`. The last line is JSON: by arm, tasks and seeds with a run, the
geometric mean over them of its episodes over those of GRPO, and the least and the mean success
after.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arms import Arm, Rows, World, arguments, held_out, play_grid, rows_of
from arms_tables import before, cpu, percent, print_arms
from first_try import recipe_of

TASKS = (
    "sort_swaps",
    "stack_machine",
    "unit_conversion",
    "file_system",
    "battleship",
    "haggling",
    "text_edit",
)
SEEN = {"train.state": "observation"}
ARMS = (
    Arm("grpo", {"train.algorithm": "grpo"}),
    Arm("gagpo", {"train.algorithm": "gagpo"}),
    Arm("gagpo_seen", {"train.algorithm": "gagpo"} | SEEN),
    Arm("gigpo", {"train.algorithm": "gigpo"}),
    Arm("gigpo_seen", {"train.algorithm": "gigpo"} | SEEN),
    Arm("state_grpo", {"train.algorithm": "state_grpo"}),
    Arm("state_grpo_seen", {"train.algorithm": "state_grpo"} | SEEN),
    Arm("turn_ppo", {"train.algorithm": "turn_ppo"}),
)


def worlds_in(folder: Path) -> list[World]:
    """Return the tasks, with the recipes that `init` writes into a folder."""
    worlds = []
    for name in TASKS:
        recipe = folder / name / "recipe.toml"
        if not recipe.exists():
            folder.mkdir(parents=True, exist_ok=True)
            recipe = recipe_of(name, folder)
        worlds.append(World(name=name, recipe=recipe))
    return worlds


def steps_of(row: Mapping[str, Any]) -> int:
    """Return the steps that a run took."""
    return len(row["curve"]["success"])


def summary_of(rows: Rows) -> dict[str, Any]:
    """Return what each arm came to, over the tasks and seeds that GRPO has too."""
    found = {}
    for arm in ARMS:
        ratios, afters = [], []
        for task in TASKS:
            references = rows.of(task, "grpo")
            for seed, row in rows.of(task, arm.name).items():
                if seed in references:
                    ratios.append(math.log(steps_of(row) / steps_of(references[seed])))
                    afters.append(held_out(row))
        if ratios:
            found[arm.name] = {
                "runs": len(ratios),
                "episodes_vs_grpo": round(math.exp(statistics.fmean(ratios)), 3),
                "after_min": min(afters),
                "after_mean": round(statistics.fmean(afters), 4),
            }
    return found


COLUMNS = {
    "before, %": percent(before),
    "after, %": percent(held_out),
    "steps": lambda row: str(steps_of(row)),
    "CPU s": cpu,
}


def main() -> int:
    """Play and compare; return how many runs failed."""
    args = arguments(__doc__)
    worlds = worlds_in(args.out / "recipes")
    failed = play_grid(worlds, ARMS, args)
    rows = rows_of(worlds, ARMS, args.out)
    print_arms(rows, worlds, ARMS, COLUMNS)
    print(json.dumps(summary_of(rows)))
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))

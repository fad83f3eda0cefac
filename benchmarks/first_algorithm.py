"""Which algorithm `turnwright init` should write: small tasks of `examples/`, each reinforced by
several from the same weak policy.

    python benchmarks/first_algorithm.py --out DIR [--seeds N] [--worlds TASK ...] [--table]

The recipe is the one that `init` writes, apart from the keys of an arm, and ends a run when 97% of
a step's episodes succeed. The tasks are text, of two to eight turns, and none is a world of
`credit.py`. None names its states: a state is all that was read, or the last observation (`_seen`).
Arms may be chosen by `--arms`. The last line is JSON: by arm, tasks and seeds with a run, the
geometric mean over them of its episodes over those of GRPO, and the least success after.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from arms import Arm, Rows, World, arguments, held_out, percent, play_grid, rows_of
from credit_tables import markdown
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
STEPS = 180
"""What `init` writes."""


def worlds_in(folder: Path) -> list[World]:
    """Return the tasks, with the recipes that `init` writes into a folder."""
    worlds = []
    for name in TASKS:
        recipe = folder / name / "recipe.toml"
        if not recipe.exists():
            folder.mkdir(parents=True, exist_ok=True)
            recipe = recipe_of(name, folder)
        worlds.append(World(name=name, recipe=recipe, steps=STEPS))
    return worlds


def steps_of(row: dict[str, Any]) -> int:
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


def print_table(rows: Rows) -> None:
    """Print steps and success of each task and arm."""
    lines = []
    for task in TASKS:
        for arm in ARMS:
            of_arm = [row for _, row in sorted(rows.of(task, arm.name).items())]
            if of_arm:
                lines.append([
                    f"`{task}`",
                    f"`{arm.name}`",
                    percent([row["before"] for row in of_arm]),
                    percent([held_out(row) for row in of_arm]),
                    ", ".join(str(steps_of(row)) for row in of_arm),
                    ", ".join(f"{row['cpu_s']:.0f}" for row in of_arm),
                ])  # fmt: skip
    header = ["task", "arm", "before, % by seed", "after", "steps", "CPU s"]
    print(markdown(header, lines))


def main() -> int:
    """Play and compare; return how many runs failed."""
    args = arguments(__doc__)
    worlds = worlds_in(args.out / "recipes")
    failed = play_grid(worlds, ARMS, args)
    rows = rows_of(worlds, ARMS, args.out)
    print_table(rows)
    print()
    print(json.dumps(summary_of(rows)))
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))

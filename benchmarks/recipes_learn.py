"""Do the recipes learn? JSON tool calls, and a judge one in ten of whose calls fails: held-out
success before and after.

    python benchmarks/recipes_learn.py [--seeds 0 1] [--recipes json_tools judge]

Exits with 1 where success does not rise by 0.2 with disjoint 95% intervals. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RISE = 0.2


def train(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train a recipe in a process of its own; its summary, and how many
    verdicts failed in training."""
    out = folder / f"{recipe}-{seed}"
    command = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "train",
        str(ROOT / "recipes" / f"{recipe}.toml"),
    ]
    command += ["--seed", str(seed), "--out", str(out), "--display", "none"]
    subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    failed = sum(row.get("reward_counts", {}).get("judge_failed", 0) for row in rows)
    return {**json.loads((out / "summary.json").read_text()), "judge_failed": int(failed)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--recipes", nargs="+", default=["json_tools", "judge"])
    given = parser.parse_args()
    print(
        "| recipe | seed | success before, % | after, % | greedy before | after | turns before | "
        "after | no verdict | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    found, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        for recipe in given.recipes:
            for seed in given.seeds:
                row = train(recipe, seed, Path(folder))
                before, after = row["success_before_ci"], row["success_after_ci"]
                learned = (
                    row["success_after"] - row["success_before"] >= RISE and after[0] > before[1]
                )
                good = good and learned

                def percent(name: str, row: dict[str, Any] = row) -> str:
                    low, high = row[f"{name}_ci"]
                    return f"{100 * row[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

                greedy = f"{100 * row['greedy_before']:.1f} | {100 * row['greedy_after']:.1f}"
                turns = f"{row['turns_before']:.2f} | {row['turns_after']:.2f}"
                print(
                    f"| {recipe} | {seed} | {percent('success_before')} | "
                    f"{percent('success_after')} | {greedy} | {turns} | {row['judge_failed']} | "
                    f"{row['cpu_s']:.0f} |",
                    flush=True,
                )
                found.append(
                    {"recipe": recipe, "seed": seed, "learned": learned, "cpu_s": row["cpu_s"]}
                )
    print(json.dumps({"learned": good, "runs": found}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

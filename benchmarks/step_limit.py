"""What the bound on a step saves where the learning rate is too high.

    python benchmarks/step_limit.py [--lr LR] [--seeds N ...] [--only NAME ...] [--jobs N]

Small tasks of `examples/` by the recipe of `turnwright init`, for 40 steps at four times its
learning rate, with the bound of `train.gradient_signal_steps` on a step's divergence and without
it. `lost` is the largest loss of the success of a step's episodes within three steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
STEPS = 40


def child(recipe: str, seed: str, out: str, lr: str, bounded: str) -> None:
    """Train one task and print its row."""
    from first_try import train, wasted

    from turnwright.training.trainer.trainer import Trainer

    if not int(bounded):

        @contextmanager
        def unbounded(self: Trainer, *args: Any) -> Iterator[None]:
            yield

        Trainer._limited = unbounded  # type: ignore[method-assign, assignment]

    settings = (f"train.lr={lr}", f"train.steps={STEPS}", "train.stop_success=none")
    summary = train(Path(recipe), int(seed), Path(out), settings, shuffled=False)
    rows = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if row["phase"] == "train"]
    row = {
        "before": summary.get("success_before"),
        "after": steps[-1]["success"],
        "lost": wasted(steps)["lost"],
        "shortened": sum(row.get("step_share", 1.0) < 1.0 for row in steps),
    }
    print(json.dumps(row))


def run_one(name: str, seed: int, lr: float, bounded: bool) -> dict[str, Any]:
    """Train a task in a process of its own; return its row."""
    from first_try import recipe_of

    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(name, Path(folder))
        words = [
            sys.executable,
            __file__,
            "--child",
            str(recipe),
            str(seed),
            f"{folder}/run",
            str(lr),
            str(int(bounded)),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return {
        "task": name,
        "seed": seed,
        "bounded": bounded,
        **json.loads(done.stdout.splitlines()[-1]),
    }


def main() -> None:
    """Run all and print a table; the last line is JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seeds", nargs="*", type=int, default=(0, 1))
    parser.add_argument("--only", nargs="*", default=("text_edit", "file_system", "mastermind"))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()

    print(
        "| task | seed | bound | before | after | lost | shortened steps "
        "|\n|---|---|---|---|---|---|---|"
    )
    work = [
        (name, seed, args.lr, bounded)
        for name in args.only
        for seed in args.seeds
        for bounded in (False, True)
    ]
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda one: run_one(*one), work):
            rows.append(row)
            shares = " | ".join(f"{100 * row[key]:.0f}" for key in ("before", "after", "lost"))
            bound = "yes" if row["bounded"] else "no"
            print(
                f"| {row['task']} | {row['seed']} | {bound} | {shares} | {row['shortened']} |",
                flush=True,
            )

    worst = {
        bounded: max(row["lost"] for row in rows if row["bounded"] == bounded)
        for bounded in (False, True)
    }
    least = {
        bounded: min(row["after"] for row in rows if row["bounded"] == bounded)
        for bounded in (False, True)
    }
    figures = {
        "lost_without": worst[False],
        "lost_with": worst[True],
        "least_after_without": least[False],
        "least_after_with": least[True],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

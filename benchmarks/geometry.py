"""Six curves of the tiny geometry recipes: reward, repetition, reply length, throughput and times.

    python benchmarks/geometry.py [--quick] [--only short long] [--seeds 0 1] [--runs DIR]

Each recipe is trained twice from the same warm-up: with its rewards, and with rewards shuffled
within each group (the control). The table has the means of the first and the last 5 steps. The exit
status is 1 where a run takes 300 s of CPU, held-out episodes take under 2 turns (long: 7) before
reinforcement, the reward does not rise by 0.2 with disjoint intervals of held-out success,
repetition does not halve, replies do not shorten by a fifth, or a control moves: by 0.1 of reward,
or a tenth of the repetition or the reply length. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {"short": "geometry_tiny_short", "long": "geometry_tiny_long"}
MIN_TURNS = {"short": 2.0, "long": 7.0}  # of an episode before reinforcement, on held-out tasks
MAX_CPU_S = 300.0
RISE, REPETITION, LENGTH = 0.2, 0.5, 0.8
REWARD_DRIFT, DRIFT = 0.1, 0.1
STEPS = 5  # at each end of a curve
CURVES = {
    "reward": "{:.3f}",
    "repetition": "{:.3f}",
    "reply_tokens.mean": "{:.1f}",
    "sampled_tokens": "{:,.0f}",
    "tokens_per_s": "{:,.0f}",
    "train_s": "{:.2f}",
    "rollout_s": "{:.2f}",
    "rollout_over_train": "{:.2f}",
    "turns": "{:.1f}",
}
HEADER = (
    "| recipe | seed | rewards | reward | repetition | reply, ids | sampled, ids | ids/s "
    "| train, s | rollout, s | rollout / train | turns | held-out, % | blind, % | CPU s |"
)


def train(recipe: str, seed: int, shuffled: bool, out: Path) -> dict[str, Any]:
    """Train a recipe in a process of its own, unless `out` has the finished run; return figures."""
    words = [sys.executable, "-m", "turnwright", "train", str(ROOT / "recipes" / f"{recipe}.toml")]
    words += ["--seed", str(seed), "--out", str(out), "--display", "none"]
    if shuffled:
        # The same name gives the same tasks and draws, so both runs have the same warm-up.
        control = str(ROOT / "recipes" / "geometry_tiny.py") + ":Shuffled"
        words += ["--env.use", control, "--env.name", "Figures"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if not (out / "summary.json").exists():
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stderr}")

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "train"]
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    ends = {name: (mean(steps[:STEPS], name), mean(steps[-STEPS:], name)) for name in CURVES}
    return {"shuffled": shuffled, "seed": seed, "curves": ends, "summary": summary}


def mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the steps that have it."""
    key, _, inner = name.partition(".")
    values = [step[key][inner] if inner else step.get(key) for step in steps]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def failures(name: str, run: Mapping[str, Any]) -> list[str]:
    """Return the expectations that a run does not meet."""
    summary, curves = run["summary"], run["curves"]
    reward, repetition, length = (curves[c] for c in ("reward", "repetition", "reply_tokens.mean"))
    checks = {
        f"{MAX_CPU_S:.0f} s of CPU": summary["cpu_s"] < MAX_CPU_S,
        "turns before": summary["turns_before"] >= MIN_TURNS[name],
    }
    if run["shuffled"]:
        checks["reward moved"] = abs(reward[1] - reward[0]) <= REWARD_DRIFT
        checks["repetition moved"] = abs(repetition[1] / repetition[0] - 1) <= DRIFT
        checks["reply length moved"] = abs(length[1] / length[0] - 1) <= DRIFT
    else:
        apart = summary["success_after_ci"][0] > summary["success_before_ci"][1]
        checks["reward"] = reward[1] - reward[0] >= RISE
        checks["held-out success"] = apart
        checks["repetition"] = repetition[1] <= REPETITION * repetition[0]
        checks["reply length"] = length[1] <= LENGTH * length[0]
    return [check for check, holds in checks.items() if not holds]


def line(name: str, run: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    cells = [name, str(run["seed"]), "shuffled" if run["shuffled"] else "its own"]
    for curve, form in CURVES.items():
        ends = ["-" if value is None else form.format(value) for value in run["curves"][curve]]
        cells.append(", ".join(ends))
    summary = run["summary"]
    held_out = [f"{100 * summary[f'success_{when}']:.1f}" for when in ("before", "after", "blind")]
    cells += [", ".join(held_out[:2]), held_out[2], f"{summary['cpu_s']:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Train all, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seed 0 alone")
    parser.add_argument("--only", nargs="+", choices=tuple(RECIPES), default=tuple(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--runs", type=Path, help="directory of the runs, finished ones included")
    args = parser.parse_args()

    runs: list[dict[str, Any]] = []
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            for seed in [0] if args.quick else args.seeds:
                for shuffled in (False, True):
                    out = (args.runs or Path(folder)) / f"{name}-{seed}{'-shuffled' * shuffled}"
                    run = train(RECIPES[name], seed, shuffled, out)
                    run |= {"recipe": name, "failed": failures(name, run)}
                    runs.append(run)
                    print(line(name, run), flush=True)

    keys = ("recipe", "seed", "shuffled", "curves", "failed")
    kept = [{key: run[key] for key in keys} | {"cpu_s": run["summary"]["cpu_s"]} for run in runs]
    holds = not any(run["failed"] for run in runs)
    print(json.dumps({"holds": holds, "runs": kept}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

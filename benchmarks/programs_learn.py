"""Do programs learn through the recording proxy? Held-out success before and after,
and with shuffled rewards.

    python benchmarks/programs_learn.py [--recipes react_hop bash_agent] [--seeds 0 1 2]
        [--jobs 1] [--without-control]

Needs openai, for react_hop, and the extra sandbox, for bash_agent. The control begins where
the warm-up of the same seed ended; its rewards are shuffled among the episodes of each
step. With `--without-signal` the control's learning rate is not scaled by what the episodes
agree on. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
RISE, DRIFT = 0.3, 0.1
NO_SIGNAL = "train.gradient_signal_steps=0"


def run(recipe: str, seed: int, out: str, shuffled: bool, *overrides: str) -> dict[str, Any]:
    """Train in a process of its own; return the summary."""
    words = [
        sys.executable,
        __file__,
        "--child",
        recipe,
        str(seed),
        out,
        str(int(shuffled)),
        *overrides,
    ]
    done = subprocess.run(
        words,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        {"error": done.stderr[-300:]}
        if done.returncode
        else json.loads(done.stdout.splitlines()[-1])
    )


def line(recipe: str, seed: int, kind: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "error" in row:
        return f"| {recipe}{kind} | {seed} | {row['error']} |"
    shares = [
        f"{100 * row[name]:.1f} [{', '.join(f'{100 * one:.1f}' for one in row[f'{name}_ci'])}]"
        for name in ("success_before", "success_after")
    ]
    turns = f"{row['turns_before']:.2f} | {row['turns_after']:.2f}"
    return (
        f"| {recipe}{kind} | {seed} | {' | '.join(shares)} | {turns} | {row['cpu_s']:.0f} | "
        f"{row['lr_sum']:.4f} |"
    )


def child(recipe: str, seed: str, out: str, shuffled: str, *overrides: str) -> None:
    """Train one run and print its summary."""
    from first_try import train

    path = ROOT / "recipes" / f"{recipe}.toml"
    summary = train(path, int(seed), Path(out), overrides, bool(int(shuffled)))
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    summary["lr_sum"] = sum(row["lr"] for row in rows if row["phase"] == "train")
    print(json.dumps(summary))


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=["react_hop", "bash_agent"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--without-control", action="store_true")
    parser.add_argument("--without-signal", action="store_true")
    args = parser.parse_args()
    print(
        "| recipe | seed | success before, % | after, % | turns before | after | CPU s | sum of "
        "learning rates |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rises: dict[str, list[float]] = {}
    drifts: list[float] = []

    def both(recipe: str, seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            row = run(recipe, seed, f"{folder}/run", False)
            print(line(recipe, seed, "", row), flush=True)
            rises.setdefault(recipe, []).append(
                row["success_after"] - row["success_before"] if "error" not in row else -1.0
            )
            if args.without_control:
                return
            given = [NO_SIGNAL] if args.without_signal else []
            row = run(recipe, seed, f"{folder}/run-warm", True, *given)
            print(line(recipe, seed, " shuffled", row), flush=True)
            drifts.append(
                row["success_after"] - row["success_before"] if "error" not in row else 1.0
            )

    with ThreadPoolExecutor(args.jobs) as pool:
        for done in [
            pool.submit(both, recipe, seed) for recipe in args.recipes for seed in args.seeds
        ]:
            done.result()
    found = {
        "least_rise": {recipe: round(min(values), 3) for recipe, values in rises.items()},
        "learned": all(min(values) >= RISE for values in rises.values()),
        "control_drift": round(max(map(abs, drifts)), 3) if drifts else None,
        "control_flat": max(drifts) <= DRIFT if drifts else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

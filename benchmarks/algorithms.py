"""The quickstart's task trained by each algorithm: held-out success and time.

For one seed all algorithms reinforce the same weights: those of the warm-up of the seed's first
run. The recipe is recipes/quickstart.toml and nothing but `train.algorithm` differs. Runs go one
after the other, each in a process of its own.

    python benchmarks/algorithms.py                       # every algorithm, three seeds
    python benchmarks/algorithms.py --seeds 1 --only gspo

The last line is JSON: by algorithm, a row for each seed with success before and after (sampled, 95%
interval), greedy success after, and seconds of CPU of the reinforcement steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from turnwright.config.names import ALGORITHMS

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.toml"


def trained(
    algorithm: str, seed: int, folder: Path, steps: int | None, warmed: Path | None
) -> dict[str, object]:
    """Train once and return what the run says of itself.

    Args:
        warmed: a model that was warmed up; none warms one up.
    """
    out = folder / f"{algorithm}-{seed}"
    command = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "train",
        str(RECIPE),
        "--out",
        str(out),
        "--seed",
        str(seed),
    ]
    command += ["--train.algorithm", algorithm, "--display", "none", "--checkpoint.keep", "99"]
    command += [] if steps is None else ["--train.steps", str(steps)]
    command += [] if warmed is None else ["--model.path", str(warmed), "--warmup.demos", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{algorithm}, seed {seed}: {done.stderr.strip() or done.stdout.strip()}")
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    names = ("success_before", "success_after", "success_after_ci", "greedy_after", "turns_after")
    rows = [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    began = max(row["cpu_s"] for row in rows if row.get("name") == "before")
    spent = max(row["cpu_s"] for row in rows if row["phase"] == "train") - began
    return {"seed": seed} | {name: summary[name] for name in names} | {"cpu_s": spent}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", choices=ALGORITHMS, help="an algorithm; may be given again"
    )
    parser.add_argument("--steps", type=int, help="reinforcement steps, in place of the recipe's")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, object]]] = {}
    print(
        "| algorithm | seed | success before | success after | greedy after | turns | CPU of "
        "reinforcement |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            warmed = None
            for name in args.only or ALGORITHMS:
                row = trained(name, seed, Path(folder), args.steps, warmed)
                warmed = warmed or Path(folder) / f"{name}-{seed}" / "checkpoints" / "warmed"
                rows.setdefault(name, []).append(row)
                low, high = row["success_after_ci"]  # type: ignore[misc]
                print(
                    f"| `{name}` | {seed} | "
                    f"{100 * row['success_before']:.1f}% "  # type: ignore[operator]
                    f"| {100 * row['success_after']:.1f}% "
                    f"[{100 * low:.1f}, {100 * high:.1f}] "  # type: ignore[operator]
                    f"| {100 * row['greedy_after']:.0f}% | {row['turns_after']:.2f} | "
                    f"{row['cpu_s']:.0f} s |",  # type: ignore[operator]
                    flush=True,
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

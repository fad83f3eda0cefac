"""Success and time of the quickstart's task by schedule, with the engine in a process of its own,
slowed as a large model's is.

`turnwright serve` samples, 50 ms a pass; the run trains beside it. Per seed all modes reinforce the
same weights, those of the warm-up of a run in one process. `wall_over_sync` compares the seconds
from the first evaluation's end to the last step's.

    python benchmarks/overlap.py                                     # three seeds, sync, one_step_off and async: about an hour
    python benchmarks/overlap.py --seeds 1 --modes sync async_2      # other words are overrides of the recipe
    python benchmarks/overlap.py --recipe recipes/quickstart_vlm.toml --token-s 0.01      # images, at the recipe's size

The last line is JSON: by mode a row for each seed: success before and after (sampled, 95%
interval), `wall_s` of reinforcement, `wall_over_sync`, and the mean and largest lag.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from updates import SLOWED

ROOT = Path(__file__).parents[1]
MODES = {"sync": [], "one_step_off": ["--schedule.mode", "one_step_off"]}
MODES |= {
    f"async_{n}": ["--schedule.mode", "async", "--schedule.staleness", str(n)] for n in (1, 2, 4)
}
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")
SIZE = {QUICKSTART: ["--model.heads", "2", "--model.kv-heads", "2"]}


def train(recipe: str, out: Path, words: list[str]) -> None:
    """Train in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "train",
        recipe,
        "--out",
        str(out),
        "--display",
        "none",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-2000:]}")


def reinforced(
    mode: str, seed: int, warmed: Path, folder: Path, args: argparse.Namespace, words: list[str]
) -> dict[str, Any]:
    """Reinforce the warmed-up model with a server of its own; return what came of it."""
    out = folder / f"{mode}-{seed}"
    command = [
        sys.executable,
        "-c",
        SLOWED,
        str(args.token_s),
        "serve",
        str(warmed),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            given = [
                "--seed",
                str(seed),
                "--model.path",
                str(warmed),
                "--warmup.demos",
                "0",
                "--engine.kind",
                "auto",
            ]
            given += ["--engine.urls", json.dumps([url]), *MODES[mode]]
            train(
                args.recipe,
                out,
                [
                    *given,
                    *(["--train.correction", args.correction] if mode != "sync" else []),
                    *words,
                ],
            )
        finally:
            server.terminate()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "train"]
    began = max((row["time_s"] for row in rows if row.get("name") == "before"), default=0.0)
    summary = json.loads((out / "summary.json").read_text())
    names = ("success_before", "success_after", "success_after_ci", "greedy_after")
    lags = [row.get("lag_mean", 0.0) for row in steps]
    found = {
        "seed": seed,
        "wall_s": round(steps[-1]["time_s"] - began, 1),
        "lag_mean": statistics.mean(lags),
    }
    return (
        found
        | {"lag_max": max(row.get("lag_max", 0) for row in steps)}
        | {name: summary[name] for name in names}
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--modes", nargs="*", choices=MODES, default=["sync", "one_step_off", "async_2"]
    )
    parser.add_argument("--correction", default="tis")
    parser.add_argument(
        "--token-s",
        type=float,
        default=0.05,
        help="seconds by which each pass of the engine is slowed",
    )
    parser.add_argument(
        "--warm", nargs="*", default=[], help="overrides of the warm-up, as warmup.steps=50"
    )
    parser.add_argument("--recipe", default=QUICKSTART)
    args, words = parser.parse_known_args()
    args.warm = [f"--{word}" for word in args.warm]
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    print(
        "| mode | seed | success before | success after | wall s | over sync | lag mean / max "
        "|\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(args.seeds):
            warm = folder / f"warm-{seed}"
            size = SIZE.get(args.recipe, [])
            given = [
                *words,
                *args.warm,
                "--seed",
                str(seed),
                "--checkpoint.keep",
                "99",
                "--eval.greedy",
                "false",
                *size,
            ]
            train(args.recipe, warm, given)
            warmed = warm / "checkpoints" / "warmed"
            for mode in args.modes:
                row = reinforced(mode, seed, warmed, folder, args, words)
                found[mode].append(row)
                sync = found.get("sync") or [row]
                row["wall_over_sync"] = round(row["wall_s"] / sync[-1]["wall_s"], 2)
                low, high = (100 * bound for bound in row["success_after_ci"])
                print(
                    f"| `{mode}` | {seed} | {100 * row['success_before']:.1f}% | "
                    f"{100 * row['success_after']:.1f}% [{low:.1f}, {high:.1f}] | {row['wall_s']} "
                    f"| {row['wall_over_sync']} | {row['lag_mean']:.2f} / {row['lag_max']:g} |",
                    flush=True,
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What faulty trackers cost training: its CPU time beside a run without, and
that it trained the same.

    python benchmarks/trackers.py [--runs 7]

Runs of the same seed alternate, without a tracker and with one that hangs, raises, is slow (a
second a row) or finds its disk full (the kernel's /dev/full). Counted is the CPU time of the
training process from its first row to its last; the trackers' own processes are not, and neither is
the import of torch. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import turnwright as tw
from turnwright import trackers

FAULTY = Path(__file__).resolve().parents[1] / "tests" / "viewer" / "faulty_trackers.py"
KINDS = ("none", "Hangs", "Raises", "Slow", "Full")


def once(kind: str, out: Path, steps: int) -> tuple[float, float, list[float]]:
    """CPU seconds, wall seconds and the rewards of one run."""
    world = tw.resolve_env("hop")
    track = {} if kind == "none" else {"track": {"to": [f"{FAULTY}:{kind}"]}}
    began = time.process_time(), time.monotonic()
    tw.train(
        model=tw.tiny(hidden=32, heads=2, kv_heads=1, layers=2),
        env=world.factory,
        out=out,
        display="none",
        rollout={"groups": 8, "group_size": 8},
        warmup={"demos": 64, "steps": 10, "gate_every": 10, "gate_success": 0.0, "gate_tasks": 8},
        train={"steps": steps},
        eval={"tasks": 8},
        **track,
    )
    spent = time.process_time() - began[0], time.monotonic() - began[1]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return *spent, [row["reward"] for row in rows if row["phase"] == "train"]


def main() -> None:
    """Run, and print medians."""
    parser = argparse.ArgumentParser(description="what faulty trackers cost training")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trackers.PATIENCE_S = 0.5
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rewards = set()
    with tempfile.TemporaryDirectory() as name:
        once("none", Path(name) / "first", args.steps)  # what is compiled and cached once
        for number in range(args.runs):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                spent, _, found = once(kind, Path(name) / f"{kind}{number}", args.steps)
                cpu[kind].append(spent)
                rewards.add(tuple(found))
    medians = {kind: statistics.median(values) for kind, values in cpu.items()}
    for kind, value in medians.items():
        low, high = min(cpu[kind]), max(cpu[kind])
        print(
            f"{kind:8} {value:.3f} s of CPU, {100 * (value / medians['none'] - 1):+.2f}% "
            f"({low:.3f} to {high:.3f})"
        )
    over = {
        kind: round(value / medians["none"] - 1, 4)
        for kind, value in medians.items()
        if kind != "none"
    }
    print(
        json.dumps(
            {
                "runs": args.runs,
                "cpu_s": {k: round(v, 3) for k, v in medians.items()},
                "over": over,
                "same": len(rewards) == 1,
            }
        )
    )


if __name__ == "__main__":
    main()

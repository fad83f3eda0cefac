"""Does a curriculum find the tasks that can be learned? Hop with four of five training tasks
mislabeled, at equal episodes.

    python benchmarks/curriculum.py                 # three seeds; 6 minutes on two cores
    python benchmarks/curriculum.py --kills 20      # and a run that is killed 20 times

`held_out_*` is the success on held-out tasks, whose answers are right: tasks drawn by `window`,
`uniform`ly, and `permuted`, by the statistics of another task each. The warm-up is the same for all
arms of a seed. `draws_after_kill_equal` compares the episodes of a killed run with those of one
that ran undisturbed, by step, task, sample and id. Last line JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from turnwright.envs.builtin import Hop  # noqa: E402
from turnwright.envs.resolve import load_object  # noqa: E402
from turnwright.training.samplers import Window  # noqa: E402

HERE = Path(__file__).resolve()
TASKS = f"{ROOT / 'recipes' / 'noisy_hop.py'}:tasks"
STEPS = 40
WARMED = """\
[model]
heads = 4
kv_heads = 4

[[env]]
use = "hop"

[limits]
turns = 6
turn_tokens = 32

[warmup]
demos = 4000
steps = 500
gate_success = 0.22
gate_every = 50
gate_tasks = 256

[train]
batching = "rows"
lr = 2e-3
gradient_signal_steps = 20

[eval]
greedy = false
"""


class Permuted(Window):
    """`window` on the statistics of another task each, fixed by lot."""

    def weights(self, keys: Sequence[str]) -> list[float]:
        """As `TaskSampler.weights`."""
        others = random.Random("permuted").sample(list(keys), len(keys))
        return super().weights(others)


SAMPLERS = {"window": "window", "uniform": "uniform", "permuted": f"{HERE}:Permuted"}


def run(*words: object) -> float:
    """Run `turnwright train`; return its seconds."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "train",
        *map(str, words),
        "--display",
        "none",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-2000:]}"
        )
    return time.monotonic() - began


def arms(folder: Path, seed: int, steps: int, only: Sequence[str]) -> dict[str, Any]:
    """Train one seed with each sampler from the same warm-up."""
    file, warm = folder / "warm.toml", folder / f"warm-{seed}"
    file.write_text(WARMED)
    row: dict[str, Any] = {
        "seed": seed,
        "warmup_s": run(file, "--out", warm, "--seed", seed, "--train.steps", 0),
    }
    row["before"] = json.loads((warm / "summary.json").read_text())["success_after"]
    head, _, tail = WARMED.partition("[warmup]")
    model = f'[model]\npath = "{warm / "checkpoints" / "warmed"}"\n'
    for name in only:
        recipe = folder / f"{name}.toml"
        env = f'use = "hop"\nname = "hop"\ntasks = "{TASKS}"\nsampler = "{SAMPLERS[name]}"\n'
        rest = tail[tail.index("[train]") :].replace("[train]\n", f"[train]\nsteps = {steps}\n")
        recipe.write_text(
            head.replace('use = "hop"\n', env).replace(head[: head.index("[[env]]")], model) + rest
        )
        out = folder / f"{name}-{seed}"
        row[f"{name}_s"] = run(recipe, "--out", out, "--seed", seed)
        row[f"held_out_{name}"] = json.loads((out / "summary.json").read_text())["success_after"]
        labeled = load_object(TASKS)("train", 0, seed)
        right = {
            task.id
            for task, true in zip(labeled, Hop.tasks("train", len(labeled), seed), strict=True)
            if task == true
        }
        played = [
            json.loads(line)["key"]
            for line in (out / "trajectories.jsonl").read_text().splitlines()
        ]
        drawn = [key["task"] for key in played if key["phase"] == "train"]
        row[f"episodes_{name}"], row[f"right_{name}"] = (
            len(drawn),
            sum(task in right for task in drawn) / len(drawn),
        )
    return row


def kill_resume() -> ModuleType:
    """Import the benchmark beside this one."""
    spec = importlib.util.spec_from_file_location("kill_resume", HERE.with_name("kill_resume.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_resume"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Print every seed, then the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samplers", nargs="*", choices=SAMPLERS, default=[*SAMPLERS])
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        rows = []
        for seed in given.seeds:
            rows.append(arms(Path(name), seed, given.steps, given.samplers))
            print(json.dumps(rows[-1]), flush=True)
        if rows:
            summary = {
                key: sum(row[key] for row in rows) / len(rows) for key in rows[0] if key != "seed"
            }
            summary["seeds"] = rows
        if given.kills:
            bench = kill_resume()
            folder = Path(name) / "kills"
            folder.mkdir()
            recipe = bench.RECIPE.replace(
                'use = "hop"\n', 'use = "hop"\nsampler = "window"\nkey = "start"\n'
            )
            outcome = bench.compare(
                folder, list(bench.instants(given.kills, 0.9, random.Random(0))), recipe
            )
            summary |= {
                "kills": len(outcome.kills),
                "killed_at": outcome.kills,
                "draws_after_kill_equal": outcome.good,
            }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

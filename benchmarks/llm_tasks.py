"""The tasks of `examples/llm` and `make quickstart-llm`, each learned by a small language model:
held-out success and cost.

    python benchmarks/llm_tasks.py [--only NAME ...] [--seeds 0 1] [--control]
        [--steps N] [--device cuda]

Each run is `turnwright train` in a process of its own. With `--control` each task is also trained
from the same warm-up with rewards shuffled within its groups. A row is printed and appended to the
results file (JSON lines) as soon as a run ends. A run that is finished in `--runs` is not repeated,
one that was cut off is resumed, and checkpoints of finished ones are removed unless `--keep`.
Intervals are Wilson's, at 95%. A run that stops, such as at the gate of its warm-up, has its error
in place of figures. The model is that of `make quickstart-llm` unless `--model` names another.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "llm"
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HEADER = (
    "| task | seed | rewards | before, % | after, % | greedy, % | turns | steps | wall, s | "
    "CPU, s | peak, MiB | |"
)

FIGURES = (
    *("success_before", "success_before_ci", "success_after", "success_after_ci", "n_eval"),
    *("greedy_before", "greedy_after", "turns_before", "turns_after"),
    *("warmup_steps", "rl_steps", "wall_s", "cpu_s", "rolled_back", "machine"),
)
"""Keys of a run's summary that a row of the results has."""


@dataclass(frozen=True)
class LlmTask:
    """One task: its environment, its recipe, and options in which it differs from the recipe."""

    file: str
    """Empty for the recipe's own environment."""
    env: str
    recipe: str = "recipe.toml"
    options: tuple[str, ...] = ()

    def words(self, *, shuffled: bool = False) -> list[str]:
        """Return the recipe and the options of `turnwright train`."""
        file = "shuffled.py" if shuffled else self.file
        env = ["--env.use", f"{EXAMPLES / file}:{self.env}"] if file else []
        return [str(EXAMPLES / self.recipe), *env, *self.options]


TASKS = {
    "lookups": LlmTask("lookups.py", "Lookups"),
    # A call takes up to 36 ids of SmolLM2's tokenizer.
    "word_problems": LlmTask(
        "word_problems.py", "WORD_PROBLEMS", options=("--limits.turn-tokens", "40")
    ),
    "higher_lower": LlmTask("higher_lower.py", "HigherLower"),
    "adventure": LlmTask("adventure.py", "Adventure"),
    "sums": LlmTask("sums.py", "Sums"),
    "reversal": LlmTask("reversal.py", "Reversal"),
    "spelling": LlmTask("spelling.py", "Spelling"),
    "page_search": LlmTask("page_search.py", "PageSearch"),
    "pick_animal": LlmTask("pick_animal.py", "PickAnimal", "no_warmup_pick.toml"),
    "copy_numbers": LlmTask("copy_numbers.py", "CopyNumbers", "no_warmup_copy.toml"),
}
RUNS = {"quickstart": LlmTask("", "Hop", str(ROOT / "recipes" / "quickstart_llm.toml"))} | TASKS


def train(
    task: LlmTask, options: Sequence[str], shuffled: bool, out: Path, keep: bool
) -> dict[str, Any]:
    """Train, or go on with a run that was cut off; return the figures of the run, or its error."""
    if not (out / "summary.json").exists():
        words = [sys.executable, "-m", "turnwright", "train"]
        if out.exists():
            words += ["--resume", str(out)]
        else:
            words += [*task.words(shuffled=shuffled), *options, "--out", str(out)]
        words += ["--display", "none"]
        paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"command": shlex.join(words), "error": lines[-1]}

    # The checkpoints of a model of 135M parameters have gigabytes, and no figure needs them.
    if not keep:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return figures(out)


def figures(run: Path) -> dict[str, Any]:
    """Return what the table shows of a finished run."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    found = {key: summary.get(key) for key in FIGURES}
    found["peak_memory_mib"] = max((row.get("peak_memory_mib") or 0.0) for row in rows)
    found["train_success"] = [row["success"] for row in rows if row["phase"] == "train"]
    return found


def percent(row: Mapping[str, Any], when: str) -> str:
    """Return held-out success with its interval."""
    success, interval = row[f"success_{when}"], row[f"success_{when}_ci"]
    if success is None or interval is None:
        return "-"
    low, high = interval
    return f"{100 * success:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    head = [row["task"], str(row["seed"]), "shuffled" if row["shuffled"] else "its own"]
    if "error" in row:
        return f"| {' | '.join([*head, *['-'] * 8, row['error'][:200]])} |"

    greedy = ", ".join(f"{100 * row[f'greedy_{when}']:.0f}" for when in ("before", "after"))
    turns = ", ".join(f"{row[f'turns_{when}']:.2f}" for when in ("before", "after"))
    cells = [*head, percent(row, "before"), percent(row, "after"), greedy, turns]
    cells += [
        f"{row['warmup_steps']} + {row['rl_steps']}",
        f"{row['wall_s']:.0f}",
        f"{row['cpu_s']:.0f}",
    ]
    cells += [f"{row['peak_memory_mib']:.0f}", "rolled back" if row["rolled_back"] else ""]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Train all, print the table, and return 1 where a run stopped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(RUNS), default=tuple(RUNS), metavar="NAME"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--control", action="store_true", help="also with shuffled rewards")
    parser.add_argument("--steps", type=int, help="reinforcement steps in place of the recipe's")
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="a GGUF file, or a model directory"
    )
    parser.add_argument(
        "--device", default="auto", help="model.device of all runs: auto, cpu, cuda"
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "llm-tasks", help="directory of the runs"
    )
    parser.add_argument(
        "--results", type=Path, help="JSON lines are appended here; default RUNS/results.jsonl"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of finished runs")
    args = parser.parse_args()
    if not args.model.exists():
        parser.error(
            f"{args.model}: no such model; python contrib/smollm2.py fetches it, or name one by "
            "--model"
        )

    results = args.results or args.runs / "results.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    kinds = (False, True) if args.control else (False,)
    stopped = 0
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}", flush=True)
    for seed in args.seeds:
        for name in args.only:
            for shuffled in kinds:
                options = [
                    "--seed",
                    str(seed),
                    "--model.path",
                    str(args.model),
                    "--model.device",
                    args.device,
                ]
                suffix = "-shuffled" if shuffled else ""
                if args.steps is not None:
                    options += ["--train.steps", str(args.steps)]
                    suffix += f"-{args.steps}"

                row = {"task": name, "seed": seed, "shuffled": shuffled}
                out = args.runs / f"{name}-{seed}{suffix}"
                row |= train(RUNS[name], options, shuffled, out, args.keep)
                stopped += "error" in row
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(line(row), flush=True)
    return 1 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())

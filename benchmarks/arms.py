"""Runs that are compared: arms that differ in a few keys, and begin with the same weak policy.

A world is a recipe. For one world and seed the warm-up is done once; each arm reinforces that
policy for as many steps, on the same tasks, in a process of its own. A run writes its row into a
folder. Runs whose row is there are skipped, and one that was interrupted begins anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rows import half_width, write_json

ROOT = Path(__file__).resolve().parents[1]

Changes = Mapping[str, Any]
"""Values of a recipe's keys, in place of its own."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A task, and how long it is trained."""

    name: str
    recipe: Path
    steps: int | None = None
    """None is the recipe's."""
    changes: Changes = field(default_factory=dict)
    """Of all its runs, the warm-up included."""


@dataclass(frozen=True)
class Arm:
    """What one side of a comparison does otherwise than the recipe."""

    name: str
    changes: Changes


@dataclass(frozen=True)
class Run:
    """One training."""

    world: World
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder and of its row."""
        return f"{self.world.name}-{self.arm.name}-{self.seed}"

    @property
    def changes(self) -> dict[str, Any]:
        """All keys that it has otherwise than the recipe."""
        steps = {} if self.world.steps is None else {"train.steps": self.world.steps}
        return steps | dict(self.world.changes) | dict(self.arm.changes)


class RunError(Exception):
    """A run ended with an error, which is the text."""


def _train(recipe: Path, out: Path, seed: int, changes: Changes) -> None:
    """Train in a process of its own, with one thread; what is in `out` is no complete run of this,
    and goes."""
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "turnwright", "train", str(recipe)]
    words += ["--out", str(out), "--seed", str(seed), "--display", "none"]
    for key, value in changes.items():
        words += [f"--{key}", str(value)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{out.name}: {done.stderr.strip()[-500:]}")


def _warmed(world: World, seed: int, out: Path) -> Path:
    """Return the policy of a world with which the arms of a seed begin, made once."""
    folder = out / "runs" / f"{world.name}-warm-{seed}"
    if not (folder / "summary.json").exists():
        _train(world.recipe, folder, seed, dict(world.changes) | {"train.steps": 0})
    return folder / "checkpoints" / "warmed"


def _row_file(out: Path, run: Run) -> Path:
    return out / "rows" / f"{run.name}.json"


CURVE = ("success", "reward", "entropy")
"""Metrics of each step that a row keeps."""


def _row(run: Run, folder: Path) -> dict[str, Any]:
    """Return what became of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, lines) if one["phase"] == "train"]
    # A step of which nothing is trained has no entropy and no gradient.
    curve: dict[str, list[Any]] = {name: [one.get(name) for one in steps] for name in CURVE}
    tied = [one["groups_no_signal"] / one["groups"] for one in steps]
    return {
        "world": run.world.name,
        "arm": run.arm.name,
        "seed": run.seed,
        "changes": run.changes,
        "before": summary["success_before"],
        "after": summary["success_after"],
        "cpu_s": summary["cpu_s"],
        "curve": curve | {"groups_tied": tied},
    }


def play(run: Run, out: Path) -> str:
    """Train and write the row; return a line about it.

    Raises:
        RunError: for a run that ended with an error.
    """
    start = _warmed(run.world, run.seed, out)
    folder = out / "runs" / run.name
    _train(
        run.world.recipe,
        folder,
        run.seed,
        run.changes | {"model.path": start, "warmup.demos": 0},
    )
    row = _row(run, folder)
    write_json(_row_file(out, run), row)
    return f"{run.name}: {row['before']:.3f} to {row['after']:.3f}, {row['cpu_s']:.0f} s"


def play_all(runs: Sequence[Run], out: Path, jobs: int) -> int:
    """Play what has no row with these changes; return how many runs failed."""
    by_start: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if not _is_done(run, out):
            by_start.setdefault((run.world.name, run.seed), []).append(run)

    def play_these(these: Sequence[Run]) -> int:
        failed = 0
        for run in these:
            try:
                print(play(run, out), flush=True)
            except RunError as error:
                failed += 1
                print(f"failed: {error}", file=sys.stderr, flush=True)
        return failed

    # Those with the same beginning one after the other: the first makes it.
    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(play_these, by_start.values()))


def _is_done(run: Run, out: Path) -> bool:
    path = _row_file(out, run)
    return path.exists() and json.loads(path.read_text())["changes"] == run.changes


def rows_of(worlds: Sequence[World], arms: Sequence[Arm], out: Path) -> Rows:
    """Return the rows that are there."""
    rows = [json.loads(path.read_text()) for path in sorted((out / "rows").glob("*.json"))]
    known = {world.name for world in worlds}, {arm.name for arm in arms}
    return Rows([row for row in rows if row["world"] in known[0] and row["arm"] in known[1]])


@dataclass
class Rows:
    """Rows of some worlds and arms."""

    rows: list[dict[str, Any]]

    def of(self, world: str, arm: str) -> dict[int, dict[str, Any]]:
        """Return the rows of an arm in a world by seed."""
        found = {}
        for row in self.rows:
            if (row["world"], row["arm"]) == (world, arm):
                found[row["seed"]] = row
        return found

    def by_seed(self, world: str, arm: str) -> list[dict[str, Any]]:
        """Return the rows of an arm in a world, in the order of seeds."""
        return [row for _, row in sorted(self.of(world, arm).items())]

    def pairs(
        self, world: str, left: str, right: str, figure: Callable[[dict[str, Any]], float]
    ) -> list[float]:
        """Return for each seed how far the figure of the left arm is above that of the right."""
        rights = self.of(world, right)
        differences = []
        for seed, row in sorted(self.of(world, left).items()):
            if seed in rights:
                differences.append(figure(row) - figure(rights[seed]))
        return differences


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95% interval (Student's t)."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of at least one value; of a single one nothing is known."""
        mean = statistics.fmean(values)
        half = math.inf
        if len(values) > 1:
            half = half_width(values)
        return cls(mean, mean - half, mean + half, len(values))

    def __str__(self) -> str:
        text = f"{100 * self.mean:+.1f}"
        if self.seeds > 1:
            text += f" [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return text

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval, which a single seed does not have."""
        return (round(self.low, 4), round(self.high, 4)) if self.seeds > 1 else None

    @property
    def verdict(self) -> str:
        """What the interval says of the claim that the mean is above 0."""
        if self.low > 0:
            return "holds"
        return "does not hold" if self.high < 0 else "not shown"


def trained_success(row: Mapping[str, Any]) -> float:
    """Return the mean success of the training episodes of all steps: the area below the learning
    curve."""
    return statistics.fmean(row["curve"]["success"])


def held_out(row: Mapping[str, Any]) -> float:
    """Return held-out success of the policy that a run ended with."""
    return float(row["after"])


def arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments of a script that compares arms."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and rows")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worlds", nargs="+", help="names; all by default")
    parser.add_argument("--arms", nargs="+", help="names; all by default")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is there, train nothing")
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


def play_grid(worlds: Sequence[World], arms: Sequence[Arm], args: argparse.Namespace) -> int:
    """Play every arm in every world, seed by seed; return how many runs failed."""
    if args.table:
        return 0
    runs = []
    for seed in range(args.seeds):
        for world in worlds:
            if args.worlds is None or world.name in args.worlds:
                chosen = [arm for arm in arms if args.arms is None or arm.name in args.arms]
                runs += [Run(world, arm, seed) for arm in chosen]
    return play_all(runs, args.out, args.jobs)

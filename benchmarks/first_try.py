"""Small tasks of `examples/`, each trained with the recipe that `turnwright init` writes,
and with shuffled rewards.

    python benchmarks/first_try.py [--quick] [--only NAME ...] [--set KEY=VALUE ...] [--jobs N]

Four look at images, four take seven or more turns with JSON tools. A task is learned if held-out
success is at least 0.8 of its solver's, and reinforcement closed at least half of the gap between
the policy before it and the solver. With rewards shuffled among the episodes of each step (the
control) none may be learned (a gain over 0.1), and none broken (a loss over 0.1). Success is that
of 480 held-out episodes after the run: in the run's own 120 a policy that did not change may gain a
tenth. CPU seconds are without them, and in the last line (JSON) without controls.

`idle` is the share of steps with a learning rate of 0 although most groups had episodes with
different rewards, `lost` the largest loss of the success of a step's episodes within three steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
TASKS = {
    "sort_swaps": "SortSwaps",
    "stack_machine": "StackMachine",
    "unit_conversion": "env",
    "file_system": "FileSystem",
    "battleship": "Battleship",
    "mastermind": "Mastermind",
    "calendar_slot": "env",
    "text_edit": "TextEdit",
    "haggling": "Haggling",
    "zoom_count": "ZoomCount",
    "click_target": "ClickTarget",
    "level_tuning": "LevelTuning",
    "find_pair": "FindPair",
    "belt_sorting": "BeltSorting",
    "order_form": "env",
    "stock_refill": "env",
    "mail_rules": "env",
    "machine_repair": "env",
}
IMAGES = ("zoom_count", "click_target", "level_tuning", "find_pair", "belt_sorting")
HEADER = (
    "| task | seed | demonstrations | before | after | solver | steps | CPU s | idle | lost "
    "| gate | |"
)
OF_SOLVER, OF_GAP, DRIFT = 0.8, 0.5, 0.1


def recipe_of(name: str, folder: Path) -> Path:
    """Write what `turnwright init` writes, with the example in place of its
    environment; return the recipe."""
    words = [
        sys.executable,
        "-m",
        "turnwright",
        "init",
        name,
        *(["--vision"] if name in IMAGES else []),
    ]
    subprocess.run(
        words,
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    recipe = folder / name / "recipe.toml"
    text = recipe.read_text()
    use = next(line for line in text.splitlines() if line.startswith("use = "))
    recipe.write_text(text.replace(use, f'use = "{ROOT}/examples/{name}.py:{TASKS[name]}"'))
    return recipe


def train(
    recipe: Path, seed: int, out: Path, overrides: Sequence[str], shuffled: bool
) -> dict[str, Any]:
    """Train in this process, from the warm-up in `out` if there is one; return the summary, or the
    error that stopped the run.

    The run before reinforcement is copied to `out` + `-warm`, where the control
    of the same seed begins.
    """
    from honesty import Shuffled

    from turnwright.config import load
    from turnwright.config.dump import to_json_dict
    from turnwright.errors import TurnwrightError
    from turnwright.records import NullListener, RunDir
    from turnwright.training import TrainingRun
    from turnwright.training.task_plan import make_env_specs

    class Copied(TrainingRun):
        def _save(self, name: str, **cursor: Any) -> None:
            super()._save(name, **cursor)
            if name == "warmed":
                shutil.copytree(self.run.path, f"{out}-warm", dirs_exist_ok=True)

    resolved = load(recipe, [*(f"--{one}" for one in overrides), f"--seed={seed}"])
    config, warm = resolved.config, (out / "checkpoints" / "warmed").exists()
    with RunDir(out) as directory:
        directory.write_json("config.json", to_json_dict(resolved))
        try:
            run = Copied(config, make_env_specs(config), directory, NullListener(), resumed=warm)
            if shuffled:
                run.policies = Shuffled(run.policies, seed)  # type: ignore[assignment]
            return asyncio.run(run.play())
        except TurnwrightError as error:
            return {"error": str(error)}


def solver_success(name: str, recipe: Path, seed: int = 0, n: int = 128) -> float:
    """Success of the solver on held-out tasks, within the turns of the recipe."""
    import turnwright as tw
    from turnwright.config import load
    from turnwright.config.schema import EnvConfig
    from turnwright.envs import resolve_env

    spec = resolve_env(EnvConfig(use=f"{ROOT}/examples/{name}.py:{TASKS[name]}"))
    assert spec.factory is not None
    assert spec.solver is not None
    # Without a model, a token is a byte.
    limits = tw.Limits(turns=load(recipe, []).config.limits.turns)
    found = tw.rollout(
        spec.factory,
        spec.tasks("eval", n, seed),
        engine=tw.ScriptedEngine(spec.solver),
        limits=limits,
    )
    return sum(one.reward == 1.0 for one in found) / len(found)


def success_of(run: str, checkpoint: str | Path) -> float:
    """Return held-out success of a checkpoint of a run."""
    words = ["eval", "--run", run, "--checkpoint", str(checkpoint), "--samples", "4", "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "turnwright", *words],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["sampled"]["success"])


def run_one(
    name: str, seed: int, kinds: Sequence[bool], overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Train a task in processes of their own, with true and shuffled rewards after the same
    warm-up; return a row for each."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(name, Path(folder))
        out, warm = f"{folder}/run", f"{folder}/run-warm"
        for shuffled in kinds:
            words = [
                sys.executable,
                __file__,
                "--child",
                name,
                str(seed),
                str(recipe),
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
            found = (
                {"error": done.stderr[-300:]}
                if done.returncode
                else json.loads(done.stdout.splitlines()[-1])
            )
            rows.append({"task": name, "seed": seed, "shuffled": shuffled, **found})
            if found.get("error"):
                break
            if not shuffled:
                before = success_of(warm, f"{warm}/checkpoints/warmed")
            last = max(Path(out, "checkpoints").glob("step-*"))  # before any rollback
            rows[-1] |= {"success_before": before, "success_after": success_of(out, last)}
            out = warm
    return rows


def wasted(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how far the training steps of a run were wasted: `idle` and `lost`, as above."""
    if not rows:
        return {}
    idle = sum(row["lr"] == 0 and row["groups_no_signal"] < row["groups"] / 2 for row in rows)
    success = [row["success"] for row in rows]
    lost = (success[step] - min(success[step : step + 4]) for step in range(len(success)))
    return {"idle": idle / len(rows), "lost": max(lost)}


def child(name: str, seed: str, recipe: str, out: str, shuffled: str, *overrides: str) -> None:
    """Train one task and print its row."""
    summary = train(Path(recipe), int(seed), Path(out), overrides, bool(int(shuffled)))
    gates = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    keys = "turns_after", "warmup_steps", "cpu_s", "rolled_back", "error"
    row = {key: summary.get(key) for key in keys}
    row["demos"] = next((one["demo_reward"] for one in gates if one["phase"] == "warmup"), None)
    row["gate"] = [round(one["success"], 2) for one in gates if one["phase"] == "gate"]
    steps = [one for one in gates if one["phase"] == "train"]
    row |= {"steps": len(steps)} | wasted(steps)
    row["solver"] = solver_success(name, Path(recipe))
    print(json.dumps(row))


def judge(row: dict[str, Any]) -> str:
    """Return what became of a run."""
    if row.get("error"):
        return "stopped"
    before, after, best = row["success_before"], row["success_after"], row["solver"]
    if row["shuffled"]:
        return (
            "learned" if after - before > DRIFT else "broken" if before - after > DRIFT else "flat"
        )
    return (
        "learned"
        if after >= OF_SOLVER * best and after - before >= OF_GAP * (best - before)
        else "not learned"
    )


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    keys = "demos", "success_before", "success_after", "solver"
    shares = [f"{100 * row[key]:.0f}" if row.get(key) is not None else "-" for key in keys]
    control = " shuffled" if row["shuffled"] else ""
    told = (
        f" | {row['error'][:110]}"
        if row.get("error")
        else " | rolled back"
        if row.get("rolled_back")
        else ""
    )
    waste = " | ".join(
        f"{100 * row[key]:.0f}" if row.get(key) is not None else "-" for key in ("idle", "lost")
    )
    rest = (
        f"{row.get('warmup_steps')} + {row.get('steps')} | {row.get('cpu_s') or 0:.0f} | "
        f"{waste} | {row.get('gate')}"
    )
    return (
        f"| {row['task']}{control} | {row['seed']} | {' | '.join(shares)} | {rest} | "
        f"{judge(row)}{told} |"
    )


def main() -> None:
    """Run all tasks and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="seed 0 alone")
    parser.add_argument("--only", nargs="*", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=(0, 1, 2))
    parser.add_argument("--without-control", action="store_true")
    parser.add_argument("--set", nargs="*", default=(), metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    seeds = (0,) if args.quick else tuple(args.seeds)
    kinds = (False,) if args.without_control else (False, True)
    work = [(name, seed, kinds) for seed in seeds for name in args.only]
    print(f"{HEADER}\n|{'---|' * HEADER.count(' | ')}")
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda one: run_one(*one, args.set), work):
            rows += found
            print("\n".join(map(line, found)), flush=True)
    learned = {
        name: all(judge(r) == "learned" for r in rows if r["task"] == name and not r["shuffled"])
        for name in args.only
    }
    control = [judge(row) for row in rows if row["shuffled"]]
    trained = [row for row in rows if not row["shuffled"] and row.get("steps")]
    steps = sum(row["steps"] for row in trained)
    found = {
        "tasks": len(learned),
        "learned_first_try": sum(learned.values()),
        "cpu_s_max": max((row.get("cpu_s") or 0.0) for row in rows if not row["shuffled"]),
        "control_learned": control.count("learned"),
        "control_broken": control.count("broken"),
        "idle": sum(row["idle"] * row["steps"] for row in trained) / steps if steps else None,
        "lost": max((row["lost"] for row in trained), default=None),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

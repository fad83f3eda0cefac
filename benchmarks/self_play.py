"""Self-play on a zero-sum game with an advantage for one role (recipes/self_play.toml): what
averages by role are worth.

    python benchmarks/self_play.py             # three seeds, under a minute each

`stronger_role` is the share of rounds that the first role wins between equal policies, those of
the warm-up; `beats_past` the share that the newest policy wins against the first one, over
2,000 rounds with sides changed. The role bias is the mean advantage of a role in a batch, which
pushes all that it does up or down whatever it is. It is measured on the next batch after the
run, before any update, of 8,000 episodes in place of 128: with the mean of both roles as the
baseline (`role_bias_group`), and with the averages of the run (`role_bias_running`), both with
the standard error `role_bias_error`. `batches` has the same for the next batches after steps
10, 20, 30 and 40. Last line JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "recipes"))

import torch  # noqa: E402
from self_play import ODDS, play, tasks, wins  # noqa: E402

import turnwright as tw  # noqa: E402
from turnwright.config import RunConfig, load  # noqa: E402
from turnwright.engines.local import LocalEngine  # noqa: E402
from turnwright.records import NullListener, RunDir  # noqa: E402
from turnwright.training import TrainingRun  # noqa: E402
from turnwright.training.task_plan import make_env_specs  # noqa: E402

RECIPE = ROOT / "recipes" / "self_play.toml"
ROLES = ("first", "second")
NEXT = 8000
"""Episodes of a next batch: a standard error of at most 0.011."""


async def newest_against_first(task: tw.Task, model: tw.Model) -> float:
    """Play a round; 1 if the newest policy wins."""
    sides = (
        {"new": "first", "old": "second"}
        if task.info["sides"]
        else {"old": "first", "new": "second"}
    )
    texts = {
        side: (await model.generate(task.messages, agent=agent)).text
        for agent, side in sides.items()
    }
    return float(wins(texts["first"], texts["second"]) is (sides["new"] == "first"))


def role_bias(run: Path, point: str, config: RunConfig) -> dict[str, Any]:
    """Return the bias of the first role in the batch after a checkpoint, with both baselines, and
    its standard error; that of the second role is its negative."""
    cursor = json.loads((run / "checkpoints" / point / "state.json").read_text())["cursor"]
    averages = {agent: average for _, agent, average in cursor["baselines"]["player"]}
    engine = tw.PolicyEngine({"player": engine_of(run, point)}, agents={"player": ROLES})
    found = tw.rollout(
        play, tasks("train", 200, 0), engine=engine, limits=config.limits, samples=NEXT // 200
    )
    # Others failed.
    first, second = ([t.agent_rewards[role] for t in found if t.agent_rewards] for role in ROLES)
    assert first == [-reward for reward in second]
    mean = statistics.mean(first)
    error = statistics.stdev(first) / math.sqrt(len(first))
    return {
        "point": point,
        "episodes": len(first),
        "group": mean,
        "running": mean - averages["first"],
        "error": error,
    }


def engine_of(run: Path, point: str) -> LocalEngine:
    """Return the engine of a checkpoint's policy."""
    return LocalEngine.load(
        run / "checkpoints" / point / "player", renderer=tw.load_renderer(run / "model")
    )


def rounds(engines: dict[str, Any], limits: Any, count: int) -> float:
    """Return the share of rounds that `new` wins, sides changed."""
    tasks = [
        tw.Task(f"Round {200 + n // 2}. Your digit?", info={"sides": n % 2}, id=f"{n}")
        for n in range(count)
    ]
    found = tw.rollout(newest_against_first, tasks, engine=tw.PolicyEngine(engines), limits=limits)
    return statistics.mean(t.reward or 0.0 for t in found)


def trained(seed: int, folder: Path) -> dict[str, Any]:
    """Train once; return the figures of a seed."""
    config = load(
        RECIPE,
        [
            "--seed",
            str(seed),
            "--eval.greedy",
            "false",
            "--eval.samples",
            "5",
            "--checkpoint.keep",
            "9",
        ],
    ).config
    with RunDir(folder) as directory:
        asyncio.run(TrainingRun(config, make_env_specs(config), directory, NullListener()).play())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (before,) = (row for row in rows if row["phase"] == "eval" and row["name"] == "before")
    engines = {"new": engine_of(folder, "step-00040"), "old": engine_of(folder, "warmed")}
    found: dict[str, Any] = {
        "stronger_role": before["success"],
        "beats_past": rounds(engines, config.limits, 2000),
    }
    batches = [role_bias(folder, f"step-000{step}", config) for step in (10, 20, 30, 40)]
    found |= {f"role_bias_{name}": abs(batches[-1][name]) for name in ("group", "running", "error")}
    return found | {"batches": batches}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            found.append(trained(seed, Path(name) / "run"))
        print(f"seed {seed}: {found[-1]}", flush=True)
    means = {
        name: statistics.mean(one[name] for one in found) for name in found[0] if name != "batches"
    }
    print(json.dumps(means | {"odds": ODDS, "by_seed": found}))


if __name__ == "__main__":
    main()

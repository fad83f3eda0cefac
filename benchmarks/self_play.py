"""Self-play on a zero-sum game with an advantage for one role (recipes/self_play.toml): what averages by role are worth.

    python benchmarks/self_play.py             # three seeds, under a minute each

`stronger_role` is the share of rounds that the first role wins between equal policies, those of the warm-up; `beats_past` the
share that the newest policy wins against the first one, over 2,000 rounds with sides changed. The role bias is the mean
advantage of a role, which pushes all that it does up or down whatever it is: with the mean of both roles as the baseline
(`role_bias_group`), and with the averages from before the step (`role_bias_running`), on the same batches of one run, from the
second step on: the mean over the steps, of either role the larger. `role_bias_step` is the mean of the steps' absolute values,
which has the noise of a batch of 128. Last line JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "recipes"))

import torch  # noqa: E402
from self_play import ODDS, wins  # noqa: E402

import turnwise as tw  # noqa: E402
from turnwise.config import load  # noqa: E402
from turnwise.engines.local import LocalEngine  # noqa: E402
from turnwise.records import NullListener, RunDir  # noqa: E402
from turnwise.training import TrainingRun  # noqa: E402
from turnwise.training.task_plan import make_env_specs  # noqa: E402
from turnwise.types import Trajectory  # noqa: E402

RECIPE = ROOT / "recipes" / "self_play.toml"
ROLES = ("first", "second")


class Watched(TrainingRun):
    """A run that keeps the bias of each role in each batch, before it is trained on."""

    def watch_bias(self) -> None:
        """Measure from here on."""
        self.bias: dict[str, list[dict[str, float]]] = {"group": [], "running": []}
        step = self.policies.step

        def stepped(trajectories: Sequence[Trajectory], **given: Any) -> Any:
            averages = {agent: mean for _, agent, mean in self.policies.state().get("baselines", {}).get("player", [])}
            rewards = {role: [t.agent_rewards[role] for t in trajectories if role in t.agent_rewards] for role in ROLES}
            shared = statistics.mean(rewards["first"] + rewards["second"])
            if averages:
                self.bias["group"].append({role: statistics.mean(rewards[role]) - shared for role in ROLES})
                self.bias["running"].append({role: statistics.mean(rewards[role]) - averages[role] for role in ROLES})
            return step(trajectories, **given)

        self.policies.step = stepped  # type: ignore[method-assign]


async def newest_against_first(task: tw.Task, model: tw.Model) -> float:
    """Play a round; 1 if the newest policy wins."""
    sides = {"new": "first", "old": "second"} if task.info["sides"] else {"old": "first", "new": "second"}
    texts = {side: (await model.generate(task.messages, agent=agent)).text for agent, side in sides.items()}
    return float(wins(texts["first"], texts["second"]) is (sides["new"] == "first"))


def rounds(engines: dict[str, Any], limits: Any, count: int) -> float:
    """Return the share of rounds that `new` wins, sides changed."""
    tasks = [tw.Task(f"Round {200 + n // 2}. Your digit?", info={"sides": n % 2}, id=f"{n}") for n in range(count)]
    found = tw.rollout(newest_against_first, tasks, engine=tw.PolicyEngine(engines), limits=limits)
    return statistics.mean(t.reward or 0.0 for t in found)


def trained(seed: int, folder: Path) -> dict[str, float]:
    """Train once; return the figures of a seed."""
    config = load(
        RECIPE, ["--seed", str(seed), "--eval.greedy", "false", "--eval.samples", "5", "--checkpoint.keep", "9"]
    ).config
    with RunDir(folder) as directory:
        run = Watched(config, make_env_specs(config), directory, NullListener())
        run.watch_bias()
        asyncio.run(run.play())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (before,) = (row for row in rows if row["phase"] == "eval" and row["name"] == "before")
    points = {"new": "step-00040", "old": "warmed"}
    engines = {
        name: LocalEngine.load(folder / "checkpoints" / point / "player", renderer=tw.load_renderer(folder / "model"))
        for name, point in points.items()
    }
    found = {"stronger_role": before["success"], "beats_past": rounds(engines, config.limits, 2000)}
    for kind, steps in run.bias.items():
        found[f"role_bias_{kind}"] = max(abs(statistics.mean(step[role] for step in steps)) for role in ROLES)
    found["role_bias_step"] = statistics.mean(abs(step[role]) for step in run.bias["running"] for role in ROLES)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            found.append(trained(seed, Path(name) / "run"))
        print(f"seed {seed}: {found[-1]}", flush=True)
    means = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    print(json.dumps(means | {"odds": ODDS, "by_seed": found}))


if __name__ == "__main__":
    main()

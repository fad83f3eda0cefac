"""Is it learning? Five seeds of the quickstart, the same five with shuffled rewards, and
what could be fooling us.

    python benchmarks/honesty.py

Checked besides: no held-out task is in training, by id or by content; the best success of one
reply, by enumeration. Last line JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart.toml"
sys.path.insert(0, str(ROOT / "src"))


class Shuffled:
    """The policies of a run, which get each step's rewards dealt to the episodes at random, and
    those of agents to agents."""

    def __init__(self, policies: Any, seed: int) -> None:
        self._policies = policies
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policies, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._policies)

    def step(self, trajectories: Sequence[Any], *, step: int, **given: Any) -> Any:
        """Train on copies of the episodes; what is recorded keeps the true rewards."""
        rewards = [t.reward for t in trajectories]
        by_agent = [
            t.agent_rewards[agent] for t in trajectories for agent in sorted(t.agent_rewards)
        ]
        for values in (rewards, by_agent):
            random.Random(f"{self._seed}/{step}").shuffle(values)
        twins, dealt = [copy.copy(trajectory) for trajectory in trajectories], iter(by_agent)
        for twin, reward in zip(twins, rewards, strict=True):
            twin.reward, twin.agent_rewards = (
                reward,
                {agent: next(dealt) for agent in sorted(twin.agent_rewards)},
            )
        return self._policies.step(twins, step=step, **given)


def control(seed: int, out: Path) -> dict[str, Any]:
    """The quickstart with shuffled rewards, in this process."""
    from turnwright.config import load
    from turnwright.records import NullListener, RunDir
    from turnwright.training import TrainingRun
    from turnwright.training.task_plan import make_env_specs

    config = replace(load(RECIPE).config, seed=seed)
    with RunDir(out) as directory:
        run = TrainingRun(config, make_env_specs(config), directory, NullListener())
        run.policies = Shuffled(run.policies, seed)  # type: ignore[assignment]
        return asyncio.run(run.play())


def quickstart(seed: int, out: Path) -> dict[str, Any]:
    """The quickstart as anyone runs it."""
    words = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "train",
        RECIPE,
        "--seed",
        seed,
        "--out",
        out,
        "--display",
        "none",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([str(word) for word in words], env=env, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def overlap(seed: int) -> int:
    """Held-out tasks that are in training by id, by content or by the chain of
    names that they lead over."""
    from turnwright.config import load
    from turnwright.envs.builtin.hop import chain_of
    from turnwright.envs.tasks import content_key
    from turnwright.training import TaskPlan
    from turnwright.training.task_plan import make_env_specs

    config = load(RECIPE).config
    steps, groups = config.train.steps, config.rollout.groups
    plan = TaskPlan(
        make_env_specs(config), steps=steps, groups=groups, held_out=config.eval.tasks, seed=seed
    )
    known = [{name(c.task) for c in plan.train} for name in (lambda t: t.id, content_key, chain_of)]
    held = [c.task for c in plan.held_out]
    return sum(
        t.id in known[0] or content_key(t) in known[1] or chain_of(t) in known[2] for t in held
    )


def single_turn_best(split: str) -> float:
    """The most that one reply can score, by enumeration of every chain of names
    and every code of a split.

    The reply sees the question alone, so it does best with the code that is
    likeliest given the question.
    """
    from turnwright.envs.builtin import hop

    mass: dict[str, Counter[str]] = {}
    for hops in range(1, hop.MAX_HOPS + 1):
        chains = [
            chain
            for chain in permutations(hop.NAMES, hops)
            if hop.held_out(chain) == (split == "eval")
        ]
        for chain, code in product(chains, hop.CODES):
            mass.setdefault(chain[0], Counter())[code] += 1 / len(chains)  # type: ignore[assignment]
    return sum(max(codes.values()) for codes in mass.values()) / sum(
        codes.total() for codes in mass.values()
    )


def drawn_best(n: int = 30_000) -> float:
    """The same of tasks as they are drawn: the share of the likeliest code of each
    question, chance included."""
    from turnwright.envs.builtin import Hop

    codes: dict[str, Counter[str]] = {}
    for task in Hop.tasks("eval", n, 12345):
        codes.setdefault(task.messages[0].text, Counter())[str(task.answer)] += 1
    return sum(max(counter.values()) for counter in codes.values()) / n


def z_of(summary: dict[str, Any]) -> float:
    """How many standard errors success after is over success before, both taken
    as independent draws."""
    n, before, after = summary["n_eval"], summary["success_before"], summary["success_after"]
    share = (before + after) / 2
    return (
        float((after - before) / math.sqrt(2 * share * (1 - share) / n)) if 0 < share < 1 else 0.0
    )


def row(name: str, summary: dict[str, Any]) -> str:
    """One line of the table."""

    def share(key: str) -> str:
        low, high = summary[f"{key}_ci"]
        return f"{100 * summary[key]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    greedy = f"{100 * summary['greedy_before']:.1f} | {100 * summary['greedy_after']:.1f}"
    turns = f"{summary['turns_before']:.2f} | {summary['turns_after']:.2f}"
    times = f"{summary['cpu_s']:.0f} | {summary['wall_s']:.0f}"
    return (
        f"| {name} | {share('success_before')} | {share('success_after')} | {greedy} | {turns} "
        f"| {times} |"
    )


def main() -> None:
    """Run everything, print a table, and say whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--control", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    print(
        "| seed | success before, % | after, % | greedy before | after | turns before | after | "
        "CPU s | wall s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    runs, controls = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            runs.append(quickstart(seed, Path(folder) / f"seed-{seed}"))
            print(row(str(seed), runs[-1]), flush=True)
        for seed in args.control:
            controls.append(control(seed, Path(folder) / f"control-{seed}"))
            print(row(f"{seed}, rewards shuffled", controls[-1]), flush=True)
    shared = {seed: overlap(seed) for seed in args.seeds}
    best = single_turn_best("eval")
    print(
        f"held-out tasks that are in training too: {sum(shared.values())}; one reply at best: "
        f"{best:.4f} by enumeration, {drawn_best():.4f} of 30,000 tasks as drawn"
    )
    learned = all(
        s["success_after"] - s["success_before"] >= 0.5
        and s["success_after"] >= 0.93
        and s["greedy_before"] < 0.3
        and s["greedy_after"] >= 0.93
        for s in runs
    )
    figures = {
        "learned": learned,
        "least_after": min((s["success_after"] for s in runs), default=None),
        "least_lift": min((s["success_after"] - s["success_before"] for s in runs), default=None),
        "most_cpu_s": max((s["cpu_s"] for s in runs), default=None),
        "control_before": [s["success_before"] for s in controls],
        "control_before_ci": [s["success_before_ci"] for s in controls],
        "control_after": [s["success_after"] for s in controls],
        "control_z": [z_of(s) for s in controls],
        "control_within": all(
            s["success_before_ci"][0] <= s["success_after"] <= s["success_before_ci"][1]
            for s in controls
        ),
        "overlap": sum(shared.values()),
        "single_turn_best": best,
    }
    print(json.dumps(figures))
    sys.exit(0 if learned and figures["control_within"] and not figures["overlap"] else 1)


if __name__ == "__main__":
    main()

"""Does it learn from what it sees? Seeds of the quickstart with images, their blind controls, and
what could be fooling us.

    python benchmarks/honesty_vlm.py [--seeds 0 1 2 3] [any key of the recipe]

Checked besides: no held-out task is in training, by id, by content, or by where its goal begins and
in which colour; no image that a held-out task can show is one of training; the most that a player
reaches who sees nothing, by trying every sequence of moves. The exit status is 1 when a seed starts
over 0.58, ends under 0.93, or keeps over 0.15 blind. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart_vlm.toml"
sys.path.insert(0, str(ROOT / "src"))
STARTS_UNDER, ENDS_OVER, BLIND_UNDER = 0.58, 0.93, 0.15


def quickstart(seed: int, out: Path, overrides: list[str]) -> dict[str, Any] | None:
    """The quickstart as anyone runs it; None where it did not come to its end."""
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
    done = subprocess.run([*map(str, words), *overrides], env=env, stdout=subprocess.DEVNULL)
    if done.returncode:
        return None
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def row(seed: int, summary: dict[str, Any] | None) -> str:
    """One line of the table."""
    if summary is None:
        return f"| {seed} | did not come to its end |"

    def share(key: str) -> str:
        low, high = summary[f"{key}_ci"]
        return f"{100 * summary[key]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    greedy = f"{100 * summary['greedy_before']:.1f} | {100 * summary['greedy_after']:.1f}"
    turns = f"{summary['turns_before']:.2f} | {summary['turns_after']:.2f}"
    rest = f"{summary['warmup_steps']} | {summary['cpu_s']:.0f} | {summary['wall_s']:.0f}"
    shares = " | ".join(share(key) for key in ("success_before", "success_after", "success_blind"))
    return f"| {seed} | {shares} | {greedy} | {turns} | {rest} |"


def overlap(seed: int) -> int:
    """Held-out tasks that are in training by id, by content, or by the place and the colour of
    their goal at the start."""
    from turnwright.config import load
    from turnwright.envs.tasks import content_key
    from turnwright.training import TaskPlan
    from turnwright.training.task_plan import make_env_specs

    config = load(RECIPE).config
    steps, groups = config.train.steps, config.rollout.groups
    plan = TaskPlan(
        make_env_specs(config), steps=steps, groups=groups, held_out=config.eval.tasks, seed=seed
    )
    names = (
        lambda t: t.id,
        content_key,
        lambda t: (t.info["right"], t.info["up"], t.info["colour"]),
    )
    known = [{name(c.task) for c in plan.train} for name in names]
    return sum(
        any(name(c.task) in seen for name, seen in zip(names, known, strict=True))
        for c in plan.held_out
    )


def shared_images(reach: int) -> int:
    """Images that both sides of the split can show, of all that there are."""
    from turnwright.envs.builtin import radar

    fields = range(-reach, reach + 1)
    sides: dict[str, set[bytes]] = {"train": set(), "eval": set()}
    for side, images in sides.items():
        for right, up, colour, ground in product(
            fields, fields, range(len(radar.COLOURS)), range(radar.GROUNDS)
        ):
            images.add(radar.draw((right, up), reach, colour, f"{side} {ground}").tobytes())
    return len(sides["train"] & sides["eval"])


def blind_best(reach: int) -> float:
    """The share of starts from which the best sequence of moves reaches the goal; who sees
    nothing can choose no more."""
    from turnwright.envs.builtin.radar import MOVES

    fields = range(-reach, reach + 1)
    goals = [(x, y) for x in fields for y in fields if abs(x) + abs(y) >= 2]

    def reached(goal: tuple[int, int], moves: tuple[tuple[int, int], ...]) -> bool:
        x, y = goal
        for right, up in moves[: abs(x) + abs(y) + 1]:
            if max(abs(x - right), abs(y - up)) <= reach:
                x, y = x - right, y - up
            if x == y == 0:
                return True
        return False

    every = product(MOVES.values(), repeat=2 * reach + 1)
    return max(sum(reached(goal, moves) for goal in goals) for moves in every) / len(goals)


def main() -> None:
    """Run everything, print a table, and say whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    args, overrides = parser.parse_known_args()
    print(
        "| seed | before, % | after, % | blind, % | greedy before | after | turns before | after "
        "| warm-up | CPU s | wall s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    runs: list[dict[str, Any] | None] = []
    reach = tomllib.loads(RECIPE.read_text())["env"][0]["args"]["reach"]
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            runs.append(quickstart(seed, Path(folder) / f"seed-{seed}", overrides))
            print(row(seed, runs[-1]), flush=True)
    ended = [summary for summary in runs if summary is not None]
    figures: dict[str, Any] = {
        "learned": len(ended) == len(runs)
        and all(
            s["success_before"] < STARTS_UNDER
            and s["success_after"] >= ENDS_OVER
            and s["success_blind"] < BLIND_UNDER
            for s in ended
        ),
        "before": [s["success_before"] for s in ended],
        "after": [s["success_after"] for s in ended],
        "blind": [s["success_blind"] for s in ended],
        "greedy_before": [s["greedy_before"] for s in ended],
        "greedy_after": [s["greedy_after"] for s in ended],
        "most_cpu_s": max((s["cpu_s"] for s in ended), default=None),
        "most_wall_s": max((s["wall_s"] for s in ended), default=None),
        "overlap": sum(map(overlap, args.seeds)),
        "shared_images": shared_images(reach),
        "blind_best": blind_best(reach),
    }
    shared = (
        f"held-out tasks in training too: {figures['overlap']}; images of both sides: "
        f"{figures['shared_images']}"
    )
    print(f"{shared}; blind at best: {figures['blind_best']:.3f}")
    print(json.dumps(figures))
    sys.exit(
        0 if figures["learned"] and not figures["overlap"] and not figures["shared_images"] else 1
    )


if __name__ == "__main__":
    main()

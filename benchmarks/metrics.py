"""What turn-level figures cost: CPU microseconds a trajectory, beside what playing it costs.

python benchmarks/metrics.py [--episodes 256] [--turns 8]
"""

from __future__ import annotations

import argparse
import json
import random
import time

import turnwright as tw
from turnwright.records import rollout_metrics


class Talk(tw.Env):
    """Says something for a number of turns."""

    turns = 8

    async def reset(self, task, *, seed=None):
        self.left = self.turns
        return "Begin."

    async def step(self, action):
        self.left -= 1
        return tw.Step("go on, there is more to come " * 6, 0.1, self.left == 0)


def main() -> None:
    """Play episodes, measure them, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    Talk.turns = args.turns
    rng = random.Random(0)
    words = [
        " ".join(rng.choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=12))
        for _ in range(args.turns)
    ]
    tasks = [tw.Task(f"task {n}") for n in range(args.episodes // 8)]
    began = time.process_time()
    played = tw.rollout(Talk, tasks, engine=tw.ScriptedEngine(words), samples=8)
    rollout = time.process_time() - began
    times = []
    for _ in range(7):
        began = time.process_time()
        rollout_metrics(played)
        times.append(time.process_time() - began)
    each = sorted(times)[3] / len(played) * 1e6
    ids = sum(len(span.ids) for one in played for span in one.spans) / len(played)
    figures = {
        "episodes": len(played),
        "turns": args.turns,
        "ids": round(ids),
        "us_per_trajectory": round(each, 1),
    }
    print(
        json.dumps(
            figures
            | {
                "us_per_id": round(each / ids, 4),
                "share_of_rollout": round(sorted(times)[3] / rollout, 4),
            }
        )
    )


if __name__ == "__main__":
    main()

"""The same rollouts of several turns on the local engine, vLLM and SGLang, one
after another in one run.

A tiny Qwen3 (128 wide, 4 layers, heads of 32 numbers, fp32, random weights) plays episodes of 4
turns: replies of 48 ids that nothing ends, observations of about 20 ids, siblings of 8 with one
prompt. Servers are started as `turnwright engines start` does, each alone, and get the model as
training gives it; their environments are those of `contrib/cpu_servers.py`. After a first round,
whose first calls pay for warming up, the medians of the rounds are told: sampled ids a second by
the clock, the share of the prompts' ids that came from a cache, the time until the first reply, and
the largest |logprob - trainer's|.

    python benchmarks/engines.py [--home DIR] [--engines local,vllm,sglang]
        [--episodes 64] [--rounds 3]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import turnwright as tw
from turnwright.config import EngineConfig, Limits, ModelConfig, RunConfig, TrainConfig
from turnwright.engines.remote.managed import HOME, how_to_install
from turnwright.renderers import load_renderer
from turnwright.rollouts import arollout
from turnwright.training import Trainer, create_tiny_model, make_engine, unique_weights
from turnwright.training.model.models import load

TURNS, TOKENS, SIBLINGS = 4, 48, 8
TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(200)
]


class Talk(tw.Env):
    """Goes on for four turns, whatever is said."""

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        self.turn = 0
        return f"{task.id}: " + "the code of amber is in the house of birch, look it up. " * 4

    def step(self, action: Any) -> tw.Step:
        self.turn += 1
        return tw.Step(
            "see cedar, then dune, then ember.", reward=0.0, terminated=self.turn == TURNS
        )


class Counting:
    """An engine, and what it was asked and gave."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.counts: Counter[str] = Counter()
        self.first: float | None = None

    async def generate(self, request: tw.Request) -> tw.Generation:
        found = await self.engine.generate(request)
        if self.first is None:
            self.first = time.perf_counter()
        self.counts["prompt"] += len(request.ids)
        self.counts["cached"] += found.cached_tokens
        self.counts["sampled"] += len(found.ids)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def measure(
    kind: str, source: Path, place: Path, args: argparse.Namespace
) -> dict[str, float]:
    module, _ = load(source)
    renderer = load_renderer(source)
    # Nothing ends a reply but its length.
    renderer.banned_ids |= renderer.invalid_ids | renderer.stop_ids
    trainer = Trainer(module, TrainConfig(), banned_ids=renderer.banned_ids)
    limits = Limits(turns=TURNS, turn_tokens=TOKENS, on_turn_length="continue", context=1024)
    config = RunConfig(engine=EngineConfig(kind=kind, install_dir=str(args.home)), limits=limits)  # type: ignore[arg-type]
    engine = Counting(make_engine(config, source, module, renderer, place))
    rows: list[dict[str, float]] = []
    try:
        await engine.update(list(unique_weights(module)), 0)
        for number in range(args.rounds + 1):
            tasks = [tw.Task("go", id=f"{number}-{n}") for n in range(args.episodes // SIBLINGS)]
            engine.clear()
            began = time.perf_counter()
            found = await arollout(
                Talk,
                tasks,
                engine,
                renderer=renderer,
                limits=limits,
                samples=SIBLINGS,
                seed=number,
                sanity="off",
            )
            wall = time.perf_counter() - began
            assert all(str(t.stop) == "done" for t in found), Counter(str(t.error) for t in found)
            assert engine.first is not None
            counts = engine.counts
            row = {
                "tokens_per_s": counts["sampled"] / wall,
                "cached": counts["cached"] / counts["prompt"],
            }
            rows.append(row | {"first_s": engine.first - began, "gap": gap(trainer, found)})
    finally:
        await engine.close()
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}


def gap(trainer: Trainer, trajectories: list[tw.Trajectory]) -> float:
    """Largest |logprob of engine - of trainer|."""
    worst = 0.0
    for trajectory, wanted in zip(trajectories, trainer.logprobs(trajectories), strict=True):
        said = [
            p for s in trajectory.samples() for p, w in zip(s.logprobs, s.weights, strict=True) if w
        ]
        worst = max(
            worst, *(abs(p - w) for p, w in zip(said, wanted, strict=True) if p is not None)
        )
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", type=Path, default=Path(os.environ.get("TURNWRIGHT_ENGINES", HOME))
    )
    parser.add_argument("--engines", default="local,vllm,sglang")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="turnwright-") as place:
        source = create_tiny_model(
            ModelConfig(hidden=128, layers=4, heads=4, kv_heads=2),
            TEXTS,
            Path(place) / "model",
            seed=1,
        )
        for kind in args.engines.split(","):
            if kind != "local" and not (args.home / kind).is_dir():
                print(
                    f"{kind}: not installed in {args.home} ({how_to_install(kind, gpu=False)})",
                    file=sys.stderr,
                )
                continue
            found[kind] = asyncio.run(measure(kind, source, Path(place) / kind, args))
            row = found[kind]
            told = (
                f"cached {row['cached']:.0%}  first reply {row['first_s'] * 1e3:.0f} ms  max "
                f"|dlogp| {row['gap']:.1e}"
            )
            print(f"{kind:8} {row['tokens_per_s']:8.0f} ids/s  {told}", flush=True)
    print(
        json.dumps(
            {
                kind: {name: round(value, 6) for name, value in row.items()}
                for kind, row in found.items()
            }
        )
    )


if __name__ == "__main__":
    main()

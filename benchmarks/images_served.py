"""Episodes with a new image in each turn through a real vLLM: images sent once and named after
that, or sent with each turn.

A tiny Qwen3-VL (random weights, float32) plays episodes of 8 turns, replies of 8 ids, an image of
noise of 224 x 224 pixels in each. The server is started as `turnwright engines start` does; its
environment is that of `contrib/cpu_servers.py`. Both ways take turns with it, each with weights of
its own number, so that nothing is known from before. Told are the medians of the rounds: bytes that
requests sent, and seconds by the clock.

    python benchmarks/images_served.py [--home DIR] [--turns 8] [--episodes 16]
        [--pixels 224] [--rounds 3]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import turnwright as tw
from turnwright.config import EngineConfig, Limits, ModelConfig, RunConfig
from turnwright.engines.remote import vllm_images
from turnwright.engines.remote.managed import HOME
from turnwright.renderers import load_renderer
from turnwright.rollouts import arollout
from turnwright.training import create_tiny_model, make_engine, unique_weights
from turnwright.training.model.models import load

TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(200)
]
NAMED, EACH = "named", "each turn"


def show(turns: int, pixels: int) -> type[tw.Env]:
    """An environment that shows another image in each turn."""

    class Show(tw.Env):
        def reset(self, task: tw.Task, *, seed: int | None = None) -> Any:
            self.turn, self.number = 0, int(task.id)
            return self.look()

        def step(self, action: Any) -> tw.Step:
            self.turn += 1
            return tw.Step(self.look(), reward=0.0, terminated=self.turn == turns)

        def look(self) -> Any:
            noise = np.random.default_rng([self.number, self.turn]).integers(
                0, 256, (pixels, pixels, 3), dtype=np.uint8
            )
            return (tw.Message("user", (tw.Image(noise), f"see {self.turn}")),)

    return Show


async def measure(
    source: Path, place: Path, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    module, _ = load(source)
    renderer = load_renderer(source)
    # Nothing ends a reply but its length.
    renderer.banned_ids |= renderer.invalid_ids | renderer.stop_ids
    limits = Limits(
        turns=args.turns + 1, turn_tokens=8, on_turn_length="continue", context=args.context
    )
    config = RunConfig(engine=EngineConfig(kind="vllm", install_dir=str(args.home)), limits=limits)
    fleet: Any = make_engine(config, source, module, renderer, place)
    (member,), sent = fleet.members, [0]
    ask = member.engine.http._ask

    async def counted(method: str, path: str, content: bytes, *more: Any) -> bytes:
        sent[0] += len(content)
        return await ask(method, path, content, *more)

    member.engine.http._ask = counted
    since, rows = vllm_images.MIN_VERSION, {NAMED: [], EACH: []}
    made = show(args.turns, args.pixels)
    try:
        for number in range(2 * (args.rounds + 1)):
            way = (NAMED, EACH)[number % 2]
            vllm_images.MIN_VERSION = since if way == NAMED else (10**9,)
            member.engine.images._pixel_format = None  # probe again, including the cache
            await fleet.update(list(unique_weights(module)), number)
            tasks = [tw.Task("go", id=str(n)) for n in range(args.episodes)]
            sent[0], began = 0, time.perf_counter()
            found = await arollout(
                made, tasks, fleet, renderer=renderer, limits=limits, seed=number, sanity="off"
            )
            row = {"bytes": float(sent[0]), "seconds": time.perf_counter() - began}
            assert all(str(t.stop) == "done" for t in found), {str(t.error) for t in found}
            if number > 1:
                rows[way].append(row)
    finally:
        await fleet.close()
    return {
        way: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for way, found in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", type=Path, default=Path(os.environ.get("TURNWRIGHT_ENGINES", HOME))
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="turnwright-") as place:
        source = create_tiny_model(
            ModelConfig(hidden=64, heads=2, kv_heads=2, vision=True),
            TEXTS,
            Path(place) / "model",
            seed=1,
        )
        settings = source / "preprocessor_config.json"
        told = json.loads(settings.read_text())
        told["size"]["longest_edge"] = args.pixels**2  # images are shown as large as they are
        settings.write_text(json.dumps(told))
        found = asyncio.run(measure(source, Path(place) / "run", args))
    for way, row in found.items():
        print(f"{way:10} {row['bytes'] / 1e6:8.1f} MB  {row['seconds']:6.2f} s", flush=True)
    ratios = {name: round(found[EACH][name] / found[NAMED][name], 2) for name in found[EACH]}
    print(json.dumps({"ratio_bytes": ratios["bytes"], "ratio_seconds": ratios["seconds"]} | found))


if __name__ == "__main__":
    main()

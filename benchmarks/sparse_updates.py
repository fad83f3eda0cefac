"""Bytes of a weight update of a bfloat16 model whose steps change few elements,
beside those of a full update.

A trainer with float32 masters takes `--steps` steps of AdamW on demonstrations of `hop`. After each
its weights are written, and two relay processes (`turnwright engines relay`) fetch them through
`WeightTree`, the second from the first or from the trainer. The first update is a full one. Halfway
the second relay is killed and started again with an empty disk, so it needs a full update once
more. After each step both relays must have the trainer's bytes.

    python benchmarks/sparse_updates.py [--model DIR] [--steps 20] [--lr 1e-6]

How many elements change depends on the learning rate: a step moves a weight by about that much. The
last line is JSON: `full_bytes`, `update_bytes` (the mean of one relay's updates without the first
and that of the kill), `ratio` (their quotient), `run_ratio` (the same of the whole run: all bytes
received, over those of full updates), `changed` (the mean share of elements), `full_s` and
`update_s` (medians until both relays have an update), and `equal`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import turnwright as tw
from turnwright.config import ModelConfig, TrainConfig
from turnwright.config.schema import EnvConfig
from turnwright.engines.remote.http import HttpClient
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.engines.remote.weight_sync import DiskWeights
from turnwright.envs import resolve_env
from turnwright.training import Trainer, create_tiny_model, load_model_and_renderer, unique_weights
from turnwright_serve.sharing import WeightTree

HOSTS = ("127.0.0.2", "127.0.0.3")
TOKEN = "TURNWRIGHT_SERVE_TOKEN"


class Relay:
    """`turnwright engines relay` in a process of its own."""

    def __init__(self, root: Path, host: str, port: int) -> None:
        self.host = host
        command = [
            sys.executable,
            "-m",
            "turnwright",
            "engines",
            "relay",
            str(root),
            "--host",
            host,
            "--port",
            str(port),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])

    async def fetched(self) -> int:
        """Return the bytes that it received from peers."""
        http = HttpClient(self.url, key_env=TOKEN)
        try:
            return int((await http.get("/weights/counts", 5)).get("bytes_fetched", 0))
        finally:
            await http.close()

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait()


async def measure(
    trainer: Trainer, demos: list[tw.Trajectory], source: Path, root: Path, args: argparse.Namespace
) -> dict[str, object]:
    """Train, send, compare; return the figures."""
    directories = ModelDirectories(root / "weights", source)
    relays = [Relay(root / HOSTS[0], HOSTS[0], 0)]
    relays.append(Relay(root / HOSTS[1], HOSTS[1], relays[0].port))
    tree = WeightTree(relay_port=relays[0].port)
    urls = [relay.url for relay in relays]
    sizes: list[int] = []
    seconds: dict[str, list[float]] = {"full": [], "update": []}
    changed: list[float] = []
    equal, size, total = True, 0, 0
    try:
        for version in range(args.steps + 1):
            before = {name: tensor.clone() for name, tensor in unique_weights(trainer.model)}
            if version:
                trainer.supervised(demos[version % len(demos) :][: args.rows], lr=args.lr)
                moved = sum(
                    int((before[name] != tensor).sum())
                    for name, tensor in unique_weights(trainer.model)
                )
                changed.append(moved / sum(tensor.numel() for tensor in before.values()))
            restarts = version == args.steps // 2
            if restarts:
                relays[1].kill()
                relays[1] = Relay(root / "fresh", HOSTS[1], relays[0].port)

            directory, _ = await asyncio.to_thread(
                directories.write, unique_weights(trainer.model), version
            )
            size = sum(path.stat().st_size for path in directory.iterdir())
            had = [await relay.fetched() for relay in relays]
            began = time.perf_counter()
            shared = await tree.share(DiskWeights(directory, version), urls)
            nodes = await asyncio.gather(*(shared.directory_on(relay.host) for relay in relays))
            seconds["update" if version and not restarts else "full"].append(
                time.perf_counter() - began
            )
            got = [
                await relay.fetched() - earlier for relay, earlier in zip(relays, had, strict=True)
            ]
            total += sum(got)
            if version and not restarts:
                sizes += got
            for node in nodes:
                equal &= all(
                    (node / path.name).read_bytes() == path.read_bytes()
                    for path in directory.iterdir()
                )
            print(
                f"step {version}: {changed[-1] if changed else 0:.2%} of elements, bytes {got}, "
                f"equal {equal}",
                flush=True,
            )
    finally:
        await tree.close()
        for relay in relays:
            relay.kill()
    mean = statistics.mean(sizes)
    return {
        "full_bytes": size,
        "update_bytes": round(mean),
        "ratio": round(mean / size, 4),
        "run_ratio": round(total / (2 * size * (args.steps + 1)), 4),
        "changed": round(statistics.mean(changed), 4),
        "full_s": round(statistics.median(seconds["full"]), 2),
        "update_s": round(statistics.median(seconds["update"]), 2),
        "equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a tiny model without it")
    parser.add_argument("--hidden", type=int, default=256, help="width of the tiny model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--rows", type=int, default=2, help="demonstrations of a step")
    args = parser.parse_args()
    os.environ[TOKEN] = "sparse"
    torch.set_num_threads(1)
    spec = resolve_env(EnvConfig(use="hop", args={"rules": True}))
    assert spec.factory is not None
    assert spec.solver is not None
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tasks = spec.tasks("train", args.rows + args.steps, 0)
        if args.model is None:
            texts = spec.texts(50, 0, lambda tools: "")
            args.model = create_tiny_model(
                ModelConfig(hidden=args.hidden), texts, root / "model", seed=0
            )
        config = ModelConfig(path=str(args.model), dtype="bfloat16", device="cpu")
        source = config.directory
        assert source is not None
        model, renderer = load_model_and_renderer(source, source, config)
        demos = tw.rollout(
            spec.factory, tasks, engine=tw.ScriptedEngine(spec.solver), renderer=renderer
        )
        trainer = Trainer(model, TrainConfig(), seed=0)
        print(json.dumps(asyncio.run(measure(trainer, demos, source, root, args))))


if __name__ == "__main__":
    main()

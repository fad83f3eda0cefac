"""What a weight update costs while calls are in flight: `turnwright serve` in a process
of its own, over a socket.

The engine is slowed to 50 ms a token, as a large model's: otherwise callers and update compete for
the same processor. A fleet of one server gets new weights from disk (written, loaded, and proven by
their logprobs), with no call in flight and with 64, which callers make without a pause between
them. Both take turns in each round; the figures are medians over the rounds. Nothing that was
sampled may be lost, so the ids of all replies are counted on both sides.

    python benchmarks/updates.py [--in-flight 64] [--reply 16] [--token-s 0.05] [--rounds 7]

Last line: JSON with, for each of the two formats, `idle_s` and `busy_s` (seconds of an update
without and with calls in flight), `ratio` (busy / idle) and `sent_again` (calls that were cancelled
and sent once more: their ids are lost).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from turnwright.config import ModelConfig
from turnwright.engines import Request
from turnwright.engines.remote import Fleet, SglangEngine, VllmEngine
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.training import create_tiny_model, score_with_model, unique_weights
from turnwright.training.model.models import load

TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]
CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine}
PROMPT = list(range(10, 40))
SLOWED = """
import sys, time
from turnwright.cli.main import main
from turnwright.engines.local.sampler import Sampler
pick, seconds = Sampler.pick, float(sys.argv[1])
Sampler.pick = lambda *args: time.sleep(seconds) or pick(*args)
sys.exit(main(sys.argv[2:]))
"""


async def measure(
    kind: str, url: str, root: Path, source: Path, args: argparse.Namespace
) -> dict[str, float]:
    model, _ = load(source)
    client = CLIENTS[kind](url)
    fleet = Fleet(
        [client],
        delivery=WeightDelivery(
            directories=ModelDirectories(root / kind, source),
            expected_logprobs=score_with_model(model),
        ),
    )
    version, going = 0, True
    seconds: dict[int, list[float]] = {0: [], args.in_flight: []}

    async def caller(number: int) -> None:
        ids: list[int] = []
        length = 1 + number % args.reply
        while going or ids:  # a reply begun is finished
            left, context = length - len(ids), [*PROMPT, *ids]
            request = Request(
                context, left, frozenset(), number, f"s{number}", reply_position=len(ids)
            )
            made = await fleet.generate(request)
            ids = [*ids, *made.ids] if made.finish == "abort" else []
            ids = [] if len(ids) == length else ids

    for turn in range(args.rounds + 1):
        for calls, row in seconds.items():
            going = True
            callers = [asyncio.create_task(caller(number)) for number in range(calls)]
            await asyncio.sleep(0.5 if calls else 0.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01 * torch.randn(parameter.shape)
            version += 1
            began = time.perf_counter()
            await fleet.update(unique_weights(model), version)
            if turn:  # the first round opens connections and compiles
                row.append(time.perf_counter() - began)
            going = False
            await asyncio.gather(*callers)
    idle, busy = (statistics.median(row) for row in seconds.values())
    again = sum(count for name, count in fleet.counts.items() if name.startswith("asked_again/"))
    await fleet.close()
    again += client.counts["sent_again"]
    return {
        "idle_s": round(idle, 3),
        "busy_s": round(busy, 3),
        "ratio": round(busy / idle, 2),
        "sent_again": again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument(
        "--reply", type=int, default=16, help="most ids of a reply; short ones put calls in transit"
    )
    parser.add_argument(
        "--token-s",
        type=float,
        default=0.05,
        help="seconds by which each pass of the engine is slowed",
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        source = create_tiny_model(
            ModelConfig(hidden=args.hidden, layers=2), TEXTS, root / "model", seed=3
        )
        for kind in CLIENTS:
            command = [
                sys.executable,
                "-c",
                SLOWED,
                str(args.token_s),
                "serve",
                str(source),
                "--formats",
                kind,
            ]
            command += ["--port", "0", "--device", "cpu", "--context", "1024"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                try:
                    assert server.stdout is not None
                    url = server.stdout.readline().split()[0]
                    found[kind] = asyncio.run(measure(kind, url, root, source, args))
                    print(kind, found[kind], flush=True)
                finally:
                    server.terminate()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What a controller of 10, 100 and 1,000 engines needs, from costs measured in this run.

    python benchmarks/scale_sim.py [--engines 100] [--episodes 256]

Measured, in CPU time of this process: (1) a turn of `tw.rollout` with its records on disk,
through a `Fleet` of 100 clients of HTTP servers in another process, with replies of 720 ids
and of 64, 8 turns an episode, and the bytes that it sends, receives and records; (2) a
check of an engine (health, name of its weights, load), of which each engine gets one every
two seconds; (3) a relay that fetches weights from another and verifies them, and one that
serves them; (4) the disk of records.

Assumed, since no such machines are at hand: an engine samples 6,000 tokens a second; 8 engines a
machine; ports of 25 Gb/s; 32 billion weights of 2 bytes, updated every 120 s. Then cores = turns a
second x cost of a turn + checks a second x cost of a check, and so on. `bottleneck` is what is used
most, as a share of one core, one port, the disk's rate and the time between updates.

Last line: JSON with a row per number of engines: `engines`, `controller_cores`, `request_MB_s`,
`trajectory_MB_s`, `weights_s`, `bottleneck`; `cores_64` are those at replies of 64 ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fleet
import orjson
from rollout_loop import OBSERVATION, make_env, make_tokenizer, text_of

import turnwright as tw
from turnwright.engines.remote import Fleet, VllmEngine
from turnwright.engines.remote.fleet_settings import FleetSettings
from turnwright.engines.remote.http import HttpClient
from turnwright.renderers import CHATML, ChatRenderer, ChatTemplate, HFTokenizer

TURNS, REPLIES = 8, (720, 64)
TOKENS_S, PER_MACHINE, PORT_MB_S = 6000, 8, 25_000 / 8
WEIGHTS_MB, UPDATE_S, CHECK_S = 64_000, 120, 2.0


async def serve(count: int) -> None:
    """Answer on `count` ports with replies of a pool; the first line of the input is the pool."""
    pool = orjson.loads(sys.stdin.readline())
    fleet.Server.answers = [answer(ids) for ids in pool]
    fleet.REPLY = len(pool[0])
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Server, "127.0.0.1", 0, backlog=1024) for _ in range(count)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


def answer(ids: list[int]) -> bytes:
    rows = [{"token_id": one, "logprob": -0.5, "rank": 1, "top_logprobs": []} for one in ids]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": rows}}
    choice["weight_versions"] = [{"version": "0", "start": 0, "end": len(ids)}]
    return orjson.dumps(
        {"prompt_token_ids": [], "choices": [choice], "usage": {"prompt_tokens": 1}}
    )


class Server(fleet.Server):
    """Answers with the next reply of the pool."""

    answers: list[bytes] = []  # noqa: RUF012
    number = 0

    @property
    def answer(self) -> bytes:  # type: ignore[override]
        Server.number += 1
        return fleet.Server.answers[Server.number % len(fleet.Server.answers)]


class Setting:
    """Tokenizer, environment and replies, made once."""

    def __init__(self) -> None:
        rng = random.Random(0)
        tokenizer, words = make_tokenizer(rng)
        self.renderer = ChatRenderer(HFTokenizer(tokenizer), ChatTemplate(CHATML))
        self.env = make_env(
            [text_of(tokenizer, words, rng, OBSERVATION) for _ in range(256)], TURNS, is_async=True
        )
        end = tokenizer.token_to_id("<|im_end|>")
        self.pools = {}
        for size in REPLIES:
            texts = [text_of(tokenizer, words, rng, size - 1) for _ in range(64)]
            rows = (
                tokenizer.encode(text, add_special_tokens=False).ids[: size - 1] for text in texts
            )
            self.pools[size] = [[*row, end] for row in rows]

    def play(self, ports: list[int], episodes: int, most: int) -> tuple[float, float, float]:
        """CPU seconds a turn; bytes a turn of requests and responses, and of records."""
        counted = [0]
        ask = HttpClient._ask_once

        async def noted(
            self: HttpClient, method: str, path: str, content: bytes, *rest: Any
        ) -> bytes:
            raw = await ask(self, method, path, content, *rest)
            counted[0] += len(content) + len(raw)
            return raw

        HttpClient._ask_once = noted  # type: ignore[method-assign]
        engines = [VllmEngine(f"http://127.0.0.1:{port}", most=most) for port in ports]
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "run"
            tasks = [tw.Task(answer=number) for number in range(episodes)]
            cpu = time.process_time()
            found = tw.rollout(
                self.env,
                tasks,
                Fleet(engines, FleetSettings(most=most, check_s=3600.0)),
                renderer=self.renderer,
                limits=tw.Limits(turns=TURNS, turn_tokens=1024, context=16_384),
                out=out,
                concurrency=episodes,
            )
            cpu = time.process_time() - cpu
            written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        HttpClient._ask_once = ask  # type: ignore[method-assign]
        turns = sum(len(trajectory.turns) for trajectory in found)
        assert turns == TURNS * episodes, {str(trajectory.error) for trajectory in found}
        return cpu / turns, counted[0] / turns, written / turns


async def check_cost(ports: list[int]) -> float:
    """CPU seconds of a check of an engine."""
    engine = Fleet(
        [VllmEngine(f"http://127.0.0.1:{port}") for port in ports], FleetSettings(check_s=3600.0)
    )
    await engine.open()
    cpu = time.process_time()
    for _ in range(5):
        for member in engine.members:
            assert await member.check(5.0, lambda member=member: engine._latest_for(member))
    cpu = (time.process_time() - cpu) / 5 / len(ports)
    await engine.close()
    return cpu


async def relay_rates(folder: Path, megabytes: int = 256) -> tuple[float, float, float]:
    """MB per second of CPU: of a relay's event loop as it fetches, of all its threads (which verify
    and write), and of one that serves, in a process of its own."""
    import psutil

    from turnwright_serve.sharing import Manifest, WeightRelay

    source = folder / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(random.Random(0).randbytes(2**20) * megabytes)
    # Equal chunks would be fetched once: each gets a number.
    with (source / "model.safetensors").open("r+b") as file:
        for number in range(megabytes):
            file.seek(number * 2**20)
            file.write(number.to_bytes(8, "little"))
    command = [
        sys.executable,
        "-m",
        "turnwright",
        "engines",
        "relay",
        str(folder / "peer"),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        url = peer.stdout.readline().strip()
        manifest = await asyncio.to_thread(Manifest.of, source, 1)
        from turnwright.engines.remote.weight_sync import DiskWeights
        from turnwright_serve.sharing import WeightTree

        tree = WeightTree()
        shared = await tree.share(DiskWeights(source, 1), [url])
        http = HttpClient(url)
        await http.post(
            "/weights/fetch",
            {"manifest": orjson.Fragment(shared.manifest), "sources": [[await tree.start()]]},
            600,
        )
        await http.close()
        await tree.close()
        before = sum(psutil.Process(peer.pid).cpu_times()[:2])
        relay = WeightRelay(folder / "node")
        cpu, thread = time.process_time(), time.thread_time()
        await relay.fetch(manifest, [[url]])
        cpu, thread = time.process_time() - cpu, time.thread_time() - thread
        served = sum(psutil.Process(peer.pid).cpu_times()[:2]) - before
        await relay.close()
        peer.kill()
    return megabytes / thread, megabytes / cpu, megabytes / served


def disk_rate(folder: Path, megabytes: int = 128) -> float:
    """MB a second, wall clock, of lines that are written and then forced to the disk."""
    line, began = b"x" * 10_000, time.perf_counter()
    with (folder / "lines").open("wb") as file:
        for _ in range(megabytes * 100):
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return megabytes / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=100, help="servers in the other process")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    setting, costs = Setting(), {}
    for size in REPLIES:
        command = [sys.executable, __file__, "--serve", str(args.engines)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(orjson.dumps(setting.pools[size]) + b"\n")
            server.stdin.flush()
            ports = json.loads(server.stdout.readline())
            try:
                rows = [setting.play(ports, args.episodes, 64) for _ in range(args.rounds + 1)][1:]
                check_s = asyncio.run(check_cost(ports))
            finally:
                server.kill()
        costs[size] = [statistics.median(column) for column in zip(*rows, strict=True)]
        turn, sent, written = costs[size]
        print(
            f"replies of {size} ids: {turn * 1e6:.0f} us of CPU a turn, {sent:.0f} bytes over "
            f"HTTP, {written:.0f} recorded"
        )
    with tempfile.TemporaryDirectory() as name:
        loop_rate, fetch_rate, serve_rate = asyncio.run(relay_rates(Path(name)))
        disk = disk_rate(Path(name))
    print(f"a check {check_s * 1e6:.0f} us; disk of records {disk:.0f} MB/s")
    print(
        f"MB a CPU second: a relay fetches {fetch_rate:.0f}, its event loop alone {loop_rate:.0f}; "
        f"it serves {serve_rate:.0f}"
    )
    # Each machine receives all weights and sends them once.
    relay = 1 / (1 / loop_rate + 1 / serve_rate)
    rows = [row_of(engines, costs, check_s, relay, disk) for engines in (10, 100, 1000)]
    for row in rows:
        print(row)
    keys = (
        "engines",
        "controller_cores",
        "request_MB_s",
        "trajectory_MB_s",
        "weights_s",
        "bottleneck",
        "cores_64",
    )
    print(
        json.dumps(
            {
                "rows": [{key: row[key] for key in keys} for row in rows],
                "us_per_turn": round(costs[720][0] * 1e6, 1),
            }
        )
    )


def row_of(
    engines: int, costs: dict[int, list[float]], check_s: float, relay: float, disk: float
) -> dict[str, Any]:
    """The needs of a number of engines."""
    checks = engines / CHECK_S * check_s
    cores = {
        size: engines * TOKENS_S / size * turn + checks for size, (turn, _, _) in costs.items()
    }
    turns = engines * TOKENS_S / 720
    sent, written = turns * costs[720][1] / 1e6, turns * costs[720][2] / 1e6
    machines = math.ceil(engines / PER_MACHINE)
    hops = math.floor(math.log2(machines)) + 1
    wire = WEIGHTS_MB / PORT_MB_S + hops * 8.4 / PORT_MB_S
    weights_s = max(wire, WEIGHTS_MB / relay)
    shares = {
        "controller CPU": cores[720],
        "controller network": sent / PORT_MB_S,
        "disk of records": written / disk,
        "weights": weights_s / UPDATE_S,
    }
    return {
        "engines": engines,
        "controller_cores": round(cores[720], 2),
        "request_MB_s": round(sent, 1),
        "trajectory_MB_s": round(written, 1),
        "weights_s": round(weights_s, 1),
        "weights_wire_s": round(wire, 1),
        "weights_one_port_s": round(engines * WEIGHTS_MB / PORT_MB_S, 1),
        "bottleneck": max(shares, key=shares.__getitem__),
        "shares": {name: round(share, 3) for name, share in shares.items()},
        "cores_64": round(cores[64], 2),
    }


if __name__ == "__main__":
    main()

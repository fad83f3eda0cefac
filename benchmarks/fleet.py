"""What the fleet's client costs a request, next to the bare HTTP library in the same run.

A server in a process of its own answers at once, in vLLM's tokens-only form, with the 8,192 ids of the prompt echoed and 64
ids with logprobs. Sent to it: 256 requests at a time, (a) by `Fleet` and `VllmEngine`, placed, verified and all; (b) by the
library alone (httpx2): the same bytes out, the same bytes back, nothing made and nothing read. Both take turns; the figures
are medians of CPU time of this process over the rounds, so that neither server nor other processes count.

    python benchmarks/fleet.py [--requests 1024] [--rounds 5] [--prompt 8192]

Last line: JSON with `ratio` (a / b), `us_per_request` (a), `requests_per_s` (a, wall clock).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from unittest.mock import patch

import orjson

REPLY = 64


class Server(asyncio.Protocol):
    """Answers each POST of a generation with the same bytes; everything else by a small table."""

    answer: bytes = b""
    prompt: list[int] = []  # noqa: RUF012

    def connection_made(self, transport) -> None:
        self.transport, self.buffer = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[:end]).lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            path = head.split(b" ", 2)[1]
            body = bytes(self.buffer[end + 4 : end + 4 + size])
            del self.buffer[: end + 4 + size]
            self.transport.write(self.answer if path == b"/inference/v1/generate" else framed(page(path.decode(), body)))


def framed(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def page(path: str, body: bytes) -> bytes:
    if path == "/v1/completions":
        ids = orjson.loads(body)["prompt"]
        rows = [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])]
        return orjson.dumps({"choices": [{"prompt_logprobs": rows}]})
    table = {
        "/version": {"version": "0"},
        "/v1/models": {"data": [{"id": "m", "parent": None, "max_model_len": 1 << 17}]},
        "/weight_info": {"weight_version": "0"},
        "/openapi.json": {"paths": {"/inference/v1/generate": {}, "/v1/completions": {}, "/weight_info": {}}},
    }
    return orjson.dumps(table.get(path, {}))


async def serve(size: int) -> None:
    ids = prompt(size)
    rng = random.Random(1)
    rows = [{"token_id": rng.randrange(32_000), "logprob": -rng.random(), "rank": 1, "top_logprobs": []} for _ in range(REPLY)]
    choice = {
        "index": 0,
        "token_ids": [row["token_id"] for row in rows],
        "finish_reason": "length",
        "logprobs": {"content": rows},
    }
    choice["weight_versions"] = [{"version": "0", "start": 0, "end": REPLY}]
    Server.answer = framed(orjson.dumps({"prompt_token_ids": ids, "choices": [choice], "usage": {"prompt_tokens": size}}))
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def prompt(size: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(32_000) for _ in range(size)]


async def many(one: Callable[[int], Awaitable[object]], requests: int, in_flight: int) -> tuple[float, float]:
    """CPU and wall seconds of `requests` calls, `in_flight` at a time."""
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            await one(number)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return time.process_time() - cpu, time.perf_counter() - wall


async def measure(url: str, args: argparse.Namespace) -> dict[str, float]:
    import httpx2

    from turnwise.engines import Request
    from turnwise.engines.remote import Fleet, VllmEngine

    ids = prompt(args.prompt)
    client = VllmEngine(url, most=args.in_flight)
    fleet = Fleet([client], most=args.in_flight, check_s=60.0)

    async def ours(number: int) -> None:
        found = await fleet.generate(Request(ids, REPLY, frozenset({32_001}), number, f"s{number}"))
        assert len(found.ids) == REPLY

    with patch.object(client.http, "post", wraps=client.http.post) as posted:
        await ours(0)
    content = orjson.dumps(posted.call_args.args[1])  # the same body for the bare library
    limits = httpx2.Limits(max_connections=args.in_flight, max_keepalive_connections=args.in_flight)
    rows: dict[str, list[tuple[float, float]]] = {"fleet": [], "bare": []}
    async with httpx2.AsyncClient(limits=limits, timeout=60.0, trust_env=False) as bare:

        async def library(number: int) -> None:
            answer = await bare.post(
                f"{url}/inference/v1/generate", content=content, headers={"content-type": "application/json"}
            )
            assert len(answer.content) > args.prompt

        for number in range(args.rounds + 1):
            for name, one in (("fleet", ours), ("bare", library)):
                found = await many(one, args.requests, args.in_flight)
                if number:  # the first round makes the connections
                    rows[name].append(found)
    await fleet.close()
    figures = {f"{name}_us": statistics.median(cpu for cpu, _ in row) / args.requests * 1e6 for name, row in rows.items()}
    figures["wall_s"] = statistics.median(wall for _, wall in rows["fleet"])
    figures["ratio"] = statistics.median(a / b for (a, _), (b, _) in zip(rows["fleet"], rows["bare"], strict=True))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.prompt))
        return
    command = [sys.executable, __file__, "--serve", "--prompt", str(args.prompt)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            figures = asyncio.run(measure(f"http://127.0.0.1:{int(server.stdout.readline())}", args))
        finally:
            server.kill()
    print(f"{args.prompt} ids of prompt, {REPLY} of reply, {args.in_flight} in flight; Python {platform.python_version()}")
    print(f"fleet {figures['fleet_us']:.0f} us of CPU a request, the library alone {figures['bare_us']:.0f}")
    last = {"ratio": figures["ratio"], "us_per_request": figures["fleet_us"], "bare_us": figures["bare_us"]}
    print(
        json.dumps({k: round(v, 3) for k, v in last.items()} | {"requests_per_s": round(args.requests / figures["wall_s"], 1)})
    )


if __name__ == "__main__":
    main()

"""What the fleet's client costs a request, next to well-kept HTTP libraries
that do the same by hand.

    python benchmarks/fleet.py [--contexts 1024 8192 32768] [--requests 512]
        [--rounds 7] [--libraries aiohttp]

A server in a process of its own answers at once, in vLLM's tokens-only form: the ids of the prompt,
echoed, and 64 ids with logprobs. 64 episodes run at a time; each sends its context, and the next
turn has the reply and 16 other ids appended. They go (a) through `Fleet` and `VllmEngine`: placed,
verified and all; (b) by hand: a body is made and encoded, sent by the library, the response is
parsed, its echo compared with the ids sent, and its ids and logprobs are taken; (c) by the library
alone: the same bytes out, the same bytes back, nothing made and nothing read. All libraries that
are installed take part (`pip install aiohttp httpx2 httpx urllib3 niquests pycurl`); libraries
without asyncio run 64 threads. The sides take turns within each round. Figures are medians over
rounds of the CPU time of this process, so that neither server nor other processes count; ratios are
medians of the rounds' own.

    python benchmarks/fleet.py elastic [--kills 20]

Trains with four `turnwright serve`, of which two are killed (-9) and two others join in the middle
of a step, and once more with servers that stay; compares the ids that were trained and the final
weights. A replacement's time runs from the start of its process, or from joining the list, to its
first reply, which only proven weights give.

Last line: JSON. Of the client: `ratio` (a / b, the cheapest library, at the second
context), `client_us` and `by_hand_us` by context, and `growth` (a at the longest
context / a at the shortest).
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import orjson

REPLY, OBSERVATION, TURNS = 64, 16, 8
EPISODES = 64
GENERATE = "/inference/v1/generate"
JSON = {"content-type": "application/json"}


class Server(asyncio.Protocol):
    """Answers each POST of a generation with the prompt that it has and the same reply; everything
    else by a small table."""

    answer: bytes = b""

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
            if path == GENERATE.encode():
                start = body.index(b'"token_ids":') + 12
                ids = body[start : body.index(b"]", start) + 1]
                self.transport.write(framed(self.answer.replace(b"[]", ids, 1)))
            else:
                self.transport.write(framed(page(path.decode(), body)))


def framed(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )


def page(path: str, body: bytes) -> bytes:
    if path == "/v1/completions":
        ids = orjson.loads(body)["prompt"]
        rows = [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])]
        return orjson.dumps({"choices": [{"prompt_logprobs": rows}]})
    table = {
        "/version": {"version": "0"},
        "/v1/models": {"data": [{"id": "m", "parent": None, "max_model_len": 1 << 17}]},
        "/weight_info": {"weight_version": "0"},
        "/openapi.json": {"paths": {GENERATE: {}, "/v1/completions": {}, "/weight_info": {}}},
    }
    return orjson.dumps(table.get(path, {}))


async def serve() -> None:
    rng = random.Random(1)
    rows = [
        {"token_id": rng.randrange(32_000), "logprob": -rng.random(), "rank": 1, "top_logprobs": []}
        for _ in range(REPLY)
    ]
    choice = {
        "index": 0,
        "token_ids": [row["token_id"] for row in rows],
        "finish_reason": "length",
        "logprobs": {"content": rows},
        "weight_versions": [{"version": "0", "start": 0, "end": REPLY}],
    }
    Server.answer = orjson.dumps(
        {"prompt_token_ids": [], "choices": [choice], "usage": {"prompt_tokens": 1}}
    )
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def prompt(size: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(32_000) for _ in range(size)]


def by_hand(ids: list[int], number: int) -> bytes:
    """A body as a user would make it."""
    sampling = {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": REPLY,
        "logprobs": 0,
    }
    sampling |= {
        "stop_token_ids": [32_001],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "detokenize": False,
    }
    sampling |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    body = {"request_id": f"r{number}", "model": "m", "token_ids": ids, "sampling_params": sampling}
    return orjson.dumps(body | {"return_token_ids": True, "cache_salt": "0"})


def taken(content: bytes, ids: list[int]) -> list[int]:
    """The ids of a response as a user would take them."""
    found = orjson.loads(content)
    assert found["prompt_token_ids"] == ids
    choice = found["choices"][0]
    logprobs = [row["logprob"] for row in choice["logprobs"]["content"]]
    assert len(choice["token_ids"]) == len(logprobs) == REPLY
    return choice["token_ids"]


Post = Callable[[str, bytes], Awaitable[bytes]]


async def libraries(stack: AsyncExitStack, names: list[str]) -> dict[str, Post]:
    """A function per installed library that posts a body and returns the response's body."""
    found: dict[str, Post] = {}
    pool = stack.enter_context(ThreadPoolExecutor(EPISODES))
    loop = asyncio.get_running_loop()
    with suppress(ImportError):
        import aiohttp

        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=EPISODES))
        )

        async def with_aiohttp(url: str, body: bytes) -> bytes:
            async with session.post(url, data=body, headers=JSON) as response:
                return await response.read()

        found["aiohttp"] = with_aiohttp
    for name in ("httpx2", "httpx"):
        if find_spec(name) is None:
            continue
        httpx = __import__(name)
        limits = httpx.Limits(max_connections=EPISODES, max_keepalive_connections=EPISODES)
        client = await stack.enter_async_context(
            httpx.AsyncClient(limits=limits, timeout=60.0, trust_env=False)
        )

        async def with_httpx(client: Any, url: str, body: bytes) -> bytes:
            return (await client.post(url, content=body, headers=JSON)).content

        found[name] = partial(with_httpx, client)
    with suppress(ImportError):
        import niquests

        requests = await stack.enter_async_context(niquests.AsyncSession(pool_maxsize=EPISODES))

        async def with_niquests(url: str, body: bytes) -> bytes:
            return (await requests.post(url, data=body, headers=JSON)).content

        found["niquests"] = with_niquests
    with suppress(ImportError):
        import urllib3

        manager = urllib3.PoolManager(maxsize=EPISODES, retries=False)

        async def with_urllib3(url: str, body: bytes) -> bytes:
            return await loop.run_in_executor(
                pool, lambda: manager.request("POST", url, body=body, headers=JSON).data
            )

        found["urllib3, threads"] = with_urllib3
    with suppress(ImportError):
        import threading
        from io import BytesIO

        import pycurl

        local = threading.local()

        def curl(url: str, body: bytes) -> bytes:
            if not hasattr(local, "handle"):
                local.handle = pycurl.Curl()
                local.handle.setopt(
                    pycurl.HTTPHEADER, ["content-type: application/json", "expect:"]
                )
            handle, out = local.handle, BytesIO()
            handle.setopt(pycurl.URL, url)
            handle.setopt(pycurl.POSTFIELDS, body)
            handle.setopt(pycurl.WRITEDATA, out)
            handle.perform()
            return out.getvalue()

        async def with_curl(url: str, body: bytes) -> bytes:
            return await loop.run_in_executor(pool, curl, url, body)

        found["pycurl, threads"] = with_curl
    return {
        name: post for name, post in found.items() if not names or name.partition(",")[0] in names
    }


async def episodes(
    turn: Callable[[Any, int], Awaitable[list[int]]], start: Callable[[], Any], requests: int
) -> float:
    """CPU seconds of `requests` turns, in `EPISODES` episodes at a time."""
    numbers, observation = iter(range(requests)), prompt(OBSERVATION)

    async def work() -> None:
        while True:
            ids = start()
            for _ in range(TURNS):
                number = next(numbers, None)
                if number is None:
                    return
                ids.extend(await turn(ids, number))
                ids.extend(observation)

    cpu = time.process_time()
    await asyncio.gather(*(work() for _ in range(EPISODES)))
    return time.process_time() - cpu


async def measure(
    url: str, size: int, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """CPU microseconds of a request on each side, and our ratio to each."""
    from turnwright.engines import Request
    from turnwright.engines.ids import GrowingIds
    from turnwright.engines.remote import Fleet, VllmEngine
    from turnwright.engines.remote.fleet_settings import FleetSettings

    first, stops, calls = prompt(size), frozenset([32_001]), 0
    fleet = Fleet([VllmEngine(url, most=EPISODES)], FleetSettings(most=EPISODES, check_s=60.0))

    async def ours(ids: list[int], number: int) -> list[int]:
        return (await fleet.generate(Request(ids, REPLY, stops, number, str(id(ids))))).ids

    async with AsyncExitStack() as stack:
        sides: dict[str, tuple[Callable[[Any, int], Awaitable[list[int]]], Callable[[], Any]]] = {}
        sides["turnwright"] = ours, lambda: GrowingIds(first)
        for name, post in (await libraries(stack, args.libraries)).items():

            async def hand(post: Post, ids: list[int], number: int) -> list[int]:
                return taken(await post(url + GENERATE, by_hand(ids, number)), ids)

            async def bare(post: Post, content: bytes, ids: list[int], number: int) -> list[int]:
                assert len(await post(url + GENERATE, content)) > size
                return []

            sides[f"{name}, by hand"] = partial(hand, post), lambda: list(first)
            sides[f"{name}, alone"] = partial(bare, post, by_hand(first, 0)), list
        rows: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name, (turn, start) in sides.items():
                seconds = await episodes(turn, start, args.requests)
                calls += args.requests
                if number:  # the first round makes the connections
                    rows[name].append(seconds / args.requests * 1e6)
    await fleet.close()
    figures = {name: statistics.median(row) for name, row in rows.items()}
    # Neighbors in a round: what else the machine does meets both.
    pairs = {name: zip(rows["turnwright"], row, strict=True) for name, row in rows.items()}
    return figures, {
        name: statistics.median(a / b for a, b in pair) for name, pair in pairs.items()
    }


def client(args: argparse.Namespace) -> dict[str, Any]:
    """Print a table of all sides and contexts; return the figures of the last line."""
    tables, against = {}, {}
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for size in args.contexts:
                tables[size], against[size] = asyncio.run(measure(url, size, args))
        finally:
            server.kill()
    print(
        f"CPU us of a request, {REPLY} ids of reply, {EPISODES} in flight; Python "
        f"{platform.python_version()}"
    )
    print(f"{'context':28}" + "".join(f"{size:>8}" for size in args.contexts))
    for name in next(iter(tables.values())):
        print(f"{name:28}" + "".join(f"{tables[size][name]:8.0f}" for size in args.contexts))
    hand = {
        size: min((us, name) for name, us in row.items() if "by hand" in name)
        for size, row in tables.items()
    }
    ours = {size: row["turnwright"] for size, row in tables.items()}
    ratios = {size: round(against[size][name], 3) for size, (_, name) in hand.items()}
    return {
        "ratio": ratios[args.contexts[min(1, len(ratios) - 1)]],
        "ratios": ratios,
        "cheapest": hand[args.contexts[0]][1].removesuffix(", by hand"),
        "client_us": {size: round(us, 1) for size, us in ours.items()},
        "by_hand_us": {size: round(us, 1) for size, (us, _) in hand.items()},
        "growth": round(ours[args.contexts[-1]] / ours[args.contexts[0]], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("client", "elastic"), default="client")
    parser.add_argument(
        "--kills", type=int, default=20, help="elastic: how often two of four are replaced"
    )
    parser.add_argument("--seed", type=int, default=0, help="elastic: chooses the servers to kill")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--libraries", nargs="+", default=[], help="only these")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    if args.part == "elastic":
        from elastic import elastic

        print(json.dumps(elastic(args.kills, args.seed)))
        return
    print(json.dumps(client(args)))


if __name__ == "__main__":
    main()

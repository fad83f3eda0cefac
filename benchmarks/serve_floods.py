"""Clients of `turnwright serve`, the proxy of programs and `turnwright record` that send too much,
too slowly or too often.

Part of `serve_fuzz.py`. Each server has a process of its own, whose memory is watched; a second
process floods it with every access that an adversary may have, and a third one asks for something
small, again and again, on new connections. What counts is how much the server grows and how long
the small requests wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
KINDS = ("serve", "proxy", "record")
QUIET = "nothing"
"""No flood, for comparison."""
FLOODS = ("bodies", "strangers", "values", "slow bodies", "slow heads", "connections", "requests")
MIB = 2**20
BOUND_MIB, LONGEST_S = 1536, 1.0
"""Growth that docs/reference/servers.md states, and maximum seconds that a small
request of others waits."""
PROBE_S = 20.0
"""Seconds after which a small request counts as not answered."""
TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]


@dataclass(frozen=True)
class Target:
    """Where a server is asked, and with which access."""

    port: int
    path: str
    key: str
    body: dict[str, Any]
    """A small request."""

    def head(self, size: int, key: str | None = None) -> bytes:
        """Return the head of a request with a body of so many bytes."""
        key = self.key if key is None else key
        return (
            f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        ).encode()


# The server's process


async def host(kind: str) -> None:
    """Serve until standard input ends; print the targets of the flood and of the probe."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make = {"serve": host_engine, "proxy": host_proxy, "record": host_record}[kind]
        await make(stack, Path(folder))


def announce(flooded: Target, probed: Target) -> None:
    """Print the targets."""
    print(json.dumps([asdict(flooded), asdict(probed)]), flush=True)


async def until_told() -> None:
    """Wait until standard input ends."""
    await asyncio.to_thread(sys.stdin.read)


async def host_engine(stack: contextlib.AsyncExitStack, folder: Path) -> None:
    """Serve a tiny model."""
    from turnwright.config import ModelConfig
    from turnwright.training import create_tiny_model
    from turnwright_serve import make_service
    from turnwright_serve.server import JsonHttpServer

    source = create_tiny_model(ModelConfig(hidden=32, layers=1), TEXTS, folder / "model", seed=3)
    app, engine = make_service(source, context=100, device="cpu")
    stack.push_async_callback(engine.close)
    server = JsonHttpServer(app.routes("vllm"), host="127.0.0.1", port=0)
    await server.start()
    stack.push_async_callback(server.close)
    body = {"prompt": list(range(10, 30)), "max_tokens": 1}
    target = Target(server.port, "/v1/completions", server.token, body)
    announce(target, target)
    await until_told()


def chat(text: str) -> dict[str, Any]:
    """Return the body of a request for a reply."""
    return {"model": "any", "messages": [{"role": "user", "content": text}]}


async def host_proxy(stack: contextlib.AsyncExitStack, folder: Path) -> None:
    """Serve two sessions: that of a hostile program, and another one."""
    import turnwright as tw
    from turnwright_serve.proxy import ProxyServer, ProxySession

    async def play(task: tw.Task, model: tw.Model) -> float:
        async with ProxyServer() as server:
            hostile, other = ProxySession(model), ProxySession(model)
            server.open(hostile)
            server.open(other)
            path = "/v1/chat/completions"
            announce(
                Target(server.port, path, hostile.token, chat("x")),
                Target(server.port, "/v1/messages/count_tokens", other.token, chat("x")),
            )
            await until_told()
            for session in (hostile, other):
                await session.end()
        return 1.0

    limits = tw.Limits(turns=10**6, context=32_000, wall_clock_s=3600.0)
    await tw.arollout(
        play, [tw.Task("x")], tw.ScriptedEngine(lambda messages, rng: "a"), limits=limits
    )


async def host_record(stack: contextlib.AsyncExitStack, folder: Path) -> None:
    """Record sessions."""
    import turnwright as tw
    from turnwright.renderers import byte_renderer
    from turnwright.rollouts.rollout_settings import RolloutSettings
    from turnwright.rollouts.runner import Rollout
    from turnwright_serve.proxy.recording import record_sessions

    def started(url: str) -> None:
        port = int(url.rpartition(":")[2])
        announce(
            Target(port, "/s/hostile/v1/chat/completions", "key", chat("x")),
            Target(port, "/s/other/v1/messages/count_tokens", "key", chat("x")),
        )

    renderer = byte_renderer()
    engine = tw.ScriptedEngine(lambda messages, rng: "a")
    engine.set_renderer(renderer)
    limits = tw.Limits(turns=10**6, context=32_000, wall_clock_s=3600.0)
    rollout = Rollout(engine, renderer, RolloutSettings(limits=limits, sanity="off"))
    recording = asyncio.ensure_future(
        record_sessions(
            rollout, port=0, idle_s=600, on_start=started, note=lambda line: None, key="key"
        )
    )
    await until_told()
    recording.cancel()
    await recording


# The adversary's process


async def flood(target: Target, kind: str, seconds: float) -> None:
    """Flood a server."""
    begin = time.monotonic()
    made = list_of_bodies(target, kind)

    async def client(number: int) -> None:
        while time.monotonic() - begin < seconds:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await one(number)
            await asyncio.sleep(0.01)

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            if kind in ("connections", QUIET):
                await asyncio.sleep(seconds)
            elif kind == "slow heads":
                for byte in target.head(10)[:-2]:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.2)
            elif kind == "slow bodies":
                writer.write(target.head(60_000_000))
                for _ in range(1000):
                    writer.write(b" " * 100_000)
                    await writer.drain()
                    await asyncio.sleep(0.2)
            else:
                body = made[number % len(made)]
                writer.write(target.head(len(body), "wrong" if kind == "strangers" else None))
                for start in range(0, len(body), MIB):
                    writer.write(body[start : start + MIB])
                    await writer.drain()
                await reader.readuntil(b"\r\n\r\n")
        finally:
            writer.close()

    clients = {
        QUIET: 0,
        "connections": 1200,
        "slow heads": 300,
        "slow bodies": 100,
        "requests": 100,
    }.get(kind, 50)
    await asyncio.gather(asyncio.sleep(seconds), *(client(number) for number in range(clients)))


def list_of_bodies(target: Target, kind: str) -> list[bytes]:
    """Return the bodies of a flood."""
    small = json.dumps(target.body).encode()
    opening = small[:-1] + b', "x": '
    if kind == "values":
        return [
            opening + b"[" + b"[]," * 6_000_000 + b"0]}",
            opening + b"[" + b"[]," * 60_000 + b"0]}",
            opening + b"[" + b"12345," * 3_300_000 + b"0]}",
            opening + b"[" + b'"a",' * 2_000_000 + b"0]}",
            opening + b"{" + b",".join(b'"k%d":1' % number for number in range(200_000)) + b"}}",
            small.replace(b"[", b"[" + b'"a",' * 2_000_000, 1),
        ]
    if kind == "requests":
        return [small]
    return [opening + b'"' + b"a" * 55_000_000 + b'"}', small[:-1].ljust(60_000_000) + b"}"]


# The other client's process


async def probe(target: Target) -> None:
    """Ask for something small until standard input ends; print how long an answer took at most."""
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    longest, answered, failed = 0.0, 0, 0
    body = json.dumps(target.body).encode()
    while not over.done():
        began = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                writer.write(target.head(len(body)) + body)
                line = await reader.readuntil(b"\r\n")
                writer.close()
            failed += b" 200 " not in line
            answered += 1
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            failed += 1
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.02)
    print(
        json.dumps({"answered": answered, "failed": failed, "longest_s": round(longest, 3)}),
        flush=True,
    )


# All of it


def resident_mib(pid: int) -> float:
    """Return the memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def child(*words: str) -> subprocess.Popen[str]:
    """Start a process of this file."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, *words], **pipes)


def measure(kind: str, seconds: float) -> dict[str, Any]:
    """Flood one server in every way; return what each did to its memory and to the others."""
    server = child("host", kind)
    assert server.stdin is not None
    assert server.stdout is not None
    targets = server.stdout.readline()
    flooded, probed = json.loads(targets)
    row: dict[str, Any] = {}
    before = resident_mib(server.pid)
    peak = before
    for name in (QUIET, *FLOODS):
        prober = child("probe", json.dumps(probed))
        flooder = child("flood", json.dumps(flooded), name, str(seconds))
        while flooder.poll() is None:
            peak = max(peak, resident_mib(server.pid))
            time.sleep(0.02)
        told, _ = prober.communicate("")
        row[name] = json.loads(told)
    row["grown_mib"] = round(peak - before)
    row["longest_s"] = max(row[name]["longest_s"] for name in FLOODS)
    row["failed"] = sum(row[name]["failed"] for name in FLOODS)
    server.stdin.close()
    server.wait()
    return row


def main() -> None:
    """Run one of the processes, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("host", "flood", "probe", "all"))
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    words = args.words
    if args.what == "host":
        asyncio.run(host(words[0]))
    elif args.what == "flood":
        asyncio.run(flood(Target(**json.loads(words[0])), words[1], float(words[2])))
    elif args.what == "probe":
        asyncio.run(probe(Target(**json.loads(words[0]))))
    else:
        seconds = float(words[1]) if len(words) > 1 else 5.0
        for kind in words[:1] if words else KINDS:
            print(kind, json.dumps(measure(kind, seconds)))


if __name__ == "__main__":
    main()

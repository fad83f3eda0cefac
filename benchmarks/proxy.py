"""What the recording proxy adds to a call: CPU time of our process over a rollout of the
same episodes by the loop.

    python benchmarks/proxy.py [--sessions 64] [--tokens 32000] [--calls 32]
        [--repeats 3] [--profile]

Each session is a program that sends its complete history with every call, up to a context of
`--tokens` (a token is a byte); all sessions make each call at once. The programs run in a process
of their own, whose time is not counted. `growth` is what the proxy adds to the last four calls over
what it adds to the first four; the minimum of the repeats counts. Last line JSON.

Python's collector of cycles runs about once in 250,000 new objects, for some 0.1 s, which are
counted in whichever round they fall on. So it is off for the table and `growth`, and on for the
other figures; `us_collector` is its share of `us_per_call`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
REPLY = "look at number {}"


def observation(number: int, size: int) -> str:
    """Return the text that answers a call."""
    return f"{number}: ".ljust(size, "abcdefgh "[number % 9])


async def client(sessions: int, calls: int, size: int) -> None:
    """Play all sessions, whose addresses come from standard input, in step."""
    urls = [sys.stdin.readline().strip() for _ in range(sessions)]
    barrier = asyncio.Barrier(sessions)

    async def session(url: str) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        reader, writer = await asyncio.open_connection(*host.split(":"), limit=1 << 20)
        history = json.dumps({"role": "user", "content": observation(0, size)})
        for number in range(calls):
            await barrier.wait()
            body = f'{{"model": "m", "messages": [{history}]}}'.encode()
            head = (
                f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: "
                "application/json\r\n"
            )
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[15:])
                for line in answer.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            )
            message = json.loads(await reader.readexactly(length))["choices"][0]["message"]
            rows = message, {"role": "user", "content": observation(number + 1, size)}
            history = ", ".join([history, *map(json.dumps, rows)])
        writer.close()

    await asyncio.gather(*map(session, urls))
    print("done", flush=True)


def measure(
    kind: str, sessions: int, calls: int, size: int, *, collects: bool = True
) -> list[float]:
    """Play the episodes; return the CPU seconds of each round of calls.

    `collects`: with Python's collector of cycles.
    """
    import turnwright as tw
    from turnwright_serve import program

    class InStep(tw.ScriptedEngine):
        """Answers when all sessions asked, and notes the CPU time of this process then."""

        def __init__(self) -> None:
            super().__init__(lambda messages, rng: REPLY.format(len(messages)))
            self.barrier, self.marks = asyncio.Barrier(sessions), [0.0]

        async def generate(self, request: tw.Request) -> tw.Generation:
            if await self.barrier.wait() == 0:
                self.marks.append(time.process_time())
            return await super().generate(request)

    class Loop(tw.Env):
        max_turns = calls

        def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
            self.number = 0
            return observation(0, size)

        def step(self, action: tw.Action) -> tw.Step:
            self.number += 1
            last = self.number == calls
            return tw.Step(observation(self.number, size), reward=float(last), terminated=last)

    given = {
        "limits": tw.Limits(turns=calls, turn_tokens=64),
        "concurrency": sessions,
        "sanity_share": 0.0,
    }
    tasks = [tw.Task(f"{number}") for number in range(sessions)]

    async def play() -> list[float]:
        engine = InStep()
        if kind == "loop":
            found = await tw.arollout(Loop, tasks, engine, **given)
        else:
            words = [sys.executable, __file__, "--client", str(sessions), str(calls), str(size)]
            pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
            process = await asyncio.create_subprocess_exec(*words, **pipes)
            over = asyncio.ensure_future(process.stdout.readline())  # type: ignore[union-attr]

            async def agent(endpoint: Any) -> None:
                process.stdin.write(f"{endpoint.base_url}\n".encode())  # type: ignore[union-attr]
                await asyncio.shield(over)

            found = await tw.arollout(
                program(agent, score=lambda result: 1.0), tasks, engine, **given
            )
            await process.wait()
        assert all(
            one.reward == 1.0 and len(one.turns) == calls and not one.branches for one in found
        ), found[0].error
        assert {len(list(one.samples())) for one in found} == {1}
        return engine.marks[1:]

    gc.collect()
    if not collects:
        gc.disable()
    try:
        marks = asyncio.run(play())
    finally:
        gc.enable()
    return [after - before for before, after in pairwise(marks)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the proxy's time goes")
    args = parser.parse_args()
    size = args.tokens // args.calls - 60  # a turn has a reply and markup too
    runs: dict[tuple[str, bool], list[float]] = {}
    for kind, collects in (
        (kind, collects) for kind in ("loop", "proxy") for collects in (False, True)
    ):
        profile = cProfile.Profile() if args.profile and kind == "proxy" else None
        if profile:
            profile.enable()
        count = 1 if args.profile else args.repeats
        repeats = [
            measure(kind, args.sessions, args.calls, size, collects=collects) for _ in range(count)
        ]
        if profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        runs[kind, collects] = [
            1e6 * min(column) / args.sessions for column in zip(*repeats, strict=True)
        ]
    loop, proxy = runs["loop", False], runs["proxy", False]
    added = [one - other for one, other in zip(proxy, loop, strict=True)]
    print("| calls | context | loop, us a call | proxy | added |\n|---|---|---|---|---|")
    for first in range(0, len(added), 4):
        part = slice(first, first + 4)
        mean = [sum(row[part]) / len(row[part]) for row in (loop, proxy, added)]
        calls, context = (
            f"{first + 1} to {first + len(added[part])}",
            (first + 2) * args.tokens // args.calls,
        )
        print(f"| {calls} | {context} | {' | '.join(f'{one:.0f}' for one in mean)} |")
    total = {kind: sum(row) / len(row) for kind, row in runs.items()}
    per_call = total["proxy", True] - total["loop", True]
    figures = {
        "us_per_call": round(per_call),
        "us_collector": round(per_call - (total["proxy", False] - total["loop", False])),
        "vs_native": round(total["proxy", True] / total["loop", True], 2),
        "growth": round(sum(added[-4:]) / sum(added[:4]), 2),
        "sessions": args.sessions,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        asyncio.run(client(*map(int, sys.argv[2:])))
    else:
        main()

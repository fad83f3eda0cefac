"""What stalls the event loop: environments that sleep, and long texts that are encoded.

32 synchronous environments that sleep one second in a step are played side by side (bound: 2.5 s). Then, while 16 short
episodes go on, one environment answers with a text of 128k tokens; a coroutine that wakes every millisecond measures the
longest time in which the loop did not come by (bound: 50 ms). The ids are compared with those of the renderer called directly.
There is no room for media yet, so no images are decoded: Pillow's part of that bound is not measured.

    python benchmarks/stalls.py            # seconds; last line JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

from rollout_loop import Fixed, make_tokenizer, text_of

import turnwise as tw
from turnwise.render.chat import ChatRenderer
from turnwise.render.codec import TokenizerCodec
from turnwise.render.template import CHATML, Template
from turnwise.rollout import Rollout, episodes

TOKENS = 128_000


class Sleeps(tw.Env):
    """One step that takes a second."""

    def reset(self, task, *, seed=None):
        return "Sleep."

    def step(self, action):
        time.sleep(1.0)
        return tw.Step(terminated=True)


class Talks(tw.Env):
    """Says its task's text in its first step, and something short in 20 more."""

    async def reset(self, task, *, seed=None):
        self.left, self.text = 20, task.answer
        return "Go."

    async def step(self, action):
        self.left -= 1
        await asyncio.sleep(0.01)
        return tw.Step(self.text if self.left == 19 else "on", terminated=self.left == 0)


async def stalls(done: asyncio.Event) -> list[float]:
    """By how much the loop came late, each time."""
    late = []
    while not done.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - before - 0.001)
    return late


async def encode(renderer: ChatRenderer, pool: list[list[int]], text: str) -> tuple[list[tw.Trajectory], float]:
    """Play the long text among short ones; the trajectories, and the longest stall in seconds."""
    rows = [tw.Task("go", answer=text if i == 0 else "short", id=f"{i}") for i in range(17)]
    limits = tw.Limits(turns=32)
    rollout = Rollout(Fixed(pool), renderer, limits=limits, sanity="off")
    await rollout.play(episodes(Talks, rows[1:], phase="warm", step=0))  # shapes are found out once
    done = asyncio.Event()
    watch = asyncio.ensure_future(stalls(done))
    await asyncio.sleep(0.05)
    played = await rollout.play(episodes(Talks, rows, phase="stalls", step=0))
    done.set()
    return played, max(await watch)


def main() -> int:
    """Print both figures."""
    began = time.monotonic()
    engine = tw.ScriptedEngine(lambda messages, rng: "zzz")
    slept = tw.rollout(Sleeps, [tw.Task("go", id=f"{i}") for i in range(32)], engine)
    sleeping = time.monotonic() - began
    rng = random.Random(0)
    tokenizer, words = make_tokenizer(rng)
    renderer = ChatRenderer(TokenizerCodec(tokenizer), Template(CHATML))
    end = min(renderer.stop_ids)
    pool = [[*renderer.encode(text_of(tokenizer, words, rng, 8)), end] for _ in range(8)]
    text = " ".join(rng.choice(words) for _ in range(TOKENS))
    size = len(renderer.encode(text))
    text = text[: len(text) * TOKENS // size]
    size = len(renderer.encode(text))
    played, worst = asyncio.run(encode(renderer, pool, text))
    long = played[0]
    found: list[Any] = [span.ids for span in long.spans if len(span.ids) > size // 2]
    direct = tuple(renderer.encode(text))
    equal = len(found) == 1 and any(tuple(found[0][i : i + len(direct)]) == direct for i in range(32))
    fine = all(t.reward is not None for t in [*slept, *played])
    print(f"32 environments that sleep 1 s: {sleeping:.2f} s (bound 2.5 s)")
    print(f"longest stall of the event loop while {size} tokens are encoded: {worst * 1000:.1f} ms (bound 50 ms)")
    print(f"ids equal to the renderer's own: {equal}; images: none decoded, there is no room for media yet")
    row = {"sleep_s": round(sleeping, 2), "tokens": size, "stall_ms": round(worst * 1000, 1), "ids_equal": equal, "images": 0}
    print(json.dumps(row))
    return 0 if fine and equal and sleeping < 2.5 and worst < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())

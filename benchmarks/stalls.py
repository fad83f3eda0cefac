"""What stalls the event loop: environments that sleep, long texts that are encoded, and large
images that are taken in.

32 synchronous environments that sleep one second in a step are played side by side (bound: 2.5
s). Then, while 16 short episodes go on, one environment answers with a text of 128k tokens, and
8 others each with an image of 4000 x 3000 pixels, half of them arrays and half of them JPEG
files, which are decoded, hashed, written to disk and then processed as Qwen3-VL's processor
does; a coroutine that wakes every millisecond measures the longest time in which the loop did
not come by (bound: 50 ms). The ids are compared with those of the renderer called directly.
Needs the extra `vision`.

    python benchmarks/stalls.py            # seconds; last line JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from kit.vision import tiny_vlm_directory
from PIL import Image
from rollout_loop import Fixed, make_tokenizer, text_of

import turnwright as tw
from turnwright.media import MediaStore
from turnwright.renderers import CHATML, ChatRenderer, ChatTemplate, HFTokenizer, load_renderer
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings

TOKENS = 128_000
IMAGES = 8
SIZE = (4000, 3000)


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


class Shows(tw.Env):
    """Shows one large image."""

    async def reset(self, task, *, seed=None):
        self.shown = False
        return "Go."

    async def step(self, action):
        if self.shown:
            return tw.Step(terminated=True)
        self.shown = True
        return tw.Step(tw.Image(PICTURES.pop()))


PICTURES: list[Any] = []


def pictures() -> list[Any]:
    """Large images with something on them, as arrays and as files, each another."""
    rng = np.random.default_rng(0)
    down, across = np.mgrid[0 : SIZE[1], 0 : SIZE[0]]
    made: list[Any] = []
    for number in range(IMAGES):
        waves = 128 + 100 * np.sin(down / (50 + number)) * np.cos(across / (70 + number))
        pixels = np.stack([waves, waves[::-1], waves[:, ::-1]], 2) + rng.integers(
            -8, 8, (*SIZE[::-1], 3)
        )
        pixels = pixels.clip(0, 255).astype(np.uint8)
        out = BytesIO()
        if number % 2:
            Image.fromarray(pixels).save(out, "JPEG", quality=90)
        made.append(out.getvalue() if number % 2 else pixels)
    return made


async def stalls(done: asyncio.Event) -> list[float]:
    """By how much the loop came late, each time."""
    late = []
    while not done.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - before - 0.001)
    return late


async def see(rollout: Rollout) -> tuple[list[tw.Trajectory], int]:
    """Episodes that show large images; and what the processor makes of those, in threads."""
    rows = [tw.Task("look", id=f"image {n}") for n in range(IMAGES)]
    played = await rollout.play(make_episode_specs(Shows, rows, phase="images", step=0))
    media = [
        block.media for trajectory in played for span in trajectory.spans for block in span.media
    ]
    assert rollout.pixels is not None
    await asyncio.gather(*(asyncio.to_thread(rollout.pixels.get, one) for one in media))
    return played, rollout.pixels.processed


async def encode(
    renderer: ChatRenderer, pool: list[list[int]], text: str, seeing: Rollout
) -> tuple[list[tw.Trajectory], int, float]:
    """Play the long text among short ones and the images; the trajectories, images processed,
    and the longest stall."""
    rows = [tw.Task("go", answer=text if i == 0 else "short", id=f"{i}") for i in range(17)]
    limits = tw.Limits(turns=32)
    rollout = Rollout(Fixed(pool), renderer, RolloutSettings(limits=limits, sanity="off"))
    # Shapes are found out once.
    await rollout.play(make_episode_specs(Talks, rows[1:], phase="warm", step=0))
    done = asyncio.Event()
    watch = asyncio.ensure_future(stalls(done))
    await asyncio.sleep(0.05)
    played, (shown, processed) = await asyncio.gather(
        rollout.play(make_episode_specs(Talks, rows, phase="stalls", step=0)), see(seeing)
    )
    done.set()
    return [*played, *shown], processed, max(await watch)


def main() -> int:
    """Print both figures."""
    began = time.monotonic()
    engine = tw.ScriptedEngine(lambda messages, rng: "zzz")
    slept = tw.rollout(Sleeps, [tw.Task("go", id=f"{i}") for i in range(32)], engine)
    sleeping = time.monotonic() - began
    rng = random.Random(0)
    tokenizer, words = make_tokenizer(rng)
    renderer = ChatRenderer(HFTokenizer(tokenizer), ChatTemplate(CHATML))
    end = min(renderer.stop_ids)
    pool = [[*renderer.encode(text_of(tokenizer, words, rng, 8)), end] for _ in range(8)]
    text = " ".join(rng.choice(words) for _ in range(TOKENS))
    size = len(renderer.encode(text))
    text = text[: len(text) * TOKENS // size]
    size = len(renderer.encode(text))
    PICTURES.extend(pictures())
    with tempfile.TemporaryDirectory() as folder:
        eyed = load_renderer(
            tiny_vlm_directory(
                Path(folder) / "vlm", "qwen3_vl", weights=False, max_pixels=1024 * 1024
            )
        )
        store = MediaStore(Path(folder) / "media")
        seeing = Rollout(
            tw.ScriptedEngine(lambda messages, rng: "zzz"),
            eyed,
            RolloutSettings(sanity="off"),
            media=store,
        )
        played, processed, worst = asyncio.run(encode(renderer, pool, text, seeing))
        images = len(list((Path(folder) / "media").glob("*.png")))
    long = played[0]
    found: list[Any] = [span.ids for span in long.spans if len(span.ids) > size // 2]
    direct = tuple(renderer.encode(text))
    equal = len(found) == 1 and any(
        tuple(found[0][i : i + len(direct)]) == direct for i in range(32)
    )
    fine = all(t.reward is not None for t in [*slept, *played])
    print(f"32 environments that sleep 1 s: {sleeping:.2f} s (bound 2.5 s)")
    print(
        f"longest stall of the event loop while {size} tokens are encoded and {images} images of "
        f"{SIZE[0]} x {SIZE[1]} are taken in and processed: {worst * 1000:.1f} ms (bound 50 ms)"
    )
    print(f"ids equal to the renderer's own: {equal}")
    row: dict[str, Any] = {
        "sleep_s": round(sleeping, 2),
        "tokens": size,
        "stall_ms": round(worst * 1000, 1),
    }
    print(json.dumps(row | {"ids_equal": equal, "images": images, "images_processed": processed}))
    fine = fine and equal and images == processed == IMAGES
    return 0 if fine and sleeping < 2.5 and worst < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())

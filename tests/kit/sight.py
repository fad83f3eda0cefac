"""Images of noise for a tiny model, contexts with images among words, and the model's own forward
pass to compare with."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kit.local_engines import request
from turnwright.config import ModelConfig
from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine
from turnwright.media import MediaStore
from turnwright.renderers.vision import PixelCache, VisionProcessor
from turnwright.training import load_model_and_renderer
from turnwright.types import (
    EpisodeKey,
    ImageRef,
    Media,
    MediaPlacement,
    Origin,
    Span,
    StopReason,
    Task,
    Trajectory,
    VideoRef,
)


@dataclass
class Shown:
    """Ids that grow, with images among them."""

    vision: VisionProcessor
    ids: list[int] = field(default_factory=list)
    placed: list[MediaPlacement] = field(default_factory=list)

    def say(self, ids: Any) -> Shown:
        self.ids += list(ids)
        return self

    def show(self, media: Media) -> Shown:
        block = self.vision.block(media)
        self.placed.append(
            MediaPlacement(media, len(self.ids), len(block.ids), block.grid, block.compact)
        )
        return self.say(block.ids)


class Gallery:
    """Images of noise for one model.

    Args:
        directory: of a model that sees.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.module, self.renderer = load_model_and_renderer(directory, directory, ModelConfig())
        assert self.renderer.vision is not None
        self.vision, self.store = self.renderer.vision, MediaStore()
        self.banned = self.renderer.banned_ids
        self.pixels = PixelCache(self.vision, self.store)
        self.words = [i for i in range(20, 200) if i not in self.banned]

    def image(self, seed: int, height: int = 32, width: int = 32) -> ImageRef:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return self.store.add(noise)

    def clip(self, seed: int, frames: int = 3, height: int = 32, width: int = 32) -> VideoRef:
        shown = tuple(self.image(1000 * seed + frame, height, width) for frame in range(frames))
        return VideoRef(shown, tuple(frame / 2 for frame in range(frames)))

    def some(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(self.words, k=count)

    def shown(self) -> Shown:
        return Shown(self.vision)

    def stock(self, ids: list[int], placed: list[MediaPlacement], grad: bool = False) -> Tensor:
        """Logprobs [ids, vocabulary] as transformers' own forward pass computes them,
        without the banned ids."""
        body = self.module.model
        body.rope_deltas = None
        images = [block.media for block in placed if isinstance(block.media, ImageRef)]
        clips = [block.media for block in placed if isinstance(block.media, VideoRef)]
        arrays = [self.pixels.merged(some) for some in (images, clips) if some]
        given = {
            name: torch.from_numpy(np.array(array))
            for some in arrays
            for name, array in some.items()
        }
        row = torch.tensor([ids])
        config = self.module.config
        kinds = (row == config.image_token_id).int()
        if hasattr(config, "video_token_id"):
            given["mm_token_type_ids"] = kinds + 2 * (row == config.video_token_id).int()
        with torch.set_grad_enabled(grad):
            logits = self.module(input_ids=row, use_cache=False, **given).logits[0]
            never = torch.zeros(logits.shape[1])
            never[sorted(self.banned)] = -1e30
            return (logits + never).log_softmax(-1)


def episode(
    gallery: Gallery, turns: list[Media | None], *, task: str = "t", sample: int = 0, seed: int = 0
) -> Trajectory:
    """A chain in which each turn shows one thing (or none), and the model
    answers with some words."""
    chance = random.Random(seed)
    spans: list[Span] = []
    for number, media in enumerate(turns):
        said = gallery.shown().say(gallery.some(chance.randint(1, 5), seed + number))
        if media is not None:
            said.show(media)
        said.say(gallery.some(chance.randint(1, 4), seed + number + 50))
        start = spans[-1].end if spans else 0
        origin = Origin.ENV if spans else Origin.PROMPT
        spans.append(Span(origin, tuple(said.ids), len(spans) - 1, start, media=tuple(said.placed)))
        reply = gallery.some(chance.randint(1, 5), seed + number + 100)
        spans.append(
            Span(Origin.MODEL, tuple(reply), len(spans) - 1, spans[-1].end, [-1.0] * len(reply), 0)
        )
    key = EpisodeKey("train", 0, task, sample)
    return Trajectory(
        Task(task, id=task), key, spans, reward=float(sample % 2), stop=StopReason.DONE
    )


TEXTS = [
    f"<|im_start|>user\nlook {n}<|im_end|>\n<|im_start|>assistant\nleft right up down {n}<|im_end|>"
    for n in range(40)
]


def engine_of(gallery: Gallery, **options: object) -> LocalEngine:
    engine = LocalEngine(gallery.module, context=512, **options)
    engine.add_pixel_source(gallery.pixels)
    return engine


async def ask(
    engine: LocalEngine, shown: Shown, session: str = "s", **changes: object
) -> Generation:
    values = {"media": tuple(shown.placed), "banned_ids": shown.vision.placeholder_ids} | changes
    return await engine.generate(request(shown.ids, session, **values))


async def look(
    engine: LocalEngine, gallery: Gallery, seed: int, turns: int = 4, group: str = ""
) -> list[Generation]:
    """One conversation, determined by its seed, in which most observations are images."""
    chance = random.Random(seed)
    shown = gallery.shown().say(gallery.some(chance.randint(2, 9), 5 if group else seed))
    heard = []
    for turn in range(turns):
        what = chance.randrange(4) if turn or not group else 0
        if what == 3:
            shown.show(gallery.clip(chance.randrange(8), 2))
        elif what:
            shown.show(gallery.image(chance.randrange(8), 32, 32 * what))
        shown.say(gallery.some(chance.randint(1, 9), seed + turn))
        answer = await ask(
            engine,
            shown,
            f"look-{seed}",
            group=group,
            call=turn,
            seed=seed * 100 + turn,
            max_tokens=5,
        )
        heard.append(answer)
        shown.say(answer.ids)
        await asyncio.sleep(0)
    engine.release(f"look-{seed}")
    return heard

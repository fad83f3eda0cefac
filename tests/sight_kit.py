"""Tiny models that see, images of noise, contexts with images, and the model's own forward pass to compare with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.media import MediaStore
from turnwise.render.vision import Block, Eyes, Pixels
from turnwise.types import ImageRef, Key, Media, Origin, Placed, Span, StopReason, Task, Trajectory, VideoRef


@dataclass
class Shown:
    """Ids that grow, with images among them."""

    eyes: Eyes
    ids: list[int] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)

    def say(self, ids: Any) -> Shown:
        self.ids += list(ids)
        return self

    def show(self, media: Media) -> Shown:
        block = self.eyes.block(media)
        self.placed.append(Placed(media, len(self.ids), len(block.ids), block.grid, block.compact))
        return self.say(block.ids)


class Gallery:
    """Images of noise for one model.

    Args:
        module: that sees.
        eyes: of it.
    """

    def __init__(self, module: nn.Module, eyes: Eyes) -> None:
        self.module, self.eyes, self.store = module, eyes, MediaStore()
        self.pixels = Pixels(eyes, self.store)
        self.words = [i for i in range(20, 200) if i not in eyes.media_ids]

    def image(self, seed: int, height: int = 32, width: int = 32) -> ImageRef:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return self.store.add(noise)

    def clip(self, seed: int, frames: int = 3, height: int = 32, width: int = 32) -> VideoRef:
        shown = tuple(self.image(1000 * seed + frame, height, width) for frame in range(frames))
        return VideoRef(shown, tuple(frame / 2 for frame in range(frames)))

    def some(self, count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(self.words, k=count)

    def shown(self) -> Shown:
        return Shown(self.eyes)

    def stock(self, ids: list[int], placed: list[Placed], banned: frozenset[int] = frozenset(), grad: bool = False) -> Tensor:
        """Logprobs [ids, vocabulary] as transformers' own forward pass computes them, from ids and pixel values."""
        body = self.module.model
        body.rope_deltas = None
        images = [block.media for block in placed if isinstance(block.media, ImageRef)]
        clips = [block.media for block in placed if isinstance(block.media, VideoRef)]
        arrays = [self.pixels.merged(some) for some in (images, clips) if some]
        given = {name: torch.from_numpy(np.array(array)) for some in arrays for name, array in some.items()}
        row = torch.tensor([ids])
        config = self.module.config
        kinds = (row == config.image_token_id).int()
        if hasattr(config, "video_token_id"):
            given["mm_token_type_ids"] = kinds + 2 * (row == config.video_token_id).int()
        with torch.set_grad_enabled(grad):
            logits = self.module(input_ids=row, use_cache=False, **given).logits[0]
            never = torch.zeros(logits.shape[1])
            never[sorted(banned)] = -1e30
            return (logits + never).log_softmax(-1)


def episode(gallery: Gallery, turns: list[Media | None], *, task: str = "t", sample: int = 0, seed: int = 0) -> Trajectory:
    """A chain in which each turn shows one thing (or none), and the model answers with some words."""
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
        spans.append(Span(Origin.MODEL, tuple(reply), len(spans) - 1, spans[-1].end, [-1.0] * len(reply), 0))
    key = Key("train", 0, task, sample)
    return Trajectory(Task(task, id=task), key, spans, reward=float(sample % 2), stop=StopReason.DONE)


class Squares:
    """Eyes of a tiny Qwen3-VL, written for tests and slowly: sides are whole tokens, and clips tell no times."""

    fingerprint = "squares"

    def __init__(self, token: Any, patch: int = 8) -> None:
        self.start, self.end, self.image, self.video = [
            token(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad")
        ]
        self.pad_ids = frozenset({self.image, self.video})
        self.media_ids = self.pad_ids | {self.start, self.end}
        self.patch = patch

    def block(self, media: Media) -> Block:
        frames = media.frames if isinstance(media, VideoRef) else (media,)
        pad = self.video if isinstance(media, VideoRef) else self.image
        grid = tuple((1, frame.height // self.patch, frame.width // self.patch) for frame in frames)
        ids = [i for _, high, wide in grid for i in (self.start, *[pad] * (high * wide // 4), self.end)]
        return Block(tuple(ids), grid, (self.start, pad, self.end))

    def positions(self, length: int, placed: Any, start: int = 0) -> Any:
        found: list[tuple[int, int, int]] = []
        at = 0

        def words(count: int) -> None:
            nonlocal at
            found.extend((at + n,) * 3 for n in range(count))
            at += max(count, 0)

        for block in placed:
            words(block.start - len(found))
            for _, high, wide in block.grid:
                words(1)
                found += [(at, at + y, at + x) for y in range(high // 2) for x in range(wide // 2)]
                at += max(high, wide) // 2
                words(1)
        words(length - len(found))
        return np.array(found, dtype=np.int64).reshape(-1, 3).T[:, start:length]

    def process(self, media: Media, store: MediaStore) -> dict[str, Any]:
        frames = media.frames if isinstance(media, VideoRef) else (media,)
        made, patch = [], self.patch
        for frame in frames:
            pixels = (store.pixels(frame).astype(np.float32) / 255 - 0.5) / 0.5
            high, wide = frame.height // patch, frame.width // patch
            cut = pixels.transpose(2, 0, 1).reshape(3, high // 2, 2, patch, wide // 2, 2, patch)
            made.append(cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(high * wide, -1))
        rows, grid = np.concatenate(made), np.array([[len(frames), high, wide]])
        if isinstance(media, VideoRef):
            return {"pixel_values_videos": rows, "video_grid_thw": grid}
        return {"pixel_values": rows, "image_grid_thw": grid}

    def merge(self, chunks: Any) -> dict[str, Any]:
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

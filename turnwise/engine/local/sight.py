"""What the engine has seen: features of images, each encoded once for a set of weights."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from turnwise.engine.local.tower import ImageFeatures, SplitVLM
from turnwise.errors import EngineError, MediaError, TurnwiseError
from turnwise.types import Media, MediaPlacement

CACHE_BYTES = 2**28
"""Memory for features that are kept."""
TOGETHER = 32
"""Features that are made at a time where an image has fewer."""
Shape = tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]
"""How many features an image has, and the shapes of its pixel values."""


class ImageFeatureCache:
    """Features by what is seen. They are forgotten with the weights that made them.

    The bits of an image's features do not depend on what else is looked at: small images of one shape are encoded so many at a
    time, always the same number (where some are missing, one is repeated), and only if that was seen to change nothing.

    Args:
        tower: of the model.
        most_bytes: memory for features; the longest unused go first, and are made again when needed.
    """

    def __init__(self, tower: SplitVLM, most_bytes: int = CACHE_BYTES) -> None:
        self.tower = tower
        self.encoded = 0
        """Images and videos that went through the tower."""
        self._most = most_bytes
        self._held = 0
        self._known: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._together: dict[Shape, int] = {}
        self._last: Any = None
        self._earlier: list[weakref.ref[Any]] = []

    def add_pixel_source(self, pixels: Any) -> None:
        """Pixel values come from here too; a rollout that is gone is forgotten, the last one is asked first."""
        known = [found for found in self._sources() if found is not pixels]
        self._last, self._earlier = pixels, [weakref.ref(found) for found in known]

    @property
    def has_pixel_source(self) -> bool:
        """Whether anybody said what images are."""
        return self._last is not None

    @property
    def vision(self) -> Any:
        """The renderer's side of the model's sight.

        Raises:
            EngineError: when nobody gave any.
        """
        if self._last is None:
            raise EngineError("a request with images, and nothing is known of them: call engine.see(pixels) first")
        return self._last.vision

    def features(self, media: Media, size: int) -> ImageFeatures:
        """The features of one image or video, `size` rows.

        Raises:
            EngineError, MediaError, ModelError: when there are none to be had.
        """
        if media.key not in self._known:
            arrays = self._pixels(media)
            self._encode(_shape(arrays, size), {media.key: arrays})
        self._known.move_to_end(media.key)
        return self._known[media.key]

    def prepare(self, wanted: Sequence[tuple[Media, int]]) -> None:
        """Encode together what `features` will be asked for next. What cannot be had is left to it, which says why."""
        fresh: dict[Shape, dict[str, Any]] = {}
        for media, size in wanted:
            if media.key not in self._known:
                with suppress(TurnwiseError, OSError):
                    arrays = self._pixels(media)
                    fresh.setdefault(_shape(arrays, size), {})[media.key] = arrays
        for shape, some in fresh.items():
            with suppress(TurnwiseError):
                count = self._count(shape, next(iter(some.values())))
                keys = list(some)
                for first in range(0, len(keys), count):
                    self._encode(shape, {key: some[key] for key in keys[first : first + count]})

    def clear(self) -> None:
        """The weights are others now."""
        self._known.clear()
        self._held = 0

    def _encode(self, shape: Shape, some: Mapping[str, Any]) -> None:
        chunks = list(some.values())
        chunks += chunks[:1] * (self._count(shape, chunks[0]) - len(chunks))
        made = self.tower.encode(self.vision.merge(chunks), [shape[0]] * len(chunks))
        self.encoded += len(some)
        for key, features in zip(some, made, strict=False):
            self._known[key] = kept = features.clone()
            self._held += kept.nbytes
        while self._held > self._most and len(self._known) > len(some):
            self._held -= self._known.popitem(last=False)[1].nbytes

    def _count(self, shape: Shape, chunk: Mapping[str, Any]) -> int:
        """How many images of a shape go through the tower at a time."""
        count = self._together.get(shape)
        if count is None:
            count = max(1, TOGETHER // max(1, shape[0]))
            if count > 1 and not self._same_bits(shape[0], chunk, count):
                count = 1
            self._together[shape] = count
        return count

    def _same_bits(self, size: int, chunk: Mapping[str, Any], count: int) -> bool:
        """Whether the features of an image are the same at every place, and in other company."""
        other = {name: -array if array.dtype.kind == "f" else array for name, array in chunk.items()}
        copies = self.tower.encode(self.vision.merge([chunk] * count), [size] * count)
        mixed = self.tower.encode(self.vision.merge([*[other] * (count - 1), chunk]), [size] * count)
        return all(copies[0].same(features) for features in (*copies[1:], mixed[-1]))

    def _pixels(self, media: Media) -> Any:
        missing: MediaError | None = None
        for pixels in self._sources():
            if pixels.vision.fingerprint == self.vision.fingerprint:
                try:
                    return pixels.get(media)
                except MediaError as error:
                    missing = missing or error
        raise missing or MediaError(f"nobody knows {media.key[:12]}")

    def _sources(self) -> list[Any]:
        """Where pixel values may come from, the last one given first."""
        found = [self._last, *(ref() for ref in self._earlier)]
        return [pixels for pixels in found if pixels is not None]


def _shape(arrays: Mapping[str, Any], size: int) -> Shape:
    return size, tuple((name, tuple(array.shape)) for name, array in sorted(arrays.items()))


class ContextMedia:
    """What one call sees: where features stand in its context, and the positions that it counts.

    Args:
        ids: the context.
        placed: its blocks.
        eyes: of the model.
    """

    def __init__(self, ids: Sequence[int], placed: Sequence[MediaPlacement], eyes: Any) -> None:
        self._ids, self._placed, self._eyes = ids, tuple(placed), eyes
        behind = eyes.positions(len(ids) + 1, placed, start=len(ids))
        self.shift = 0 if behind is None else int(behind[0, 0]) - len(ids)
        """How far the positions of what is sampled are from their places."""

    def rotary_positions(self, start: int, end: int) -> Any:
        """Rotary positions of the places from `start` to `end`, [3, end - start]; None where they are the places."""
        found = self._eyes.positions(len(self._ids), self._placed, start=start)
        return None if found is None else found[:, : end - start]

    def features_between(self, start: int, end: int) -> list[tuple[Media, int, list[int], slice]]:
        """Which features stand from `start` to `end`: the medium, its rows in all, their places, and which of the rows."""
        found = []
        for block in self._placed:
            if block.end <= start or block.start >= end:
                continue
            pads = [at for at in range(block.start, block.end) if self._ids[at] in self._eyes.pad_ids]
            inside = [number for number, at in enumerate(pads) if start <= at < end]
            if inside:
                part = slice(inside[0], inside[-1] + 1)
                found.append((block.media, len(pads), pads[part], part))
        return found

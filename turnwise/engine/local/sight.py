"""What the engine has seen: features of images, each encoded once for a set of weights."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from turnwise.engine.local.tower import Features, Tower
from turnwise.errors import EngineError, MediaError
from turnwise.types import Media, Placed

CACHE_BYTES = 2**28
"""Memory for features that are kept."""


class Seen:
    """Features by what is seen. They are forgotten with the weights that made them.

    Every image is encoded by itself, so that the bits of its features do not depend on what else is looked at.

    Args:
        tower: of the model.
        most_bytes: memory for features; the longest unused go first, and are made again when needed.
    """

    def __init__(self, tower: Tower, most_bytes: int = CACHE_BYTES) -> None:
        self.tower = tower
        self.encoded = 0
        """Images and videos that went through the tower."""
        self._most = most_bytes
        self._held = 0
        self._known: OrderedDict[str, Features] = OrderedDict()
        self._last: Any = None
        self._earlier: list[weakref.ref[Any]] = []

    def source(self, pixels: Any) -> None:
        """Pixel values come from here too; a rollout that is gone is forgotten, the last one is asked first."""
        known = [found for found in self._sources() if found is not pixels]
        self._last, self._earlier = pixels, [weakref.ref(found) for found in known]

    @property
    def given(self) -> bool:
        """Whether anybody said what images are."""
        return self._last is not None

    @property
    def eyes(self) -> Any:
        """The renderer's side of the model's sight.

        Raises:
            EngineError: when nobody gave any.
        """
        if self._last is None:
            raise EngineError("a request with images, and nothing is known of them: call engine.see(pixels) first")
        return self._last.eyes

    def features(self, media: Media, size: int) -> Features:
        """The features of one image or video, `size` rows.

        Raises:
            EngineError, MediaError, ModelError: when there are none to be had.
        """
        known = self._known.get(media.key)
        if known is not None:
            self._known.move_to_end(media.key)
            return known
        (made,) = self.tower.encode(self._pixels(media), [size])
        self.encoded += 1
        self._known[media.key] = made
        self._held += made.nbytes
        while self._held > self._most and len(self._known) > 1:
            self._held -= self._known.popitem(last=False)[1].nbytes
        return made

    def forget(self) -> None:
        """The weights are others now."""
        self._known.clear()
        self._held = 0

    def _pixels(self, media: Media) -> Any:
        missing: MediaError | None = None
        for pixels in self._sources():
            if pixels.eyes.fingerprint == self.eyes.fingerprint:
                try:
                    return pixels.get(media)
                except MediaError as error:
                    missing = missing or error
        raise missing or MediaError(f"nobody knows {media.key[:12]}")

    def _sources(self) -> list[Any]:
        """Where pixel values may come from, the last one given first."""
        found = [self._last, *(ref() for ref in self._earlier)]
        return [pixels for pixels in found if pixels is not None]


class View:
    """What one call sees: where features stand in its context, and the positions that it counts.

    Args:
        ids: the context.
        placed: its blocks.
        eyes: of the model.
    """

    def __init__(self, ids: Sequence[int], placed: Sequence[Placed], eyes: Any) -> None:
        self._ids, self._placed, self._eyes = ids, tuple(placed), eyes
        behind = eyes.positions(len(ids) + 1, placed, start=len(ids))
        self.shift = 0 if behind is None else int(behind[0, 0]) - len(ids)
        """How far the positions of what is sampled are from their places."""

    def turns(self, start: int, end: int) -> Any:
        """Rotary positions of the places from `start` to `end`, [3, end - start]; None where they are the places."""
        found = self._eyes.positions(len(self._ids), self._placed, start=start)
        return None if found is None else found[:, : end - start]

    def between(self, start: int, end: int) -> list[tuple[Media, int, list[int], slice]]:
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

"""Pixel values when they are needed: each image processed once, kept while memory allows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.media import MediaStore
from turnwise.render.vision.eyes import VisionProcessor
from turnwise.types import Media


class PixelCache:
    """What a model's processor makes of the images of one run, for engine and trainer alike. Safe to use from several threads.

    Args:
        eyes: the model's.
        store: where the images are.
        most_bytes: memory for what was processed; the longest unused goes first, and is processed again when needed.
    """

    def __init__(self, eyes: VisionProcessor, store: MediaStore, most_bytes: int = 2**30) -> None:
        self.vision = eyes
        self.store = store
        self.processed = 0
        """Images and videos processed so far."""
        self._most = most_bytes
        self._held = 0
        self._known: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, media: Media) -> Mapping[str, Any]:
        """The pixel values of one image or video, not to be written to.

        Raises:
            MediaError: when it is not in the store.
        """
        key = media.key
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
            made = self.vision.process(media, self.store)
            self.processed += 1
            self._known[key] = made
            self._held += _bytes(made)
            while self._held > self._most and len(self._known) > 1:
                self._held -= _bytes(self._known.popitem(last=False)[1])
            return made

    def merged(self, media: Sequence[Media]) -> dict[str, Any]:
        """The pixel values of several, in order."""
        return self.vision.merge([self.get(one) for one in media])


def _bytes(arrays: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in arrays.values())

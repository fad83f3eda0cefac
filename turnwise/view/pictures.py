"""The images that a model saw, for a page: read from the run's media, proven by their hash, drawn anew, inside the page.

Nothing of a file goes into the page as it is: its pixels are decoded within limits, held to the hash that is its name, and
written as a small PNG. So a file that somebody put there in place of an image is told of and not shown.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwise.errors import MediaError
from turnwise.media import MediaLimits, MediaStore
from turnwise.trace.record import read_media
from turnwise.types import ImageRef, VideoRef
from turnwise.view.rundir import Row

MOST_PICTURES = 300
"""Images of one page; those behind are named only."""
MOST_BYTES = 6_000_000
"""Characters of all images of a page."""
MOST_SIDE = 256
"""Pixels of an image in the page along its longer side."""
MOST_FRAMES = 8
"""Frames of a clip that are shown."""
LEAST_SHOWN = 96
"""Smaller images are shown enlarged to this width, pixel for pixel."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image for a page, or why there is none."""

    caption: str
    source: str = ""
    """A data URI; empty where it cannot be shown."""
    width: int = 0
    """That it is shown with."""
    alt: str = ""
    small: bool = False
    """Enlarged, with its pixels as squares."""


class Gallery:
    """The images of one run, as long as the page has room.

    Args:
        run_dir: with a directory `media`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._store = MediaStore(run_dir / "media", limits=MediaLimits(pixels=20_000_000))
        self._known: dict[str, tuple[str, int]] = {}
        self._left = MOST_PICTURES
        self._room = MOST_BYTES

    @property
    def used(self) -> bool:
        """Whether an image was shown."""
        return bool(self._known)

    def pictures(self, part: Row) -> Iterator[Picture]:
        """The image of a content part, or the first frames of its clip; nothing for other parts."""
        if part.get("type") not in ("image", "video"):
            return
        try:
            media = read_media(part)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield Picture(f"an image that cannot be read: {type(error).__name__}")
            return
        if isinstance(media, VideoRef):
            for frame, at in zip(media.frames[:MOST_FRAMES], media.times, strict=False):
                yield self._picture(frame, f"{at:g} s, ", media.alt)
            if len(media.frames) > MOST_FRAMES:
                yield Picture(f"{len(media.frames) - MOST_FRAMES} more frames")
        else:
            yield self._picture(media, "", media.alt)

    def _picture(self, ref: ImageRef, before: str, alt: str | None) -> Picture:
        caption = f"{before}{ref.width} × {ref.height}"
        caption += f", shown with at most {ref.max_pixels} pixels" if ref.max_pixels else ""
        if not _is_name(ref.sha256):
            return Picture(f"{caption}: no image is called so")
        try:
            source, side = self._source(ref)
        except (MediaError, ImportError, OSError, ValueError, TypeError) as error:
            told = str(error).replace(f"{self._run_dir}{os.sep}", "")
            return Picture(f"{caption}: not shown ({type(error).__name__}: {told})")
        if not source:
            return Picture(f"{caption}: image {ref.sha256[:12]}, not shown for want of room")
        return Picture(caption, source, max(side, LEAST_SHOWN), str(alt or ""), side < LEAST_SHOWN)

    def _source(self, ref: ImageRef) -> tuple[str, int]:
        """A data URI and the width of an image; empty when the page is full."""
        if self._left <= 0 or self._room <= 0:
            return "", 0
        if ref.key not in self._known:
            from PIL import Image as Pillow

            picture = Pillow.fromarray(self._store.pixels(ref))
            picture.thumbnail((MOST_SIDE, MOST_SIDE))
            out = BytesIO()
            picture.save(out, "PNG", optimize=True)
            self._known[ref.key] = f"data:image/png;base64,{b64encode(out.getvalue()).decode()}", picture.width
        source, width = self._known[ref.key]
        self._left -= 1
        self._room -= len(source)
        return source, width


def of_message(message: Row, gallery: Gallery | None) -> list[Picture]:
    """All images of a message, in order."""
    content: Any = message.get("content")
    if gallery is None or not isinstance(content, Sequence) or isinstance(content, str):
        return []
    return [picture for part in content if isinstance(part, Mapping) for picture in gallery.pictures(part)]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) == 64 and all(char in "0123456789abcdef" for char in name)

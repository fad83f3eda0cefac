"""Images and videos: raw, as content-addressed references, and as placements among ids.

A user gives an `Image` or a `Video`. The rollout stores its pixels (`media/store.py`) and keeps an
`ImageRef` or a `VideoRef`. Rendering gives it a block of placeholder ids, whose place is a
`MediaPlacement`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

_MAX_HASHED = 1 << 29
"""Array elements or pixels above which the name is the shape; such an image exceeds every limit."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image, identified by the SHA-256 of its pixels, which the media store holds once."""

    sha256: str
    """Hash of the size and the 8-bit RGB pixels, row by row, so that one picture in two files is
    one image."""
    width: int = 0
    """Pixels, 0 if unknown."""
    height: int = 0
    """Pixels, 0 if unknown."""
    max_pixels: int = 0
    """Number of pixels to which the image is scaled down for the model; 0 keeps its size. Part of
    equality."""
    alt: str | None = field(default=None, compare=False)
    """Text for a text-only model."""

    @property
    def key(self) -> str:
        """Identifies the model's input: the image and its scaling."""
        return f"{self.sha256}@{self.max_pixels}" if self.max_pixels else self.sha256

    def to_dict(self) -> dict[str, Any]:
        """Return the reference as a content part, without empty fields."""
        row: dict[str, Any] = {
            "type": "image",
            "image": self.sha256,
            "width": self.width,
            "height": self.height,
        }
        if self.max_pixels:
            row["max_pixels"] = self.max_pixels
        return row if self.alt is None else row | {"alt": self.alt}


@dataclass(frozen=True, slots=True)
class VideoRef:
    """A video: its frames as images, and their times."""

    frames: tuple[ImageRef, ...]
    """Frames of one size."""
    times: tuple[float, ...]
    """Seconds from the start of the video, one per frame."""
    alt: str | None = field(default=None, compare=False)
    """Text for a text-only model."""

    @property
    def key(self) -> str:
        """Identifies the model's input."""
        content = ",".join((*(frame.key for frame in self.frames), *map(repr, self.times)))
        return sha256(content.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the reference as a content part."""
        row = {
            "type": "video",
            "frames": [frame.to_dict() for frame in self.frames],
            "times": list(self.times),
        }
        return row if self.alt is None else row | {"alt": self.alt}


Media = ImageRef | VideoRef
"""Image or video by reference."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """A raw image; the rollout stores its pixels and keeps a reference.

    Example::

        >>> import numpy as np
        >>> pixels = np.zeros((32, 48, 3), np.uint8)
        >>> picture = tw.Image(pixels, alt="goal: 2 right")
        >>> observation = tw.Step([{"role": "user", "content": [picture, "Where to?"]}])
    """

    value: Any
    """A PIL image; a numpy array [height, width], [height, width, 3] or [height, width, 4] of
    uint8; the bytes of an image file; a data URI; or a `pathlib.Path` to an image file.
    """
    alt: str | None = None
    """Text for a text-only model, which cannot play the episode without it."""
    max_pixels: int = 0
    """Number of pixels to which the image is scaled down for the model; 0 keeps its size."""
    name: str = ""
    """Name in task ids; by default a hash of the content, or a path as given.

    Datasets set their path.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return a content part that names the image, for records and task ids."""
        row: dict[str, Any] = {"type": "image", "image": media_label(self)}
        if self.max_pixels:
            row["max_pixels"] = self.max_pixels
        return row if self.alt is None else row | {"alt": self.alt}

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Image)
            and self.max_pixels == other.max_pixels
            and media_label(self) == media_label(other)
        )

    def __hash__(self) -> int:
        return hash(media_label(self))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Video:
    """A raw video: its frames and their times."""

    frames: Sequence[Any]
    """Images of one size, each in a form that `Image` accepts; or one array
    [frames, height, width, 3]."""
    fps: float | None = None
    """Frames per second; set this or `times`."""
    times: Sequence[float] | None = None
    """Seconds from the start, one per frame, non-decreasing."""
    alt: str | None = None
    """Text for a text-only model."""

    def to_dict(self) -> dict[str, Any]:
        """Return a content part that names the video, for records and task ids."""
        row: dict[str, Any] = {
            "type": "video",
            "frames": [media_label(frame) for frame in self.frames],
        }
        if self.times is None:
            row["fps"] = self.fps
        else:
            row["times"] = [float(seconds) for seconds in self.times]
        if self.alt is not None:
            row["alt"] = self.alt
        return row

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Video) or self is other:
            return self is other
        return {**self.to_dict(), "alt": None} == {**other.to_dict(), "alt": None}

    def __hash__(self) -> int:
        return hash(tuple(map(media_label, self.frames)))


class MediaPlacement(NamedTuple):
    """Placement of one image or video among ids: a block of placeholder ids."""

    media: Media
    start: int
    """Index of the block's first id, in the ids that the placement belongs to (a span's, a
    request's)."""
    length: int
    """Number of ids of the block, as in training and in engines that accept ids."""
    grid: tuple[tuple[int, ...], ...] = ()
    """Output grids of the model's processor: one row per grid of patches, (time, height, width)
    where there are three."""
    compact: tuple[int, ...] = ()
    """Ids that a chat template writes in place of the block."""

    @property
    def end(self) -> int:
        """Index after the block's last id."""
        return self.start + self.length

    def shifted(self, by: int) -> MediaPlacement:
        """Return the same placement, `by` positions later."""
        return self._replace(start=self.start + by)


def placements_between(
    placed: Sequence[MediaPlacement], start: int, end: int
) -> tuple[MediaPlacement, ...]:
    """Return the placements within ids `start` to `end`, relative to `start`.

    Raises `ValueError` when the range splits a block; media are kept or dropped completely.
    """
    blocks = []
    for block in placed:
        if block.end <= start or block.start >= end:
            continue
        if block.start < start or block.end > end:
            raise ValueError(
                f"ids {start} to {end} cut the block {block.start} to {block.end} of "
                f"{block.media.key[:12]}"
            )
        blocks.append(block.shifted(-start))
    return tuple(blocks)


def ids_with_media_keys(ids: Sequence[int], placed: Sequence[MediaPlacement]) -> list[int]:
    """Return ids in which the positions of a block identify its content.

    Two such lists are equal exactly where the model's input is equal. Positions of blocks become
    negative numbers: 60 bits of a hash of the content and the grid, plus the offset in the block.
    """
    keys = list(ids)
    for block in placed:
        content = f"{block.media.key} {block.grid} {block.length}".encode()
        base = int.from_bytes(sha256(content).digest()[:8], "big") >> 4
        keys[block.start : block.end] = [
            -1 - ((base + (offset << 20)) & ((1 << 60) - 1)) for offset in range(block.length)
        ]
    return keys


def media_label(value: Any) -> str:
    """Return a name for a raw image: its own, a path as given, or a hash of its content."""
    if isinstance(value, Image):
        return value.name or media_label(value.value)
    if isinstance(value, ImageRef):
        return value.sha256
    if isinstance(value, str) and not value.startswith("data:"):
        return value
    if hasattr(value, "__fspath__"):
        return str(value)

    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    if hasattr(value, "tobytes") and not isinstance(value, memoryview):
        # An array or a PIL image. The size of an array is a number, that of an image a pair.
        description = "".join(
            str(getattr(value, name, "")) for name in ("mode", "size", "shape", "dtype")
        )
        size = getattr(value, "size", 0)
        pixels = size if isinstance(size, int) else math.prod(size)
        if pixels > _MAX_HASHED:
            return f"<{type(value).__name__} {description}>"
        try:
            content = description.encode() + value.tobytes()
        except Exception:  # a broken file; decoding it raises the error
            return f"<{type(value).__name__} {description}>"
    if isinstance(content, (bytes, bytearray, memoryview)):
        return sha256(content).hexdigest()
    return f"<{type(value).__name__}>"


def limit_pixels(ref: ImageRef, max_pixels: int) -> ImageRef:
    """Return the image scaled down to at most `max_pixels`, or to its own limit if that is
    smaller."""
    limit = min(max_pixels, ref.max_pixels) if ref.max_pixels else max_pixels
    return replace(ref, max_pixels=limit)

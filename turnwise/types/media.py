"""Images and videos: as people give them, as references by content, and where they stand among ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

_MOST_HASHED = 1 << 29
"""Numbers of an array, or pixels, above which it is named by its shape alone: no limit would let it be shown."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image by the SHA-256 of its pixels; the pixels live in the media store, once."""

    sha256: str
    """Of the size and the 8-bit RGB pixels, row by row, so that the same picture in two files is one."""
    width: int = 0
    """Pixels, 0 when not known."""
    height: int = 0
    """Pixels, 0 when not known."""
    max_pixels: int = 0
    """Shown scaled down to at most this many pixels; 0 as it is. It is part of what the model sees, so of equality too."""
    alt: str | None = field(default=None, compare=False)
    """What a model that sees no images is told instead."""

    @property
    def key(self) -> str:
        """Names what the model sees: the picture, and how it is scaled down."""
        return f"{self.sha256}@{self.max_pixels}" if self.max_pixels else self.sha256

    def to_dict(self) -> dict[str, Any]:
        """The reference as a content part; what is empty is left out."""
        row: dict[str, Any] = {"type": "image", "image": self.sha256, "width": self.width, "height": self.height}
        if self.max_pixels:
            row["max_pixels"] = self.max_pixels
        return row if self.alt is None else row | {"alt": self.alt}


@dataclass(frozen=True, slots=True)
class VideoRef:
    """A clip: its frames as images, and when each is shown."""

    frames: tuple[ImageRef, ...]
    """All of one size."""
    times: tuple[float, ...]
    """Seconds from the beginning of the clip, one per frame."""
    alt: str | None = field(default=None, compare=False)
    """What a model that sees no videos is told instead."""

    @property
    def key(self) -> str:
        """Names what the model sees."""
        told = ",".join((*(frame.key for frame in self.frames), *map(repr, self.times)))
        return sha256(told.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The reference as a content part."""
        row = {"type": "video", "frames": [frame.to_dict() for frame in self.frames], "times": list(self.times)}
        return row if self.alt is None else row | {"alt": self.alt}


Media = ImageRef | VideoRef
"""What is seen, by reference."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image as a person gives it; the rollout stores its pixels and keeps a reference.

    Example::

        tw.Step([{"role": "user", "content": [tw.Image(pixels, alt="goal: 2 right"), "Where to?"]}])
    """

    value: Any
    """A PIL image; a numpy array [height, width], [height, width, 3] or [height, width, 4] of uint8; the bytes of an image
    file; a data URI; a `pathlib.Path` to an image file."""
    alt: str | None = None
    """What a model that sees no images is told instead; without it, such a model cannot play the episode."""
    max_pixels: int = 0
    """Shown scaled down to at most this many pixels; 0 as it is."""
    name: str = ""
    """What names it in ids of tasks; by default its content, or a path as it is. Those of a dataset have their path there."""

    def to_dict(self) -> dict[str, Any]:
        """A content part that names the image, for records and for the ids of tasks."""
        row: dict[str, Any] = {"type": "image", "image": media_label(self)}
        if self.max_pixels:
            row["max_pixels"] = self.max_pixels
        return row if self.alt is None else row | {"alt": self.alt}

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Image) and self.max_pixels == other.max_pixels and media_label(self) == media_label(other)
        )

    def __hash__(self) -> int:
        return hash(media_label(self))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Video:
    """A clip as a person gives it: its frames, and when each is shown."""

    frames: Sequence[Any]
    """Images, each in one of the forms that `Image` takes, all of one size; or one array [frames, height, width, 3]."""
    fps: float | None = None
    """Frames per second; give this or `times`."""
    times: Sequence[float] | None = None
    """Seconds from the beginning, one per frame, not falling."""
    alt: str | None = None
    """What a model that sees no videos is told instead."""

    def to_dict(self) -> dict[str, Any]:
        """A content part that names the clip, for records and for the ids of tasks."""
        row: dict[str, Any] = {"type": "video", "frames": [media_label(frame) for frame in self.frames]}
        row |= {"fps": self.fps} if self.times is None else {"times": [float(at) for at in self.times]}
        return row if self.alt is None else row | {"alt": self.alt}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Video) or self is other:
            return self is other
        return {**self.to_dict(), "alt": None} == {**other.to_dict(), "alt": None}

    def __hash__(self) -> int:
        return hash(tuple(map(media_label, self.frames)))


class MediaPlacement(NamedTuple):
    """Where one image or video stands among ids: a block of placeholder ids and what belongs to them."""

    media: Media
    start: int
    """Of the first id of the block: among the ids that this is given with (a span's own, a request's context)."""
    length: int
    """Ids of the block, as engines that take ids verbatim and training see it."""
    grid: tuple[tuple[int, ...], ...] = ()
    """What its model's processor makes of it: one row per grid of patches, (time, height, width) where there are three."""
    compact: tuple[int, ...] = ()
    """The ids that stand in the block's place in what a chat template writes."""

    @property
    def end(self) -> int:
        """Behind the last id of the block."""
        return self.start + self.length

    def shifted(self, by: int) -> MediaPlacement:
        """The same block among ids that begin `by` earlier."""
        return self._replace(start=self.start + by)


def placements_between(placed: Sequence[MediaPlacement], start: int, end: int) -> tuple[MediaPlacement, ...]:
    """The blocks of the ids from `start` to `end`, as of those ids alone.

    Raises:
        ValueError: when an edge stands inside of a block; media are kept or dropped whole.
    """
    found = []
    for block in placed:
        if block.end <= start or block.start >= end:
            continue
        if block.start < start or block.end > end:
            raise ValueError(f"ids {start} to {end} cut the block {block.start} to {block.end} of {block.media.key[:12]}")
        found.append(block.shifted(-start))
    return tuple(found)


def ids_with_media_keys(ids: Sequence[int], placed: Sequence[MediaPlacement]) -> list[int]:
    """Ids in which each position of a block is told apart by what is seen there: equal exactly where the model sees the same.

    Positions of blocks become negative numbers, of 60 bits of the hash of what is seen, the grid and the place in the block.
    """
    keys = list(ids)
    for block in placed:
        told = f"{block.media.key} {block.grid} {block.length}".encode()
        base = int.from_bytes(sha256(told).digest()[:8], "big") >> 4
        keys[block.start : block.end] = [-1 - ((base + (offset << 20)) & ((1 << 60) - 1)) for offset in range(block.length)]
    return keys


def media_label(value: Any) -> str:
    """A name for an image as a person gave it: its own, a path as it is, anything else by a hash of its content."""
    if isinstance(value, (Image, ImageRef)):
        return (value.name or media_label(value.value)) if isinstance(value, Image) else value.sha256
    if isinstance(value, str) and not value.startswith("data:"):
        return value
    if hasattr(value, "__fspath__"):
        return str(value)
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    if hasattr(value, "tobytes") and not isinstance(value, memoryview):
        about = "".join(str(getattr(value, name, "")) for name in ("mode", "size", "shape", "dtype"))
        if _area(value) > _MOST_HASHED:
            return f"<{type(value).__name__} {about}>"
        try:
            content = about.encode() + value.tobytes()
        except Exception:  # a broken file behind it, which whoever decodes it will name
            return f"<{type(value).__name__} {about}>"
    if isinstance(content, (bytes, bytearray, memoryview)):
        return sha256(content).hexdigest()
    return f"<{type(value).__name__}>"


def _area(value: Any) -> int:
    """How many numbers an array or an image has, without decoding it."""
    size = getattr(value, "size", 0)
    return size if isinstance(size, int) else math.prod(size)


def limit_pixels(ref: ImageRef, max_pixels: int) -> ImageRef:
    """The same image, shown at most this large (or as before, where that was smaller)."""
    most = min(max_pixels, ref.max_pixels) if ref.max_pixels else max_pixels
    return replace(ref, max_pixels=most)

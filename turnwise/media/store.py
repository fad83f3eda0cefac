"""The media store: images decoded once, kept once by the hash of their pixels."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwise.errors import MediaError
from turnwise.media.decode import decode
from turnwise.types import Image, ImageRef, Video, VideoRef


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What an image may be before anything decodes it."""

    pixels: int = 50_000_000
    """Most pixels of one image."""
    side: int = 16_384
    """Most pixels along one side."""
    bytes: int = 64 * 2**20
    """Most bytes of a file."""
    frames: int = 256
    """Most frames of a video."""


class MediaStore:
    """Images by content. Safe to use from several threads.

    Args:
        directory: where each image is written once, as PNG, before its reference is given out; None keeps it in memory.
        limits: what is refused.
        decoded_bytes: memory for decoded pixels where a directory holds the rest.
        blank: whether every image is taken in as a grey one of its size: the control that shows what a model does blind.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        limits: MediaLimits | None = None,
        decoded_bytes: int = 256 * 2**20,
        blank: bool = False,
    ) -> None:
        self.directory = Path(directory) if directory is not None else None
        self.limits = limits or MediaLimits()
        self.blank = blank
        self._most = decoded_bytes
        self._held = 0
        self._pixels: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, value: Image | Video | ImageRef | VideoRef) -> ImageRef | VideoRef:
        """Store what a person gave.

        Raises:
            MediaError: for what is no image, is over a limit, or is not known.
        """
        if isinstance(value, (Video, VideoRef)):
            return self._take_video(value)
        if isinstance(value, ImageRef):
            return value
        pixels = decode(value.value, self.limits)
        return self.add(pixels, alt=value.alt, max_pixels=value.max_pixels)

    def add(self, pixels: Any, *, alt: str | None = None, max_pixels: int = 0) -> ImageRef:
        """Store pixels, [height, width, 3] of uint8."""
        if self.blank:
            pixels = pixels * 0 + 128
        height, width = pixels.shape[:2]
        name = _hash(pixels)
        with self._lock:
            known = name in self._pixels
        if not known:
            path = self._path(name)
            if path is not None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
                draft.write_bytes(_png(pixels))
                os.replace(draft, path)
            self._keep(name, pixels)
        return ImageRef(name, width, height, max_pixels, alt)

    def pixels(self, ref: ImageRef) -> Any:
        """The 8-bit RGB pixels of an image, [height, width, 3], not to be written to; scaled down where the reference says so.

        Raises:
            MediaError: when the store does not have it, or its file was changed.
        """
        with self._lock:
            pixels = self._pixels.get(ref.sha256)
            if pixels is not None:
                self._pixels.move_to_end(ref.sha256)
        if pixels is None:
            path = self._path(ref.sha256)
            if path is None or not path.exists():
                raise MediaError(f"image {ref.sha256[:12]} is not in the media store{f' {self.directory}' if path else ''}")
            pixels = decode(path, self.limits)
            if _hash(pixels) != ref.sha256:
                raise MediaError(f"{path} was changed: its pixels have another hash than its name")
            self._keep(ref.sha256, pixels)
        return _scaled(pixels, ref.max_pixels) if ref.max_pixels else pixels

    def png(self, ref: ImageRef) -> bytes:
        """The image as a PNG file, scaled down where the reference says so.

        Raises:
            MediaError: as `pixels`.
        """
        path = self._path(ref.sha256)
        if path is not None and not ref.max_pixels and path.exists():
            return path.read_bytes()
        return _png(self.pixels(ref))

    def _take_video(self, value: Video | VideoRef) -> VideoRef:
        if isinstance(value, VideoRef):
            return value
        frames = list(value.frames)
        if not frames or len(frames) > self.limits.frames:
            raise MediaError(f"a video of {len(frames)} frames; it has 1 to {self.limits.frames}")
        if (value.times is None) == (value.fps is None):
            raise MediaError("a video says fps or times, one of them")
        times = value.times if value.times is not None else [n / value.fps for n in range(len(frames))]  # type: ignore[operator]
        refs = tuple(f if isinstance(f, ImageRef) else self.add(decode(f, self.limits)) for f in frames)
        if len(times) != len(refs) or len({(f.width, f.height) for f in refs}) > 1:
            raise MediaError(f"a video of {len(refs)} frames needs as many times, and frames of one size")
        return VideoRef(refs, tuple(map(float, times)), value.alt)

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / f"{name}.png"

    def _keep(self, name: str, pixels: Any) -> None:
        with self._lock:
            if name in self._pixels:
                return
            self._pixels[name] = pixels
            self._held += pixels.nbytes
            while self.directory is not None and self._held > self._most and len(self._pixels) > 1:
                self._held -= self._pixels.popitem(last=False)[1].nbytes


def _hash(pixels: Any) -> str:
    height, width = pixels.shape[:2]
    return sha256(f"RGB {width} {height} ".encode() + pixels.tobytes()).hexdigest()


def _png(pixels: Any) -> bytes:
    from PIL import Image as Pillow

    out = BytesIO()
    Pillow.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def shown_size(width: int, height: int, most: int) -> tuple[int, int]:
    """Width and height at which an image is shown: as it is, or scaled down to at most `most` pixels (0 for no limit)."""
    share = (most / (height * width)) ** 0.5 if most else 1.0
    return (width, height) if share >= 1 else (max(1, int(width * share)), max(1, int(height * share)))


def _scaled(pixels: Any, most: int) -> Any:
    import numpy as np
    from PIL import Image as Pillow

    height, width = pixels.shape[:2]
    size = shown_size(width, height, most)
    if size == (width, height):
        return pixels
    return np.asarray(Pillow.fromarray(pixels).resize(size, Pillow.Resampling.BICUBIC))

"""Media store: images decoded once and stored by the hash of their pixels."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from turnwright.errors import MediaError
from turnwright.media.images import END, MediaLimits, decode, encode_png, import_numpy
from turnwright.types import Image, ImageRef, Video, VideoRef

GRAY = 128
"""Value of each channel of a blank image."""


class MediaStore:
    """Content-addressed image store. Safe for several threads, and for several
    processes on one directory.

    A reference is returned only once its image is stored: with a directory,
    once its file is complete.

    Args:
        directory: directory with one `SHA256.png` per image; None keeps all images in memory.
        limits: limits on images.
        decoded_bytes: memory for decoded pixels, if there is a directory.
        blank: whether every image, references included, becomes a gray one of its size: a control
            experiment that shows how a model performs without images.
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
        self.encoded = 0
        """Number of PNG files encoded so far."""
        self._max_decoded_bytes = decoded_bytes
        self._decoded_bytes = 0
        self._pixels: OrderedDict[str, Any] = OrderedDict()
        self._files: OrderedDict[str, bytes] = OrderedDict()
        """PNG files that are not on disk."""
        self._encoded_bytes = 0
        self._complete: set[str] = set()
        """Images whose file is known to be complete on disk."""
        self._decoded: dict[Hashable, ImageRef] = {}
        """References by the content key of files."""
        self._gray: dict[tuple[int, int], ImageRef] = {}
        self.has_unseen = False
        """Whether a model without vision read the alternative texts of media in place of them."""
        self._lock = threading.Lock()
        # Every decoding thread contends for the interpreter lock, and the event loop
        # waits for all of them.
        self._decode_slots = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))
        self._writing: dict[str, tuple[threading.Lock, list[int]]] = {}

    def put(
        self, value: Image | Video | ImageRef | VideoRef, *, blank: bool = False
    ) -> ImageRef | VideoRef:
        """Store a raw image or video; a reference is checked, and gets its size if it has none.
        With `blank` it becomes gray.

        Raises `MediaError` for a value that is not an image, is over a limit, or is unknown;
        `UsageError` where numpy or Pillow is missing.
        """
        blank = blank or self.blank
        if isinstance(value, (Video, VideoRef)):
            return self._put_video(value, blank)
        if not isinstance(value, ImageRef):
            return self._put_image(value, blank)
        if not (value.width and value.height):
            height, width = self.pixels(replace(value, max_pixels=0)).shape[:2]
            value = replace(value, width=width, height=height)
        if blank:
            return self._blank(value.width, value.height, value.alt, value.max_pixels)
        if not self._has(value.sha256):
            raise self._unknown(value)
        return value

    def add(
        self, pixels: Any, *, alt: str | None = None, max_pixels: int = 0, blank: bool = False
    ) -> ImageRef:
        """Store pixels, [height, width, 3] of uint8, which must not change afterwards;
        with `blank`, gray ones."""
        height, width = pixels.shape[:2]
        if blank or self.blank:
            return self._blank(width, height, alt, max_pixels)
        return ImageRef(self._add(pixels), width, height, max_pixels, alt)

    def note_unseen(self) -> None:
        """Note that a model without vision reads the alternative texts of media."""
        self.has_unseen = True

    def pixels(self, ref: ImageRef) -> Any:
        """Return the 8-bit RGB pixels of an image, [height, width, 3], read-only; scaled down as
        the reference specifies.

        Raises `MediaError` when the store does not have it, or its file was changed.
        """
        with self._lock:
            pixels = self._pixels.get(ref.sha256)
            if pixels is not None:
                self._pixels.move_to_end(ref.sha256)
        if pixels is None:
            path = self._path(ref.sha256)
            if path is None or not path.exists():
                raise self._unknown(ref)
            pixels = decode(
                path, replace(self.limits, bytes=path.stat().st_size)
            )  # a stored file may exceed the limit
            if _hash(pixels) != ref.sha256:
                raise MediaError(f"{path} was changed: its pixels have another hash than its name")
            self._cache(ref.sha256, pixels)
        return _scaled(pixels, ref.max_pixels) if ref.max_pixels else pixels

    def png_bytes(self, ref: ImageRef) -> bytes:
        """Return the image as a PNG file, scaled down as the reference specifies; cached.

        Raises `MediaError` as `pixels`.
        """
        path = self._path(ref.sha256)
        if path is not None and not ref.max_pixels and path.exists():
            return path.read_bytes()
        with self._lock:
            cached = self._files.get(ref.key)
            if cached is not None:
                self._files.move_to_end(ref.key)
                return cached
        png = self._png(self.pixels(ref))
        with self._lock:
            self._encoded_bytes += len(png) - len(self._files.get(ref.key, b""))
            self._files[ref.key] = png
            while self._encoded_bytes > self._max_decoded_bytes // 4 and len(self._files) > 1:
                self._encoded_bytes -= len(self._files.popitem(last=False)[1])
        return png

    def _put_image(self, image: Image, blank: bool) -> ImageRef:
        content = _content_key(image.value)
        content = None if content is None else (content, blank)
        known = self._decoded.get(content) if content is not None else None
        if known is None or not self._has(known.sha256):
            with self._decode_slots:
                known = self.add(decode(image.value, self.limits), blank=blank)
            if content is not None:
                self._decoded[content] = known
        return replace(known, alt=image.alt, max_pixels=image.max_pixels)

    def _put_video(self, value: Video | VideoRef, blank: bool) -> VideoRef:
        frames = list(value.frames)
        if not frames or len(frames) > self.limits.frames:
            raise MediaError(
                f"a video of {len(frames)} frames; it must have 1 to {self.limits.frames}"
            )
        times = value.times if isinstance(value, VideoRef) else _times(value, len(frames))
        refs = [
            self.put(f if isinstance(f, (Image, ImageRef)) else Image(f), blank=blank)
            for f in frames
        ]
        image_refs = tuple(ref for ref in refs if isinstance(ref, ImageRef))
        sizes = sorted({(ref.width, ref.height, ref.max_pixels) for ref in image_refs})
        if len(sizes) > 1:
            listed = ", ".join(f"{width} x {height}" for width, height, _ in sizes[:3])
            raise MediaError(
                f"a video must have frames of one size; this one has frames of {listed}"
            )
        return VideoRef(image_refs, frame_times(times, len(image_refs)), value.alt)

    def _blank(self, width: int, height: int, alt: str | None, max_pixels: int) -> ImageRef:
        gray = self._gray.get((width, height))
        if gray is None:
            np = import_numpy()
            gray = ImageRef(self._add(np.full((height, width, 3), GRAY, np.uint8)), width, height)
            self._gray[width, height] = gray
        return replace(gray, max_pixels=max_pixels, alt=alt)

    def _add(self, pixels: Any) -> str:
        name = _hash(pixels)
        path = self._path(name)
        if path is not None and name not in self._complete:
            with self._exclusive(name):
                if not self._has(name):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    draft = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
                    draft.write_bytes(self._png(pixels))
                    os.replace(draft, path)
                    self._complete.add(name)
        self._cache(name, pixels)
        return name

    def _has(self, name: str) -> bool:
        """Return whether an image is stored; a truncated file does not count."""
        path = self._path(name)
        if path is None:
            with self._lock:
                return name in self._pixels
        if name in self._complete:
            return True
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - len(END)))
                complete = file.read() == END
        except OSError:
            return False
        if complete:
            self._complete.add(name)
        return complete

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Hold a lock per image."""
        with self._lock:
            lock, waiting = self._writing.setdefault(name, (threading.Lock(), [0]))
            waiting[0] += 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                waiting[0] -= 1
                if not waiting[0]:
                    self._writing.pop(name, None)

    def _unknown(self, ref: ImageRef) -> MediaError:
        where = f" {self.directory}" if self.directory is not None else ""
        return MediaError(f"image {ref.sha256[:12]} is not in the media store{where}")

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / f"{name}.png"

    def _png(self, pixels: Any) -> bytes:
        self.encoded += 1
        return encode_png(pixels)

    def _cache(self, name: str, pixels: Any) -> None:
        with self._lock:
            if name in self._pixels:
                self._pixels.move_to_end(name)
                return
            self._pixels[name] = pixels
            self._decoded_bytes += pixels.nbytes
            while (
                self.directory is not None
                and self._decoded_bytes > self._max_decoded_bytes
                and len(self._pixels) > 1
            ):
                self._decoded_bytes -= self._pixels.popitem(last=False)[1].nbytes


def _content_key(value: Any) -> Hashable:
    """Return a key of a file's content without decoding it; None for values that
    may change in memory."""
    if isinstance(value, Path):
        try:
            info = value.stat()
        except OSError:
            return None
        return str(value), info.st_ino, info.st_size, info.st_mtime_ns
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    return sha256(value).digest() if isinstance(value, bytes) else None


def frame_times(times: Any, frames: int) -> tuple[float, ...]:
    """Return the times of a video's frames in seconds.

    Raises `MediaError` unless there is one per frame, each a finite number of at least 0,
    in non-decreasing order.
    """
    try:
        seconds = tuple(float(at) for at in times)
    except (TypeError, ValueError) as error:
        raise MediaError(f"the times of a video must be numbers of seconds: {error}") from error
    if len(seconds) != frames:
        raise MediaError(f"a video of {frames} frames has {len(seconds)} times; pass one per frame")
    if not all(math.isfinite(at) and at >= 0 for at in seconds) or list(seconds) != sorted(seconds):
        raise MediaError(
            f"the times of a video must be finite, at least 0, and non-decreasing: {seconds!r:.120}"
        )
    return seconds


def _times(value: Video, frames: int) -> Any:
    if (value.times is None) == (value.fps is None):
        raise MediaError("a video needs either fps or times")
    if value.times is not None:
        return value.times
    fps = value.fps
    if (
        isinstance(fps, bool)
        or not isinstance(fps, (int, float))
        or not (math.isfinite(fps) and fps > 0)
    ):
        raise MediaError(f"fps must be a number over 0, not {fps!r:.60}")
    return [number / fps for number in range(frames)]


def _hash(pixels: Any) -> str:
    height, width = pixels.shape[:2]
    digest = sha256(f"RGB {width} {height} ".encode())
    digest.update(import_numpy().ascontiguousarray(pixels).data)
    return digest.hexdigest()


def scaled_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the width and height of an image scaled down to at most `max_pixels`
    pixels (0 for no limit)."""
    share = (max_pixels / (height * width)) ** 0.5 if max_pixels else 1.0
    return (
        (width, height) if share >= 1 else (max(1, int(width * share)), max(1, int(height * share)))
    )


def _scaled(pixels: Any, max_pixels: int) -> Any:
    from PIL import Image as Pillow

    height, width = pixels.shape[:2]
    size = scaled_size(width, height, max_pixels)
    if size == (width, height):
        return pixels
    return import_numpy().asarray(Pillow.fromarray(pixels).resize(size, Pillow.Resampling.BICUBIC))

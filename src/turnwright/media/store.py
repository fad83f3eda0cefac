"""Media store: images decoded once and stored by the hash of their pixels.

`MediaStore.put` takes what a user gives and returns a reference; `MediaStore.pixels` and
`MediaStore.png_bytes` return the image of a reference. Decoding and the PNG format are in
`images.py`; whole messages are stored by `references.py:store_media`.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from turnwright.errors import MediaError
from turnwright.media.images import END, MediaLimits, decode, encode_png, import_numpy
from turnwright.types import Image, ImageRef, Video, VideoRef

GRAY = 128
"""Value of each channel of a blank image."""


@dataclass(slots=True)
class _WriteLock:
    """Lock of an image that threads write."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: int = 0
    """Number of threads that hold or await it."""

    def join(self) -> None:
        """Count one more thread."""
        self.threads += 1

    def leave(self) -> None:
        """Count one thread less."""
        self.threads -= 1


class MediaStore:
    """Content-addressed image store.

    It is safe for several threads, and for several processes on one directory. A reference is
    returned only once its image is stored: with a directory, once its file is complete.

    Example::

        store = MediaStore("runs/first/media")
        reference = store.put(Image(Path("cat.png")))
        store.pixels(reference).shape  # (480, 640, 3)

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
        self.has_unseen = False
        """Whether a model without vision read the alternative texts of media in place of them."""

        # Caches: pixels by hash, and PNG files that are not on disk by `ImageRef.key`. Both are in
        # order of use, the last used at the end.
        self._max_decoded_bytes = decoded_bytes
        self._pixels: OrderedDict[str, Any] = OrderedDict()
        self._decoded_bytes = 0
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._encoded_bytes = 0

        self._complete: set[str] = set()
        """Images whose file is known to be complete on disk."""
        self._decoded: dict[Hashable, ImageRef] = {}
        """References by the content key of files."""
        self._gray: dict[tuple[int, int], ImageRef] = {}
        """Blank images by width and height."""

        self._lock = threading.Lock()
        self._writing: dict[str, _WriteLock] = {}
        # Every decoding thread contends for the interpreter lock, and the event loop waits for all
        # of them.
        self._decode_slots = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))

    def put(
        self, value: Image | Video | ImageRef | VideoRef, *, blank: bool = False
    ) -> ImageRef | VideoRef:
        """Store a raw image or video, and return its reference.

        A reference is checked, and gets its size if it has none. With `blank` it becomes gray.

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
        """Store pixels, [height, width, 3] of uint8, which must not change afterwards.

        With `blank`, gray ones are stored instead.
        """
        height, width = pixels.shape[:2]
        if blank or self.blank:
            return self._blank(width, height, alt, max_pixels)
        return ImageRef(self._add(pixels), width, height, max_pixels, alt)

    def note_unseen(self) -> None:
        """Note that a model without vision reads the alternative texts of media."""
        self.has_unseen = True

    def pixels(self, ref: ImageRef) -> Any:
        """Return the pixels of an image, read-only [height, width, 3] of uint8.

        They are scaled down as the reference specifies.

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
            # A stored PNG may be larger than the file that a user may give.
            limits = replace(self.limits, bytes=path.stat().st_size)
            pixels = decode(path, limits)
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
            # Another thread may have encoded it meanwhile.
            self._encoded_bytes += len(png) - len(self._files.get(ref.key, b""))
            self._files[ref.key] = png
            while self._encoded_bytes > self._max_decoded_bytes // 4 and len(self._files) > 1:
                _, oldest = self._files.popitem(last=False)
                self._encoded_bytes -= len(oldest)
        return png

    def _put_image(self, image: Image, blank: bool) -> ImageRef:
        reference = None
        content = _content_key(image.value)
        if content is not None:
            reference = self._decoded.get((content, blank))

        if reference is None or not self._has(reference.sha256):
            with self._decode_slots:
                reference = self.add(decode(image.value, self.limits), blank=blank)
            if content is not None:
                self._decoded[content, blank] = reference

        return replace(reference, alt=image.alt, max_pixels=image.max_pixels)

    def _put_video(self, value: Video | VideoRef, blank: bool) -> VideoRef:
        frames = list(value.frames)
        if not frames or len(frames) > self.limits.frames:
            raise MediaError(
                f"a video of {len(frames)} frames; it must have 1 to {self.limits.frames}"
            )
        times = value.times if isinstance(value, VideoRef) else _times(value, len(frames))

        image_refs: list[ImageRef] = []
        for frame in frames:
            image = frame if isinstance(frame, (Image, ImageRef)) else Image(frame)
            reference = self.put(image, blank=blank)
            if isinstance(reference, ImageRef):
                image_refs.append(reference)

        sizes = sorted({(ref.width, ref.height, ref.max_pixels) for ref in image_refs})
        if len(sizes) > 1:
            listed = ", ".join(f"{width} x {height}" for width, height, _ in sizes[:3])
            raise MediaError(
                f"a video must have frames of one size; this one has frames of {listed}"
            )
        return VideoRef(tuple(image_refs), frame_times(times, len(image_refs)), value.alt)

    def _blank(self, width: int, height: int, alt: str | None, max_pixels: int) -> ImageRef:
        gray = self._gray.get((width, height))
        if gray is None:
            np = import_numpy()
            pixels = np.full((height, width, 3), GRAY, np.uint8)
            gray = ImageRef(self._add(pixels), width, height)
            self._gray[width, height] = gray
        return replace(gray, max_pixels=max_pixels, alt=alt)

    def _add(self, pixels: Any) -> str:
        name = _hash(pixels)
        path = self._path(name)
        if path is not None and name not in self._complete:
            with self._exclusive(name):
                if not self._has(name):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    # Of this thread alone: other processes may write the same image.
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
                is_complete = file.read() == END
        except OSError:
            return False
        if is_complete:
            self._complete.add(name)
        return is_complete

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Hold the lock of one image."""
        with self._lock:
            write_lock = self._writing.setdefault(name, _WriteLock())
            write_lock.join()
        try:
            with write_lock.lock:
                yield
        finally:
            with self._lock:
                write_lock.leave()
                if not write_lock.threads:
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
            if self.directory is None:
                return  # memory is the only place that has them
            while self._decoded_bytes > self._max_decoded_bytes and len(self._pixels) > 1:
                _, oldest = self._pixels.popitem(last=False)
                self._decoded_bytes -= oldest.nbytes


def _content_key(value: Any) -> Hashable:
    """Return a key of a file's content without decoding it.

    None for values that may change in memory.
    """
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
        seconds = tuple(float(time) for time in times)
    except (TypeError, ValueError) as error:
        raise MediaError(f"the times of a video must be numbers of seconds: {error}") from error
    if len(seconds) != frames:
        raise MediaError(f"a video of {frames} frames has {len(seconds)} times; pass one per frame")

    are_valid = all(math.isfinite(time) and time >= 0 for time in seconds)
    if not are_valid or list(seconds) != sorted(seconds):
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
    is_bool = isinstance(fps, bool)  # which Python takes for a number
    if is_bool or not isinstance(fps, (int, float)) or not math.isfinite(fps) or fps <= 0:
        raise MediaError(f"fps must be a number over 0, not {fps!r:.60}")
    return [number / fps for number in range(frames)]


def _hash(pixels: Any) -> str:
    height, width = pixels.shape[:2]
    digest = sha256(f"RGB {width} {height} ".encode())
    digest.update(import_numpy().ascontiguousarray(pixels).data)
    return digest.hexdigest()


def scaled_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the width and height of an image scaled down to at most `max_pixels` pixels.

    0 is no limit.
    """
    scale = (max_pixels / (height * width)) ** 0.5 if max_pixels else 1.0
    if scale >= 1:
        return width, height
    return max(1, int(width * scale)), max(1, int(height * scale))


def _scaled(pixels: Any, max_pixels: int) -> Any:
    from PIL import Image as Pillow

    height, width = pixels.shape[:2]
    size = scaled_size(width, height, max_pixels)
    if size == (width, height):
        return pixels
    return import_numpy().asarray(Pillow.fromarray(pixels).resize(size, Pillow.Resampling.BICUBIC))

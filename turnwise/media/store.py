"""The media store: images decoded once, kept once by the hash of their pixels."""

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

from turnwise.errors import MediaError
from turnwise.media.images import END, MediaLimits, decode, encode_png, import_numpy
from turnwise.types import Image, ImageRef, Video, VideoRef

GREY = 128
"""Each channel of a blank image."""


class MediaStore:
    """Images by content. Safe to use from several threads, and by several processes on one directory.

    A reference is given out when its image can be had by it: where there is a directory, when its file stands there whole.

    Args:
        directory: where each image is written once, as `SHA256.png`; None keeps all of them in memory.
        limits: what is refused.
        decoded_bytes: memory for decoded pixels where a directory holds the rest.
        blank: whether every image, also one given by its reference, becomes a grey one of its size: the control that shows
            what a model does blind.
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
        """PNG files made so far."""
        self._most = decoded_bytes
        self._held = 0
        self._pixels: OrderedDict[str, Any] = OrderedDict()
        self._files: OrderedDict[str, bytes] = OrderedDict()
        """PNG files that stand nowhere on disk."""
        self._filed = 0
        self._whole: set[str] = set()
        """Images whose file is known to stand on disk."""
        self._decoded: dict[Hashable, ImageRef] = {}
        """What came of the contents of files."""
        self._grey: dict[tuple[int, int], ImageRef] = {}
        self._lock = threading.Lock()
        # Each thread that decodes wants the interpreter's lock again and again, and the event loop waits behind all of them.
        self._gate = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))
        self._writing: dict[str, tuple[threading.Lock, list[int]]] = {}

    @contextmanager
    def blanked(self, blank: bool) -> Iterator[None]:
        """Set `blank` within a `with` block, and unset it after."""
        self.blank = blank
        try:
            yield
        finally:
            self.blank = False

    def put(self, value: Image | Video | ImageRef | VideoRef) -> ImageRef | VideoRef:
        """Store what a person gave; a reference is seen to be known, and gets the size that it lacks.

        Raises:
            MediaError: for what is no image, is over a limit, or is not known.
            UsageError: where numpy or Pillow is missing.
        """
        if isinstance(value, (Video, VideoRef)):
            return self._take_video(value)
        if not isinstance(value, ImageRef):
            return self._take_image(value)
        if not (value.width and value.height):
            height, width = self.pixels(replace(value, max_pixels=0)).shape[:2]
            value = replace(value, width=width, height=height)
        if self.blank:
            return self._blank(value.width, value.height, value.alt, value.max_pixels)
        if not self._has(value.sha256):
            raise self._unknown(value)
        return value

    def add(self, pixels: Any, *, alt: str | None = None, max_pixels: int = 0) -> ImageRef:
        """Store pixels, [height, width, 3] of uint8, which nobody changes any more."""
        height, width = pixels.shape[:2]
        if self.blank:
            return self._blank(width, height, alt, max_pixels)
        return ImageRef(self._add(pixels), width, height, max_pixels, alt)

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
                raise self._unknown(ref)
            pixels = decode(path, replace(self.limits, bytes=path.stat().st_size))  # our own file, which may be longer
            if _hash(pixels) != ref.sha256:
                raise MediaError(f"{path} was changed: its pixels have another hash than its name")
            self._keep(ref.sha256, pixels)
        return _scaled(pixels, ref.max_pixels) if ref.max_pixels else pixels

    def png_bytes(self, ref: ImageRef) -> bytes:
        """The image as a PNG file, scaled down where the reference says so. Made once, while memory allows.

        Raises:
            MediaError: as `pixels`.
        """
        path = self._path(ref.sha256)
        if path is not None and not ref.max_pixels and path.exists():
            return path.read_bytes()
        with self._lock:
            found = self._files.get(ref.key)
            if found is not None:
                self._files.move_to_end(ref.key)
                return found
        made = self._png(self.pixels(ref))
        with self._lock:
            self._filed += len(made) - len(self._files.get(ref.key, b""))
            self._files[ref.key] = made
            while self._filed > self._most // 4 and len(self._files) > 1:
                self._filed -= len(self._files.popitem(last=False)[1])
        return made

    def _take_image(self, image: Image) -> ImageRef:
        content = _told_apart(image.value)
        known = self._decoded.get(content) if content is not None else None
        if known is None or not self._has(known.sha256):
            with self._gate:
                known = self.add(decode(image.value, self.limits))
            if content is not None:
                self._decoded[content] = known
        return replace(known, alt=image.alt, max_pixels=image.max_pixels)

    def _take_video(self, value: Video | VideoRef) -> VideoRef:
        frames = list(value.frames)
        if not frames or len(frames) > self.limits.frames:
            raise MediaError(f"a video of {len(frames)} frames; it has 1 to {self.limits.frames}")
        times = value.times if isinstance(value, VideoRef) else _times(value, len(frames))
        refs = [self.put(f if isinstance(f, (Image, ImageRef)) else Image(f)) for f in frames]
        shown = tuple(ref for ref in refs if isinstance(ref, ImageRef))
        sizes = sorted({(ref.width, ref.height, ref.max_pixels) for ref in shown})
        if len(sizes) > 1:
            told = ", ".join(f"{width} x {height}" for width, height, _ in sizes[:3])
            raise MediaError(f"a video has frames of one size; this one has frames of {told}")
        return VideoRef(shown, frame_times(times, len(shown)), value.alt)

    def _blank(self, width: int, height: int, alt: str | None, max_pixels: int) -> ImageRef:
        grey = self._grey.get((width, height))
        if grey is None:
            np = import_numpy()
            grey = ImageRef(self._add(np.full((height, width, 3), GREY, np.uint8)), width, height)
            self._grey[width, height] = grey
        return replace(grey, max_pixels=max_pixels, alt=alt)

    def _add(self, pixels: Any) -> str:
        name = _hash(pixels)
        path = self._path(name)
        if path is not None and name not in self._whole:
            with self._alone(name):
                if not self._has(name):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    draft = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
                    draft.write_bytes(self._png(pixels))
                    os.replace(draft, path)
                    self._whole.add(name)
        self._keep(name, pixels)
        return name

    def _has(self, name: str) -> bool:
        """Whether an image can be had by its hash; a file that was cut off does not count."""
        path = self._path(name)
        if path is None:
            with self._lock:
                return name in self._pixels
        if name in self._whole:
            return True
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - len(END)))
                whole = file.read() == END
        except OSError:
            return False
        if whole:
            self._whole.add(name)
        return whole

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One thread at a time for one image."""
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

    def _keep(self, name: str, pixels: Any) -> None:
        with self._lock:
            if name in self._pixels:
                self._pixels.move_to_end(name)
                return
            self._pixels[name] = pixels
            self._held += pixels.nbytes
            while self.directory is not None and self._held > self._most and len(self._pixels) > 1:
                self._held -= self._pixels.popitem(last=False)[1].nbytes


def _told_apart(value: Any) -> Hashable:
    """What tells the content of a file apart from others without decoding it; None for what may change in memory."""
    if isinstance(value, Path):
        try:
            about = value.stat()
        except OSError:
            return None
        return str(value), about.st_ino, about.st_size, about.st_mtime_ns
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    return sha256(value).digest() if isinstance(value, bytes) else None


def frame_times(times: Any, frames: int) -> tuple[float, ...]:
    """When the frames of a video are shown, in seconds.

    Raises:
        MediaError: when they are not as many as frames, or no finite numbers from 0 on that never fall.
    """
    try:
        found = tuple(float(at) for at in times)
    except (TypeError, ValueError) as error:
        raise MediaError(f"the times of a video are numbers of seconds: {error}") from error
    if len(found) != frames:
        raise MediaError(f"a video of {frames} frames has {len(found)} times; give one per frame")
    if not all(math.isfinite(at) and at >= 0 for at in found) or list(found) != sorted(found):
        raise MediaError(f"the times of a video are finite, from 0 on, and never fall: {found!r:.120}")
    return found


def _times(value: Video, frames: int) -> Any:
    if (value.times is None) == (value.fps is None):
        raise MediaError("a video says fps or times, one of them")
    if value.times is not None:
        return value.times
    fps = value.fps
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not (math.isfinite(fps) and fps > 0):
        raise MediaError(f"fps is a number over 0, not {fps!r:.60}")
    return [number / fps for number in range(frames)]


def _hash(pixels: Any) -> str:
    height, width = pixels.shape[:2]
    found = sha256(f"RGB {width} {height} ".encode())
    found.update(import_numpy().ascontiguousarray(pixels).data)
    return found.hexdigest()


def scaled_size(width: int, height: int, most: int) -> tuple[int, int]:
    """Width and height at which an image is shown: as it is, or scaled down to at most `most` pixels (0 for no limit)."""
    share = (most / (height * width)) ** 0.5 if most else 1.0
    return (width, height) if share >= 1 else (max(1, int(width * share)), max(1, int(height * share)))


def _scaled(pixels: Any, most: int) -> Any:
    from PIL import Image as Pillow

    height, width = pixels.shape[:2]
    size = scaled_size(width, height, most)
    if size == (width, height):
        return pixels
    return import_numpy().asarray(Pillow.fromarray(pixels).resize(size, Pillow.Resampling.BICUBIC))

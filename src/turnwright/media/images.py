"""Decoding of images to RGB pixels (`decode`), and a PNG writer (`encode_png`).

Pillow's PNG writer tries five filters for each row. With it, a turn with a new image costs a
rollout 1.4 times the CPU (1.00 times the floor of `benchmarks/images.py`, not 0.74), for files of
the same size on photographs. Here numpy applies one filter, and zlib compresses. Format: the PNG
specification (W3C, third edition), sections 5.3 (chunks), 9.2 (filter types) and 11.2.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwright.errors import MediaError, UsageError
from turnwright.types import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""File formats, by Pillow's names; of animations the first frame is used."""

_ORIENTATION = 0x0112
"""EXIF tag of the orientation."""
_BAND_BYTES = 2**20
"""Bytes copied or filtered at a time."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on images and videos, checked before decoding."""

    pixels: int = 50_000_000
    """Maximum number of pixels of an image."""
    side: int = 16_384
    """Maximum number of pixels along one side."""
    bytes: int = 64 * 2**20
    """Maximum size of a file in bytes."""
    frames: int = 256
    """Maximum number of frames of a video."""


def decode(value: Any, limits: MediaLimits) -> Any:
    """Decode an image to pixels, read-only [height, width, 3] of uint8, in memory of their own.

    Transparent images are composited on white; the EXIF orientation is applied. Of 16-bit channels
    the upper 8 bits are used; of animations the first frame. File formats: `FORMATS`. The size is
    read from the header before decoding.

    Raises `MediaError` for a value that is not an image, is broken, or is over a limit;
    `UsageError` where numpy or Pillow is missing.
    """
    np = import_numpy()
    pillow = _pillow()
    while isinstance(value, Image):
        value = value.value

    try:
        if isinstance(value, np.ndarray):
            pixels = _from_array(value, limits)
        else:
            picture = value if isinstance(value, pillow.Image) else _open(value, limits)
            check_size(picture.size, limits)
            pixels = _array(_rgb(picture))
    except MediaError:
        raise
    except Exception as error:  # decoders raise many types for broken files
        raise MediaError(
            f"an image cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error

    pixels.flags.writeable = False
    return pixels


def import_numpy() -> Any:
    """Import numpy. Raises `UsageError` where it is missing."""
    return _import("numpy", "numpy")


def _pillow() -> Any:
    return _import("PIL.Image", "Pillow")


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"images need {package}, which is not installed; pip install 'turnwright[vision]'"
        ) from error


def _open(value: Any, limits: MediaLimits) -> Any:
    content = content_of(value, limits)
    try:
        return _pillow().open(BytesIO(content), formats=FORMATS)
    except _pillow().UnidentifiedImageError:
        received = "an SVG drawing" if b"<svg" in content[:4096] else f"{len(content)} bytes"
        raise MediaError(
            f"{received}, which is no image in one of the formats {', '.join(FORMATS)}; pass "
            "pixels or such a file"
        ) from None


def _array(picture: Any) -> Any:
    """Convert an RGB picture to an array."""
    # One band at a time, since Pillow holds the interpreter lock during a copy.
    np = import_numpy()
    width, height = picture.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_BYTES // (3 * width))
    for top in range(0, height, rows):
        pixels[top : top + rows] = picture.crop((0, top, width, min(height, top + rows)))
    return pixels


def _rgb(picture: Any) -> Any:
    """Convert a picture to RGB, on white, upright."""
    if picture.getexif().get(_ORIENTATION, 1) != 1:
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture)

    is_16_bit = picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG")
    if is_16_bit:
        upper_bits = (import_numpy().asarray(picture) >> 8).astype("uint8")
        picture = _pillow().fromarray(upper_bits)
    if picture.mode in ("I", "F"):
        raise MediaError(
            f"an image of mode {picture.mode}, whose values have no fixed range; use 8 bits per "
            "channel"
        )

    if picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        picture = _pillow().new("RGB", layer.size, "white")
        picture.paste(layer, mask=layer.getchannel("A"))
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def content_of(value: Any, limits: MediaLimits) -> bytes:
    """Return the content of an image file passed as bytes, a path or a data URI.

    Raises `MediaError` for anything else, for content over the limit, and for a path that is not a
    file.
    """
    if isinstance(value, Path):
        return _file(value, limits)
    if isinstance(value, str):
        value = _data_uri(value, limits)
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise MediaError(
            "an image must be a PIL image, an array, bytes, a data URI or a pathlib.Path, not "
            f"{type(value).__name__}"
        )
    size = memoryview(value).nbytes
    if size > limits.bytes:
        raise MediaError(f"{size} bytes; the limit of an image file is {limits.bytes}")
    return bytes(value)


def _file(path: Path, limits: MediaLimits) -> bytes:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise MediaError(f"{path}: not a file")
        if info.st_size > limits.bytes:
            raise MediaError(
                f"{path}: {info.st_size} bytes; the limit of an image file is {limits.bytes}"
            )
        with path.open("rb") as file:
            content = file.read(limits.bytes + 1)
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or 0)
        raise MediaError(f"{path}: cannot be read ({why})") from error

    if len(content) > limits.bytes:  # it has grown since
        raise MediaError(f"{path}: over {limits.bytes} bytes, the limit of an image file")
    return content


def _data_uri(value: str, limits: MediaLimits) -> bytes:
    head, comma, _ = value[:256].partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise MediaError(
            f"an image as a string must be a base64 data URI, not {value!r:.60}; URLs are not "
            "fetched and paths in strings are not opened: pass a pathlib.Path for a file"
        )

    # Base64 writes 3 bytes as 4 characters; 8 more for the comma and the padding.
    if len(value) - len(head) > limits.bytes * 4 // 3 + 8:
        raise MediaError(
            f"a data URI of {len(value)} characters; the limit of an image file is {limits.bytes} "
            "bytes"
        )

    try:
        return base64.b64decode(value[len(head) + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"a data URI that is not valid base64: {error}") from error


def check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    """Check the (width, height) of an image against the limits.

    Raises `MediaError` when it is empty or too large.
    """
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"an image of {width} x {height} pixels")
    if max(size) > limits.side or width * height > limits.pixels:
        raise MediaError(
            f"an image of {width} x {height} pixels; the limits are {limits.side} per side and "
            f"{limits.pixels} in total: scale it down"
        )


def _from_array(value: Any, limits: MediaLimits) -> Any:
    np = import_numpy()
    is_gray = value.ndim == 2
    is_color = value.ndim == 3 and value.shape[2] in (1, 3, 4)
    if value.dtype != np.uint8 or not (is_gray or is_color):
        raise MediaError(
            f"an array of {value.dtype} {value.shape} is no image; pass uint8 [height, width, 3], "
            "from 0 to 255"
        )
    height, width = value.shape[:2]
    check_size((width, height), limits)

    if is_gray:
        value = value[:, :, None]
    if value.shape[2] == 4:
        # On white, rounded to the nearest value.
        alpha = value[:, :, 3:].astype(np.uint16)
        value = ((value[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)

    # Always a copy: environments draw the next observation into the same array.
    return np.array(np.broadcast_to(value, (height, width, 3)), order="C", subok=False)


SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = b"IEND\xaeB`\x82"
"""Last bytes of every complete file."""
_SUB = 1
"""Filter type: each byte is stored as the difference from the same channel of the pixel to the
left."""


def encode_png(pixels: Any) -> bytes:
    """Encode pixels, [height, width, 3] of uint8, as a PNG file."""
    import numpy as np

    height, width, _ = pixels.shape
    bit_depth = 8
    color_type = 2  # RGB
    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)

    # Rows of one byte for the filter and 3 per pixel, filtered and compressed a band at a time.
    compressor = zlib.compressobj(1)
    parts = []
    row_bytes = 3 * width + 1
    rows = max(1, _BAND_BYTES // row_bytes)
    for top in range(0, height, rows):
        band = pixels[top : top + rows].reshape(-1, 3 * width)
        filtered = np.empty((len(band), row_bytes), np.uint8)
        filtered[:, 0] = _SUB
        filtered[:, 1:4] = band[:, :3]
        np.subtract(band[:, 3:], band[:, :-3], out=filtered[:, 4:])
        parts.append(compressor.compress(filtered.data))
    parts.append(compressor.flush())

    data = b"".join(_chunk(b"IDAT", part) for part in parts if part)
    return SIGNATURE + _chunk(b"IHDR", header) + data + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    length = struct.pack(">I", len(content))
    checksum = struct.pack(">I", zlib.crc32(content, zlib.crc32(kind)))
    return length + kind + content + checksum

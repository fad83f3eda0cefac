"""Decode any image form to RGB pixels; write PNG.

PNG files of 8-bit RGB pixels, written so that other threads go on meanwhile.

Pillow's writer holds the interpreter's lock for every 64 KB that it writes, so that a few threads which store large images keep
the event loop waiting. Here filter and compression run in numpy and zlib, which let go of it. Format: the PNG specification
(W3C, third edition), sections 5.3 (chunks), 9.2 (filter types) and 11.2.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwise.errors import MediaError, UsageError
from turnwise.types import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Of files, by Pillow's names; of moving ones the first frame is shown."""

_ORIENTATION = 0x0112
"""The EXIF tag that says which way is up."""
_BAND = 2**20
"""Bytes that are copied at a time."""


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


def decode(value: Any, limits: MediaLimits) -> Any:
    """The pixels of an image, read-only [height, width, 3] of uint8, whose memory nobody else writes to.

    Transparent images are shown on white, and turned as their EXIF data says. Of 16 bits a channel the upper 8 are shown; of
    moving images the first frame. Formats of files: `FORMATS`. The size is read from the header before anything is decoded.

    Raises:
        MediaError: for what is no image, is broken, or is over a limit.
        UsageError: where numpy or Pillow is missing.
    """
    np, pillow = import_numpy(), _pillow()
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
    except Exception as error:  # decoders raise nearly anything for a broken file
        raise MediaError(f"an image cannot be read: {type(error).__name__}: {error!s:.200}") from error
    pixels.flags.writeable = False
    return pixels


def import_numpy() -> Any:
    """The module numpy.

    Raises:
        UsageError: where it is missing.
    """
    try:
        import numpy
    except ImportError as error:
        raise _missing("numpy") from error
    return numpy


def _pillow() -> Any:
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise _missing("Pillow") from error
    return Pillow


def _missing(package: str) -> UsageError:
    return UsageError(f"images need {package}, which is not installed; pip install 'turnwise[vision]'")


def _open(value: Any, limits: MediaLimits) -> Any:
    content = content_of(value, limits)
    try:
        return _pillow().open(BytesIO(content), formats=FORMATS)
    except _pillow().UnidentifiedImageError:
        drawn = b"<svg" in content[:4096]
        said = "an SVG drawing, which is none of" if drawn else f"{len(content)} bytes that are no image in one of"
        raise MediaError(f"{said} the formats {', '.join(FORMATS)}; give pixels, or a file of one of them") from None


def _array(picture: Any) -> Any:
    """An RGB picture as an array, copied a band at a time: Pillow holds the lock of the interpreter while it copies all."""
    np = import_numpy()
    width, height = picture.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND // (3 * width))
    for top in range(0, height, rows):
        pixels[top : top + rows] = picture.crop((0, top, width, min(height, top + rows)))
    return pixels


def _rgb(picture: Any) -> Any:
    """A picture as RGB, on white, upright."""
    if picture.getexif().get(_ORIENTATION, 1) != 1:
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        picture = _pillow().fromarray((import_numpy().asarray(picture) >> 8).astype("uint8"))
    if picture.mode in ("I", "F"):
        raise MediaError(f"an image of mode {picture.mode}, whose numbers have no range; give 8 bits a channel")
    if picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        picture = _pillow().new("RGB", layer.size, "white")
        picture.paste(layer, mask=layer.getchannel("A"))
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def content_of(value: Any, limits: MediaLimits) -> bytes:
    """The content of an image file that was given as bytes, a path or a data URI.

    Raises:
        MediaError: for anything else, for too much, and for a path that is no file.
    """
    if isinstance(value, Path):
        return _file(value, limits)
    if isinstance(value, str):
        value = _data_uri(value, limits)
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise MediaError(f"an image is a PIL image, an array, bytes, a data URI or a pathlib.Path, not {type(value).__name__}")
    if memoryview(value).nbytes > limits.bytes:
        raise MediaError(f"{memoryview(value).nbytes} bytes; an image file has at most {limits.bytes}")
    return bytes(value)


def _file(path: Path, limits: MediaLimits) -> bytes:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise MediaError(f"{path}: not a file")
        if about.st_size > limits.bytes:
            raise MediaError(f"{path}: {about.st_size} bytes; an image file has at most {limits.bytes}")
        with path.open("rb") as file:
            content = file.read(limits.bytes + 1)
    except OSError as error:
        raise MediaError(f"{path}: cannot be read ({error.strerror or os.strerror(error.errno or 0)})") from error
    if len(content) > limits.bytes:
        raise MediaError(f"{path}: over {limits.bytes} bytes, the most of an image file")
    return content


def _data_uri(value: str, limits: MediaLimits) -> bytes:
    head, comma, _ = value[:256].partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise MediaError(
            f"an image given as text is a data URI with base64, not {value!r:.60}; nothing is fetched, and paths in texts are "
            "not opened: give a pathlib.Path for a file"
        )
    if len(value) - len(head) > limits.bytes * 4 // 3 + 8:
        raise MediaError(f"a data URI of {len(value)} characters; an image file has at most {limits.bytes} bytes")
    try:
        return base64.b64decode(value[len(head) + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"a data URI that is no base64: {error}") from error


def check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    """Hold an image of (width, height) to the limits.

    Raises:
        MediaError: when it is empty or too large.
    """
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"an image of {width} x {height} pixels")
    if max(size) > limits.side or width * height > limits.pixels:
        raise MediaError(
            f"an image of {width} x {height} pixels; at most {limits.side} a side and {limits.pixels} in all: scale it down"
        )


def _from_array(value: Any, limits: MediaLimits) -> Any:
    np = import_numpy()
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
        raise MediaError(f"an array of {value.dtype} {value.shape} is no image; give uint8 [height, width, 3], from 0 to 255")
    check_size((value.shape[1], value.shape[0]), limits)
    if value.ndim == 2:
        value = value[:, :, None]
    if value.shape[2] == 4:
        alpha = value[:, :, 3:].astype(np.uint16)
        value = ((value[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    # A copy, also of what has the right form already: worlds draw the next observation into the same array.
    return np.array(np.broadcast_to(value, (*value.shape[:2], 3)), order="C", subok=False)


SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = b"IEND\xaeB`\x82"
"""How every file ends that was written whole."""
BAND = 2**20
"""Bytes that are filtered at a time."""
_SUB = 1
"""The filter: what is written of each byte is the difference to the same channel of the pixel on its left."""


def encode_png(pixels: Any) -> bytes:
    """The file of an image, [height, width, 3] of uint8."""
    import numpy as np

    height, width, _ = pixels.shape
    compress = zlib.compressobj(1)
    parts = []
    rows = max(1, BAND // (3 * width + 1))
    for top in range(0, height, rows):
        band = pixels[top : top + rows].reshape(-1, 3 * width)
        written = np.empty((len(band), 3 * width + 1), np.uint8)
        written[:, 0] = _SUB
        written[:, 1:4] = band[:, :3]
        np.subtract(band[:, 3:], band[:, :-3], out=written[:, 4:])
        parts.append(compress.compress(written.data))
    parts.append(compress.flush())
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"".join(_chunk(b"IDAT", part) for part in parts if part)
    return SIGNATURE + _chunk(b"IHDR", head) + data + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(content, zlib.crc32(kind)))

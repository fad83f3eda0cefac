"""Images in whatever form people have them, decoded to 8-bit RGB pixels. Nothing over a limit is decoded."""

from __future__ import annotations

import base64
import binascii
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import MediaError

if TYPE_CHECKING:
    from turnwise.media.store import MediaLimits


def decode(value: Any, limits: MediaLimits) -> Any:
    """The pixels of an image, [height, width, 3] of uint8.

    Transparent images are shown on white, and turned as their EXIF data says.

    Raises:
        MediaError: for what is no image, is broken, or is over a limit.
    """
    import numpy as np
    from PIL import Image as Pillow
    from PIL import ImageOps

    if isinstance(value, np.ndarray):
        return _from_array(value, limits)
    try:
        picture = value if isinstance(value, Pillow.Image) else _open(value, limits)
        _check_size(picture.size, limits)
        picture = ImageOps.exif_transpose(picture)
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            layer = picture.convert("RGBA")
            picture = Pillow.new("RGB", layer.size, "white")
            picture.paste(layer, mask=layer.getchannel("A"))
        return np.asarray(picture.convert("RGB"))
    except MediaError:
        raise
    except Exception as error:  # decoders raise nearly anything for a broken file
        raise MediaError(f"an image cannot be read: {type(error).__name__}: {error!s:.200}") from error


def _open(value: Any, limits: MediaLimits) -> Any:
    from PIL import Image as Pillow

    content = _bytes(value, limits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
        return Pillow.open(BytesIO(content), formats=("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"))


def _bytes(value: Any, limits: MediaLimits) -> bytes:
    if isinstance(value, Path):
        if value.stat().st_size > limits.bytes:
            raise MediaError(f"{value}: {value.stat().st_size} bytes; an image file has at most {limits.bytes}")
        return value.read_bytes()
    if isinstance(value, str):
        head, comma, body = value.partition(",")
        if not head.startswith("data:") or not comma or not head.endswith(";base64"):
            raise MediaError(
                f"an image given as text is a data URI with base64, not {value!r:.60}; give a pathlib.Path for a file"
            )
        try:
            value = base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise MediaError(f"a data URI that is no base64: {error}") from error
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise MediaError(f"an image is a PIL image, an array, bytes, a data URI or a pathlib.Path, not {type(value).__name__}")
    if len(value) > limits.bytes:
        raise MediaError(f"{len(value)} bytes; an image file has at most {limits.bytes}")
    return bytes(value)


def _check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"an image of {width} x {height} pixels")
    if max(size) > limits.side or width * height > limits.pixels:
        raise MediaError(
            f"an image of {width} x {height} pixels; at most {limits.side} a side and {limits.pixels} in all: scale it down"
        )


def _from_array(value: Any, limits: MediaLimits) -> Any:
    import numpy as np

    if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
        raise MediaError(f"an array of {value.dtype} {value.shape} is no image; give uint8 [height, width, 3]")
    _check_size((value.shape[1], value.shape[0]), limits)
    if value.ndim == 2:
        value = value[:, :, None]
    if value.shape[2] == 4:
        alpha = value[:, :, 3:].astype(np.uint16)
        value = ((value[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(value, (*value.shape[:2], 3)))

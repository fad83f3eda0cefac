"""Image files made by hand and by Pillow."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image as Pillow


def noise(width: int, height: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def file_of(picture: Pillow.Image, kind: str = "PNG", **more) -> bytes:
    out = BytesIO()
    picture.save(out, kind, **more)
    return out.getvalue()


def png(pixels: np.ndarray) -> bytes:
    return file_of(Pillow.fromarray(pixels))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A one-bit PNG whose header says so many pixels; as many as fit in
    some kilobytes are there."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width // 8 + 1) * min(height, 400)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def png16(rows: np.ndarray) -> bytes:
    """Grey, 16 bits a pixel."""
    height, width = rows.shape
    head = struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0)
    data = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'  # noqa: E501

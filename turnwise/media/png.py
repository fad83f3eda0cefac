"""PNG files of 8-bit RGB pixels, written so that other threads go on meanwhile.

Pillow's writer holds the interpreter's lock for every 64 KB that it writes, so that a few threads which store large images keep
the event loop waiting. Here filter and compression run in numpy and zlib, which let go of it. Format: the PNG specification
(W3C, third edition), sections 5.3 (chunks), 9.2 (filter types) and 11.2.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

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

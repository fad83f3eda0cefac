"""Images as vLLM's tokens-only route takes them: what our own processor made of them, and where their placeholders stand.

The server is given ids in which images are expanded already, and takes them as they are. A feature is a MessagePack map of
vLLM's (`vllm/v1/serial_utils.py`, 0.32.0): by name its array as [type, shape, bytes] and how those of several images are put
together, in base64.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from struct import pack as _bytes_of
from typing import Any

from turnwise.types import Placed

BYTES, NUMBERS = "uint8", "float32"
"""What a server's model takes: 8-bit pixels, which it scales and normalises itself (`mm_device_do_normalize`, a default for the
Qwen-VL family), or what is scaled and normalised already. It takes the one for the other without a word."""
RAW = 3
"""vLLM's MessagePack extension for the bytes of an array."""
BLACK = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAG0lEQVR42u3BgQAAAADDoPlT3+AEVQEAAAB8AxBAAAG9PLePAAAAAElFTkSuQmCC"
"""An image of 64 x 64 pixels, as a PNG file in base64."""
GRIDS = frozenset(("pixel_values", "image_grid_thw"))
"""What processors of the Qwen-VL family make of an image: patches [patches, numbers], and their grid [1, 3]."""


def known(arrays: Mapping[str, Any]) -> bool:
    """Whether the arrays of an image can be sent; how others are put together is known to vLLM's own processors alone."""
    return set(arrays) == GRIDS


def taken(features: Any) -> str | None:
    """What a server's model takes, by the features that its own processor made of an image; None where they do not say."""
    try:
        raw = b64decode(features["kwargs_data"]["image"][0])
    except (LookupError, TypeError, ValueError):
        return None
    found = re.search(rb"pixel_values.{1,5}data.{1,5}?(uint8|float32|float16|bfloat16)", raw, re.DOTALL)
    return None if found is None else BYTES if found[1] == b"uint8" else NUMBERS


def vllm_features(media: Sequence[Placed], pixels: Any, salt: str, takes: str) -> dict[str, Any]:
    """The `features` of a request.

    Args:
        media: images whose blocks are one run of placeholders each.
        pixels: gives what a processor made of an image (`get(media)`), as numpy arrays that `known` knows.
        salt: names the weights. vLLM keeps what its tower made of an image under the hash that comes with it, and new weights
            do not clear that, so the hash is one of image, processor and weights.
        takes: `BYTES` or `NUMBERS`.
    """
    hashes, ranges, data = [], [], []
    for block in media:
        arrays = pixels.get(block.media)
        hashes.append(sha256(f"{block.media.key} {pixels.eyes.fingerprint} {salt}".encode()).hexdigest())
        ranges.append({"offset": block.start, "length": block.length})
        patches, grid = arrays["pixel_values"], arrays["image_grid_thw"][0]
        if takes == BYTES:
            patches = pixels.eyes.unscaled(patches)
        together = ["flat", {"slices": [[0, len(patches), None]], "dim": 0, "keep_on_cpu": False}]
        item = {
            "pixel_values": {"data": _array(patches), "field": together},
            "image_grid_thw": {"data": _array(grid), "field": ["batched", {"keep_on_cpu": True}]},
        }
        data.append(b64encode(packed(item)).decode())
    return {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": ranges}, "kwargs_data": {"image": data}}


class _Raw(bytes):
    """The bytes of an array."""


def _array(array: Any) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [array.dtype.name, list(array.shape), _Raw(little.tobytes())]


def packed(value: Any) -> bytes:
    """A value as MessagePack, of what features need: maps by text, lists, texts, numbers from 0 to 2**63, and arrays' bytes.

    The format: https://github.com/msgpack/msgpack/blob/master/spec.md.

    Raises:
        TypeError: for anything else.
    """
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, _Raw):
        return _bytes_of(">BIb", 0xC9, len(value), RAW) + value
    if isinstance(value, int) and value >= 0:
        return _bytes_of("B", value) if value < 128 else _bytes_of(">BQ", 0xCF, value)
    if isinstance(value, str):
        raw = value.encode()
        return _bytes_of(">BI", 0xDB, len(raw)) + raw
    if isinstance(value, list):
        return _bytes_of(">BI", 0xDD, len(value)) + b"".join(map(packed, value))
    if isinstance(value, dict):
        return _bytes_of(">BI", 0xDF, len(value)) + b"".join(packed(one) for pair in value.items() for one in pair)
    raise TypeError(f"{value!r} has no place in an image's features")

"""Images as vLLM's tokens-only route takes them: what our own processor made of them, and where their placeholders stand.

The server is given ids in which images are expanded already, and takes them as they are. A feature is a MessagePack map of
vLLM's (`vllm/v1/serial_utils.py`, 0.32.0): by name its array as [type, shape, bytes] and how those of several images are put
together, in base64.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

from turnwise.types import MediaPlacement

BYTES, NUMBERS = "uint8", "float32"
"""What a server's model takes: 8-bit pixels, which it scales and normalises itself (`mm_device_do_normalize`, a default for the
Qwen-VL family), or what is scaled and normalised already. It takes the one for the other without a word."""
RAW = 3
"""vLLM's MessagePack extension for the bytes of an array."""
PROBE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAG0lEQVR42u3BgQAAAADDoPlT3+AEVQEAAAB8AxBAAAG9PLePAAAAAElFTkSuQmCC"
"""An image of 64 x 64 pixels, as a PNG file in base64."""
GRIDS = frozenset(("pixel_values", "image_grid_thw"))
"""What processors of the Qwen-VL family make of an image: patches [patches, numbers], and their grid [1, 3]."""


def is_supported(arrays: Mapping[str, Any]) -> bool:
    """Whether the arrays of an image can be sent; how others are put together is known to vLLM's own processors alone."""
    return set(arrays) == GRIDS


def accepted_features(features: Any) -> str | None:
    """What a server's model takes, by the features that its own processor made of an image; None where they do not say."""
    from msgpack import unpackb

    try:
        kind = unpackb(b64decode(features["kwargs_data"]["image"][0]))["pixel_values"]["data"][0]
        return {"uint8": BYTES, "float32": NUMBERS, "float16": NUMBERS, "bfloat16": NUMBERS}.get(kind)
    except (LookupError, TypeError, ValueError):  # msgpack's own are among them
        return None


def feature_key(block: MediaPlacement, pixels: Any, salt: str) -> str:
    """What a server keeps an image under.

    vLLM keeps what its tower made of an image under the hash that comes with it, and new weights do not clear that, so the hash
    is one of image, processor and weights.

    Args:
        salt: names the weights.
    """
    return sha256(f"{block.media.key} {pixels.eyes.fingerprint} {salt}".encode()).hexdigest()


def vllm_features(
    media: Sequence[MediaPlacement], names: Sequence[str], pixels: Any, takes: str, have: Collection[str] = ()
) -> dict[str, Any]:
    """The `features` of a request.

    Args:
        media: images whose blocks are one run of placeholders each.
        names: of each, as `feature_key` gives them.
        pixels: gives what a processor made of an image (`get(media)`), as numpy arrays that `is_supported` knows.
        takes: `BYTES` or `NUMBERS`.
        have: names of those that the server has already.
    """
    from msgpack import packb

    ranges, data = [], list[str | None]()
    for name, block in zip(names, media, strict=True):
        ranges.append({"offset": block.start, "length": block.length})
        if name in have:
            data.append(None)
            continue
        arrays = pixels.get(block.media)
        patches, grid = arrays["pixel_values"], arrays["image_grid_thw"][0]
        if takes == BYTES:
            patches = pixels.vision.unscaled(patches)
        together = ["flat", {"slices": [[0, len(patches), None]], "dim": 0, "keep_on_cpu": False}]
        item = {
            "pixel_values": {"data": _array(patches), "field": together},
            "image_grid_thw": {"data": _array(grid), "field": ["batched", {"keep_on_cpu": True}]},
        }
        data.append(b64encode(packb(item)).decode())
    return {"mm_hashes": {"image": list(names)}, "mm_placeholders": {"image": ranges}, "kwargs_data": {"image": data}}


def size_of(data: str | None) -> int:
    """Bytes of an image in a request's features; 0 for one that was left out."""
    return 0 if data is None else len(data) * 3 // 4


def _array(array: Any) -> list[Any]:
    from msgpack import ExtType

    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [array.dtype.name, list(array.shape), ExtType(RAW, little.tobytes())]

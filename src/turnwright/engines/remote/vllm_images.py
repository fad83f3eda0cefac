"""Images for vLLM's tokens-only route: arrays from our own processor, and the positions of their
placeholders.

The ids sent have images already expanded, and the server keeps them as they are. A feature is a
MessagePack map in base64 (`vllm/v1/serial_utils.py`, 0.32.0): array name to [type, shape, bytes]
and how the arrays of several images are joined.

`VllmImages.ask` sends the images of a request. What is read from the server first is its pixel
format (`accepted_features`) and the size of its cache (`cache_capacity`), of which
`ServerImageCache` is a mirror here.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol

from turnwright.engines.protocols import Request
from turnwright.engines.remote.http import CONTROL_S, HttpClient
from turnwright.errors import EngineError, EngineUnavailable
from turnwright.types import MediaPlacement, VideoRef

RAW_PIXELS, SCALED_PIXELS = "uint8", "float32"
"""Pixel formats of a server's model: 8-bit pixels, which it scales and normalizes itself
(`mm_device_do_normalize`, a default for the Qwen-VL family), or scaled and normalized values. The
server does not detect a mismatch."""
NDARRAY_EXT = 3
"""vLLM's MessagePack extension for the bytes of an array."""
PROBE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAG0lEQVR42u3BgQAAAADDoPlT3+AEVQEAAAB8AxBAAAG9PLePAAAAAElFTkSuQmCC"  # noqa: E501
"""A 64 x 64 pixel PNG file in base64."""
PATCH_ARRAYS = frozenset(("pixel_values", "image_grid_thw"))
"""Output of Qwen-VL processors for an image: patches [patches, values] and their grid [1, 3].
Joining others is internal to vLLM's processors."""


def accepted_features(features: Any) -> str | None:
    """Return the pixel format of a server's model, from features its own processor made.

    None when it is undetermined.
    """
    from msgpack import unpackb

    format_of_dtype = {
        "uint8": RAW_PIXELS,
        "float32": SCALED_PIXELS,
        "float16": SCALED_PIXELS,
        "bfloat16": SCALED_PIXELS,
    }
    try:
        arrays = unpackb(b64decode(features["kwargs_data"]["image"][0]))
        dtype = arrays["pixel_values"]["data"][0]
        return format_of_dtype.get(dtype)
    except (LookupError, TypeError, ValueError):  # includes msgpack's errors
        return None


def _array(array: Any) -> list[Any]:
    """Return an array in vLLM's form."""
    from msgpack import ExtType

    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [array.dtype.name, list(array.shape), ExtType(NDARRAY_EXT, little_endian.tobytes())]


RENDER = "/v1/chat/completions/render"
INFO = "/server_info"
ERROR = 500
"""One of vLLM 0.32.0's statuses for a request that refers to an image it lacks."""
MIN_VERSION = (0, 32)
"""Oldest vLLM seen to report a missing image and keep running."""
ASSUMED_FRACTION = 0.9
"""Fraction of a server's image memory assumed usable."""
MAX_MISSES = 8
"""With more misses than this, and more than hits, the address is assumed to have several
servers."""


class ServerOfImages(Protocol):
    """What the images of requests need of vLLM's client."""

    http: HttpClient
    pixels: Any
    counts: Counter[str]
    server_version: str
    routes: frozenset[str]
    takes_pictures: bool
    model: str | None

    @property
    def display_name(self) -> str:
        """Name of the server in messages."""


class VllmImages:
    """Sends the images of requests to one server.

    An episode's images recur with every turn. A server that reports a cache (`/server_info`, a
    developer route) gets each image once and its key afterwards. This class mirrors the server's
    least-recently-used cache; a request that misses is repeated with all images.
    """

    def __init__(self, engine: ServerOfImages) -> None:
        self._engine = engine
        self._pixel_format: str | None = None
        """Pixel format of the server's model: "" when undetermined, None before the probe."""
        self._weights_key = ""
        """Cache salt of the last request."""
        self._capacity = 0.0
        """Bytes of images that the server caches."""
        self._cache = ServerImageCache(0.0)
        self._hits = 0
        """Requests that referred to cached images, since the last weight update; `_misses` are
        those of which the server lacked an image."""
        self._misses = 0

    async def ask(
        self, path: str, body: Mapping[str, Any], request: Request, seconds: float
    ) -> Any:
        """Post a request, `body` without its images, and return the response."""
        engine = self._engine
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        if engine.pixels is None:
            raise EngineError(
                f"{engine.display_name}: images, but no pixel source; call add_pixel_source"
            )
        if any(isinstance(block.media, VideoRef) for block in request.media):
            raise EngineError(f"{engine.display_name}: sending videos to servers is not supported")
        await self._prepare(body["cache_salt"], request, seconds)

        # vLLM caches tower output by this hash and keeps it across weight updates, so it covers
        # image, processor and weights.
        about = f"{engine.pixels.vision.fingerprint} {self._weights_key}"
        names = [
            sha256(f"{block.media.key} {about}".encode()).hexdigest() for block in request.media
        ]

        # Once with the images that the server lacks, and again with all where that was wrong.
        cache = self._cache
        cached = cache.among(names)
        fields = self._media_fields(request, names, cached)
        try:
            response = await engine.http.post(path, {**body, **fields}, seconds)
            if cached:
                self._hits += 1
        except EngineUnavailable as error:
            if not cached or error.status != ERROR:
                raise
            engine.counts["images_missed"] += 1  # the server restarted, or evicted them
            self._misses += 1
            has_several_servers = self._misses > max(MAX_MISSES, self._hits)
            self._cache.clear(0.0 if has_several_servers else self._capacity)
            fields = self._media_fields(request, names, frozenset())
            left = max(0.001, end - loop.time())
            response = await engine.http.post(path, {**body, **fields}, left)

        if "features" in fields:
            images = fields["features"]["kwargs_data"]["image"]
            sizes = [len(data or "") * 3 // 4 for data in images]
            engine.counts["images_sent"] += sum(size > 0 for size in sizes)
            engine.counts["images_named"] += sizes.count(0)
            cache.put(zip(names, sizes, strict=True))
        return response

    async def _prepare(self, cache_salt: str, request: Request, seconds: float) -> None:
        """Probe the server before its first request with images, and follow its weights."""
        if self._pixel_format is None:
            self._capacity = await self._cache_bytes(seconds)
            picture = self._data_url(request.media[0].media)
            self._pixel_format = await self._probe_pixel_format(picture, seconds)
        if cache_salt != self._weights_key:  # new weights: new keys, empty cache
            self._weights_key = cache_salt
            self._cache = ServerImageCache(self._capacity)
            self._hits = 0
            self._misses = 0

    async def supports_images(self) -> bool:
        """Return whether the server processes images; False when it cannot render (no route, no
        template)."""
        if self._engine.takes_pictures:
            return True
        picture = f"data:image/png;base64,{PROBE_IMAGE}"
        return bool(await self._probe_pixel_format(picture, CONTROL_S))

    def _media_fields(
        self, request: Request, names: Sequence[str], cached: Collection[str]
    ) -> dict[str, Any]:
        """Return processed images beside expanded ids.

        When an image's placeholders are not one run, or its arrays are unsupported, return compact
        ids and the pictures: the server's processor expands them, and its echoed ids are compared
        with ours.
        """
        pixels = self._engine.pixels
        media = request.media
        pads = pixels.vision.pad_ids
        if self._pixel_format and all(
            pads.issuperset(request.ids[block.start : block.end])
            and (name in cached or set(pixels.get(block.media)) == PATCH_ARRAYS)
            for block, name in zip(media, names, strict=True)
        ):
            return {"features": self._features(media, names, cached)}

        self._engine.counts["images_as_pictures"] += len(media)
        parts = [{"type": "image_url", "url": self._data_url(block.media)} for block in media]
        return {
            "token_ids": list(pixels.vision.compact(request.ids, media)),
            "content_parts": parts,
        }

    def _features(
        self, media: Sequence[MediaPlacement], names: Sequence[str], cached: Collection[str]
    ) -> dict[str, Any]:
        """Return names, places and arrays of images; None as the arrays of a cached one."""
        from msgpack import packb

        pixels = self._engine.pixels
        encoded: list[str | None] = []
        for name, block in zip(names, media, strict=True):
            if name in cached:
                encoded.append(None)
                continue
            arrays = pixels.get(block.media)
            patches = arrays["pixel_values"]
            grid = arrays["image_grid_thw"][0]
            if self._pixel_format == RAW_PIXELS:
                patches = pixels.vision.unscaled(patches)
            slices = {"slices": [[0, len(patches), None]], "dim": 0, "keep_on_cpu": False}
            item = {
                "pixel_values": {"data": _array(patches), "field": ["flat", slices]},
                "image_grid_thw": {
                    "data": _array(grid),
                    "field": ["batched", {"keep_on_cpu": True}],
                },
            }
            encoded.append(b64encode(packb(item)).decode())

        ranges = [{"offset": block.start, "length": block.length} for block in media]
        return {
            "mm_hashes": {"image": list(names)},
            "mm_placeholders": {"image": ranges},
            "kwargs_data": {"image": encoded},
        }

    async def _cache_bytes(self, seconds: float) -> float:
        """Return the bytes of images that the server caches; 0 unless reported.

        A server without a cache, or with one in another process, would take a key for an image and
        exit.
        """
        engine = self._engine
        parts = engine.server_version.split(".")[:2]
        version = tuple(int(part) for part in parts if part.isdigit())
        if INFO not in engine.routes or version < MIN_VERSION:
            return 0.0
        try:
            info = await engine.http.get(f"{INFO}?config_format=json", seconds)
        except EngineUnavailable:
            raise
        except EngineError:
            return 0.0
        return cache_capacity(info)

    async def _probe_pixel_format(self, picture: str, seconds: float) -> str:
        """Determine the pixel format by rendering a picture with the server's processor; "" when it
        cannot."""
        engine = self._engine
        if RENDER not in engine.routes:
            return ""
        part = {"type": "image_url", "image_url": {"url": picture}}
        body = {"model": engine.model, "messages": [{"role": "user", "content": [part]}]}
        try:
            rendered = await engine.http.post(RENDER, body, seconds)
        except EngineUnavailable:
            raise
        except EngineError:  # no template, or an unsupported form
            return ""
        return accepted_features((rendered or {}).get("features")) or ""

    def _data_url(self, media: Any) -> str:
        encoded = b64encode(self._engine.pixels.store.png_bytes(media))
        return f"data:image/png;base64,{encoded.decode()}"


class ServerImageCache:
    """Mirror of a server's least-recently-used image cache of at most `most` bytes."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names in the cache."""
        return frozenset(name for name in names if name in self._sizes)

    def put(self, sent: Iterable[tuple[str, int]]) -> None:
        """Record images sent: name, and bytes (0 when only named)."""
        for name, size in sent:
            old_size = self._sizes.pop(name, 0)
            if not size and not old_size:
                continue  # evicted during the request
            self._sizes[name] = size or old_size
            self._bytes += self._sizes[name] - old_size
        while self._bytes > self._most:
            _, evicted_size = self._sizes.popitem(last=False)
            self._bytes -= evicted_size

    def clear(self, most: float) -> None:
        """Empty the cache and set its capacity."""
        self._sizes.clear()
        self._most = most
        self._bytes = 0


def cache_capacity(info: Any) -> float:
    """Return the bytes of images that a vLLM caches across requests, from its `/server_info` JSON.

    It is 0 without such a cache. vLLM has one where a single process answers for a single engine
    (`vllm/multimodal/cache/factories.py`, 0.32.0).
    """
    try:
        images = info["vllm_config"]["model_config"]["multimodal_config"]
        processes = info["vllm_config"]["parallel_config"]
        is_alone = processes["_api_process_count"] == 1 and (
            processes["data_parallel_size"] == 1 or processes["data_parallel_external_lb"] is True
        )
        if images["mm_processor_cache_type"] != "lru" or not is_alone:
            return 0.0
        gibibytes = float(images["mm_processor_cache_gb"])
        return max(0.0, ASSUMED_FRACTION * gibibytes * 2**30)
    except (LookupError, TypeError, ValueError):
        return 0.0

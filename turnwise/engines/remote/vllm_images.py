"""Images for vLLM servers.

Images as vLLM's tokens-only route takes them: what our own processor made of them, and where their placeholders stand.

The server is given ids in which images are expanded already, and takes them as they are. A feature is a MessagePack map of
vLLM's (`vllm/v1/serial_utils.py`, 0.32.0): by name its array as [type, shape, bytes] and how those of several images are put
together, in base64.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol

from turnwise.engines.base import Request
from turnwise.engines.remote.base import CONTROL_S
from turnwise.engines.remote.http import HttpClient
from turnwise.errors import EngineError, EngineUnavailable
from turnwise.types import MediaPlacement, VideoRef

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
    return sha256(f"{block.media.key} {pixels.vision.fingerprint} {salt}".encode()).hexdigest()


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


RENDER = "/v1/chat/completions/render"
INFO = "/server_info"
ERROR = 500
"""What vLLM 0.32.0 answers, among others, where a request refers to an image that it has not."""
SINCE = (0, 32)
"""The oldest vLLM of which it was seen that it tells of an image which it has not, and goes on."""
SHARE = 0.9
"""Of a server's memory for images: so much is taken to be there."""
MISSES = 8
"""With more requests than these whose images were not there, and fewer that went well, there are others behind its address."""


class VllmConnection(Protocol):
    """The client of a vLLM server."""

    http: HttpClient
    model: str | None
    routes: frozenset[str]
    server_version: str
    pixels: Any
    counts: Counter[str]

    @property
    def display_name(self) -> str:
        """What errors call it."""


class VllmImages:
    """What a server is shown of the images of requests.

    With each turn an episode's images come again. A server that says that it keeps them (`/server_info`, one of its routes for
    developers) is sent each once, and their names after that. It drops those that were longest not asked for; what is taken to
    be there goes the same way, and a request whose images are not there after all is asked again with all of them.
    """

    def __init__(self, engine: VllmConnection) -> None:
        self._engine = engine
        self._takes: str | None = None
        """What its model takes for an image (see `features`): "" where it cannot be known, None before it was asked."""
        self._salt, self._room = "", 0.0
        self._kept = ServerImageCache(0.0)
        self._went_well = self._missed = 0
        """Requests that named images, since there were other weights."""

    async def ask(self, path: str, body: Mapping[str, Any], request: Request, seconds: float) -> Any:
        """What the server answers to a request with images.

        Args:
            body: of the request without them.

        Raises:
            EngineError: as `HttpClient.post`, and for images that cannot be shown.
        """
        engine, end = self._engine, asyncio.get_running_loop().time() + seconds
        if engine.pixels is None:
            raise EngineError(
                f"{engine.display_name}: the request has images, and nobody told the engine where they are (see())"
            )
        if any(isinstance(block.media, VideoRef) for block in request.media):
            raise EngineError(f"{engine.display_name}: videos are not sent to servers yet")
        if self._takes is None:
            self._room = await self._keeps(seconds)
            self._takes = await self._ask_what_it_takes(self._picture(request.media[0].media), seconds)
        if body["cache_salt"] != self._salt:  # other weights see them anew, under other names
            self._salt, self._kept, self._went_well, self._missed = body["cache_salt"], ServerImageCache(self._room), 0, 0
        names = [feature_key(block, engine.pixels, self._salt) for block in request.media]
        kept, have = self._kept, self._kept.among(names)
        shown = self._shown(request, names, have)
        try:
            said = await engine.http.post(path, {**body, **shown}, seconds)
            self._went_well += bool(have)
        except EngineUnavailable as error:
            if not have or error.status != ERROR:
                raise
            self._miss()
            shown = self._shown(request, names, frozenset())
            said = await engine.http.post(path, {**body, **shown}, max(0.001, end - asyncio.get_running_loop().time()))
        if "features" in shown:
            sizes = [size_of(data) for data in shown["features"]["kwargs_data"]["image"]]
            engine.counts["images_sent"] += sum(size > 0 for size in sizes)
            engine.counts["images_named"] += sizes.count(0)
            kept.put(zip(names, sizes, strict=True))
        return said

    async def supports_images(self) -> bool:
        """Whether the server makes something of an image; of one that does not render (no route, no template) it is not known.

        Raises:
            EngineUnavailable: when it does not answer.
        """
        return bool(await self._ask_what_it_takes(f"data:image/png;base64,{PROBE_IMAGE}", CONTROL_S))

    def _shown(self, request: Request, names: Sequence[str], have: Collection[str]) -> dict[str, Any]:
        """What our processor made of the images, beside ids that are expanded and taken as they are.

        Where their placeholders are no single run each, or their arrays are not known to `features`, compact ids and the
        pictures: the server's own processor expands them, and what it made is compared with what we made.
        """
        pixels, media, takes = self._engine.pixels, request.media, self._takes
        pads = pixels.vision.pad_ids
        if takes and all(
            pads.issuperset(request.ids[block.start : block.end]) and (name in have or is_supported(pixels.get(block.media)))
            for block, name in zip(media, names, strict=True)
        ):
            return {"features": vllm_features(media, names, pixels, takes, have)}
        self._engine.counts["images_as_pictures"] += len(media)
        parts = [{"type": "image_url", "url": self._picture(block.media)} for block in media]
        return {"token_ids": list(pixels.vision.compact(request.ids, media)), "content_parts": parts}

    def _miss(self) -> None:
        """What was taken to be there is not: the server was started again, or had no room."""
        self._engine.counts["images_missed"] += 1
        self._missed += 1
        stops = self._missed > max(MISSES, self._went_well)
        self._kept.clear(0.0 if stops else self._room)

    async def _keeps(self, seconds: float) -> float:
        """Bytes of images that the server keeps; 0 where it does not say so.

        One that keeps none, or elsewhere than where requests arrive, would take a name for an image and end itself.
        """
        engine = self._engine
        version = tuple(int(part) for part in engine.server_version.split(".")[:2] if part.isdigit())
        if INFO not in engine.routes or version < SINCE:
            return 0.0
        try:
            return cache_capacity(await engine.http.get(f"{INFO}?config_format=json", seconds))
        except EngineUnavailable:
            raise
        except EngineError:
            return 0.0

    async def _ask_what_it_takes(self, picture: str, seconds: float) -> str:
        """What the server's own processor makes of a picture says what its model takes; "" where it cannot."""
        engine = self._engine
        if RENDER not in engine.routes:
            return ""
        shown = {"type": "image_url", "image_url": {"url": picture}}
        body = {"model": engine.model, "messages": [{"role": "user", "content": [shown]}]}
        try:
            made = await engine.http.post(RENDER, body, seconds)
        except EngineUnavailable:
            raise
        except EngineError:  # no template, or none of this form
            return ""
        return accepted_features((made or {}).get("features")) or ""

    def _picture(self, media: Any) -> str:
        return f"data:image/png;base64,{b64encode(self._engine.pixels.store.png(media)).decode()}"


class ServerImageCache:
    """Images that a server has, as it counts them itself: those go first that were longest not asked for.

    Args:
        most: bytes of them.
    """

    def __init__(self, most: float) -> None:
        self._most, self._bytes = most, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Those of them that it has."""
        return frozenset(name for name in names if name in self._sizes)

    def put(self, shown: Iterable[tuple[str, int]]) -> None:
        """It was shown these: name, and bytes, 0 for one that was named alone."""
        for name, size in shown:
            before = self._sizes.pop(name, 0)
            if not size and not before:
                continue  # forgotten while it was asked
            self._sizes[name] = size or before
            self._bytes += self._sizes[name] - before
        while self._bytes > self._most:
            self._bytes -= self._sizes.popitem(last=False)[1]

    def clear(self, most: float) -> None:
        """It has none, and room for so much."""
        self._sizes.clear()
        self._most, self._bytes = most, 0


def cache_capacity(told: Any) -> float:
    """Bytes of images that a vLLM keeps where requests may name them, by its `/server_info` as JSON; 0 where it says otherwise.

    It does where one process answers for one engine (`vllm/multimodal/cache/factories.py`, 0.32.0).
    """
    try:
        images = told["vllm_config"]["model_config"]["multimodal_config"]
        processes = told["vllm_config"]["parallel_config"]
        alone = processes["_api_process_count"] == 1 and (
            processes["data_parallel_size"] == 1 or processes["data_parallel_external_lb"] is True
        )
        keeps = images["mm_processor_cache_type"] == "lru" and alone
        return max(0.0, SHARE * float(images["mm_processor_cache_gb"]) * 2**30) if keeps else 0.0
    except (LookupError, TypeError, ValueError):
        return 0.0

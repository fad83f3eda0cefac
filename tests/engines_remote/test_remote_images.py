"""Images on their way to vLLM and SGLang: what is sent, in which form, and under which name
a server may keep it."""

from __future__ import annotations

import asyncio
import base64
import io
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import remote_engines as kit
from PIL import Image as Pillow

from turnwright.engines import Request
from turnwright.engines.remote import SglangEngine, VllmEngine, probe_server, vllm_images
from turnwright.engines.remote.vllm_images import (
    MAX_MISSES,
    ServerImageCache,
    VllmImages,
    accepted_features,
    cache_capacity,
)
from turnwright.errors import BackendContractError, EngineError, EngineUnavailable
from turnwright.types import ImageRef, MediaPlacement, VideoRef

IMAGES = [ImageRef(letter * 64, 16, 16) for letter in "ab"]
RAW = {
    image.key: np.arange(n, n + 16 * 12, dtype=np.uint8).reshape(16, 12)
    for n, image in enumerate(IMAGES)
}
IDS = [3, 4, *[kit.PAD] * 4, 5, *[kit.PAD] * 4, 6]
MEDIA = [
    MediaPlacement(image, at, 4, ((1, 4, 4),), (kit.PAD,))
    for image, at in zip(IMAGES, (2, 7), strict=True)
]


class Pixels:
    """What a rollout tells an engine of images, of a processor that halves and shifts them."""

    def __init__(self, runs: bool = True) -> None:
        self.vision = SimpleNamespace(
            pad_ids=frozenset({kit.PAD}), fingerprint="eyes", compact=compact
        )
        self.vision.unscaled = lambda patches: np.rint((patches + 1) * 127.5).astype(np.uint8)
        self.store = SimpleNamespace(png_bytes=lambda image: f"png of {image.sha256[0]}".encode())
        self.names = ("pixel_values", "image_grid_thw") if runs else ("pixel_values", "num_crops")

    def get(self, media):
        values = (RAW[media.key].astype(np.float32) / 127.5 - 1, np.array([[1, 4, 4]], np.int64))
        return dict(zip(self.names, values, strict=True))


def compact(ids, placed):
    out, done = [], 0
    for block in placed:
        out += [*ids[done : block.start], *block.compact]
        done = block.end
    return out + list(ids[done:])


def ask(make, url, *, pixels=None, media=MEDIA, ids=IDS, times=1, version=0):
    async def work():
        engine = make(url, version=version)
        engine.add_pixel_source(pixels or Pixels())
        try:
            for _ in range(times):
                await engine.generate(Request(ids, 4, frozenset(), 1, "a", media=media))
        finally:
            await engine.close()
        return engine.counts

    return kit.run(work())


@pytest.mark.parametrize("takes", ["uint8", "float32", "bfloat16"])
def test_vllm_gets_what_our_processor_made_in_the_form_that_its_model_takes(takes):
    with kit.servers("vllm", KIT_TAKES=takes) as server:
        counts = ask(VllmEngine, server.url, times=2)
        sent = [row["body"] for row in server.seen("/inference/v1/generate")]
        assert len(server.seen("/v1/chat/completions/render")) == 1  # it is asked once
    assert "images_as_pictures" not in counts
    for body in sent:
        assert body["token_ids"] == IDS  # expanded, as they are
        features = body["features"]
        assert features["mm_placeholders"] == {
            "image": [{"offset": 2, "length": 4}, {"offset": 7, "length": 4}]
        }
        assert len(set(features["mm_hashes"]["image"])) == 2
        for image, text in zip(IMAGES, features["kwargs_data"]["image"], strict=True):
            item = msgpack.unpackb(base64.b64decode(text))
            kind, shape, (code, data) = item["pixel_values"]["data"]
            assert (kind, shape, code) == ("uint8" if takes == "uint8" else "float32", [16, 12], 3)
            values = np.frombuffer(data, kind).reshape(shape)
            wanted = (
                RAW[image.key] if kind == "uint8" else RAW[image.key].astype(np.float32) / 127.5 - 1
            )
            assert np.array_equal(values, wanted)
            assert item["pixel_values"]["field"] == [
                "flat",
                {"slices": [[0, 16, None]], "dim": 0, "keep_on_cpu": False},
            ]
            kind, shape, (code, data) = item["image_grid_thw"]["data"]
            assert (kind, shape, code) == ("int64", [3], 3)
            assert np.frombuffer(data, kind).tolist() == [1, 4, 4]
            assert item["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


def test_what_a_server_keeps_of_an_image_is_of_one_policy_alone():
    """vLLM keeps what its tower made of an image, by the hash that it is sent with, also
    when the weights change."""
    with kit.servers("vllm", KIT_TAKES="uint8") as server:
        for version in (1, 1, 2):
            ask(VllmEngine, server.url, version=version)
        hashes = [
            row["body"]["features"]["mm_hashes"]["image"]
            for row in server.seen("/inference/v1/generate")
        ]
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


ROOM = 0.1
"""GiB of images that a server keeps."""


def sent(server):
    """Of each request, which of its images came with their pixels."""
    bodies = [row["body"]["features"] for row in server.seen("/inference/v1/generate")]
    return [[data is not None for data in features["kwargs_data"]["image"]] for features in bodies]


def test_an_image_is_sent_once_and_named_after_that():
    with kit.servers("vllm", KIT_TAKES="uint8", KIT_KEEPS=str(ROOM)) as server:

        async def work():
            engine = VllmEngine(server.url)
            engine.add_pixel_source(Pixels())
            for media in (MEDIA[:1], MEDIA, MEDIA):
                await engine.generate(Request(IDS, 4, frozenset(), 1, "a", media=media))
            engine.version = 1  # other weights see them anew
            await engine.generate(Request(IDS, 4, frozenset(), 1, "a", media=MEDIA))
            await engine.close()
            return engine.counts

        counts = kit.run(work())
        assert sent(server) == [[True], [False, True], [False, False], [True, True]]
        hashes = [
            row["body"]["features"]["mm_hashes"]["image"]
            for row in server.seen("/inference/v1/generate")
        ]
        assert hashes[0][0] == hashes[1][0] == hashes[2][0]  # what is named is what was sent
        assert hashes[1] == hashes[2]
    assert (counts["images_sent"], counts["images_named"]) == (4, 3)


def test_a_server_that_was_started_again_is_sent_them_again():
    with kit.servers("vllm", KIT_TAKES="uint8", KIT_KEEPS=str(ROOM)) as server:

        async def work():
            engine = VllmEngine(server.url)
            engine.add_pixel_source(Pixels())
            ask = lambda n: engine.generate(Request(IDS, 4, frozenset(), 1, f"s{n}", media=MEDIA))  # noqa: E731
            await ask(0)
            server.kill()
            server.start()
            with suppress(EngineUnavailable):  # by the connection that is gone
                await ask(0)
            await asyncio.gather(*(ask(n) for n in range(4)))
            await ask(5)
            await engine.close()
            return engine.counts

        counts = kit.run(work())
        assert sent(server)[-1] == [False, False]
    assert counts["images_missed"] >= 1


@pytest.mark.parametrize("why", ["keeps none", "an older one"])
def test_images_go_with_each_request_to_a_server_that_does_not_keep_them(why, monkeypatch):
    monkeypatch.setattr(
        vllm_images, "MIN_VERSION", (0, 33) if why == "an older one" else vllm_images.MIN_VERSION
    )
    keeps = {"KIT_KEEPS": str(ROOM)} if why == "an older one" else {}
    with kit.servers(
        "vllm", KIT_TAKES="uint8", **keeps
    ) as server:  # one that keeps none ends itself at a name
        ask(VllmEngine, server.url, times=3)
        assert sent(server) == [[True, True]] * 3


@pytest.mark.parametrize(
    ("part", "key", "value", "keeps"),
    [
        ("model_config.multimodal_config", "mm_processor_cache_gb", 0.0, False),
        ("model_config.multimodal_config", "mm_processor_cache_type", "shm", False),
        ("parallel_config", "_api_process_count", 2, False),
        ("parallel_config", "data_parallel_size", 2, False),
        ("model_config", "multimodal_config", None, False),
        ("parallel_config", "data_parallel_size", 1, True),
    ],
)
def test_a_server_keeps_images_where_one_process_answers_for_one_engine(part, key, value, keeps):
    told = kit.server_info(ROOM)
    place = told["vllm_config"]
    for name in part.split("."):
        place = place[name]
    place[key] = value
    assert (cache_capacity(told) > 0) == keeps


@pytest.mark.parametrize("told", [None, [], {}, "no", {"vllm_config": "a text, in other versions"}])
def test_what_a_server_says_otherwise_is_no_promise(told):
    assert cache_capacity(told) == 0.0


class Behind:
    """As a server's client, to which another server answers each second time."""

    def __init__(self):
        self.http, self.routes, self.counts, self.server_version = (
            self,
            {"/server_info", "/v1/chat"},
            Counter(),
            "0.32.0",
        )
        self.model, self.display_name, self.pixels = "tiny", "vLLM", Pixels()
        self.has, self.turn = [set(), set()], 0

    async def get(self, path, seconds):
        return kit.server_info(ROOM)

    async def post(self, path, body, seconds):
        self.turn += 1
        has = self.has[self.turn % 2]
        features = body["features"]
        for name, data in zip(
            features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True
        ):
            if data is None and name not in has:
                error = EngineUnavailable("no")
                error.status = 500
                raise error
            has.add(name)
        return {}


def test_an_address_with_many_servers_behind_it_is_sent_all_again_before_long():
    async def work():
        client = Behind()
        shown = VllmImages(client)
        shown._pixel_format = "uint8"
        shown._capacity = cache_capacity(kit.server_info(ROOM))
        for n in range(60):
            pictures = [ImageRef(f"{n:064x}", 16, 16)]
            RAW[pictures[0].key] = RAW[IMAGES[0].key]
            media = [MediaPlacement(one, 2, 4, ((1, 4, 4),), (kit.PAD,)) for one in pictures]
            for _ in range(2):  # each image twice: the second time it is at the other server
                await shown.ask(
                    "/generate",
                    {"cache_salt": "a"},
                    Request(IDS, 4, frozenset(), 1, "a", media=media),
                    10.0,
                )
        return client.counts

    counts = kit.run(work())
    assert counts["images_missed"] == MAX_MISSES + 1


SHOWN = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=3), max_size=30
)


@given(requests=SHOWN, most=st.integers(0, 12))
def test_what_is_taken_to_be_there_is_there(requests, most):
    """Against a memory that works as the server's, asked one request after another: nothing is
    named that is not there."""
    kept, server = ServerImageCache(most), {}
    sizes = {}
    for request in requests:
        names = list(dict.fromkeys(f"{name}" for name, _ in request))
        for name, size in request:
            sizes.setdefault(f"{name}", size)
        have = kept.among(names)
        assert have <= server.keys()
        kept.put([(name, 0 if name in have else sizes[name]) for name in names])
        for name in names:
            server.pop(name, None)
            server[name] = sizes[name]
            while sum(server.values()) > most:
                server.pop(next(iter(server)))
        assert kept.among(sizes) == server.keys()


def test_whether_vllm_sees_is_found_by_showing_it_something():
    async def look(url):
        engine = VllmEngine(url)
        try:
            return (await probe_server(engine)).images
        finally:
            await engine.close()

    with kit.servers("vllm", KIT_TAKES="uint8") as server:
        assert kit.run(look(server.url))
        (body,) = [row["body"] for row in server.seen("/v1/chat/completions/render")]
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        picture = Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        assert (picture.size, picture.convert("RGB").getextrema()) == ((64, 64), ((0, 0),) * 3)
    with kit.servers("vllm") as server:
        assert not kit.run(look(server.url))


@pytest.mark.parametrize("why", ["does not say what it takes", "another family"])
def test_pictures_go_out_where_arrays_cannot_and_the_servers_ids_are_compared(why):
    told = {} if why == "does not say what it takes" else {"KIT_TAKES": "uint8"}
    with kit.servers("vllm", **told) as server:
        counts = ask(VllmEngine, server.url, pixels=Pixels(runs=not told))
        (body,) = [row["body"] for row in server.seen("/inference/v1/generate")]
        assert body["token_ids"] == [3, 4, kit.PAD, 5, kit.PAD, 6]
        said = [
            base64.b64decode(part["url"].partition(",")[2]).decode()
            for part in body["content_parts"]
        ]
        assert said == ["png of a", "png of b"]
        assert "features" not in body
        assert counts["images_as_pictures"] == 2
        # The server makes four of what we made three of.
        short = [
            MEDIA[0]._replace(length=3),
            MEDIA[1]._replace(start=6),
        ]
        with pytest.raises(BackendContractError, match="is echoed with 12 ids; 11 were sent"):
            ask(
                VllmEngine,
                server.url,
                pixels=Pixels(runs=not told),
                media=short,
                ids=[*IDS[:2], *IDS[3:]],
            )


def test_sglang_gets_the_pictures_beside_expanded_ids():
    with kit.servers("sglang") as server:
        ask(SglangEngine, server.url)
        (body,) = [row["body"] for row in server.seen("/generate")]
    assert body["input_ids"] == IDS
    said = [base64.b64decode(url.partition(",")[2]).decode() for url in body["image_data"]]
    assert said == ["png of a", "png of b"]


@pytest.mark.parametrize("make", [VllmEngine, SglangEngine])
def test_what_cannot_be_sent_is_refused_with_a_reason(make):
    clip = VideoRef((IMAGES[0], IMAGES[1]), (0.0, 0.5))
    with kit.servers("vllm" if make is VllmEngine else "sglang") as server:
        with pytest.raises(EngineError, match="sending videos to servers is not supported"):
            ask(make, server.url, media=[MediaPlacement(clip, 2, 4, ((1, 4, 4),), (kit.PAD,))])

        async def blind():
            engine = make(server.url)
            try:
                await engine.generate(Request(IDS, 4, frozenset(), 1, "a", media=MEDIA))
            finally:
                await engine.close()

        with pytest.raises(EngineError, match="images, but no pixel source; call add_pixel_source"):
            kit.run(blind())


def test_what_is_no_feature_is_not_read():
    for said in (
        None,
        {},
        {"kwargs_data": {"image": [None]}},
        {"kwargs_data": {"image": ["!"]}},
        {"kwargs_data": {"image": [""]}},
        *(
            {"kwargs_data": {"image": [base64.b64encode(raw).decode()]}}
            for raw in (b"\x01", b"\xc1", b"\x81\xa1a", b"\x80\x80")
        ),
    ):
        assert accepted_features(said) is None

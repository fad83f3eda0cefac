"""Images on their way to vLLM and SGLang: what is sent, in which form, and under which name a server may keep it."""

from __future__ import annotations

import base64
import io
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import remote_kit as kit
from PIL import Image as Pillow

from turnwise.engine import Request
from turnwise.engine.remote import SglangEngine, VllmEngine, probe
from turnwise.engine.remote.features import packed, taken
from turnwise.errors import BackendContractError, EngineError
from turnwise.types import ImageRef, Placed, VideoRef

IMAGES = [ImageRef(letter * 64, 16, 16) for letter in "ab"]
RAW = {image.key: np.arange(n, n + 16 * 12, dtype=np.uint8).reshape(16, 12) for n, image in enumerate(IMAGES)}
IDS = [3, 4, *[kit.PAD] * 4, 5, *[kit.PAD] * 4, 6]
MEDIA = [Placed(image, at, 4, ((1, 4, 4),), (kit.PAD,)) for image, at in zip(IMAGES, (2, 7), strict=True)]


class Pixels:
    """What a rollout tells an engine of images, of a processor that halves and shifts them."""

    def __init__(self, runs: bool = True) -> None:
        self.eyes = SimpleNamespace(pad_ids=frozenset({kit.PAD}), fingerprint="eyes", compact=compact)
        self.eyes.unscaled = lambda patches: np.rint((patches + 1) * 127.5).astype(np.uint8)
        self.store = SimpleNamespace(png=lambda image: f"png of {image.sha256[0]}".encode())
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
        engine.see(pixels or Pixels())
        try:
            for _ in range(times):
                await engine.generate(Request(ids, 4, frozenset(), 1, "a", media=media))
        finally:
            await engine.close()
        return engine.counts

    return kit.run(work())


def unpacked(raw):
    """MessagePack's own words for what a feature is made of; extensions as (code, bytes)."""

    def value():
        nonlocal at
        kind, at = raw[at], at + 1
        if kind < 0x80:
            return kind
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        size = {0xCF: ">Q", 0xDB: ">I", 0xDD: ">I", 0xDF: ">I", 0xC9: ">Ib"}[kind]
        number, *code = struct.unpack_from(size, raw, at)
        at += struct.calcsize(size)
        if kind == 0xCF:
            return number
        if kind == 0xDD:
            return [value() for _ in range(number)]
        if kind == 0xDF:
            return dict((value(), value()) for _ in range(number))
        found, at = raw[at : at + number], at + number
        return (code[0], found) if kind == 0xC9 else found.decode()

    at = 0
    found = value()
    assert at == len(raw)
    return found


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
        assert features["mm_placeholders"] == {"image": [{"offset": 2, "length": 4}, {"offset": 7, "length": 4}]}
        assert len(set(features["mm_hashes"]["image"])) == 2
        for image, text in zip(IMAGES, features["kwargs_data"]["image"], strict=True):
            item = unpacked(base64.b64decode(text))
            kind, shape, (code, data) = item["pixel_values"]["data"]
            assert (kind, shape, code) == ("uint8" if takes == "uint8" else "float32", [16, 12], 3)
            values = np.frombuffer(data, kind).reshape(shape)
            wanted = RAW[image.key] if kind == "uint8" else RAW[image.key].astype(np.float32) / 127.5 - 1
            assert np.array_equal(values, wanted)
            assert item["pixel_values"]["field"] == ["flat", {"slices": [[0, 16, None]], "dim": 0, "keep_on_cpu": False}]
            kind, shape, (code, data) = item["image_grid_thw"]["data"]
            assert (kind, shape, code) == ("int64", [3], 3)
            assert np.frombuffer(data, kind).tolist() == [1, 4, 4]
            assert item["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


def test_what_a_server_keeps_of_an_image_is_of_one_policy_alone():
    """vLLM keeps what its tower made of an image, by the hash that it is sent with, also when the weights change."""
    with kit.servers("vllm", KIT_TAKES="uint8") as server:
        for version in (1, 1, 2):
            ask(VllmEngine, server.url, version=version)
        hashes = [row["body"]["features"]["mm_hashes"]["image"] for row in server.seen("/inference/v1/generate")]
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def test_whether_vllm_sees_is_found_by_showing_it_something():
    async def look(url):
        engine = VllmEngine(url)
        try:
            return (await probe(engine)).images
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
        said = [base64.b64decode(part["url"].partition(",")[2]).decode() for part in body["content_parts"]]
        assert said == ["png of a", "png of b"]
        assert "features" not in body
        assert counts["images_as_pictures"] == 2
        short = [MEDIA[0]._replace(length=3), MEDIA[1]._replace(start=6)]  # the server makes four of what we made three of
        with pytest.raises(BackendContractError, match="is echoed with 12 ids, 11 were sent"):
            ask(VllmEngine, server.url, pixels=Pixels(runs=not told), media=short, ids=[*IDS[:2], *IDS[3:]])


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
        with pytest.raises(EngineError, match="videos are not sent to servers yet"):
            ask(make, server.url, media=[Placed(clip, 2, 4, ((1, 4, 4),), (kit.PAD,))])

        async def blind():
            engine = make(server.url)
            try:
                await engine.generate(Request(IDS, 4, frozenset(), 1, "a", media=MEDIA))
            finally:
                await engine.close()

        with pytest.raises(EngineError, match=r"nobody told the engine where they are \(see\(\)\)"):
            kit.run(blind())


def test_what_is_no_feature_is_neither_packed_nor_read():
    with pytest.raises(TypeError, match="has no place in an image's features"):
        packed({"pixel_values": 0.5})
    for said in (
        None,
        {},
        {"kwargs_data": {"image": [None]}},
        {"kwargs_data": {"image": ["!"]}},
        {"kwargs_data": {"image": [""]}},
    ):
        assert taken(said) is None

"""`turnwright serve` with images and experts: episodes are those of the local
engine, interrupted or not."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from kit.forks import Forked
from kit.interrupts import interrupt, whole
from kit.serving import CLIENTS, TEXTS, run
from kit.sight import Gallery
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import turnwright as tw
from turnwright.config import Limits, ModelConfig
from turnwright.engines import Request, tokens
from turnwright.engines.local import LocalEngine
from turnwright.engines.remote import probe_server
from turnwright.training import create_tiny_model, load_model_and_renderer

LIMITS = Limits(turns=3, turn_tokens=12, on_turn_length="continue")
pytestmark = pytest.mark.filterwarnings(
    "ignore:local engine. on this machine the last bits:UserWarning"
)
WAYS = [("vllm", 0), ("sglang", 0), ("sglang", 4)]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=64)
    texts = [
        f"<|im_start|>user\nlook {n}<|im_end|>\n<|im_start|>assistant\nleft right up {n}<|im_end|>"
        for n in range(40)
    ]
    return Gallery(create_tiny_model(sizes, texts, tmp_path_factory.mktemp("vlm") / "model"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A mixture of experts with the files of a tiny model."""
    directory = create_tiny_model(
        ModelConfig(hidden=32, layers=1), TEXTS, tmp_path_factory.mktemp("moe") / "model"
    )
    old = json.loads((directory / "config.json").read_text())
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    kept = (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "eos_token_id",
        "pad_token_id",
    )
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{name: old[name] for name in kept}, num_hidden_layers=2, initializer_range=0.15, **sizes
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


serve = partial(run, context=1024)


def rows(trajectory):
    return (
        [(row.ids, row.logprobs, row.weights) for row in trajectory.samples()],
        trajectory.stop,
        trajectory.reward,
    )


@pytest.mark.parametrize(("kind", "speculate"), WAYS)
@pytest.mark.parametrize("cut", [False, True])
def test_episodes_with_images_are_those_of_the_local_engine(vlm, kind, speculate, cut):
    world = tw.resolve_env("radar")
    options = {"samples": 3, "limits": LIMITS, "seed": 1, "renderer": vlm.renderer}

    async def work(client, app, url):
        sampler = interrupt(app.engine, lambda seed, position: cut and (seed + position) % 17 == 0)
        found = await tw.arollout(world.factory, world.tasks("train", 6), client, **options)
        return found, sampler.interruptions, dict(client.counts)

    local = LocalEngine(vlm.module, renderer=vlm.renderer, context=1024)
    plain = tw.rollout(world.factory, world.tasks("train", 6), local, **options)
    found, interruptions, counts = serve(vlm.path, kind, work, speculate=speculate)
    assert len(found) == len(plain) == 18
    assert [rows(one) for one in found] == [rows(one) for one in plain]
    assert bool(interruptions) is cut
    assert kind == "sglang" or counts["images_as_pictures"] > 18


@pytest.mark.parametrize("kind", CLIENTS)
def test_images_of_a_server_are_seen(vlm, kind):
    async def work(client, app, url):
        found = await probe_server(client)
        client.add_pixel_source(vlm.pixels)
        shown = [vlm.shown().say([20, 21]).show(vlm.image(seed)).say([22]) for seed in (1, 2)]
        made = [
            await client.generate(
                Request(one.ids, 8, frozenset(), 5, "a", media=one.placed, banned_ids=vlm.banned)
            )
            for one in shown
        ]
        return found.images, shown, made

    images, shown, made = serve(vlm.path, kind, work)
    assert images
    for one, generation in zip(shown, made, strict=True):
        expected = vlm.stock([*one.ids, *generation.ids], one.placed)[len(one.ids) - 1 : -1]
        assert generation.logprobs == pytest.approx(
            expected[range(8), generation.ids].tolist(), abs=1e-4
        )
    assert made[0].logprobs != made[1].logprobs


@pytest.mark.parametrize(
    ("kind", "options"),
    [("vllm", {"route": "generate"}), ("vllm", {"route": "completions"}), ("sglang", {})],
)
@pytest.mark.parametrize("speculate", [0, 4])
def test_experts_of_every_fed_id_across_interruptions(moe, kind, options, speculate):
    model, renderer = load_model_and_renderer(moe, moe, ModelConfig())
    never = frozenset(renderer.stop_ids)  # SGLang's clients leave its own end ids in force
    request = Request(
        list(range(20, 29)), 24, frozenset(), 5, "a", extras=frozenset(["routes"]), banned_ids=never
    )

    async def work(client, app, url):
        first = await client.generate(request)
        sampler = interrupt(app.engine, lambda *_: True)
        return first, await whole(client.generate, request), sampler.interruptions

    plain, found, interruptions = serve(moe, kind, work, speculate=speculate, **options)

    async def local():
        engine = LocalEngine(model, context=1024)
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    wanted = asyncio.run(local())
    (start, routes), (_, again), (_, told) = (
        one.extras["routes"] for one in (wanted, plain, found)
    )
    expected = np.asarray(routes).reshape(9 + 23, -1)
    assert start == 0
    assert interruptions == 24
    assert plain.ids == found.ids == wanted.ids
    assert (np.asarray(again).reshape(expected.shape) == expected).all()
    assert (np.asarray(told).reshape(expected.shape) == expected).all()


def test_routes_from_a_position_on(moe):
    async def work(client, app, url):
        request = Request(list(range(20, 29)), 4, frozenset(), 5, "a", extras=frozenset(["routes"]))
        full = await client.generate(request)
        request.routes_from = 6
        return full, await client.generate(request)

    full, part = serve(moe, "sglang", work)
    start, routes = part.extras["routes"]
    assert start == 6
    assert (np.asarray(routes) == np.asarray(full.extras["routes"][1])[6:]).all()


def test_pictures_that_do_not_fit_are_refused(vlm, moe):
    import httpx2

    picture = (
        f"data:image/png;base64,{base64.b64encode(vlm.store.png_bytes(vlm.image(1))).decode()}"
    )
    pad = min(vlm.vision.pad_ids)

    def asked(ids, *urls):
        return {
            "input_ids": ids,
            "image_data": list(urls),
            "sampling_params": {"max_new_tokens": 1},
        }

    async def work(client, app, url):
        told = []
        access = {"authorization": f"Bearer {tokens.lookup(url)}"}
        async with httpx2.AsyncClient(trust_env=False, verify=False, headers=access) as http:
            for body, reason in (
                (asked([20, pad], "/etc/hostname"), "an image"),
                (asked([20, pad], "http://127.0.0.1/x.png"), "an image"),
                (asked([20, pad], "data:image/png;base64,AAAA"), "3 bytes, which is no image"),
                (asked([20], picture), "0 placeholders among 1 ids do not fit 1 images"),
                (asked([20, pad, pad], picture), "2 placeholders among 3 ids do not fit 1 images"),
                (asked([20, pad]), "1 image placeholders belong to none of 0 images"),
                (asked([20, pad], picture) | {"video_data": [picture]}, "video_data"),
                (asked([20]) | {"return_routed_experts": True}, "no mixture of experts"),
            ):
                answer = await http.post(f"{url}/generate", json=body)
                told.append((answer.status_code, reason, answer.json()["error"]))
            fine = await http.post(f"{url}/generate", json=asked([20, pad, 21], picture))
        return told, fine.status_code

    told, fine = serve(vlm.path, "sglang", work)
    for status, reason, error in told:
        assert status == 400
        assert reason in error
    assert fine == 200

    async def blind(client, app, url):
        access = {"authorization": f"Bearer {tokens.lookup(url)}"}
        async with httpx2.AsyncClient(trust_env=False, verify=False, headers=access) as http:
            answer = await http.post(f"{url}/generate", json=asked([20], picture))
            return answer.status_code, answer.json()["error"]

    assert serve(moe, "sglang", blind) == (400, "1 images, and a model without vision")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_ends_leaves_no_images(vlm, number, tmp_path):
    command = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "serve",
        str(vlm.path),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with Forked(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as server:
        try:
            assert server.stdout.readline().startswith("http://")
            kept = list(tmp_path.glob("turnwright-images-*"))
            server.send_signal(number)
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert len(kept) == 1
    assert not kept[0].exists()

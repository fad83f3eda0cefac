"""Images through a real vLLM: what our processor made of them goes out, and the
ids stay as they are."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from kit import real_servers as kit

import turnwright as tw
from turnwright.engines.remote import probe_server
from turnwright.engines.remote.vllm_images import ServerImageCache
from turnwright.media import MediaStore
from turnwright.renderers.vision import PixelCache
from turnwright.rollouts import arollout
from turnwright.training import unique_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
CLOSE, FAR = 1e-3, 1e-2


class Show(tw.Env):
    """Four turns, an image in each, no two of them alike and of several sizes."""

    def reset(self, task, *, seed=None):
        self.turn, self.seed = 0, int(task.id[1:])
        return self.look()

    def step(self, action):
        self.turn += 1
        return tw.Step(self.look(), reward=float(len(action.text)), terminated=self.turn == 4)

    def look(self):
        draw = np.random.default_rng([self.seed, self.turn])
        noise = draw.integers(0, 256, (16 * int(draw.integers(1, 4)), 32, 3), dtype=np.uint8)
        return (tw.Message("user", (tw.Image(noise), f"see {self.turn}")),)


class Black(PixelCache):
    """Sees black, whatever there is."""

    def get(self, media):
        found = super().get(media)
        return {
            name: np.full_like(array, -1.0) if name == "pixel_values" else array
            for name, array in found.items()
        }


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp("images"), vision=True)
    with kit.server("vllm", model.untied, model.root) as server:
        yield model, server


def play(model, server, place, *, weights, blind=False):
    """Trajectories, and the engine's counts."""

    async def work():
        engine = kit.fleet(model, kit.CLIENTS["vllm"], server)
        await engine.update(unique_weights(model.module), weights)
        if blind:
            see = engine.add_pixel_source
            engine.add_pixel_source = lambda pixels: see(Black(pixels.vision, pixels.store))
        tasks = [tw.Task("", id=f"t{n}") for n in range(8)]
        found = await arollout(
            Show,
            tasks,
            engine,
            renderer=model.renderer,
            limits=kit.LIMITS,
            samples=2,
            out=place,
            sanity="off",
        )
        await engine.close()
        return found, engine.members[0].engine.counts

    found, counts = asyncio.run(work())
    assert [str(t.stop) for t in found] == ["done"] * len(found), [t.error for t in found]
    assert all(len(t.turns) == 4 and sum(len(span.media) for span in t.spans) >= 4 for t in found)
    return found, counts


def gap(model, found, place, kind=PixelCache):
    model.trainer.pixels = kind(model.renderer.vision, MediaStore(place / "media"))
    return model.gap(found)


def test_that_it_sees_is_found(seeing):
    _, server = seeing

    async def work():
        engine = kit.CLIENTS["vllm"](server.url)
        try:
            return await probe_server(engine)
        finally:
            await engine.close()

    found = asyncio.run(work())
    assert found.images, list(found.findings())
    assert found.trainable


def test_rollouts_with_an_image_in_each_turn_have_the_trainers_logprobs(seeing, tmp_path):
    model, server = seeing
    found, counts = play(model, server, tmp_path, weights=1)
    worst, ids = gap(model, found, tmp_path)
    print(
        f"vLLM, images: max |dlogp| {worst:.2g} over {ids} ids, {counts['cached_tokens']} of "
        f"{counts['prompt_tokens']} cached; {counts['images_sent']} images sent, "
        f"{counts['images_named']} named alone"
    )
    assert worst < CLOSE
    # Each turn shows one more than the one before it; siblings that are asked at the same time
    # may each send an image.
    assert counts["images_sent"] + counts["images_named"] >= (1 + 2 + 3 + 4) * len(found)
    assert counts["images_sent"] <= 4 * len(found)
    assert counts["images_missed"] == 0
    assert gap(model, found, tmp_path, Black)[0] > FAR  # what was sampled depends on what was seen


def test_a_server_that_is_shown_black_images_says_what_the_trainer_says_of_black_images(
    seeing, tmp_path
):
    model, server = seeing
    found, _ = play(model, server, tmp_path, weights=2, blind=True)
    assert gap(model, found, tmp_path)[0] > FAR
    assert gap(model, found, tmp_path, Black)[0] < CLOSE


def test_images_that_are_not_there_after_all_are_sent_again(seeing, tmp_path, monkeypatch):
    """As after a restart: the client takes all images to be there, and the
    server has none of them."""
    model, server = seeing
    kept = ServerImageCache.among
    forgot: set[str] = set()

    def among(self, names):
        wrong = frozenset(names) - forgot
        forgot.update(wrong)
        return wrong | kept(self, names)

    monkeypatch.setattr(ServerImageCache, "among", among)
    found, counts = play(model, server, tmp_path, weights=5)
    worst, ids = gap(model, found, tmp_path)
    print(
        f"vLLM, images that it had not: max |dlogp| {worst:.2g} over {ids} ids, "
        f"{counts['images_missed']} sent again"
    )
    assert worst < CLOSE
    assert counts["images_missed"] > 8
    assert not server.ended


def test_new_weights_see_the_same_images_anew(seeing, tmp_path):
    """vLLM keeps what its tower made of an image, under the hash that the client gives."""
    model, server = seeing
    torch.manual_seed(3)
    for version in (3, 4):
        model.nudge()
        found, _ = play(model, server, tmp_path / str(version), weights=version)
        assert gap(model, found, tmp_path / str(version))[0] < CLOSE

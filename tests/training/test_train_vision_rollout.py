"""From an image world to trained weights: engine and trainer agree on every turn, for
models of several designs."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from kit.sight import Gallery, episode
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.config import Limits, ModelConfig, TrainConfig
from turnwright.engines.local import LocalEngine, fingerprint
from turnwright.rollouts import Rollout, group_by_task, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training import (
    Checkpoints,
    LossDenominator,
    Trainer,
    load_model_and_renderer,
    make_batch,
)
from turnwright.training.advantages import advantages
from turnwright.training.model import models
from turnwright.types import Group, Task, VideoRef

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm", "idefics3")


class Film(tw.Env):
    """Shows an image at each of eight turns, but a clip at the third."""

    max_turns = 8

    def reset(self, task, *, seed=None):
        self.noise, self.turn = np.random.default_rng(seed), 0
        return [{"role": "user", "content": [self.image(), "Where to?"]}]

    def image(self, wide=32):
        return tw.Image(self.noise.integers(0, 256, (32, wide, 3), dtype=np.uint8))

    def step(self, action):
        self.turn += 1
        shown = (
            tw.Video([self.image(64).value for _ in range(6)], fps=2.0)
            if self.turn == 2
            else self.image(32 * (1 + self.turn % 2))
        )
        return tw.Step(
            [{"role": "user", "content": [shown, "And now?"]}], reward=float(self.noise.random())
        )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    sizes = ModelConfig(heads=4, vision=True, image_side=64)
    return models.create_tiny_model(
        sizes,
        ["Where to? And now? left right up down"] * 20,
        tmp_path_factory.mktemp("sees") / "model",
    )


def parts(directory):
    model, renderer = load_model_and_renderer(directory, directory, ModelConfig())
    engine = LocalEngine(model, renderer=renderer)
    settings = TrainConfig(max_mismatch=1e-4, micro_tokens=700, lr=1e-2, schedule="constant")
    return engine, Trainer(
        model, settings, banned_ids=renderer.banned_ids, template=renderer.fingerprint
    )


def test_eight_turns_of_images_and_a_clip_are_trained_as_they_were_sampled(directory, tmp_path):
    engine, trainer = parts(directory)
    limits = Limits(turn_tokens=6, on_turn_length="continue")

    async def main():
        rollout = Rollout(engine, engine.renderer, RolloutSettings(limits=limits, seed=3))
        trainer.pixels = rollout.pixels
        for step in range(2):
            played = make_episode_specs(
                Film, [Task("a", id="a"), Task("b", id="b")], phase="train", step=step, samples=2
            )
            made = await rollout.play(played)
            whole = [t for t in made if len(t.turns) == 8]
            assert whole, [t.error or t.stop for t in made]
            kinds = [
                type(block.media) for block in whole[0].media_placements(whole[0].leaves()[-1])
            ]
            assert kinds.count(VideoRef) == 1
            assert len(kinds) >= 8  # what was shown last, nobody replied to
            figures = trainer.step(group_by_task(made), step=step, steps=2).metrics
            assert figures["ratio_mean"] == 1.0
            # An engine that was not updated would be far from it at the second step.
            assert 0 < figures["mismatch_max"] < 1e-4
            sent = list(trainer.weights())
            assert await engine.update(sent, step + 1) == fingerprint(sent)
        assert engine.media_encoded == rollout.pixels.processed
        await engine.close()

    asyncio.run(main())
    path = Checkpoints(tmp_path / "checkpoints", directory).save("step-1", trainer, {"step": 1})
    for name in (
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "chat_template.jinja",
    ):
        assert (path / name).read_bytes() == (directory / name).read_bytes()
    model, renderer = load_model_and_renderer(path, path, ModelConfig())
    assert fingerprint(model.state_dict().items()) == fingerprint(
        trainer.model.state_dict().items()
    )
    assert renderer.vision.fingerprint == engine.renderer.vision.fingerprint
    again = Trainer(model, trainer.config, banned_ids=renderer.banned_ids)
    again.load(path)
    assert again.updates == trainer.updates == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_designs_of_models(family, tmp_path):
    """Engine and trainer against the model's own forward pass, images and
    (where it sees them) a clip."""
    patch = {"patch": 8} if family.startswith("qwen") else {}
    gallery = Gallery(tiny_vlm_directory(tmp_path / family, family, **patch))
    clip = gallery.clip(7, 5, 64, 64) if family.startswith("qwen") else gallery.image(7, 64, 64)
    shows = [gallery.image(1, 64, 64), gallery.image(2, 64, 96), clip, gallery.image(1, 64, 64)]
    engine = LocalEngine(gallery.module, renderer=gallery.renderer)
    engine.add_pixel_source(gallery.pixels)

    async def main():
        shown = gallery.shown().say(gallery.some(5, 0))
        for turn, media in enumerate(shows):
            shown.show(media).say(gallery.some(3, turn))
            request = tw.Request(
                shown.ids,
                6,
                frozenset(),
                turn,
                "s",
                call=turn,
                media=tuple(shown.placed),
                banned_ids=gallery.banned,
            )
            answer = await engine.generate(request)
            logp = gallery.stock(shown.ids + answer.ids, shown.placed)
            for at, (id_, found) in enumerate(
                zip(answer.ids, answer.logprobs, strict=True), len(shown.ids)
            ):
                assert found == pytest.approx(float(logp[at - 1, id_]), abs=2e-5)
            shown.ids = shown.ids + answer.ids
        assert engine.media_encoded == 3
        await engine.close()

    asyncio.run(main())
    trainer = Trainer(gallery.module, TrainConfig(max_mismatch=1e9), banned_ids=gallery.banned)
    trainer.pixels = gallery.pixels
    made = [
        Group(
            Task("t", id="t"),
            [episode(gallery, shows[: 2 + n], sample=n, seed=n) for n in range(3)],
        )
    ]
    credits = advantages(made).credits
    batch = make_batch(
        credits, LossDenominator.of(credits, "token"), micro_tokens=2000, vision=gallery.vision
    )
    found, expected = trainer._score(batch), []
    for t in batch.trajectories:
        for sample in t.samples():
            logp = gallery.stock(sample.ids, sample.media)
            expected += [
                float(logp[p - 1, sample.ids[p]])
                for p, weight in enumerate(sample.weights)
                if weight
            ]
    assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-5
    trainer.step(made, step=0, steps=1)
    assert any(
        p.grad is not None and p.grad.abs().max() > 0
        for _, p in trainer.forward.tower.vision_parameters()
    )

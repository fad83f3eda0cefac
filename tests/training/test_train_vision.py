"""Training on images: the model's own logprobs, each image through the tower once, and no layout
changes the gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit.sight import Gallery, episode
from kit.training import STILL, distance, example_texts, gradient

from turnwright.config import ModelConfig, TrainConfig
from turnwright.engines.local import fingerprint
from turnwright.errors import ConfigError, UsageError
from turnwright.training import LossDenominator, Trainer, make_batch
from turnwright.training.advantages import advantages
from turnwright.training.model import models
from turnwright.types import Group, Span, Task


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    sizes = ModelConfig(hidden=32, heads=4, vision=True, image_side=64)
    return models.create_tiny_model(
        sizes, example_texts(), tmp_path_factory.mktemp("sees") / "model"
    )


@pytest.fixture
def gallery(directory):
    return Gallery(directory)


def groups(gallery, count=3, size=4):
    """Groups whose siblings share their first image, and then see images of several
    sizes, clips, or nothing."""
    made = []
    for g in range(count):
        first = gallery.image(g)
        rows = []
        for sample in range(size):
            shown = [first]
            for turn in range((g + sample) % 4):
                what = (g + sample + turn) % 4
                seed = 10 * g + turn + 100
                shown.append(
                    [
                        gallery.image(seed + sample),
                        gallery.image(seed, 48, 32),
                        None,
                        gallery.clip(seed),
                    ][what]
                )
            rows.append(episode(gallery, shown, task=f"t{g}", sample=sample, seed=7 * g + sample))
        made.append(Group(Task(f"t{g}", id=f"t{g}"), rows))
    return made


def branched(trajectory):
    """The same episode with every reply on a root of its own."""
    spans = []
    for span in trajectory.spans:
        if span.sampled:
            ids, media = (
                tuple(trajectory.path(span.parent)),
                tuple(trajectory.media_placements(span.parent)),
            )
            spans.append(Span(trajectory.spans[0].origin, ids, media=media))
            spans.append(
                Span(span.origin, span.ids, len(spans) - 1, span.start, span.logprobs, span.version)
            )
    return replace(trajectory, spans=spans)


def trainer_of(gallery, **settings):
    trainer = Trainer(
        gallery.module, TrainConfig(**{**STILL, **settings}), banned_ids=gallery.banned
    )
    trainer.pixels = gallery.pixels
    return trainer


def learn(gallery, made, **settings):
    trainer = trainer_of(gallery, **settings)
    figures = trainer.step(made, step=0, steps=10).metrics
    return figures["loss"], gradient(gallery.module)


def test_logprobs_are_those_of_the_model_itself(gallery):
    made = groups(gallery)
    made[1] = Group(made[1].task, [branched(t) for t in made[1].trajectories])
    trainer = trainer_of(gallery)
    credits = advantages(made).credits
    batch = make_batch(
        credits, LossDenominator.of(credits, "token"), micro_tokens=300, vision=gallery.vision
    )
    assert len(batch.micros) > 1
    found = trainer._score(batch)
    expected = []
    for t in batch.trajectories:
        for sample in t.samples():
            logp = gallery.stock(sample.ids, sample.media)
            expected += [
                float(logp[p - 1, sample.ids[p]])
                for p, weight in enumerate(sample.weights)
                if weight
            ]
    assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-5


@pytest.mark.parametrize("aggregation", ["token", "trajectory"])
def test_invariant_5_no_layout_of_the_batch_changes_loss_or_gradient(gallery, aggregation):
    made = groups(gallery)
    loss, base = learn(gallery, made, aggregation=aggregation)
    trees = [Group(g.task, [branched(t) for t in g.trajectories]) for g in made]
    for other, micro_tokens in ((made, 1), (made, 150), (trees, 4096), (trees, 100)):
        other_loss, found = learn(
            gallery, other, aggregation=aggregation, micro_tokens=micro_tokens
        )
        assert distance(found, base) < 5e-6
        assert abs(other_loss - loss) < 1e-5


def test_the_gradient_is_that_of_one_row_at_a_time_through_the_model_itself(gallery):
    made = groups(gallery, 2, 4)
    _, base = learn(gallery, made, aggregation="token")
    ledger = advantages(made)
    tokens = sum(credit.tokens for credit in ledger.credits)
    gallery.module.zero_grad()
    for credit in ledger.trained:
        for sample in credit.trajectory.samples():
            logp = gallery.stock(sample.ids, sample.media, grad=True)
            places = [p for p, weight in enumerate(sample.weights) if weight]
            chosen = logp[[p - 1 for p in places], [sample.ids[p] for p in places]]
            (-credit.advantage * chosen.sum() / tokens).backward()
    alone = gradient(gallery.module)
    assert alone.norm() > 0
    assert distance(base, alone) < 5e-6


def test_each_image_of_a_pass_goes_through_the_tower_once(gallery):
    shared = gallery.image(1)
    rows = [
        episode(gallery, [shared, gallery.image(2 + sample % 2), shared], sample=sample)
        for sample in range(16)
    ]
    trainer = trainer_of(gallery, micro_tokens=100_000)
    trainer.step([Group(Task("t", id="t"), rows)], step=0, steps=1)
    passes = len(
        trainer._batch(
            advantages([Group(Task("t", id="t"), rows)]).credits, LossDenominator("token", 1, 1)
        ).micros
    )
    assert trainer.forward.vision_inputs.encoded <= 3 * passes
    assert gallery.pixels.processed == 3


def test_siblings_take_no_more_memory_for_pixels_than_one(gallery, monkeypatch):
    """Pixel values and patches are made for what is seen, not for who sees it."""
    rows = [
        episode(gallery, [gallery.image(1, 64, 64), gallery.image(2)], sample=s, seed=3)
        for s in range(16)
    ]
    sizes = []
    merged = gallery.pixels.merged

    def counted(media):
        arrays = merged(media)
        sizes.append(sum(array.nbytes for array in arrays.values()))
        return arrays

    monkeypatch.setattr(gallery.pixels, "merged", counted)
    trainer = trainer_of(gallery, micro_tokens=100_000)
    trainer.supervised(rows[:1], lr=0.0)
    one, sizes[:] = max(sizes), []
    trainer.supervised(rows, lr=0.0)
    assert max(sizes) <= 1.3 * one


def test_blanking_an_image_changes_the_logprobs(gallery):
    def scored(media):
        row = episode(gallery, [gallery.image(1), gallery.image(2), media], seed=5)
        trainer = trainer_of(gallery)
        credits = advantages(
            [Group(row.task, [row, replace(row, reward=1.0, key=replace(row.key, sample=1))])]
        ).credits
        batch = make_batch(
            credits, LossDenominator.of(credits, "token"), micro_tokens=300, vision=gallery.vision
        )
        return trainer._score(batch)

    assert (scored(gallery.image(3)) - scored(gallery.image(4))).abs().max() > 1e-3
    assert torch.equal(scored(gallery.image(3)), scored(gallery.image(3)))


def test_the_tower_learns_or_is_left_alone(gallery):
    made = groups(gallery, 2)
    before = {name: p.detach().clone() for name, p in gallery.module.named_parameters()}
    trainer = trainer_of(gallery, lr=1e-3, vision="frozen")
    names = {name for name, _ in trainer.forward.tower.vision_parameters()}
    assert all("visual" in name for name in names)
    assert len(names) == sum("visual" in name for name in before)
    trainer.step(made, step=0, steps=1)
    encoded = trainer.forward.vision_inputs.encoded
    assert encoded == gallery.pixels.processed
    trainer.step(made, step=1, steps=2)
    # Its features are the same at every step.
    assert trainer.forward.vision_inputs.encoded == encoded
    assert not {name for name, _ in trainer.optimizer.tensors() if "visual" in name}
    for name, parameter in gallery.module.named_parameters():
        assert torch.equal(parameter, before[name]) == (
            name in names or not parameter.requires_grad
        )
    assert {name for name, _ in trainer.weights()} >= names
    gallery.module.requires_grad_(True)
    trainer = trainer_of(gallery, lr=1e-3)
    trainer.step(made, step=0, steps=1)
    moved = {
        name for name, p in gallery.module.named_parameters() if not torch.equal(p, before[name])
    }
    assert moved >= names
    assert fingerprint(trainer.weights()) != fingerprint(before.items())


def test_what_cannot_be_seen_is_said(gallery, tiny_model):
    made = groups(gallery, 1)
    with pytest.raises(UsageError, match=r"pass pixels=Rollout\(\.\.\.\)\.pixels to Trainer"):
        Trainer(gallery.module, TrainConfig(**STILL)).step(made, step=0, steps=1)
    trainer = Trainer(tiny_model, TrainConfig(**STILL))
    trainer.pixels = gallery.pixels
    with pytest.raises(UsageError, match="the model has no vision tower"):
        trainer.step(made, step=0, steps=1)
    with pytest.raises(ConfigError, match="no vision tower"):
        Trainer(tiny_model, TrainConfig(vision="frozen"))


def test_rows_without_images_are_as_before(gallery):
    """A model that sees, on text alone and beside rows with images: the same logprobs."""
    text = episode(gallery, [None, None], seed=3)
    seen = episode(gallery, [gallery.image(1)], sample=1, seed=4)
    trainer = trainer_of(gallery)

    def scored(rows):
        credits = advantages([Group(text.task, rows)]).credits
        batch = make_batch(
            credits, LossDenominator.of(credits, "token"), micro_tokens=300, vision=gallery.vision
        )
        return [
            trainer._score(batch)[batch.trajectory_n == i] for i in range(len(batch.trajectories))
        ]

    alone, beside = (
        scored([text, replace(text, key=replace(text.key, sample=5), reward=1.0)]),
        scored([text, seen]),
    )
    assert (alone[0] - beside[0]).abs().max() < 1e-5

"""Token trees of models that see: pixels decide what is shared, features stand once, positions
are those of the path."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.sight import Gallery, episode
from kit.training import STILL, distance, example_texts, gradient

from turnwright.config import ModelConfig, TrainConfig
from turnwright.training import LossDenominator, Trainer, build_prefix_tree
from turnwright.training.advantages import advantages
from turnwright.training.forward.packing import shared_prefixes, tree_micro
from turnwright.training.forward.training_rows import rows_of
from turnwright.training.model import models
from turnwright.types import Group, Origin, Span, Task


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    sizes = ModelConfig(hidden=32, heads=4, vision=True, image_side=64)
    return Gallery(
        models.create_tiny_model(sizes, example_texts(), tmp_path_factory.mktemp("sees") / "model")
    )


def trainer_of(gallery, **more):
    trainer = Trainer(gallery.module, TrainConfig(**{**STILL, **more}), banned_ids=gallery.banned)
    trainer.pixels = gallery.pixels
    return trainer


def learn(gallery, made, **more):
    figures = trainer_of(gallery, **more).step(made, step=0, steps=10).metrics
    return figures, gradient(gallery.module)


def micros_of(gallery, made, **more):
    credits = advantages(made).credits
    return (
        trainer_of(gallery, batching="tree", **more)
        ._batch(credits, LossDenominator.of(credits, "token"))
        .micros
    )


def grouped(rows):
    return [Group(Task("t", id="t"), rows)]


def stripped(trajectory):
    """The same episode where every second context forgets the first half of the reply before it."""
    spans = list(trajectory.spans)
    tail = next((i for i, span in enumerate(spans) if span.sampled and i + 2 < len(spans)), None)
    if tail is None:
        return trajectory
    ids = tuple(spans[tail].ids[len(spans[tail].ids) // 2 :])
    after = spans[tail + 1]
    context = Span(Origin.PROMPT, ids + tuple(after.ids), tail - 1, spans[tail].start)
    context.media = tuple(block.shifted(len(ids)) for block in after.media)
    reply = spans[tail + 2]
    again = Span(
        reply.origin,
        reply.ids,
        len(spans),
        context.start + len(context.ids),
        reply.logprobs,
        reply.version,
    )
    trajectory.spans = [*spans, context, again]
    return trajectory


SHOWN = st.lists(st.sampled_from(("same", "own", "wide", "clip", "none")), min_size=1, max_size=3)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_invariant_5_with_images_clips_and_stripped_thinking(gallery, data):
    rows = []
    for sample in range(data.draw(st.integers(2, 4))):
        turns = []
        for number, what in enumerate(data.draw(SHOWN)):
            kinds = {
                "same": lambda n=number: gallery.image(n),
                "own": lambda n=number, s=sample: gallery.image(50 + 10 * s + n),
                "wide": lambda n=number: gallery.image(n, 48, 32),
                "clip": lambda n=number: gallery.clip(n),
                "none": lambda: None,
            }
            turns.append(kinds[what]())
        made = episode(gallery, turns, sample=sample, seed=data.draw(st.integers(0, 1)))
        rows.append(stripped(made) if data.draw(st.booleans()) else made)
    rows[0].reward, rows[1].reward = 0.0, 1.0
    base_figures, base = learn(gallery, grouped(rows), batching="rows")
    figures, found = learn(
        gallery, grouped(rows), batching="tree", micro_tokens=data.draw(st.sampled_from((60, 4096)))
    )
    assert figures["tree_share"] == 1.0
    assert figures["loss"] == pytest.approx(base_figures["loss"], abs=1e-5)
    # Where equal replies with opposite advantages cancel, what is left is rounding.
    assert (found - base).norm() <= 5e-6 * max(base.norm(), 1.0)


def test_siblings_that_differ_only_in_pixels_are_not_merged(gallery):
    """Their ids are equal; the images differ, so nothing from the image on is shared."""
    apart = [episode(gallery, [gallery.image(n), None], sample=n) for n in range(2)]
    alike = [episode(gallery, [gallery.image(0), None], sample=n) for n in range(2)]
    assert apart[0].path(3) == apart[1].path(3) == alike[0].path(3)
    length = len(apart[0].path(3)) - 1
    before = apart[0].media_placements(3)[0].start
    (micro,) = micros_of(gallery, grouped(apart))
    assert micro.ids_bt.numel() == 2 * length - before
    assert len(micro.media) == 2
    (micro,) = micros_of(gallery, grouped(alike))
    assert micro.ids_bt.numel() == length
    assert len(micro.media) == 1
    rows, base = learn(gallery, grouped(apart), batching="rows")
    _, found = learn(gallery, grouped(apart), batching="tree")
    assert distance(found, base) < 5e-6
    # Merged by ids alone, the second sibling would have seen the first one's image.
    _, blind = learn(
        gallery,
        grouped([apart[0], episode(gallery, [gallery.image(0), None], sample=1)]),
        batching="rows",
    )
    assert distance(blind, base) > 1e-3
    assert rows["entropy"] > 0


def test_ids_and_positions_are_those_of_each_path(gallery):
    shown = [gallery.image(1, 48, 32), gallery.image(2), None]
    trajectories = [
        episode(gallery, [shown[0], shown[n % 3], shown[2]], sample=n, seed=n % 2) for n in range(5)
    ]
    rows = [row for n, t in enumerate(trajectories) for row in rows_of(t, n)]
    shared = shared_prefixes(rows)
    made = build_prefix_tree(shared, 0, len(rows))
    micro = tree_micro(rows, shared, 0, len(rows), "cpu", gallery.vision)
    assert micro.positions.shape == (3, 1, made.tree.size)
    assert made.tree.size < sum(len(row.ids) for row in rows)
    for number, row in enumerate(rows):
        places = made.places[number]
        assert micro.ids_bt[0, places].tolist() == row.ids
        assert torch.equal(
            micro.positions[:, 0, places],
            torch.from_numpy(gallery.vision.positions(len(row.ids), row.media)),
        )


def test_an_image_on_a_shared_trunk_goes_through_the_tower_once_and_stands_once(gallery):
    rows = [episode(gallery, [gallery.image(7, 64, 64), None], sample=n, seed=0) for n in range(6)]
    for n, t in enumerate(rows):  # replies that differ
        t.spans[-1] = Span(
            Origin.MODEL, tuple(gallery.some(4, 900 + n)), 2, t.spans[2].end, [-1.0] * 4, 0
        )
    trainer = trainer_of(gallery, batching="tree")
    trainer.step(grouped(rows), step=0, steps=1)
    assert trainer.forward.vision_inputs.encoded == 1
    (micro,) = micros_of(gallery, grouped(rows))
    assert len(micro.media) == 1
    assert len(micro.media[0][1]) == 16  # 64 pixels a side in patches of 8, four to a token

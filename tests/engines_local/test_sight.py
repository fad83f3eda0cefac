"""Images in the local engine: exact against the model itself, encoded once, and with bits that are
nobody else's business."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from kit.local_engines import bits, matrices, merged_in_place, model, request, run
from kit.sight import Gallery, Shown, ask, engine_of, look

from turnwright.config import LoraConfig
from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.model import EngineModel
from turnwright.errors import BackendContractError, EngineError
from turnwright.media import MediaStore
from turnwright.renderers.vision import PixelCache
from turnwright.training.model.lora import shape_of
from turnwright.types import ImageRef, MediaPlacement


def test_drafts_behind_images_change_no_bit(gallery: Gallery) -> None:
    """Rows of a draft stand as far behind an image as the ids that they may be."""

    async def main(engine: LocalEngine) -> list[Generation]:
        shown = (
            gallery.shown()
            .say(gallery.some(6, 0))
            .show(gallery.image(1, 32, 64))
            .say(gallery.some(3, 1) * 6)
        )
        # All but a few words are banned, so that they come again.
        few = frozenset(range(gallery.module.config.text_config.vocab_size)) - set(
            gallery.words[:6]
        )
        return [await ask(engine, shown, max_tokens=60, seed=n, banned_ids=few) for n in range(3)]

    plain, drafted = (run(engine_of(gallery, speculate=most), main) for most in (0, 6))
    assert bits(drafted) == bits(plain)
    assert 0 < sum(g.accepted for g in drafted) < sum(g.drafted for g in drafted)


def test_every_turn_has_the_logprobs_of_the_model_itself_and_encodes_what_is_new(
    gallery: Gallery,
) -> None:
    async def main(engine: LocalEngine) -> None:
        shown = gallery.shown().say(gallery.some(5, 0))
        cached = 0
        for turn in range(8):
            shown.show(
                gallery.clip(turn) if turn == 3 else gallery.image(turn, 32, 48 if turn % 2 else 32)
            )
            shown.say(gallery.some(3, turn))
            answer = await ask(engine, shown, call=turn, seed=turn)
            assert answer.cached_tokens == cached
            assert engine.media_encoded == turn + 1
            logp = gallery.stock(shown.ids + answer.ids, shown.placed)
            for at, (id_, found) in enumerate(
                zip(answer.ids, answer.logprobs, strict=True), len(shown.ids)
            ):
                assert found == pytest.approx(float(logp[at - 1, id_]), abs=2e-5)
            cached = len(shown.ids) + len(answer.ids) - 1
            shown.say(answer.ids)

    run(engine_of(gallery), main)


@pytest.mark.parametrize("slots", [None, 3, 1])
def test_bits_do_not_depend_on_company_order_slots_or_eviction(
    gallery: Gallery, slots: int | None
) -> None:
    probes = (1, 2, 7)
    alone = {
        seed: bits(run(engine_of(gallery), lambda e, seed=seed: look(e, gallery, seed)))
        for seed in probes
    }
    engine, chance = engine_of(gallery, slots=slots), random.Random(3)
    assert engine.exact

    async def main(engine: LocalEngine) -> None:
        for _ in range(2):
            seeds = [*probes, *chance.sample(range(10, 99), 5)]
            chance.shuffle(seeds)
            heard = await asyncio.gather(*(look(engine, gallery, seed) for seed in seeds))
            assert {
                seed: bits(h) for seed, h in zip(seeds, heard, strict=True) if seed in probes
            } == alone

    run(engine, main)


def test_siblings_that_differ_only_in_pixels_share_what_is_before_them(gallery: Gallery) -> None:
    words = gallery.some(20, 1)

    def shown(seed: int) -> Shown:
        return gallery.shown().say(words).show(gallery.image(seed)).say([30, 31])

    async def main(engine: LocalEngine) -> None:
        assert shown(1).ids == shown(2).ids
        first = await ask(engine, shown(1), "a", group="g")
        other = await ask(engine, shown(2), "b", group="g")
        same = await ask(engine, shown(1), "c", group="g")
        assert (first.cached_tokens, other.cached_tokens) == (0, 20)
        assert same.cached_tokens == len(shown(1).ids) - 1
        assert engine.media_encoded == 2
        assert bits([same]) == bits([first])
        assert first.logprobs != other.logprobs

    run(engine_of(gallery), main)


def test_an_image_may_be_fed_in_pieces(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (
        gallery.shown()
        .say(gallery.some(5, 1))
        .show(gallery.image(1, 64, 64))
        .say([30])
        .show(gallery.clip(2))
        .say([31])
    )
    whole = run(engine_of(gallery), lambda e: ask(e, shown))
    for rows in (1, 7):
        monkeypatch.setattr(
            EngineModel, "rows_per_step", lambda self, decoding, rows=rows: decoding + rows
        )
        pieces = run(engine_of(gallery), lambda e: ask(e, shown))
        assert bits([pieces]) == bits([whole])


def test_features_that_found_no_room_are_made_again(gallery: Gallery) -> None:
    engine = engine_of(gallery, slots=1)
    engine._scheduler.seen._max_bytes = 1

    async def main(engine: LocalEngine) -> list[list[Generation]]:
        return [await look(engine, gallery, seed) for seed in (1, 2, 1)]

    first, _, again = run(engine, main)
    assert bits(first) == bits(again)
    assert engine._scheduler.seen._bytes <= max(
        f.nbytes for f in engine._scheduler.seen._cached.values()
    )


def test_new_weights_see_anew(gallery: Gallery) -> None:
    """An update reaches the tower too, and nothing that the old one saw is left."""
    shown = gallery.shown().say([30, 31]).show(gallery.image(1)).say([32])

    async def main(engine: LocalEngine) -> None:
        before = await ask(engine, shown)
        weights = {name: tensor.clone() for name, tensor in gallery.module.state_dict().items()}
        weights["model.visual.merger.linear_fc2.weight"] += 0.5
        await engine.update(weights.items(), 1)
        after = await ask(engine, shown)
        assert engine.media_encoded == 2
        assert after.cached_tokens == 0
        assert abs(before.logprobs[0] - after.logprobs[0]) > 1e-4 or before.ids != after.ids
        await engine.update(gallery.module.state_dict().items(), 2)
        assert bits([await ask(engine, shown)]) == bits([before])

    run(engine_of(gallery), main)


def test_what_cannot_be_seen_fails_that_call_alone(gallery: Gallery) -> None:
    good = gallery.shown().say([30, 31]).show(gallery.image(1)).say([32])
    lost = gallery.shown().say([30, 31]).show(ImageRef("f" * 64, 32, 32)).say([32])

    async def main(engine: LocalEngine) -> None:
        calls = [ask(engine, shown, f"s{n}") for n, shown in enumerate((good, lost, good))]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[1], EngineError)
        assert (
            "an image of its context is unavailable: image ffffffffffff is not in the media store"
            in str(answers[1])
        )
        assert bits([answers[0]]) == bits([answers[2]])
        with pytest.raises(
            BackendContractError, match="4 image placeholders belong to none of 0 images"
        ):
            await engine.generate(request(good.ids))
        with pytest.raises(BackendContractError, match="an image is at 2 to 6 of 5 ids"):
            await ask(engine, Shown(gallery.vision, good.ids[:5], good.placed))
        assert bits([await ask(engine, good, "s9")]) == bits([answers[0]])

    run(engine_of(gallery), main)


def test_models_that_see_nothing_say_so(gallery: Gallery) -> None:
    blind = LocalEngine(model())
    blind.add_pixel_source(gallery.pixels)  # a rollout tells every engine
    with pytest.raises(
        BackendContractError, match="1 images or videos, but the model has no vision tower"
    ):
        run(
            blind,
            lambda e: e.generate(
                request([1, 2, 3], media=(MediaPlacement(ImageRef("a" * 64), 0, 2),))
            ),
        )
    with pytest.raises(EngineError, match=r"call engine.add_pixel_source\(pixels\)"):
        run(
            LocalEngine(gallery.module, context=64),
            lambda e: ask(e, gallery.shown().show(gallery.image(1)).say([3])),
        )


def test_two_rollouts_of_one_engine_keep_their_own_images(gallery: Gallery) -> None:
    """Each tells the engine where its images are; the earlier one's are found while it lives."""
    engine = engine_of(gallery)
    other = PixelCache(gallery.vision, MediaStore())
    engine.add_pixel_source(other)
    shown = gallery.shown().show(gallery.image(11)).say([3])
    assert run(engine, lambda e: ask(e, shown)).ids


def test_text_alone_gives_the_same_bits_beside_images(gallery: Gallery) -> None:
    text = gallery.shown().say(gallery.some(20, 3))
    seen = gallery.shown().say(gallery.some(20, 4)).show(gallery.image(3)).say([30])
    alone = run(engine_of(gallery), lambda e: ask(e, text))
    nobody = run(LocalEngine(gallery.module, context=512), lambda e: ask(e, text))

    async def main(engine: LocalEngine) -> Generation:
        return (await asyncio.gather(ask(engine, seen, "a"), ask(engine, text, "b")))[1]

    assert bits([run(engine_of(gallery), main)]) == bits([alone]) == bits([nobody])
    with torch.no_grad():
        logits = gallery.module(torch.tensor([text.ids]), use_cache=False).logits[0, -1]
    logits[sorted(gallery.vision.placeholder_ids)] = -torch.inf
    assert float(logits.log_softmax(-1)[alone.ids[0]]) == pytest.approx(alone.logprobs[0], abs=1e-5)


def test_adapters_of_several_policies_see_the_same_images(gallery: Gallery) -> None:
    """Each has the logprobs of its own merged model, and an image is encoded once for all."""
    shape = shape_of(gallery.module, LoraConfig(rank=4, targets=("all",)))
    weights = matrices(gallery.module, shape, 1)
    shown = (
        gallery.shown()
        .say(gallery.some(5, 0))
        .show(gallery.image(1, 32, 64))
        .say(gallery.some(3, 1))
    )

    async def main(engine: LocalEngine) -> list[Generation]:
        await engine.adapter(1).update(weights, 1)
        heard = [await ask(engine.adapter(number), shown, seed=number) for number in range(2)]
        assert engine.media_encoded == 1
        return heard

    plain, adapted = run(engine_of(gallery, adapters=[shape]), main)
    for answer, given in ((plain, []), (adapted, weights)):
        with merged_in_place(gallery.module, shape, given):
            logp = gallery.stock(shown.ids + answer.ids, shown.placed)
        wanted = [float(logp[at - 1, id_]) for at, id_ in enumerate(answer.ids, len(shown.ids))]
        assert answer.logprobs == pytest.approx(wanted, abs=5e-5)
    assert plain.logprobs != adapted.logprobs

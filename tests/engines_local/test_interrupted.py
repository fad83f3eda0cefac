"""A reply that is interrupted after any id, and continued, is the reply without an
interruption, to the last bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.interrupts import interrupted, leaky, whole
from kit.local_engines import bits, full_logprobs, model, request, run, words
from kit.sight import Gallery
from transformers import Qwen3MoeConfig

import turnwright as tw
from turnwright.config import Limits, ModelConfig
from turnwright.engines import Sampling, StopText
from turnwright.engines.local import LocalEngine
from turnwright.errors import BackendContractError
from turnwright.training.model import models

MODEL = model()
MOE = model(
    Qwen3MoeConfig,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    num_hidden_layers=2,
)
pytestmark = [
    pytest.mark.usefixtures("both_ways"),
    pytest.mark.filterwarnings("ignore:local engine. on this machine the last bits:UserWarning"),
]


def letters(ids: Any) -> str:
    return "".join(chr(33 + id_) for id_ in ids)


async def replies(engine: LocalEngine, asked: Any, weights: Any = None) -> Any:
    async def update() -> None:
        await engine.update(weights, engine.version)

    return [await whole(engine.generate, one, update if weights else None) for one in asked]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    cuts=st.sets(st.integers(0, 23), max_size=24),
    speculate=st.sampled_from((0, 4)),
    renew=st.booleans(),
    stop=st.booleans(),
    sampling=st.sampled_from((Sampling(), Sampling(0.7, 0.9), Sampling(0.0))),
)
def test_ids_and_logprobs_do_not_depend_on_interruptions(
    seed: int, cuts: set[int], speculate: int, renew: bool, stop: bool, sampling: Sampling
) -> None:
    chance = random.Random(seed)
    text = StopText([letters(words(2, chance.randrange(99)))], letters) if stop else None
    prompt = words(8, seed) * 2
    asked = [
        request(
            prompt,
            max_tokens=24,
            seed=seed,
            sampling=sampling,
            stop_text=text,
            stop_ids=frozenset([3]),
        )
    ]
    plain = run(LocalEngine(MODEL), lambda engine: replies(engine, asked))
    engine = interrupted(MODEL, lambda _, position: position in cuts, speculate=speculate)
    # The same weights again, whose update drops the cache.
    weights = [
        (name, value.clone())
        for name, value in MODEL.state_dict().items()
        if name != "lm_head.weight"
    ]
    found = run(engine, lambda engine: replies(engine, asked, weights if renew else None))
    assert bits(found) == bits(plain)
    assert not cuts or min(cuts) >= len(plain[0].ids) or engine._scheduler.sampler.interruptions


def test_after_every_id_with_and_without_experts() -> None:
    asked = [request(words(9, 1), max_tokens=24, seed=5, extras=frozenset(["routes"]))]
    plain = run(LocalEngine(MOE), lambda engine: replies(engine, asked))
    engine = interrupted(MOE, lambda *_: True)
    found = run(engine, lambda engine: replies(engine, asked, list(MOE.state_dict().items())))
    assert found[0].ids == plain[0].ids
    # Of a mixture of experts the last bits may differ.
    assert found[0].logprobs == pytest.approx(plain[0].logprobs, abs=1e-5)
    assert engine._scheduler.sampler.interruptions == 24
    (start, routes), (_, wanted) = found[0].extras["routes"], plain[0].extras["routes"]
    assert (start, len(routes)) == (0, 9 + 23)  # of every fed id
    assert (routes == np.asarray(wanted)).all()


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=64)
    texts = [
        f"<|im_start|>user\nlook {n}<|im_end|>\n<|im_start|>assistant\nleft right up {n}<|im_end|>"
        for n in range(40)
    ]
    return Gallery(
        models.create_tiny_model(sizes, texts, tmp_path_factory.mktemp("sees") / "model")
    )


ENVIRONMENTS = {"text": "hop", "tools": "calculator", "images": "radar"}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
@pytest.mark.parametrize("speculate", [0, 4])
def test_episodes_do_not_depend_on_interruptions(
    gallery: Gallery, kind: str, speculate: int
) -> None:
    def play(engine: LocalEngine) -> Any:
        limits = Limits(turns=3, turn_tokens=12, on_turn_length="continue")
        world = tw.resolve_env(ENVIRONMENTS[kind])
        return tw.rollout(
            world.factory, world.tasks("train", 8), engine, samples=3, limits=limits, seed=1
        )

    options = {"renderer": gallery.renderer, "context": 1024}
    plain = play(LocalEngine(gallery.module, **options))
    engine = interrupted(
        gallery.module,
        lambda seed, position: (seed + position) % 17 == 0,
        speculate=speculate,
        **options,
    )
    found = play(engine)
    assert engine._scheduler.sampler.interruptions > 10
    assert len(found) == len(plain) == 24
    equal = sum([rows(one) == rows(other) for one, other in zip(plain, found, strict=True)])
    assert equal == 24
    assert any(len(turn.spans) > 1 for one in found for turn in one.turns)


def rows(trajectory: tw.Trajectory) -> Any:
    return (
        [(row.ids, row.logprobs, row.weights) for row in trajectory.samples()],
        trajectory.stop,
        trajectory.reward,
    )


def test_a_position_outside_the_context_is_refused() -> None:
    for wrong in (-1, 3, 2.0, None):
        with pytest.raises(
            BackendContractError, match=r"reply_position must be below the 3 ids of the context"
        ):
            run(
                LocalEngine(MODEL),
                lambda engine, wrong=wrong: engine.generate(
                    request([1, 2, 3], reply_position=wrong)
                ),
            )


def test_a_cache_that_outlives_its_weights_shows_in_the_logprobs_and_a_cleared_one_does_not() -> (
    None
):
    new = model(seed=1)
    prompt = words(40, 2)

    async def main(engine: LocalEngine) -> Any:
        await engine.generate(request(prompt))
        await engine.update(list(new.state_dict().items()), 1)
        return await engine.generate(request(prompt))

    for plant, stale in ((lambda engine: engine, False), (leaky, True)):
        found = run(plant(LocalEngine(MODEL)), main)
        gaps = np.abs(
            np.subtract(found.logprobs, full_logprobs(new, [*prompt, *found.ids], len(found.ids)))
        )
        assert found.version == 1
        assert (found.cached_tokens > 0) is stale
        assert bool(gaps.max() > 1e-2) is stale

"""The experts that the local engine tells of: those that its model chose, at each position, however
the cache was filled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from kit.expert_models import WANT, moe, told
from kit.local_engines import model, request, run, words
from transformers import MixtralConfig

from turnwright.engines.local import LocalEngine
from turnwright.engines.local.model import find_routers

pytestmark = pytest.mark.filterwarnings(
    "ignore:local engine. on this machine the last bits:UserWarning"
)


def chosen(module, ids):
    """[len(ids), layers, k] of one pass of the model itself."""
    kept = []
    hooks = [
        r.module.register_forward_hook(lambda m, a, o: kept.append(o[2]))
        for r in find_routers(module)
    ]
    with torch.no_grad():
        module(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(kept, 1).numpy()


def test_routers_are_found_by_what_they_give():
    assert [(r.name, r.experts, r.k, r.layer) for r in find_routers(moe(mlp_only_layers=[1]))] == [
        ("model.layers.0.mlp.gate", 8, 2, 0),
        ("model.layers.2.mlp.gate", 8, 2, 2),
    ]
    assert len(find_routers(model(MixtralConfig, num_local_experts=4, num_experts_per_tok=2))) == 2
    assert find_routers(model()) == []


def test_two_turns_of_a_session_tell_each_position_once():
    module, prompt = moe(), words(30, 1)

    async def main(engine):
        one = await engine.generate(request(prompt, **WANT))
        start, routes = told(one)
        assert (start, routes.shape, routes.dtype) == (0, (len(prompt) + 7, 3, 2), np.uint8)
        ids = [*prompt, *one.ids, *words(9, 2)]
        two = await engine.generate(request(ids, routes_from=len(routes), **WANT))
        assert two.cached_tokens == len(routes)
        start, more = told(two)
        assert (start, len(more)) == (len(routes), len(ids) + 7 - len(routes))
        whole = [*ids, *two.ids]
        assert (np.concatenate([routes, more]) == chosen(module, whole)[:-1]).all()

    run(LocalEngine(module), main)


def test_siblings_share_a_prompt_and_branches_a_trunk():
    module, prompt = moe(), words(40, 3)

    async def main(engine):
        first = await engine.generate(request(prompt, "a", group="g", **WANT))
        others = await asyncio.gather(
            *[
                engine.generate(
                    request([*prompt, *words(n, n)], f"s{n}", group="g", seed=n, **WANT)
                )
                for n in range(5)
            ]
        )
        for number, made in enumerate(others):
            assert made.cached_tokens >= len(prompt) - 1
            whole = [*prompt, *words(number, number), *made.ids]
            assert (told(made)[1] == chosen(module, whole)[:-1]).all()
        back = [*prompt, *first.ids[:3], *words(6, 9)]
        branch = await engine.generate(
            request(back, "a", group="g", routes_from=len(prompt) + 3, **WANT)
        )
        start, routes = told(branch)
        assert start == len(prompt) + 3
        assert (routes == chosen(module, [*back, *branch.ids])[start:-1]).all()

    run(LocalEngine(module), main)


def test_they_stay_with_their_rows_when_slots_move_or_are_taken():
    module = moe()

    async def main(engine):
        async def session(number):
            ids, known = words(3 + 17 * (number % 4), number), 0
            for turn in range(3):
                made = await engine.generate(
                    request(
                        ids,
                        f"s{number}",
                        seed=number,
                        routes_from=known,
                        max_tokens=4 + number % 5,
                        **WANT,
                    )
                )
                whole = [*ids, *made.ids]
                start, routes = told(made)
                assert start == known
                assert (routes == chosen(module, whole)[start:-1]).all()
                known, ids = start + len(routes), [*whole, *words(5, number + turn)]

        await asyncio.gather(*[session(number) for number in range(12)])

    run(LocalEngine(module, slots=5), main)


def test_an_aborted_call_tells_what_was_fed():
    module, prompt = moe(), words(20, 4)

    async def main(engine):
        call = asyncio.ensure_future(engine.generate(request(prompt, max_tokens=400, **WANT)))
        await asyncio.sleep(0.05)
        engine.abort()
        made = await call
        assert made.finish == "abort"
        assert made.ids
        start, routes = told(made)
        whole = [*prompt, *made.ids]
        assert start + len(routes) == len(whole) - 1
        assert (routes == chosen(module, whole)[:-1]).all()

    run(LocalEngine(module), main)


def test_new_weights_forget_the_routes_of_the_old():
    old, new, prompt = moe(), moe(seed=1), words(25, 5)

    async def main(engine):
        await engine.generate(request(prompt, **WANT))
        await engine.update(list(new.state_dict().items()), 1)
        made = await engine.generate(request(prompt, **WANT))
        routes = told(made)[1]
        assert (routes == chosen(new, [*prompt, *made.ids])[:-1]).all()
        assert (routes != chosen(old, [*prompt, *made.ids])[:-1]).any()

    run(LocalEngine(old), main)


def test_more_than_256_experts_take_two_bytes():
    module, prompt = moe(num_experts=300, num_hidden_layers=2), words(60, 6)

    async def main(engine):
        made = await engine.generate(request(prompt, **WANT))
        routes = told(made)[1]
        assert routes.dtype == np.uint16
        assert routes.max() > 255
        assert (routes == chosen(module, [*prompt, *made.ids])[:-1]).all()

    run(LocalEngine(module), main)


def test_nothing_is_told_unasked_and_nothing_of_a_model_without_routers():
    async def main(engine):
        return await engine.generate(request(words(9, 7))), await engine.generate(
            request(words(9, 7), **WANT)
        )

    unasked, asked = run(LocalEngine(moe()), main)
    assert not unasked.extras
    assert asked.extras
    dense = LocalEngine(model())
    assert dense._model.recording is None, "the fused pass is not touched"
    assert not run(dense, main)[1].extras

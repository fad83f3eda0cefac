"""A reply's bits depend on its context, settings and seed alone."""

from __future__ import annotations

import asyncio
import random

import pytest
from kit.local_engines import KINDS, bits, model, request, run, talk, words

from turnwright.engines import Generation, Request
from turnwright.engines.local import LocalEngine

pytestmark = pytest.mark.usefixtures("all_ways")
PROBES = (1, 2, 4)


def alone(module: object, slots: int | None = None) -> dict[int, object]:
    """The probes, each in an engine that sees nothing else."""
    return {
        probe: bits(
            run(
                LocalEngine(module, context=256, slots=slots),
                lambda engine, probe=probe: talk(engine, probe),
            )
        )
        for probe in PROBES
    }


def in_company(engine: LocalEngine, chance: random.Random, most: int) -> dict[int, object]:
    async def main(engine: LocalEngine) -> dict[int, object]:
        async def pause() -> None:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                await asyncio.sleep(0.002)

        others = [1000 + chance.randrange(10**6) for _ in range(chance.randrange(most))]
        seeds = [*PROBES, *dict.fromkeys(others)]
        chance.shuffle(seeds)
        heard = await asyncio.gather(*(talk(engine, seed, pause=pause) for seed in seeds))
        return {seed: bits(h) for seed, h in zip(seeds, heard, strict=True) if seed in PROBES}

    return asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main(engine))


def compare(sets: int, kind: type, slots: tuple[int | None, ...], **changes: object) -> None:
    module = model(kind, **changes)
    expected = alone(module)
    chance = random.Random(7)
    for many in slots:
        engine = LocalEngine(module, context=256, slots=many)
        assert engine.exact
        for _ in range(sets // len(slots)):
            assert in_company(engine, chance, 24) == expected
        asyncio.run(engine.close())


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_company_order_slots_or_eviction(kind: type) -> None:
    compare(9, kind, (None, 3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_bits_in_two_hundred_companies(head_dim: int) -> None:
    compare(200, KINDS[0], (None, 9, 2), head_dim=head_dim)


def test_a_context_gives_the_same_bits_from_the_cache_and_from_nothing() -> None:
    """The last turn of a conversation, asked of an engine that never saw the earlier ones."""
    module = model()
    prompt, seen = words(90, 1), words(30, 2)

    async def in_turns(engine: LocalEngine) -> tuple[list[int], Generation]:
        first = await engine.generate(request(prompt, max_tokens=40))
        context = prompt + first.ids + seen
        return context, await engine.generate(request(context, max_tokens=30, seed=2, call=1))

    context, last = run(LocalEngine(module), in_turns)
    assert last.cached_tokens == len(prompt) + 40 - 1
    again = run(
        LocalEngine(module), lambda engine: engine.generate(request(context, max_tokens=30, seed=2))
    )
    assert again.cached_tokens == 0
    assert bits([again]) == bits([last])


@pytest.mark.parametrize("head_dim", [16, 64])
def test_long_contexts_have_the_same_bits_too(head_dim: int) -> None:
    """Several chunks of keys, where one row is long and its companions are not,
    and the other way round."""
    module = model(head_dim=head_dim)
    contexts = [words(length, length) for length in (10, 255, 256, 257, 300, 511, 513, 700, 900)]

    def asked(number: int) -> Request:
        return request(contexts[number], f"s{number}", max_tokens=12, seed=number)

    async def together(engine: LocalEngine) -> list[Generation]:
        return await asyncio.gather(
            *(engine.generate(asked(number)) for number in range(len(contexts)))
        )

    async def in_pieces(engine: LocalEngine) -> list[Generation]:
        """The cache holds parts of the contexts before they are asked for."""
        await asyncio.gather(
            *(
                engine.generate(request(ids[: len(ids) // 2 + 1], f"s{n}", max_tokens=5))
                for n, ids in enumerate(contexts)
            )
        )
        return await together(engine)

    engines = [LocalEngine(module, context=1024) for _ in range(2)]
    alone = [
        run(LocalEngine(module, context=1024), lambda e, n=n: e.generate(asked(n)))
        for n in range(len(contexts))
    ]
    assert bits(run(engines[0], together)) == bits(alone)
    assert bits(run(engines[1], in_pieces)) == bits(alone)

"""The local engine gives its memory back, and what it samples afterwards has the bits
that it would have had."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
from kit.local_engines import model, request, run, words

from turnwright.engines.local import LocalEngine
from turnwright.errors import EngineError

pytestmark = pytest.mark.usefixtures("both_ways")


def turns(engine: LocalEngine, seed: int) -> Any:
    """Sessions of two turns, side by side."""

    async def one(name: str, ids: list[int]) -> list[Any]:
        first = await engine.generate(request(ids, name, seed=seed, group="g"))
        more = [*ids, *first.ids, *words(5, seed)]
        second = await engine.generate(request(more, name, seed=seed + 1, group="g"))
        return [first.ids, first.logprobs, second.ids, second.logprobs]

    start = words(30, seed)
    return asyncio.gather(*(one(f"s{n}", [*start, *words(n, n)]) for n in range(1, 5)))


def test_memory_goes_and_replies_have_the_same_bits() -> None:
    module = model()

    async def plain(engine: LocalEngine) -> Any:
        return [await turns(engine, seed) for seed in (1, 2)]

    async def rested(engine: LocalEngine) -> Any:
        found = [await turns(engine, 1)]
        held = engine.cache_bytes
        stores = [
            weakref.ref(store.untyped_storage())
            for pair in engine._model.cache.layers.values()
            for store in pair
        ]
        assert stores
        await engine.sleep()
        await engine.sleep()
        left = engine.cache_bytes, [store() for store in stores if store() is not None]
        await engine.wake()
        await engine.wake()
        found.append(await turns(engine, 2))
        return found, held, left, engine.cache_bytes

    wanted = run(LocalEngine(module), plain)
    found, held, left, again = run(LocalEngine(module), rested)
    assert found == wanted
    assert held > 100_000
    assert left == (0, [])
    assert again == held


def test_new_weights_wake_it() -> None:
    other = model(seed=4)

    async def work(engine: LocalEngine) -> Any:
        await turns(engine, 1)
        await engine.sleep()
        with pytest.raises(EngineError, match="is asleep"):
            await engine.generate(request(words(4, 1)))
        await engine.update(other.state_dict().items(), 7)
        return await turns(engine, 2)

    async def fresh(engine: LocalEngine) -> Any:
        return await turns(engine, 2)

    assert run(LocalEngine(model()), work) == run(LocalEngine(other), fresh)


def test_calls_in_flight_end_as_aborted() -> None:
    async def work(engine: LocalEngine) -> Any:
        asked = asyncio.create_task(engine.generate(request(words(4, 1), max_tokens=400)))
        while not engine._scheduler.running:
            await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(request(words(4, 1), "late")))
        sleeping = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="is asleep"):
            await engine.generate(request(words(4, 1), "too late"))
        await sleeping
        assert engine.cache_bytes == 0
        return await asked, await late

    found = run(LocalEngine(model()), work)
    assert [generation.finish for generation in found] == ["abort", "abort"]
    assert len(found[0].ids) < 400


@pytest.mark.parametrize("large", [True, False])
def test_a_large_cache_is_dropped_with_its_memory(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one keeps its memory, which would have to be taken again; not
    while calls are in flight."""
    monkeypatch.setattr("turnwright.engines.local.model.LARGE_CACHE", 1 if large else 2**40)
    module = model()

    async def dropped(engine: LocalEngine) -> Any:
        found, held = [await turns(engine, 1)], engine.cache_bytes
        flying = asyncio.ensure_future(
            engine.generate(request(words(20, 9), "long", max_tokens=200))
        )
        await asyncio.sleep(0.02)
        await engine.drop_cache()
        assert flying.done() or engine.cache_bytes > 0
        await flying
        await engine.drop_cache()
        assert (engine.cache_bytes == 0) is large
        assert held > 0
        return [*found, await turns(engine, 2)]

    async def plain(engine: LocalEngine) -> Any:
        return [await turns(engine, seed) for seed in (1, 2)]

    assert run(LocalEngine(module), dropped) == run(LocalEngine(module), plain)

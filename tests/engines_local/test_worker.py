"""Who computes a step, an event loop or the thread, changes no reply and leaves no call waiting."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.local_engines import model, request, run, talk, words

from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.worker import SHORT_STEP_S
from turnwright.errors import EngineError

THREAD = "turnwright-local-engine"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def module() -> Any:
    return model()


def computed_by(engine: LocalEngine, short: Iterable[bool]) -> list[str]:
    """Declare each step short or long; return the names of the threads that
    compute the next ones."""
    worker, forward, flags, names = engine._worker, engine._scheduler.model.forward, iter(short), []

    def count(seconds: float) -> None:
        worker._mean_step_s = 0.0 if next(flags) else math.inf

    def named(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        return forward(*args)

    worker._add_to_mean = count  # type: ignore[method-assign]
    engine._scheduler.model.forward = named  # type: ignore[method-assign]
    return names


async def ids_of(engine: LocalEngine, seeds: Iterable[int]) -> list[list[list[int]]]:
    """The replies of some conversations at once."""
    talks = await asyncio.wait_for(
        asyncio.gather(*(talk(engine, seed) for seed in seeds)), PATIENCE_S
    )
    return [[reply.ids for reply in replies] for replies in talks]


@settings(max_examples=20, deadline=None)
@given(short=st.lists(st.booleans(), min_size=1, max_size=9), loops=st.integers(1, 3))
def test_replies_do_not_depend_on_who_computes_them(
    module: Any, short: list[bool], loops: int
) -> None:
    expected = run(LocalEngine(module), lambda engine: ids_of(engine, range(6)))
    engine = LocalEngine(module)
    computed_by(engine, itertools.cycle(short))
    left = []

    async def caller(number: int) -> list[Any]:
        left.append(
            asyncio.ensure_future(
                engine.generate(request(words(3, number), f"left {number}", max_tokens=400))
            )
        )
        # The loop closes with a call in flight.
        return await ids_of(engine, range(number, 6, loops))

    with ThreadPoolExecutor(loops) as threads:
        found = list(threads.map(lambda number: asyncio.run(caller(number)), range(loops)))
    for number, theirs in enumerate(found):
        assert theirs == expected[number::loops]
    asyncio.run(engine.close())


def test_short_steps_run_on_the_loop_and_long_ones_on_the_thread(module: Any) -> None:
    engine = LocalEngine(module)
    names = computed_by(engine, [False, False, True, True, True, False, *[True] * 9])
    run(engine, lambda engine: engine.generate(request([1, 2], max_tokens=8)))
    here = threading.current_thread().name
    assert names == [THREAD, THREAD, THREAD, here, here, here, THREAD, here]


def test_a_step_of_a_tiny_model_is_short_and_one_that_computes_for_long_is_not(module: Any) -> None:
    engine = LocalEngine(module)
    forward = engine._scheduler.model.forward

    def slow(*args: Any) -> Any:
        until = time.thread_time() + 3 * SHORT_STEP_S
        while time.thread_time() < until:
            pass
        return forward(*args)

    async def main(engine: LocalEngine) -> list[bool]:
        await engine.generate(request([1, 2], max_tokens=300))
        found = [engine._worker._short]
        engine._scheduler.model.forward = slow  # type: ignore[method-assign]
        await engine.generate(request([1, 2], max_tokens=8))
        return [*found, engine._worker._short]

    assert run(engine, main) == [True, False]


def test_a_command_from_outside_any_loop_runs(module: Any) -> None:
    engine = LocalEngine(module)
    asyncio.run(engine.generate(request([1, 2])))
    engine.release("s")
    until = time.monotonic() + PATIENCE_S
    while engine._scheduler.table._sessions and time.monotonic() < until:
        time.sleep(0.001)
    assert not engine._scheduler.table._sessions
    asyncio.run(engine.close())


def test_an_engine_that_nobody_holds_ends_its_thread(module: Any) -> None:
    before = set(threading.enumerate())
    engine = LocalEngine(module)
    asyncio.run(engine.generate(request([1, 2], max_tokens=1)))
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == THREAD)
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_ctrl_c_in_a_step_on_the_loop_is_not_swallowed(module: Any) -> None:
    engine, steps = LocalEngine(module), []
    computed_by(engine, itertools.repeat(True))

    def interrupted(*args: Any) -> Any:
        steps.append(engine._scheduler.table.step)
        engine.release("schedules another turn")
        raise KeyboardInterrupt

    async def main() -> Generation:
        await engine.generate(request([1, 2], max_tokens=1))
        engine._scheduler.model.forward = interrupted  # type: ignore[method-assign]
        return await engine.generate(request([1, 2]))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    with pytest.raises(EngineError, match="failed earlier"):
        engine.check()
    assert steps == [engine._scheduler.table.step]  # none after it
    asyncio.run(engine.close())

"""No request ends the engine: what is wrong with one is its own error, and every other reply is
as it would have been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.local_engines import VOCABULARY, model, request, words

from turnwright.engines import Generation, Sampling, StopText
from turnwright.engines.local import LocalEngine


def breaks(ids: Any) -> str:
    raise RuntimeError("no such text")


WRONG: dict[str, dict[str, Any]] = {
    "a ban outside the vocabulary": {"banned_ids": frozenset({VOCABULARY})},
    "a ban far outside": {"banned_ids": frozenset({2**70})},
    "a ban below": {"banned_ids": frozenset({-1})},
    "a ban that is no id": {"banned_ids": frozenset({"7"})},
    "every id banned": {"banned_ids": frozenset(range(VOCABULARY))},
    "a temperature below 0": {"sampling": Sampling(-1.0)},
    "no temperature": {"sampling": Sampling(float("nan"))},
    "an endless temperature": {"sampling": Sampling(float("inf"))},
    "a temperature that is a text": {"sampling": Sampling("1")},  # type: ignore[arg-type]
    "a temperature that cannot be hashed": {"sampling": Sampling([1.0])},  # type: ignore[arg-type]
    "top_p 0": {"sampling": Sampling(1.0, 0.0)},
    "top_p 2": {"sampling": Sampling(1.0, 2.0)},
    "top_k over all numbers": {"sampling": Sampling(1.0, 1.0, 2**80)},
    "top_k below 0": {"sampling": Sampling(1.0, 1.0, -5)},
    "a seed that is a text": {"seed": "1"},
    "half a token": {"max_tokens": 2.5},
    "a session that cannot be hashed": {"session": []},
    "a group that cannot be hashed": {"group": {}},
    "routes from nowhere": {"routes_from": -3, "extras": frozenset({"routes"})},
    "half an id": {"ids": [1, 2.5]},
    "a text among ids": {"ids": [1, "2"]},
    "a truth among ids": {"ids": [1, True]},
    "an id over all numbers": {"ids": [1, 2**80]},
    "a stop text that breaks": {"stop_text": StopText(["x"], breaks)},
}


def wrong_request(name: str) -> Any:
    changes = dict(WRONG[name])
    made = request(
        [1, 2, 3],
        changes.pop("session", f"wrong {name}"),
        **{"max_tokens": 5} | {k: v for k, v in changes.items() if k != "ids"},
    )
    if "ids" in changes:
        made.ids = changes["ids"]
    return made


@pytest.fixture(scope="module")
def module() -> Any:
    return model()


async def well(engine: LocalEngine, count: int = 6) -> list[Any]:
    asked = [
        engine.generate(request(words(9 + n, n), f"well {n}", max_tokens=6 + n, seed=n))
        for n in range(count)
    ]
    found = await asyncio.gather(*asked, return_exceptions=True)
    return [
        (one.ids, one.logprobs, one.finish) if isinstance(one, Generation) else repr(one)
        for one in found
    ]


@pytest.mark.parametrize("speculate", [0, 3])
def test_what_is_wrong_with_a_request_is_its_own_error_and_no_other_reply_changes(
    module: Any, speculate: int
) -> None:
    async def work() -> None:
        engine = LocalEngine(module, slots=8, speculate=speculate)
        try:
            undisturbed = await well(engine)
            for name in WRONG:
                beside = asyncio.ensure_future(well(engine))
                failed = (
                    await asyncio.gather(
                        engine.generate(wrong_request(name)), return_exceptions=True
                    )
                )[0]
                assert await beside == undisturbed, name
                assert type(failed).__name__ in ("BackendContractError", "EngineError"), (
                    name,
                    failed,
                )
            assert await well(engine) == undisturbed
        finally:
            await engine.close()

    asyncio.run(work())


@pytest.mark.parametrize("often", [1, 2, 10**9])
def test_a_step_that_fails_ends_no_call_but_the_one_that_fails_alone(
    module: Any, often: int
) -> None:
    """The forward pass breaks whenever a certain id is in it: a fault that nothing
    before the loop can see."""
    cursed = 13

    async def work() -> None:
        engine = LocalEngine(module, slots=8)
        try:
            undisturbed = await well(engine, 4)
            inner, left = engine._scheduler.model.forward, [often]

            def forward(tokens: Any, *rest: Any) -> Any:
                if (
                    any(tokens[at : at + 3] == [cursed] * 3 for at in range(len(tokens)))
                    and left[0] > 0
                ):
                    left[0] -= 1
                    raise RuntimeError("a kernel broke")
                return inner(tokens, *rest)

            engine._scheduler.model.forward = forward
            beside = asyncio.ensure_future(well(engine, 4))
            cursing = engine.generate(request([cursed] * 3, "cursed", max_tokens=4, seed=5))
            (failed,) = await asyncio.gather(cursing, return_exceptions=True)
            assert await beside == undisturbed
            assert isinstance(failed, Generation) is (often == 1), failed
            assert await well(engine, 4) == undisturbed
            engine.check()
        finally:
            await engine.close()

    asyncio.run(work())


def test_an_engine_whose_every_step_fails_says_so(module: Any) -> None:
    async def work() -> None:
        engine = LocalEngine(module, slots=8)
        try:
            assert len((await well(engine, 1))[0][0]) == 6

            def forward(*_: Any) -> Any:
                raise RuntimeError("the device is gone")

            engine._scheduler.model.forward = forward  # type: ignore[method-assign]
            assert all("the device is gone" in one for one in await well(engine, 4))
            with pytest.raises(Exception, match="steps of the local engine failed"):
                engine.check()
        finally:
            await engine.close()

    asyncio.run(work())


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=8),
    st.booleans(),
)
def test_calls_that_are_cancelled_at_any_instant_end_nothing_else(
    module: Any, cancels: list[tuple[int, int]], aborts: bool
) -> None:
    """A call may end in the same instant in which its caller goes away."""

    async def work() -> None:
        engine = LocalEngine(module, slots=8)
        try:
            undisturbed = await well(engine, 3)
            calls = [
                asyncio.ensure_future(
                    engine.generate(request(words(5, n), f"c{n}", max_tokens=n + 1))
                )
                for n in range(6)
            ]
            for number, ticks in cancels:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                calls[number].cancel()
            if aborts:
                engine.abort()
                for call in calls:
                    call.cancel()
            _, pending = await asyncio.wait(calls, timeout=60)
            assert not pending, "calls that nobody answers"
            assert await well(engine, 3) == undisturbed
        finally:
            await engine.close()

    asyncio.run(work())

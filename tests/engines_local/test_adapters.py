"""Several LoRA adapters over one model: each row of a pass takes its own, and an update of
one touches no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from kit.adapters import send, shapes
from kit.local_engines import (
    Matrices,
    bits,
    full_logprobs,
    matrices,
    merged_in_place,
    model,
    request,
    run,
    talk,
    words,
)

from turnwright.engines import Generation, Request
from turnwright.engines.local import LocalEngine, fingerprint
from turnwright.engines.local.adapters import AdapterShape
from turnwright.errors import BackendContractError, EngineError, SyncError

pytestmark = pytest.mark.usefixtures("both_ways")


def logprobs_of(
    module: Any, shape: AdapterShape | None, given: Matrices, prompt: list[int], reply: list[int]
) -> list[float]:
    """What the model with an adapter merged into it gives a reply."""
    with merged_in_place(module, shape, given):
        return full_logprobs(module, prompt + reply, len(reply))


def made(**options: Any) -> tuple[LocalEngine, Any, list[AdapterShape], list[Matrices]]:
    module = model()
    given = shapes(module)
    weights = [matrices(module, shape, number) for number, shape in enumerate(given)]
    return LocalEngine(module, adapters=given, **options), module, given, weights


def test_each_policy_has_the_logprobs_of_its_own_merged_model() -> None:
    engine, module, given, weights = made()
    own = [(None, []), *zip(given, weights, strict=True)]

    async def main(engine: LocalEngine) -> None:
        policies = await send(engine, weights)
        prompt = words(30, 0)
        for turn in range(3):  # the same session, group and prompt for all
            calls = (
                policy.generate(request(prompt, group="g", call=turn, seed=turn))
                for policy in policies
            )
            heard = await asyncio.gather(*calls)
            assert len({tuple(one.logprobs) for one in heard}) == len(policies)
            for generation, adapter in zip(heard, own, strict=True):
                wanted = logprobs_of(module, *adapter, prompt, generation.ids)
                assert generation.logprobs == pytest.approx(wanted, abs=2e-5)
            prompt = prompt + words(6, turn)
        # Each finds what it has itself computed of the context, up to where its own reply began.
        assert [one.cached_tokens for one in heard] == [30 + 6] * len(policies)

    run(engine, main)


def test_an_adapter_without_weights_is_the_model() -> None:
    engine, *_ = made()

    async def main(engine: LocalEngine) -> list[Generation]:
        return [await engine.adapter(number).generate(request(words(20, 1))) for number in range(3)]

    plain, *others = run(engine, main)
    for other in others:
        assert other.ids == plain.ids
        assert other.logprobs == pytest.approx(plain.logprobs, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"speculate": 4}], ids=str)
def test_bits_do_not_depend_on_the_other_policies(options: dict[str, int]) -> None:
    async def alone(engine: LocalEngine, number: int, weights: list[Matrices]) -> Any:
        policies = await send(engine, weights)
        return [bits(await talk(policies[number], seed)) for seed in range(4)]

    async def together(engine: LocalEngine, weights: list[Matrices]) -> Any:
        policies = await send(engine, weights)
        heard = await asyncio.gather(
            *(talk(policy, seed) for seed in range(4) for policy in policies)
        )
        return [
            [bits(one) for one in heard[number :: len(policies)]] for number in range(len(policies))
        ]

    engine, _, _, weights = made(context=256, **options)
    assert engine.exact
    found = run(engine, lambda engine: together(engine, weights))
    for number, own in enumerate(found):
        engine, _, _, weights = made(context=256)
        assert own == run(
            engine, lambda engine, number=number, weights=weights: alone(engine, number, weights)
        )


def test_an_update_ends_the_calls_of_its_policy_alone_and_drops_its_cache_alone() -> None:
    engine, module, given, weights = made()

    async def main(engine: LocalEngine) -> None:
        policies = await send(engine, weights)
        prompt = words(40, 2)
        await asyncio.gather(*(policy.generate(request(prompt)) for policy in policies))
        long = [
            asyncio.ensure_future(p.generate(request(prompt, "long", max_tokens=200)))
            for p in policies
        ]
        while len(engine._scheduler.running) < 3 or not all(
            len(call.ids) > 2 for call in engine._scheduler.running
        ):
            await asyncio.sleep(0)
        newer = matrices(module, given[0], 9)
        assert await policies[1].update(newer, 5) == fingerprint(newer)
        others, ended = [await long[0], await long[2]], await long[1]
        assert (ended.finish, ended.version) == ("abort", 1)
        assert [(one.finish, one.version, len(one.ids)) for one in others] == [
            ("length", 0, 200),
            ("length", 1, 200),
        ]
        assert [policy.version for policy in policies] == [0, 5, 1]
        again = await asyncio.gather(
            *(policy.generate(request(prompt, call=1)) for policy in policies)
        )
        assert [one.cached_tokens for one in again] == [39, 0, 39]
        assert [one.version for one in again] == [0, 5, 1]
        wanted = logprobs_of(module, given[0], newer, prompt, again[1].ids)
        assert again[1].logprobs == pytest.approx(wanted, abs=2e-5)
        with pytest.raises(
            BackendContractError, match="requests policy version 2, the engine has 1"
        ):
            await policies[2].generate(request(prompt, min_version=2))

    run(engine, main)


def test_sessions_are_released_and_calls_aborted_by_policy() -> None:
    engine, _, _, weights = made()

    async def main(engine: LocalEngine) -> None:
        policies = await send(engine, weights)
        calls = [
            asyncio.ensure_future(p.generate(request(words(9, 3), max_tokens=300)))
            for p in policies
        ]
        while len(engine._scheduler.running) < 3:
            await asyncio.sleep(0)
        policies[2].abort()
        assert (await calls[2]).finish == "abort"
        assert [(await call).finish for call in calls[:2]] == ["length", "length"]
        for policy in policies:
            policy.release("s")
        assert not engine._scheduler.table._sessions or await _released(engine)

    run(engine, main)


async def _released(engine: LocalEngine) -> bool:
    while engine._scheduler.table._sessions:
        await asyncio.sleep(0.001)
    return True


def test_sleep_keeps_the_adapters_and_an_update_wakes() -> None:
    engine, _, _, weights = made()

    async def main(engine: LocalEngine) -> None:
        policies = await send(engine, weights)
        before = bits([await policy.generate(request(words(9, 3))) for policy in policies])
        await policies[0].sleep()
        with pytest.raises(EngineError, match="asleep"):
            await policies[1].generate(request(words(9, 3)))
        await policies[2].update(weights[1], 2)
        assert bits([await policy.generate(request(words(9, 3))) for policy in policies]) == before

    run(engine, main)


def fault(weights: Matrices, kind: str) -> Matrices:
    (name, tensor), *rest = weights
    return {
        "missing": rest,
        "another name": [(name.replace("lora_A", "lora_C"), tensor), *rest],
        "of the model": [(name.replace(".lora_A", ""), tensor), *rest],
        "twice": [*weights, (name, tensor)],
        "another shape": [(name, tensor[1:]), *rest],
        "not finite": [(name, tensor * torch.inf), *rest],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "missing",
            "1 matrices of the adapter are missing, first 'model.layers.0.self_attn.q_proj.A'",
        ),
        ("another name", "unknown to the adapter"),
        ("of the model", "unknown to the adapter"),
        ("twice", "was given twice"),
        ("another shape", r"has shape \(3, 64\), the engine's has \(4, 64\)"),
        ("not finite", "is not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(kind: str, said: str) -> None:
    engine, _, _, weights = made()

    async def main(engine: LocalEngine) -> None:
        policies = await send(engine, weights)
        before = await policies[1].generate(request(words(9, 3)))
        with pytest.raises(SyncError, match=said):
            await policies[1].update(fault(weights[0], kind), 7)
        with pytest.raises(SyncError, match="has shape"):
            await policies[2].update(weights[0], 7)  # of another policy
        with pytest.raises(EngineError, match="without an adapter"):
            await policies[0].update(weights[0], 7)
        assert [policy.version for policy in policies] == [0, 1, 1]
        again = await policies[1].generate(request(words(9, 3)))
        assert (again.cached_tokens, bits([again])) == (8, bits([before]))

    run(engine, main)


def test_layers_that_do_not_run_on_rows_are_refused() -> None:
    for name in ("lm_head", "model.norm", "nowhere"):
        with pytest.raises(EngineError, match=f"has no linear layer '{name}'"):
            LocalEngine(model(), adapters=[AdapterShape((name,), 4, 2.0)])
    engine, *_ = made()
    with pytest.raises(EngineError, match="the engine has 2"):
        engine.adapter(3)


def test_an_invalid_request_is_refused_as_by_the_engine_itself() -> None:
    engine, *_ = made()

    async def main(engine: LocalEngine) -> None:
        with pytest.raises(BackendContractError, match="not in the vocabulary"):
            await engine.adapter(1).generate(Request([10_000], 3, frozenset(), 1, "s"))

    run(engine, main)

"""New weights, and the fingerprint by which both sides know that they are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.local_engines import bits, full_logprobs, model, request, run, words

from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine, fingerprint
from turnwright.errors import SyncError

pytestmark = pytest.mark.usefixtures("both_ways")


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_an_update_changes_replies_version_and_fingerprint() -> None:
    old, new = model(seed=0), model(seed=1)
    ids = words(20, 1)

    async def main(engine: LocalEngine) -> tuple[Any, ...]:
        before = await engine.generate(request(ids))
        flying = asyncio.ensure_future(engine.generate(request(ids, "t", max_tokens=400)))
        await asyncio.sleep(0.02)
        told = await engine.update(iter(weights(new).items()), 7)
        return (
            before,
            await flying,
            told,
            engine.version,
            await engine.generate(request(ids, call=1)),
        )

    before, flying, told, version, after = run(LocalEngine(old), main)
    assert told == fingerprint(new.state_dict().items()) != fingerprint(old.state_dict().items())
    assert (before.version, flying.version, version, after.version) == (0, 0, 7, 7)
    assert flying.finish in ("abort", "length")
    assert after.cached_tokens == 0
    assert before.ids != after.ids
    expected = full_logprobs(new, ids + after.ids, 8)
    assert max(abs(a - b) for a, b in zip(after.logprobs, expected, strict=True)) < 1e-4


def test_tied_weights_may_come_under_one_name_or_both() -> None:
    module = model()
    for left_out in ((), ("lm_head.weight",), ("model.embed_tokens.weight",)):
        sent = {
            name: tensor + 1 for name, tensor in weights(module).items() if name not in left_out
        }
        engine = LocalEngine(module)
        assert run(engine, lambda e, sent=sent: e.update(sent.items(), 1)) == fingerprint(
            sent.items()
        )
        assert torch.equal(engine._model.module.lm_head.weight, module.lm_head.weight + 1)


@pytest.mark.parametrize("wrong", ["missing", "unknown", "shape", "twice", "tied", "raises"])
def test_a_wrong_update_is_refused_and_changes_nothing(wrong: str) -> None:
    module, ids = model(), words(20, 1)
    sent = [(name, tensor + 1) for name, tensor in weights(module).items()]
    name = "model.layers.1.mlp.up_proj.weight"
    if wrong == "missing":
        sent = [pair for pair in sent if pair[0] != name]
    elif wrong == "unknown":
        sent.append(("model.layers.9.mlp.up_proj.weight", torch.zeros(1)))
    elif wrong == "shape":
        sent = [(n, t.T if n == name else t) for n, t in sent]
    elif wrong == "twice":
        sent.append(sent[0])
    elif wrong == "tied":
        sent = [(n, t + 1 if n == "lm_head.weight" else t) for n, t in sent]

    def given_weights() -> Any:
        yield from sent
        if wrong == "raises":
            raise SyncError("the trainer's part 'lm_head.weight' broke")

    async def main(engine: LocalEngine) -> tuple[Generation, Generation]:
        before = await engine.generate(request(ids))
        with pytest.raises(SyncError, match=r"model\.|lm_head"):
            await engine.update(given_weights(), 9)
        assert engine.version == 0
        return before, await engine.generate(request(ids, "t"))

    before, after = run(LocalEngine(module), main)
    assert bits([before]) == bits([after])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70000),
    st.integers(0, 10**9),
    st.integers(0, 31),
    st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
)
def test_every_bit_counts(size: int, where: int, bit: int, dtype: str) -> None:
    tensor = torch.arange(size).to(getattr(torch, dtype))
    other = tensor.clone()
    raw = other.view(torch.uint8)
    raw[where % raw.numel()] ^= 1 << bit % 8
    assert fingerprint([("a", tensor)]) == fingerprint([("a", tensor.clone())])
    assert fingerprint([("a", tensor)]) != fingerprint([("a", other)])


def test_names_types_and_shapes_count_and_order_does_not() -> None:
    one, two = torch.zeros(4, 6), torch.ones(3)
    base = fingerprint([("a", one), ("b", two)])
    assert fingerprint([("b", two), ("a", one)]) == base
    assert fingerprint([("a", one.T.contiguous().T), ("b", two)]) == base
    different = [
        [("b", one), ("a", two)],
        [("a", one)],
        [("a", one.reshape(6, 4)), ("b", two)],
        [("a", one.to(torch.int32)), ("b", two)],
        [("a", one), ("b", two), ("c", torch.zeros(0))],
        [("a", -one), ("b", two)],
    ]
    assert len({base, *(fingerprint(pairs) for pairs in different)}) == 7

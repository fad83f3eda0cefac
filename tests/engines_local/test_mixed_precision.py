"""Products in bfloat16: a row's bits are its own, with drafts, adapters and images, and
an update is an update."""

from __future__ import annotations

import asyncio
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters import send, shapes
from kit.local_engines import KINDS, bits, full_logprobs, matrices, model, request, run, talk, words
from kit.sight import TEXTS, Gallery, engine_of, look

from turnwright.config import ModelConfig
from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine, few_rows, fingerprint
from turnwright.engines.local.mixed_precision import (
    MOST_ROWS,
    OFF,
    TILE,
    MixedLinear,
    PackedMatrix,
    is_mixed,
    multiplies_bfloat16,
    order_of,
    pad_rows,
    plain_products,
    round_weights,
    times_inputs,
    times_weight,
    use_mixed_products,
)
from turnwright.errors import ConfigError, SyncError
from turnwright.training.model import models
from turnwright.training.model.models import choose_products, device_and_dtype
from turnwright.training.model.weight_export import unique_weights

pytestmark = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor has no products in bfloat16"
)


def mixed(*args: Any, **changes: Any) -> Any:
    """A model of the kit that multiplies in bfloat16."""
    module = model(*args, **changes)
    use_mixed_products(module.model, module.lm_head)
    return module


@pytest.fixture(params=["fused", "modules"])
def fused_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "modules":
        monkeypatch.setattr(
            "turnwright.engines.local.model.make_fused_decoder", lambda *parts: None
        )
    return request.param == "fused"


# Products.


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_of_a_product_does_not_depend_on_the_others(data: st.DataObject) -> None:
    inner, out = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 900))
    count, seed = data.draw(st.integers(1, 3 * MOST_ROWS)), data.draw(st.integers(0, 10**6))
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, inner, generator=draw)
    matrix = PackedMatrix(round_weights(torch.randn(out, inner, generator=draw)))
    together = matrix.product(rows)
    order = torch.randperm(count, generator=draw)
    assert torch.equal(matrix.product(rows[order]), together[order])
    part = data.draw(st.integers(1, count))
    assert torch.equal(matrix.product(rows[:part]), together[:part])
    into = torch.empty(count, out)
    assert torch.equal(matrix.product(rows, into), together.float())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_few_rows_have_the_bits_that_they_have_among_many(data: st.DataObject) -> None:
    inner, out = 32 * data.draw(st.integers(1, 50)), 32 * data.draw(st.integers(1, 30))
    # Sums that nearly cancel, and some that are too small for float32's exponent.
    scale = data.draw(st.sampled_from([1.0, 1e-19, 1e-37]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    rows, weight = torch.randn(TILE, inner, generator=draw), torch.randn(out, inner, generator=draw)
    half = inner // 2
    rows[:, half:] = rows[:, :half]
    weight[:, half:] = -weight[:, :half] + 1e-3 * weight[:, half:]
    matrix = PackedMatrix(round_weights(weight * scale))
    rows = rows * min(1.0, scale * 1e18)

    together = matrix.product(rows)
    count, first = (
        data.draw(st.integers(1, few_rows.MOST)),
        data.draw(st.integers(0, TILE - few_rows.MOST)),
    )
    some = slice(first, first + count)
    assert torch.equal(matrix.product(rows[some]), together[some])
    assert torch.equal(matrix.product(rows[some], torch.empty(count, out)), together[some].float())


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this processor has no matrix unit"
)
def test_few_rows_go_through_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < order_of(576, 1536, 1).part <= 1536
    multiplied = []
    kernel = few_rows.FewRows.product
    monkeypatch.setattr(
        few_rows.FewRows,
        "product",
        lambda self, rows: multiplied.append(len(rows)) or kernel(self, rows),
    )
    matrix = PackedMatrix(round_weights(torch.randn(576, 1536)))
    for count in (1, few_rows.MOST, few_rows.MOST + 1):
        matrix.product(torch.randn(count, 1536))
    assert multiplied == [1, few_rows.MOST]


@pytest.mark.parametrize("missing", ["the memory", "the kernel"])
def test_without_the_kernel_few_rows_are_a_tile(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_of.cache_clear()
    if missing == "the memory":
        monkeypatch.setattr(few_rows, "_is_readable", lambda *given: False)
    else:
        monkeypatch.setitem(sys.modules, "turnwright.engines.local.numba_kernels", None)
        monkeypatch.delattr("turnwright.engines.local.numba_kernels", raising=False)
    matrix = PackedMatrix(round_weights(torch.randn(64, 96)))
    rows = torch.randn(2, 96)
    try:
        assert torch.equal(matrix.product(rows), matrix.product(torch.cat([rows] * TILE))[:2])
        assert order_of(64, 96, torch.get_num_threads()).part == 0
    finally:
        order_of.cache_clear()


def test_gradients_are_multiplied_in_few_sizes() -> None:
    counts = range(1, 4097)
    padded = [len(pad_rows(torch.ones(count, 1))) for count in counts]
    assert len(set(padded)) == 32
    assert all(
        count <= size <= max(count * 9 / 8, count + TILE - 1)
        for count, size in zip(counts, padded, strict=True)
    )

    draw = torch.Generator().manual_seed(0)
    slope, inputs, weight = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((70, 48), (70, 32), (48, 32))
    )
    assert torch.equal(times_weight(slope, weight), (slope.float() @ weight.float()).bfloat16())
    assert torch.equal(times_inputs(slope, inputs), (slope.float().T @ inputs.float()).bfloat16())


def test_products_are_those_of_the_rounded_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(70, 300, generator=draw), torch.randn(40, 300, generator=draw)
    found = PackedMatrix(round_weights(weight[:10], weight[10:])).product(rows)
    exact = rows.bfloat16().double() @ weight.bfloat16().double().T
    # Half a unit of the last place of 8 bits, and the order of 300 additions in float32.
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


def test_the_rows_at_once_are_whole_tiles() -> None:
    for out, inner in ((576, 1536), (7, 5), (1, 1)):
        rows = order_of(out, inner, torch.get_num_threads()).rows
        assert rows % TILE == 0
        assert TILE <= rows <= MOST_ROWS


def test_the_gradients_of_a_layer_are_those_of_float32_but_for_rounding() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 80)
    inputs = torch.randn(3, 50, 96, requires_grad=True)
    slope = torch.randn(3, 50, 80)
    wanted = torch.autograd.grad(layer(inputs), [inputs, layer.weight, layer.bias], slope)
    layer.__class__ = MixedLinear
    found = torch.autograd.grad(layer(inputs), [inputs, layer.weight, layer.bias], slope)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 0.01


# The engine.


@pytest.mark.parametrize("kind", KINDS)
def test_the_logprobs_are_those_of_float32_but_for_rounding(kind: type, fused_or_not: bool) -> None:
    module = mixed(kind)

    async def main(engine: LocalEngine) -> Generation:
        assert engine.exact
        assert engine.fused is fused_or_not
        return await engine.generate(request(words(50, 1), max_tokens=30))

    heard = run(LocalEngine(module), main)
    with plain_products(module):
        wanted = full_logprobs(module, words(50, 1) + heard.ids, 30)
    gaps = torch.tensor(heard.logprobs) - torch.tensor(wanted)
    assert 1e-5 < gaps.abs().mean() < 0.1


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"speculate": 4}], ids=str)
def test_bits_do_not_depend_on_the_other_policies(
    options: dict[str, int], fused_or_not: bool
) -> None:
    module = mixed()
    given = shapes(module)
    weights = [matrices(module, shape, number) for number, shape in enumerate(given)]

    async def alone(engine: LocalEngine, number: int) -> Any:
        policies = await send(engine, weights)
        return [bits(await talk(policies[number], seed)) for seed in range(4)]

    async def together(engine: LocalEngine) -> Any:
        policies = await send(engine, weights)
        heard = await asyncio.gather(
            *(talk(policy, seed) for seed in range(4) for policy in policies)
        )
        return [
            [bits(one) for one in heard[number :: len(policies)]] for number in range(len(policies))
        ]

    found = run(LocalEngine(module, context=256, adapters=given, **options), together)
    for number, own in enumerate(found):
        engine = LocalEngine(module, context=256, adapters=given)
        assert own == run(engine, lambda engine, number=number: alone(engine, number))


def test_an_adapter_without_effect_changes_no_bit() -> None:
    module = mixed()
    plain = run(LocalEngine(module, context=256), lambda engine: talk(engine, 3))
    engine = LocalEngine(module, context=256, adapters=shapes(module))
    assert bits(run(engine, lambda engine: talk(engine.adapter(1), 3))) == bits(plain)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=64)
    found = Gallery(
        models.create_tiny_model(sizes, TEXTS, tmp_path_factory.mktemp("sees") / "model")
    )
    choose_products(found.module, ModelConfig(dtype="mixed"))
    assert is_mixed(found.module)
    assert not any(isinstance(layer, MixedLinear) for layer in found.module.model.visual.modules())
    return found


@pytest.mark.parametrize("slots", [None, 3])
def test_images_in_company_change_no_bit(gallery: Gallery, slots: int | None) -> None:
    probes = (1, 2, 7)
    alone = {
        seed: bits(run(engine_of(gallery), lambda e, seed=seed: look(e, gallery, seed)))
        for seed in probes
    }
    engine, chance = engine_of(gallery, slots=slots), random.Random(3)
    assert engine.exact
    assert engine.fused

    async def main(engine: LocalEngine) -> None:
        seeds = [*probes, *chance.sample(range(10, 99), 5)]
        chance.shuffle(seeds)
        heard = await asyncio.gather(*(look(engine, gallery, seed) for seed in seeds))
        assert {
            seed: bits(h) for seed, h in zip(seeds, heard, strict=True) if seed in probes
        } == alone

    run(engine, main)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_gives_the_bits_of_a_new_engine(tied: bool, fused_or_not: bool) -> None:
    old, new = (mixed(seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    weights = {
        name: tensor
        for name, tensor in new.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }

    async def updated(engine: LocalEngine) -> Any:
        await talk(engine, 1)
        await engine.update(weights.items(), 1)
        return bits(await talk(engine, 2))

    found = run(LocalEngine(old, context=256), updated)
    assert [one[:2] for one in found] == [
        one[:2] for one in bits(run(LocalEngine(new, context=256), lambda e: talk(e, 2)))
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_made_one_at_a_time_are_never_all_there(tied: bool) -> None:
    """Merged adapters are such; the engine joins three matrices at most."""
    given = list(unique_weights(mixed(seed=1, tie_word_embeddings=tied)))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    class OneAtATime:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal most
            for name, tensor in given:
                made = tensor.clone()
                alive.add(made)
                most = max(most, len(alive))
                yield name, made

    async def updated(engine: LocalEngine, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        assert await engine.update(weights, 1) == fingerprint(given)
        return bits(await talk(engine, 2))

    found, expected = (
        run(
            LocalEngine(mixed(tie_word_embeddings=tied), context=256),
            lambda engine, weights=weights: updated(engine, weights),
        )
        for weights in (OneAtATime(), given)
    )
    assert found == expected
    assert 3 <= most <= 5


def test_a_wrong_update_changes_nothing() -> None:
    module = mixed()
    weights = dict(module.state_dict())
    del weights["lm_head.weight"]
    name = "model.layers.1.mlp.up_proj.weight"

    async def main(engine: LocalEngine) -> None:
        before = bits(await talk(engine, 2))
        for broken in (
            weights | {name: weights[name][:-1]},
            {n: w for n, w in weights.items() if n != name},
        ):
            with pytest.raises(SyncError, match=r"up_proj|missing"):
                await engine.update({n: w + 1 for n, w in broken.items()}.items(), 1)
        assert bits(await talk(engine, 2)) == before

    run(LocalEngine(module, context=256), main)


def test_the_engine_keeps_no_float32_copy_of_what_it_packed() -> None:
    module = mixed()
    engine = LocalEngine(module, context=64)
    own = engine._model.module
    assert {name: p.shape for name, p in own.named_parameters()} == {
        name: p.shape for name, p in module.named_parameters()
    }
    kept = sum(p.untyped_storage().nbytes() for p in own.parameters())
    norms = sum(p.numel() for p in module.parameters() if p.dim() == 1)
    layers = 7 * module.config.num_hidden_layers
    assert kept == 4 * (module.lm_head.weight.numel() + norms + layers)
    run(engine, lambda engine: talk(engine, 1))


def test_a_pass_with_a_matrix_in_the_wrong_place_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapped(*parts: torch.Tensor) -> torch.Tensor:
        return round_weights(*reversed(parts))

    monkeypatch.setattr("turnwright.engines.local.fused_decoder.round_weights", swapped)
    engine = LocalEngine(mixed(num_key_value_heads=4), context=64)
    assert not engine.fused
    run(engine, lambda engine: talk(engine, 1))


# What chooses it.


def test_mixed_is_for_cpus() -> None:
    if torch.cuda.is_available():
        with pytest.raises(ConfigError, match="is for CPUs"):
            device_and_dtype(ModelConfig(dtype="mixed", device="cuda"))
    assert device_and_dtype(ModelConfig(dtype="mixed", device="cpu")) == ("cpu", torch.float32)


def test_by_default_a_large_model_multiplies_in_bfloat16_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = model()
    assert choose_products(small, ModelConfig()) == ""
    assert not is_mixed(small)
    monkeypatch.setattr("turnwright.training.model.models.MIXED_WEIGHTS", 1000)
    assert choose_products(model(), ModelConfig(dtype="float32")) == ""
    odd = model(intermediate_size=100)  # no multiple of a vector
    assert "are exact only in models like Llama" in choose_products(odd, ModelConfig())
    assert not is_mixed(odd)
    large = model()
    assert choose_products(large, ModelConfig()).startswith("mixed: products in bfloat16")
    assert is_mixed(large)
    monkeypatch.setenv(OFF, "1")
    other = model()
    assert choose_products(other, ModelConfig(dtype="mixed")).startswith("float32: this processor")
    assert not is_mixed(other)


def test_the_fused_pass_of_float32_is_left_alone() -> None:
    module = model()
    engine = LocalEngine(module, context=64)
    assert engine._model.fused is not None
    assert not engine._model.fused.packed_names
    assert not engine._model.cache.half
    run(engine, lambda engine: talk(engine, 1))

"""Training in mixed precision: the engine's logprobs to the last bits of float32, and float32's
gradients but for rounding."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.sight import Gallery, episode
from kit.training import STILL, E, M, P, chain, distance, example_texts, gradient, random_groups
from kit.trees import families
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from turnwright.config import LoraConfig, ModelConfig, TrainConfig
from turnwright.engines import Request, Sampling
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.mixed_precision import (
    MixedLinear,
    is_mixed,
    multiplies_bfloat16,
    plain_products,
    use_mixed_products,
)
from turnwright.errors import ConfigError
from turnwright.training import LossDenominator, Trainer, add_lora
from turnwright.training.advantages import advantages
from turnwright.training.forward.forward import (
    ForwardPass,
    LogitDistribution,
    OutputHead,
    target_stats,
)
from turnwright.training.forward.mixed_decoder import MixedDecoder
from turnwright.training.forward.path_attention import paths_of
from turnwright.training.forward.prefix_tree import SortedRows, build_prefix_tree
from turnwright.training.model import models
from turnwright.training.setup import model_config
from turnwright.types import Group, Task

pytestmark = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor has no products in bfloat16"
)

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama with bias": (LlamaConfig, {"attention_bias": True, "tie_word_embeddings": False}),
    "odd group": (LlamaConfig, {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 32}),
    "qwen2": (Qwen2Config, {"num_attention_heads": 4, "use_sliding_window": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
}


def model_of(kind: str, seed: int = 0) -> Any:
    config, changes = KINDS[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(**(SIZES | changes))).eval()
    with torch.no_grad():
        # Weights of norms and biases are 1 and 0 at first, which hides what is done with them.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def mixed(model: Any) -> Any:
    own = deepcopy(model)
    use_mixed_products(own.model, own.lm_head)
    return own


def sampled(engine: LocalEngine, groups: int = 3, size: int = 4, turns: int = 3) -> list[Group]:
    """Groups whose replies the engine sampled."""

    async def one(task: int, sample: int) -> Any:
        draw = np.random.default_rng(task)
        pieces: list[Any] = [(P, draw.integers(0, 60, 20 + task).tolist())]
        for turn in range(turns):
            ids = [i for _, part in pieces for i in part]
            request = Request(
                ids,
                6 + sample,
                frozenset(),
                100 * task + sample,
                f"{task}/{sample}",
                f"{task}",
                turn,
                Sampling(),
            )
            reply = await engine.generate(request)
            pieces.append((M, reply.ids))
            logprobs.setdefault((task, sample), []).extend(reply.logprobs)
            pieces.append(
                (E, np.random.default_rng((task, sample, turn)).integers(0, 60, 5).tolist())
            )
        made = chain(pieces, task=f"t{task}", sample=sample, reward=float(sample % 2))
        found = iter(logprobs[task, sample])
        for span in made.spans:
            if span.sampled:
                span.logprobs = [next(found) for _ in span.ids]
        return made

    async def all_of_them() -> list[Any]:
        try:
            return await asyncio.gather(
                *(one(task, sample) for task in range(groups) for sample in range(size))
            )
        finally:
            await engine.close()

    logprobs: dict[tuple[int, int], list[float]] = {}
    made = asyncio.run(all_of_them())
    return [
        Group(Task(f"t{g}", id=f"t{g}"), made[g * size : (g + 1) * size]) for g in range(groups)
    ]


def learn(model: Any, made: list[Group], **changes: Any) -> tuple[dict[str, float], torch.Tensor]:
    trainer = Trainer(model, TrainConfig(**{**STILL, "gradient_signal_steps": 0, **changes}))
    return trainer.step(made, step=0, steps=10).metrics, gradient(model)


# The engine's logprobs.


@pytest.mark.parametrize("batching", ["rows", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_token_has_the_logprob_it_was_sampled_with(kind: str, batching: str) -> None:
    model = mixed(model_of(kind))
    made = sampled(LocalEngine(model, context=256))
    figures, _ = learn(model, made, batching=batching, max_mismatch=None)
    if ForwardPass(model).mixed is not None:
        assert figures["mismatch_max"] < 1e-5
    else:
        # Modules add up attention in another order than the engine, and a last bit of float32 can
        # decide how an input of the next product is rounded.
        assert figures["mismatch_max"] < 0.1
        assert figures["mismatch_mean"] < 0.01
    with plain_products(model):
        plain, _ = learn(model, made, batching=batching, max_mismatch=1e9)
    assert plain["mismatch_max"] > 1e-3  # rounding would show


def test_hidden_states_have_equal_bits_in_rows_and_in_trees() -> None:
    trainer = Trainer(mixed(model_of("qwen3")), TrainConfig(**STILL))
    assert trainer.forward.mixed is not None
    credits = advantages(random_groups(4, turns=4)).credits
    scale = LossDenominator.of(credits, "token")
    plain = trainer._score(trainer._batch(credits, scale, pack=trainer.layout.pack_plainly))
    trainer.layout.batching = "tree"
    assert torch.equal(trainer._score(trainer._batch(credits, scale)), plain)


def test_an_adapter_is_computed_as_the_engine_merges_it() -> None:
    model = mixed(model_of("qwen2"))
    engine = LocalEngine(model, context=256)
    add_lora(model, LoraConfig(rank=4), seed=1)
    trainer = Trainer(model, TrainConfig(**STILL))
    assert trainer.forward.mixed is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    asyncio.run(engine.update(trainer.weights(), 0))
    figures, _ = learn(model, sampled(engine), max_mismatch=None)
    assert figures["mismatch_max"] < 1e-5


def test_the_reference_of_an_adapter_is_the_model_without_it() -> None:
    """Else the KL of an adapter against its base would be 0 for good."""
    model = mixed(model_of("llama"))
    made = random_groups(1)
    before = Trainer(model, TrainConfig(**STILL))
    credits = advantages(made).credits
    batch = before._batch(credits, LossDenominator.of(credits, "token"))
    base = before._score(batch)
    adapter = add_lora(model, LoraConfig(rank=4), seed=1)
    trainer = Trainer(model, TrainConfig(**STILL))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    assert trainer.forward.mixed is not None
    assert not torch.equal(trainer._score(batch), base)
    with adapter.disabled():
        assert torch.equal(trainer._score(batch), base)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=64)
    return Gallery(
        models.create_tiny_model(sizes, example_texts(), tmp_path_factory.mktemp("sees") / "model")
    )


def test_images_are_trained_as_they_were_seen(gallery: Gallery) -> None:
    model = deepcopy(gallery.module)
    models.choose_products(model, ModelConfig(dtype="mixed"))
    engine = LocalEngine(model, context=512)
    engine.add_pixel_source(gallery.pixels)
    rows = [
        episode(gallery, [gallery.image(n), None, gallery.image(n + 9, 32, 64)], sample=n, seed=n)
        for n in range(4)
    ]

    async def score() -> None:
        """Let the engine say what it would have sampled each reply's ids with."""
        for t in rows:
            for index, span in enumerate(t.spans):
                if span.sampled:
                    span.ids, span.logprobs = await reply_to(t, index)
        await engine.close()

    async def reply_to(t: Any, index: int) -> tuple[tuple[int, ...], list[float]]:
        ids = [i for before in t.spans[:index] for i in before.ids]
        placed, start = [], 0
        for before in t.spans[:index]:
            placed += [block.shifted(start) for block in before.media]
            start += len(before.ids)
        more = {"media": tuple(placed), "banned_ids": gallery.banned}
        count = len(t.spans[index].ids)
        found = await engine.generate(
            Request(ids, count, frozenset(), index, f"{t.key.sample}", call=index, **more)
        )
        return tuple(found.ids), found.logprobs

    asyncio.run(score())
    trainer = Trainer(
        model, TrainConfig(**(STILL | {"max_mismatch": None})), banned_ids=gallery.banned
    )
    trainer.pixels = gallery.pixels
    assert trainer.forward.mixed is not None
    figures = trainer.step([Group(Task("t", id="t"), rows)], step=0, steps=10).metrics
    assert figures["mismatch_max"] < 1e-5
    found = gradient(model)
    plain = deepcopy(gallery.module)
    other = Trainer(plain, TrainConfig(**STILL), banned_ids=gallery.banned)
    other.pixels = gallery.pixels
    other.step([Group(Task("t", id="t"), rows)], step=0, steps=10)
    assert distance(found, gradient(plain)) < 0.1


# Gradients.


@pytest.mark.parametrize("batching", ["rows", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_float32_but_for_rounding(kind: str, batching: str) -> None:
    """Of each parameter by itself: a wrong term in one would vanish among all."""
    plain = model_of(kind)
    model = mixed(plain)
    made = random_groups(2, groups=4, size=6, turns=3, high=9)
    learn(plain, made, batching=batching)
    learn(model, made, batching=batching)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert distance(parameter.grad, wanted[name]) < 0.12, name


def test_gradients_of_an_adapter_are_those_of_float32_but_for_rounding() -> None:
    plain = model_of("llama")
    model = mixed(plain)
    made = random_groups(2, groups=4, size=6, high=9)
    for one in (plain, model):
        add_lora(one, LoraConfig(rank=4), seed=1)
        with torch.no_grad():
            draw = torch.Generator().manual_seed(0)
            for name, parameter in one.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
        learn(one, made)
    wanted = dict(plain.named_parameters())
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 3
    for name, parameter in trained:
        assert distance(parameter.grad, wanted[name].grad) < 0.12, name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_checkpointing_changes_no_bit() -> None:
    made = random_groups(3)
    found = [
        learn(mixed(model_of("qwen3")), made, gradient_checkpointing=flag) for flag in (False, True)
    ]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0]["loss"] == found[1][0]["loss"]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(families(), st.sampled_from([1, 20, 100_000]))
def test_no_layout_changes_the_loss_or_more_of_the_gradient_than_rounding(
    made: list[Group], micro_tokens: int
) -> None:
    if not any(credit.tokens and credit.advantage for credit in advantages(made).trained):
        return
    model = mixed(model_of("qwen3"))
    figures, base = learn(model, made, batching="rows", micro_tokens=100_000)
    for batching in ("rows", "tree"):
        other, found = learn(model, made, batching=batching, micro_tokens=micro_tokens)
        assert other["loss"] == pytest.approx(figures["loss"], rel=1e-5, abs=1e-7)
        assert (found - base).norm() <= 0.05 * base.norm() + 1e-6


class Rounded(torch.autograd.Function):
    """Rounding of keys and values to bfloat16, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.float().bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_backward_pass_against_float64(kind: str) -> None:
    model = mixed(model_of(kind))
    decoder = MixedDecoder(model.model, _kernels())
    layer = decoder.layers[0]
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 9, 9, 9], [7, 8], [7, 3, 3, 3]] + [
        [5] * 40 + [n] * 7 for n in range(3)
    ]
    made = build_prefix_tree(SortedRows.of(rows), 0, len(rows))
    positions = np.empty(made.tree.size, dtype=np.int64)
    for number, row in enumerate(rows):
        positions[made.places[number]] = np.arange(len(row))
    plan = decoder._plan((1, made.tree.size), torch.from_numpy(positions)[None], made.tree)
    width = (decoder.heads + 2 * decoder.kv) * decoder.size
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(made.tree.size, width, generator=draw).bfloat16()
    slope = torch.randn(made.tree.size, decoder.heads * decoder.size, generator=draw)

    given = [
        qkv.double().requires_grad_(),
        *(p.detach().double().requires_grad_() for p in layer.head_parameters()),
    ]
    wanted = _attention(decoder, layer, plan, made.tree, *given)
    slopes = torch.autograd.grad(wanted, given, slope.double())
    out = decoder.attention(layer, plan, qkv)
    gaps = (out - wanted).abs() / wanted.abs().max()
    assert float(gaps.mean()) < 1e-6
    assert float(gaps.max()) < 1e-3  # a key may be rounded the other way
    of_qkv, of_heads = decoder.attention_slopes(layer, plan, qkv, slope)
    for found, exact in zip([of_qkv, *of_heads], slopes, strict=True):
        assert distance(found.double(), exact) < 0.01


def _kernels() -> Any:
    from turnwright.engines.local import numba_kernels

    return numba_kernels


def _attention(
    decoder: Any, layer: Any, plan: Any, tree: Any, qkv: Any, *heads: Any
) -> torch.Tensor:
    """Attention of a tree's rows by its paths, one row after the other."""
    count, size = len(qkv), decoder.size
    if layer.biases:
        qkv = qkv + torch.cat(heads[-3:])
    parts = qkv.split([decoder.heads * size, decoder.kv * size, decoder.kv * size], 1)
    query, key, value = (part.view(count, -1, size) for part in parts)
    if layer.q_norm is not None:

        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + layer.head_eps).rsqrt() * weight

        query, key = normed(query, heads[0]), normed(key, heads[1])
    cos, sin = (
        part.double()[torch.from_numpy(plan.turns)][:, None] for part in (plan.cos, plan.sin)
    )

    def turned(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    query, key, value = turned(query), Rounded.apply(turned(key)), Rounded.apply(value)
    out: list[Any] = [None] * count
    for (start, end), path in zip(tree.chains, paths_of(tree), strict=True):
        for row in range(start, end):
            seen = torch.from_numpy(path[path <= row])
            group = decoder.heads // decoder.kv
            k, v = (x[seen].repeat_interleave(group, 1) for x in (key, value))
            weights = (torch.einsum("hd,khd->hk", query[row], k) * layer.scale).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, v).flatten()
    return torch.stack(out)


def test_slopes_of_norms_and_gates_against_autograd() -> None:
    kernels, draw = _kernels(), torch.Generator().manual_seed(0)
    hidden, slope, beside = (torch.randn(9, 48, generator=draw) for _ in range(3))
    weight = torch.randn(48, generator=draw)
    given = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = torch.autograd.grad(
        torch.nn.functional.rms_norm(given[0], (48,), given[1], 1e-5), given, slope
    )
    out, of_weight = torch.empty_like(hidden), torch.zeros(48)
    flat = [tensor.view(-1).numpy() for tensor in (hidden, weight, slope, beside, out, of_weight)]
    kernels.norm_slope(*flat[:2], 1e-5, *flat[2:])
    assert torch.allclose(out, wanted[0] + beside, atol=1e-5)
    assert torch.allclose(of_weight, wanted[1], atol=1e-5)

    both, given_slope = (
        torch.randn(5, 64, generator=draw).bfloat16(),
        torch.randn(5, 32, generator=draw).bfloat16(),
    )
    exact = both.float().requires_grad_()
    gate, value = exact.chunk(2, -1)
    expected = torch.autograd.grad(
        torch.nn.functional.silu(gate) * value, exact, given_slope.float()
    )[0]
    decoder = MixedDecoder(mixed(model_of("llama")).model, kernels)
    found = decoder.gated_slope(both, given_slope)
    assert distance(found.double(), expected.double()) < 5e-3


def test_a_head_in_chunks_has_the_gradients_of_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(chunk: int) -> list[torch.Tensor]:
        monkeypatch.setattr("turnwright.training.forward.forward.MIXED_CHUNK", chunk)
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 50)
        layer.__class__ = MixedLinear
        hidden = torch.randn(300, 32, requires_grad=True)
        targets = torch.arange(300) % 50
        found = target_stats(hidden, OutputHead(layer), targets, LogitDistribution(), entropy=False)
        (found.logprobs_m * torch.linspace(0, 1, 300)).sum().backward()
        assert layer.packed is None
        return [hidden.grad, layer.weight.grad, layer.bias.grad]

    for found, wanted in zip(gradients(64 * 50), gradients(10**6), strict=True):
        assert distance(found.double(), wanted.double()) < 0.01


# Where it does not apply.


def test_other_models_round_in_their_modules_and_are_held_to_rounding() -> None:
    torch.manual_seed(0)
    model = mixed(
        AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, attn_logit_softcapping=None)).eval()
    )
    trainer = Trainer(model, TrainConfig(**(STILL | {"max_mismatch": None})))
    assert trainer.forward.mixed is None
    assert trainer.precision == torch.bfloat16
    made = sampled(LocalEngine(model, context=256), groups=2)
    figures = trainer.step(made, step=0, steps=10).metrics
    assert figures["mismatch_mean"] < 0.1


def test_dropout_leaves_the_modules() -> None:
    model = mixed(model_of("llama"))
    add_lora(model, LoraConfig(rank=4, dropout=0.5), seed=1)
    assert Trainer(model, TrainConfig()).forward.mixed is None


def test_it_does_not_go_with_a_grid(run_config: Any) -> None:
    with pytest.raises(ConfigError, match="does not go with"):
        model_config(run_config(dtype="mixed", quant="int4"))
    assert model_config(run_config(dtype="auto", quant="int4")).dtype == "float32"
    assert model_config(run_config(dtype="auto", quant="none")).dtype == "auto"
    assert model_config(run_config(dtype="auto", quant="none", engine="vllm")).dtype == "float32"


@pytest.fixture
def run_config() -> Any:
    from turnwright.config import EngineConfig, QuantConfig, RunConfig

    def make(dtype: str, quant: str, engine: str = "local") -> Any:
        return RunConfig(
            model=ModelConfig(dtype=dtype),
            quant=QuantConfig(kind=quant),
            engine=EngineConfig(kind=engine),
        )

    return make


def test_a_model_is_mixed_by_its_recipe(tiny_dir: Any) -> None:
    from turnwright.training import load_model_and_renderer

    said: list[str] = []
    assert is_mixed(
        load_model_and_renderer(
            tiny_dir, tiny_dir, ModelConfig(dtype="mixed"), on_note=said.append
        )[0]
    )
    assert [line.partition(",")[0] for line in said] == ["model.dtype: mixed: products in bfloat16"]
    assert not is_mixed(load_model_and_renderer(tiny_dir, tiny_dir, ModelConfig())[0])

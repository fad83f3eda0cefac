"""The fused forward pass: the logits of the module, for those models and no
others that it is for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.local_engines import KINDS, bits, full_logprobs, model, request, run, words
from transformers import GraniteConfig, MistralConfig, PretrainedConfig

from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine

kernels = pytest.importorskip("turnwright.engines.local.numba_kernels")


def stirred(kind: type[PretrainedConfig], seed: int = 0, **changes: Any) -> Any:
    """A model whose norms and biases, too, are random numbers."""
    module = model(kind, seed, **changes)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


async def some(engine: LocalEngine) -> list[tuple[list[int], Generation]]:
    """Replies to contexts of one id to several blocks of keys, all at once, and continued."""
    prompts = [words(length, length) for length in (1, 2, 31, 32, 33, 63, 64, 65, 100, 200)]
    calls = (
        engine.generate(request(ids, f"s{n}", seed=n, max_tokens=35))
        for n, ids in enumerate(prompts)
    )
    first = list(zip(prompts, await asyncio.gather(*calls), strict=True))
    longer = [ids + answer.ids + words(5, 1) for ids, answer in first]
    calls = (engine.generate(request(ids, f"s{n}", seed=n, call=1)) for n, ids in enumerate(longer))
    return first + list(zip(longer, await asyncio.gather(*calls), strict=True))


def difference(module: Any, heard: list[tuple[list[int], Generation]]) -> float:
    """The greatest difference of a logprob from one full pass of the module."""
    pairs = (
        (full_logprobs(module, ids + answer.ids, len(answer.ids)), answer.logprobs)
        for ids, answer in heard
    )
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([*KINDS, MistralConfig]),
    seed=st.integers(0, 10**6),
    kv=st.integers(1, 3),
    group=st.integers(1, 5),
    size=st.sampled_from([16, 32, 48, 64, 80, 128]),
    width=st.sampled_from([16, 48]),
    inner=st.sampled_from([16, 32, 112]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    scaled=st.booleans(),
)
def test_logprobs_are_those_of_the_module(
    kind: type[PretrainedConfig],
    seed: int,
    kv: int,
    group: int,
    size: int,
    width: int,
    inner: int,
    layers: int,
    tied: bool,
    scaled: bool,
) -> None:
    changes: dict[str, Any] = {"sliding_window": None} if kind is MistralConfig else {}
    if scaled:
        changes["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    module = stirred(
        kind,
        seed,
        num_attention_heads=kv * group,
        num_key_value_heads=kv,
        head_dim=size,
        hidden_size=width * kv * group,
        intermediate_size=inner,
        num_hidden_layers=layers,
        initializer_range=0.05,  # greater, and fp32 itself is no better than 1e-4 in wide models
        tie_word_embeddings=tied,
        **changes,
    )
    engine = LocalEngine(module)
    assert engine.fused
    assert engine.exact
    assert difference(module, run(engine, some)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (KINDS[0], {"attention_bias": True}),  # a bias behind attention
        (KINDS[0], {"hidden_act": "gelu"}),
        (KINDS[0], {"intermediate_size": 40}),
        (
            KINDS[0],
            {
                "use_sliding_window": True,
                "sliding_window": 20,
                "layer_types": ["sliding_attention"] * 2,
            },
        ),
        (KINDS[2], {"mlp_bias": True}),
        (KINDS[2], {"head_dim": 24}),
        (
            GraniteConfig,
            {"embedding_multiplier": 3.0},
        ),  # weights by the same names, put to another use
        (GraniteConfig, {"residual_multiplier": 0.5}),
        (GraniteConfig, {"logits_scaling": 1.01}),
    ],
)
def test_other_models_run_in_their_modules(
    kind: type[PretrainedConfig], changes: dict[str, Any]
) -> None:
    module = stirred(kind, **changes)
    engine = LocalEngine(module)
    assert not engine.fused
    assert difference(module, run(engine, some)) < 1e-4


def test_other_types_and_a_missing_compiler_leave_the_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not LocalEngine(model(), dtype=torch.float64).fused
    monkeypatch.setitem(sys.modules, "turnwright.engines.local.numba_kernels", None)
    monkeypatch.delattr("turnwright.engines.local.numba_kernels")
    module = model()
    engine = LocalEngine(module)
    assert not engine.fused
    assert difference(module, run(engine, some)) < 1e-4


def test_siblings_read_their_prompt_in_one_slot_with_the_bits_of_one_alone() -> None:
    module, prompt = stirred(KINDS[0]), words(150, 1)

    async def siblings(engine: LocalEngine, numbers: range) -> dict[int, Any]:
        async def talk(n: int) -> Any:
            first = await engine.generate(
                request(prompt, f"s{n}", seed=n, group="g", max_tokens=8 + n)
            )
            longer = prompt + first.ids + words(40, n % 2)
            return bits(
                [first, await engine.generate(request(longer, f"s{n}", seed=n, group="g", call=1))]
            )

        found = dict(zip(numbers, await asyncio.gather(*map(talk, numbers)), strict=True))
        shared = engine._scheduler.model.cache.shared
        assert sum(shared == 128) == len(numbers) - 1  # 149 positions are copied, in units of 32
        return found

    together = run(LocalEngine(module, context=256), lambda engine: siblings(engine, range(6)))
    for n in range(6):
        assert (
            run(
                LocalEngine(module, context=256),
                lambda engine, n=n: siblings(engine, range(n, n + 1)),
            )[n]
            == together[n]
        )


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_slot_that_starts_over_takes_no_prompt_from_its_siblings(leaves: int) -> None:
    module, prompt = stirred(KINDS[0]), words(150, 1)

    async def talk(engine: LocalEngine) -> Any:
        first = await asyncio.gather(
            *(engine.generate(request(prompt, f"s{n}", seed=n, group="g")) for n in range(2))
        )
        other = prompt[:5] + words(160, 2)
        await engine.generate(request(other, f"s{leaves}", group="g", call=1))
        stays = 1 - leaves
        return await engine.generate(
            request(prompt + first[stays].ids + words(9, 3), f"s{stays}", group="g", call=1)
        )

    async def again(engine: LocalEngine, ids: list[int]) -> Any:
        return await engine.generate(request(ids, f"s{1 - leaves}", group="g", call=1))

    found = run(LocalEngine(module, context=256, slots=2), talk)
    first = run(
        LocalEngine(module, context=256),
        lambda e: e.generate(request(prompt, "s", seed=1 - leaves)),
    )
    alone = run(
        LocalEngine(module, context=256), lambda e: again(e, prompt + first.ids + words(9, 3))
    )
    assert bits([found]) == bits([alone])


def test_the_joined_weights_are_those_of_the_module() -> None:
    """An update writes to the modules' weights: the pass has to compute with that very memory."""
    engine = LocalEngine(stirred(KINDS[1], tie_word_embeddings=False))
    own, made = engine._model.module, engine._model.fused
    assert made is not None
    with torch.no_grad():
        for number, parameter in enumerate(own.parameters()):
            parameter.fill_(number)
    values = {name: float(tensor.flatten()[0]) for name, tensor in own.named_parameters()}
    for at, layer in enumerate(made.layers):
        ours = [
            layer.qkv[0, 0],
            layer.qkv[-1, 0],
            layer.output[0, 0],
            layer.both[0, 0],
            layer.both[-1, 0],
            layer.down[0, 0],
        ]
        ours += [layer.bias[0], layer.bias[-1], layer.first[0], layer.second[0]]
        theirs = [
            "q_proj.weight",
            "v_proj.weight",
            "o_proj.weight",
            "gate_proj.weight",
            "up_proj.weight",
            "down_proj.weight",
        ]
        theirs += [
            "q_proj.bias",
            "v_proj.bias",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        ]
        for number, name in zip(ours, theirs, strict=True):
            (expected,) = [
                v
                for n, v in values.items()
                if n.startswith(f"model.layers.{at}.") and n.endswith(name)
            ]
            assert float(number) == expected
    assert float(made.table[0, 0]) == values["model.embed_tokens.weight"]
    assert float(made.head[0, 0]) == values["lm_head.weight"]
    assert float(made.last[0]) == values["model.norm.weight"]


def test_the_exponential_is_right_to_some_units_of_the_last_place() -> None:
    """Through the gate with values of one: x * sigmoid(x) has e**-x in it."""
    x = np.concatenate(
        [np.linspace(-80, 80, 16001), np.linspace(-1e-3, 1e-3, 99), [-1e4, 1e4, np.nan, -np.inf]]
    )
    x = np.resize(x.astype(np.float32), 16 * 1007)
    out = np.empty_like(x)
    both = np.stack([x.reshape(-1, 16), np.ones((1007, 16), dtype=np.float32)], 1).reshape(-1)
    kernels.swiglu(both, 1007, 16, out)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wide / (1 + np.exp(-wide))
    normal = np.abs(wide) < 80
    assert (
        np.max(np.abs(out[normal] - expected[normal]) / np.maximum(np.abs(expected[normal]), 1e-30))
        < 4e-7
    )
    assert out[x == 1e4].tolist() == [1e4] * int((x == 1e4).sum())
    assert np.abs(out[x == -1e4]).max() < 1e-30
    assert np.isnan(out[np.isnan(x)]).all()


SCRIPT = """
import sys
from numba.core.caching import CacheImpl
if sys.argv[2] == "False":
    CacheImpl._locator_classes = []  # what it comes to where no directory can be written
sys.path.insert(0, sys.argv[1])
from kit.local_engines import *
torch.set_num_threads(1)
engine = LocalEngine(model())
assert engine.fused
print(bits([run(engine, lambda e: e.generate(request(words(50, 1), max_tokens=40)))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("writable", [True, False])
def test_processes_that_compile_at_once_agree(tmp_path: Path, writable: bool) -> None:
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": str(here.parents[1]), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(here), str(writable)]
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    expected = bits(
        [run(LocalEngine(model()), lambda e: e.generate(request(words(50, 1), max_tokens=40)))]
    )
    assert {out.decode().strip() for out, _ in ended} == {str(expected)}
    assert any(tmp_path.iterdir()) == writable

"""Tiny real models and short conversations for the tests of the local engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from turnwright.engines import Generation, Request, Sampling
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.adapters import AdapterShape
from turnwright.training.model.lora import merge_weight

VOCABULARY = 97


def config(kind: type[PretrainedConfig] = Qwen3Config, **changes: Any) -> PretrainedConfig:
    """A config of a model with two layers and shared key heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return kind(**(values | changes))


def model(kind: type[PretrainedConfig] = Qwen3Config, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights that depend on the seed."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(kind, **changes)).eval()


KINDS = (Qwen3Config, Qwen2Config, LlamaConfig)


def request(ids: Iterable[int], session: str = "s", **changes: Any) -> Request:
    """A request with short replies and no stop ids."""
    values: dict[str, Any] = {"max_tokens": 8, "stop_ids": frozenset(), "seed": 1}
    return Request(list(ids), session=session, **(values | changes))


def words(count: int, seed: int) -> list[int]:
    """Random ids."""
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def run(engine: LocalEngine, main: Callable[[LocalEngine], Awaitable[Any]]) -> Any:
    """Run a coroutine function on an engine and close it."""

    async def wrapped() -> Any:
        try:
            return await main(engine)
        finally:
            await engine.close()

    return asyncio.run(wrapped())


def full_logprobs(
    module: Any, ids: list[int], reply: int, sampling: Sampling | None = None
) -> list[float]:
    """Logprobs of the last `reply` ids by one full forward pass of the model itself."""
    with torch.no_grad():
        logits = module(torch.tensor([ids]), use_cache=False).logits[0].float()
    logits = logits / ((sampling.temperature or 1.0) if sampling else 1.0)
    rows = logits.log_softmax(-1)
    return [float(rows[at - 1, ids[at]]) for at in range(len(ids) - reply, len(ids))]


async def talk(
    engine: LocalEngine,
    seed: int,
    turns: int = 3,
    pause: Callable[[], Awaitable[None]] | None = None,
    group: str = "",
) -> list[Generation]:
    """One conversation, determined by its seed: a prompt, then replies of the engine and
    observations by turns."""
    chance = random.Random(seed)
    ids = words(chance.randrange(3, 40), chance.randrange(4) if group else seed)
    heard = []
    for turn in range(turns):
        if pause is not None:
            await pause()
        sampling = Sampling(temperature=0.9, top_p=0.9) if seed % 5 == 4 else Sampling()
        asked = Request(
            ids,
            chance.randrange(1, 14),
            frozenset([3]),
            seed * 1000 + turn,
            f"talk-{seed}",
            group,
            turn,
            sampling,
        )
        answer = await engine.generate(asked)
        heard.append(answer)
        ids = ids + answer.ids + words(chance.randrange(1, 20), seed + turn)
    engine.release(f"talk-{seed}")
    return heard


def bits(heard: list[Generation]) -> list[tuple[list[int], list[float], str]]:
    """What has to be equal to the last bit."""
    return [(g.ids, g.logprobs, g.finish) for g in heard]


Matrices = list[tuple[str, torch.Tensor]]


def matrices(module: Any, shape: AdapterShape, seed: int) -> Matrices:
    """Random A and B of an adapter, by the names of peft's files."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for name in shape.layers:
        linear = module.get_submodule(name)
        sizes = {"A": (shape.rank, linear.in_features), "B": (linear.out_features, shape.rank)}
        found += [
            (f"base_model.model.{name}.lora_{h}.weight", 0.3 * torch.randn(s, generator=draw))
            for h, s in sizes.items()
        ]
    return found


@contextmanager
def merged_in_place(module: Any, shape: AdapterShape | None, given: Matrices) -> Iterator[None]:
    """An adapter merged into the weights of a model meanwhile; none without matrices."""
    by_name, before = dict(given), {}
    for name in shape.layers if shape and given else ():
        a, b = (by_name[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        weight = module.get_submodule(name).weight
        before[name], weight.data = weight.data, merge_weight(weight.data, a, b, shape.scale)
    try:
        yield
    finally:
        for name, data in before.items():
            module.get_submodule(name).weight.data = data

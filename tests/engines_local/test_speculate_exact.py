"""What is drawn with drafts has the model's distribution: counted against
all replies enumerated."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from typing import Any

import pytest
import torch
from kit.local_engines import model, request, run

from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.scheduler import Scheduler
from turnwright.engines.local.step_rows import ActiveCall

WORDS, LENGTH, REPLIES = 32, 4, 50_000
LIKELY = [
    20,
    20,
    30,
    12,
    1,
    29,
    29,
    20,
    0,
    18,
    7,
    12,
    12,
    1,
    24,
    9,
    16,
    9,
    25,
    17,
    0,
    1,
    12,
    16,
    9,
    9,
    9,
    16,
    24,
    1,
    27,
    12,
]
"""What may well follow each word."""
PROMPT = [id_ for word in range(WORDS) for id_ in (9, word, LIKELY[word])] + [9]
"""Holds every word behind its last one, so that whatever is drawn first has a draft behind it."""


def enumerated(module: Any) -> torch.Tensor:
    """[WORDS ** LENGTH] the probability of every reply behind the prompt, by the module's own
    forward pass and cache."""
    with torch.no_grad():
        seen = module(torch.tensor([PROMPT]), use_cache=True)
        joint = seen.logits[0, -1].double().log_softmax(-1)
        for length in range(1, LENGTH):
            prefixes = torch.tensor(list(itertools.product(range(WORDS), repeat=length)))
            rows = []
            for part in prefixes.split(4096):
                cache = copy.deepcopy(seen.past_key_values)
                cache.batch_repeat_interleave(len(part))
                rows.append(module(part, past_key_values=cache).logits[:, -1])
            joint = (joint[:, None] + torch.cat(rows).double().log_softmax(-1)).flatten()
    return joint.exp()


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's chi-square, cells of fewer than 5 expected taken together; by Wilson and
    Hilferty's approximation (1931)."""
    many = expected >= 5
    counts = torch.cat([counts[many], counts[~many].sum()[None]])
    expected = torch.cat([expected[many], expected[~many].sum()[None]])
    degrees = len(expected) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return 0.5 * math.erfc(
        ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread)
    )


def sampled(module: Any) -> tuple[torch.Tensor, LocalEngine]:
    """[WORDS ** LENGTH] how often each reply was drawn with drafts."""
    counts = torch.zeros(WORDS**LENGTH, dtype=torch.float64)
    engine = LocalEngine(module, speculate=3, context=128, slots=256)

    async def main(engine: LocalEngine) -> None:
        async def one(number: int) -> None:
            for at in range(number, REPLIES, 256):
                heard: Generation = await engine.generate(
                    request(PROMPT, str(number), seed=at, max_tokens=LENGTH)
                )
                counts[
                    sum(id_ * WORDS**place for place, id_ in enumerate(reversed(heard.ids)))
                ] += 1

        await asyncio.gather(*(one(number) for number in range(256)))

    run(engine, main)
    return counts, engine


@pytest.mark.slow
def test_two_hundred_thousand_tokens_have_the_distribution_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = model(vocab_size=WORDS, initializer_range=0.2)
    expected = REPLIES * enumerated(module)
    counts, engine = sampled(module)
    print(
        f"drafted {engine.drafted}, accepted {engine.accepted}, p {p_value(counts, expected):.3f}"
    )
    assert counts.sum() * LENGTH == 200_000
    assert engine.accepted > 4_000
    assert p_value(counts, expected) > 1e-3

    take = Scheduler._append_draft

    def gullible(self: Scheduler, call: ActiveCall, ids: list[int], logprobs: list[float]) -> Any:
        return take(self, call, [*call.draft, *ids[len(call.draft) :]], logprobs)

    monkeypatch.setattr(Scheduler, "_append_draft", gullible)
    counts, engine = sampled(module)
    assert engine.accepted == engine.drafted
    assert p_value(counts, expected) < 1e-12

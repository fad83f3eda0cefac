"""Speculative decoding in a real vLLM: what is sampled stays the model's, and what
was drafted is counted."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from kit import real_servers as kit

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.engines import Request, Sampling, check_generation
from turnwright.engines.remote import VllmEngine, probe_server
from turnwright.records import rollout_metrics
from turnwright.rollouts import arollout
from turnwright.training import Trainer, unique_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
CLOSE = 1e-3
WORDS = (40, 41, 42, 43)
"""All that may be said: so what was said comes again soon, and is drafted."""


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp("drafts"))
    with kit.server("vllm", model.untied, model.root, speculate=5) as server:
        yield model, server


def logprobs(model, ids, start, temperature, banned):
    """log p of all words at each place from `start` on [ids, words]."""
    with torch.no_grad():
        logits = model.module(torch.tensor([ids])).logits[0, start - 1 : -1] / temperature
    logits[:, sorted(banned)] = -torch.inf
    return logits.log_softmax(-1)[:, list(WORDS)]


@pytest.mark.parametrize("route", ["generate", "completions"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_drafts_leave_ids_and_logprobs_to_the_model(drafting, route, temperature):
    model, server = drafting
    banned = frozenset(range(model.meta.vocabulary)) - frozenset(WORDS)

    async def work():
        engine = VllmEngine(server.url, route=route, renderer=model.renderer)
        draw = random.Random(f"{route} {temperature}")
        asked = [
            Request(
                draw.choices(WORDS, k=24),
                64,
                frozenset(),
                1,
                f"{n}",
                sampling=Sampling(temperature),
                banned_ids=banned,
            )
            for n in range(64)
        ]
        try:
            before = await engine.draft_totals()
            found = await asyncio.gather(*map(engine.generate, asked))
            after = before
            for _ in range(50):  # its counters are written a moment behind its answers
                after = await engine.draft_totals()
                if after[0] - before[0] == engine.counts["draft_ids"]:
                    break
                await asyncio.sleep(0.2)
            return (
                asked,
                found,
                engine.counts,
                (after[0] - before[0], after[1] - before[1]),
                await probe_server(engine),
            )
        finally:
            await engine.close()

    asked, found, counts, totals, seen = asyncio.run(work())
    worst, over, spread = 0.0, torch.zeros(len(WORDS)), torch.zeros(len(WORDS))
    for request, generation in zip(asked, found, strict=True):
        check_generation(generation, request, "vLLM")
        rows = logprobs(
            model, [*request.ids, *generation.ids], len(request.ids), temperature or 1.0, banned
        )
        said = torch.tensor([WORDS.index(one) for one in generation.ids])
        worst = max(
            worst,
            float(
                (rows.gather(1, said[:, None])[:, 0] - torch.tensor(generation.logprobs))
                .abs()
                .max()
            ),
        )
        over += (torch.nn.functional.one_hot(said, len(WORDS)) - rows.exp()).sum(0)
        spread += (rows.exp() * (1 - rows.exp())).sum(0)
        if not temperature:
            assert torch.equal(said, rows.argmax(-1))
    z = float((over / spread.sqrt()).abs().max()) if temperature else 0.0
    told = counts["draft_ids"], counts["draft_ids_accepted"]
    print(
        f"vLLM, {route}, temperature {temperature}: {told[1]} of {told[0]} drafts, max |dlogp| "
        f"{worst:.2g}, |z| {z:.1f}"
    )
    assert worst < CLOSE
    assert told == (sum(g.drafted for g in found), sum(g.accepted for g in found))
    assert told == totals  # as the server itself counts them
    assert 0 < told[1] < told[0]
    assert seen.drafts[0] >= told[0]
    # Each word came as often as its probabilities say, within five standard deviations.
    assert z < 5.0


def test_rollouts_carry_what_was_drafted_to_the_metrics(drafting):
    model, server = drafting
    renderer = model.renderer
    renderer.banned_ids |= (
        frozenset(range(model.meta.vocabulary)) - frozenset(WORDS) - renderer.stop_ids
    )
    model.trainer = Trainer(model.module, TrainConfig(), banned_ids=renderer.banned_ids)

    async def work():
        engine = kit.fleet(model, VllmEngine, server)
        model.nudge()
        await engine.update(unique_weights(model.module), 1)
        tasks = [tw.Task(f"amber {n}", id=f"t{n}") for n in range(8)]
        found = await arollout(
            kit.Talk, tasks, engine, renderer=renderer, limits=kit.LIMITS, samples=2
        )
        await engine.close()
        return found, engine.members[0].engine.counts

    found, counts = asyncio.run(work())
    gap, ids = model.gap(found)
    row = rollout_metrics(found)
    print(
        f"vLLM with drafts: max |dlogp| {gap:.2g} over {ids} ids, draft_acceptance "
        f"{row['draft_acceptance']:.2f}"
    )
    assert gap < CLOSE
    assert sum(t.metrics.get("draft_ids", 0) for t in found) == counts["draft_ids"] > 0
    assert row["draft_acceptance"] == counts["draft_ids_accepted"] / counts["draft_ids"]

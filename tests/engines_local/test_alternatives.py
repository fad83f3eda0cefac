"""The most likely ids beside each sampled one: of the same distribution, and of no other row."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.interrupts import interrupted, whole
from kit.local_engines import bits, model, request, run, words

from turnwright.engines import Request, Sampling, check_generation
from turnwright.engines.distribution import masked_scores
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler, round_up_rows
from turnwright.errors import BackendContractError

MODEL = model()
SAMPLINGS = (
    Sampling(),
    Sampling(0.7),
    Sampling(0.0),
    Sampling(top_k=3),
    Sampling(1.3, 0.8),
    Sampling(0.9, 0.9, 5),
    Sampling(min_p=0.2),
)


@dataclass
class Row:
    request: Request
    position: int = 0


def padded(logits: torch.Tensor) -> torch.Tensor:
    spare = round_up_rows(len(logits)) - len(logits)
    return torch.cat([logits, logits[:1].expand(spare, -1)])


@st.composite
def rows_of_a_step(draw: st.DrawFn) -> tuple[torch.Tensor, list[Row]]:
    """Logits, many of them equal, and the rows that are sampled from them."""
    count = draw(st.integers(1, 20))
    vocabulary = draw(st.integers(3, 40))
    torch.manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(count, vocabulary)
    if draw(st.booleans()):
        logits = logits.round()

    rows = []
    for number in range(count):
        banned = draw(st.sampled_from((frozenset(), frozenset([0]), frozenset([0, 2]))))
        rows.append(
            Row(
                request(
                    [0],
                    seed=number,
                    sampling=draw(st.sampled_from(SAMPLINGS)),
                    banned_ids=banned,
                    alternatives=draw(st.sampled_from((0, 1, 5, 20))),
                )
            )
        )
    return logits, rows


@settings(deadline=None)
@given(rows_of_a_step())
def test_they_are_the_likeliest_ids_of_the_distribution_that_is_sampled(step) -> None:
    logits, rows = step
    sampler = Sampler()
    ids, logprobs = sampler(padded(logits), rows)
    found = sampler.alternatives(padded(logits), rows)

    assert set(found) == {number for number, row in enumerate(rows) if row.request.alternatives}
    for number, alternatives in found.items():
        asked = rows[number].request
        scores = masked_scores(logits[number : number + 1], asked.sampling, asked.banned_ids)[0]
        by_score = sorted(range(len(scores)), key=lambda id_: (-float(scores[id_]), id_))
        possible = [id_ for id_ in by_score if scores[id_] > -torch.inf]
        assert [id_ for id_, _ in alternatives] == possible[: asked.alternatives]

        # The sampled id has the bits of its own logprob where it is among them.
        likeliest = dict(alternatives)
        assert likeliest.get(ids[number], logprobs[number]) == logprobs[number]
        assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)
        assert math.fsum(map(math.exp, likeliest.values())) <= 1 + 1e-5


@settings(deadline=None)
@given(rows_of_a_step())
def test_a_row_has_the_same_ones_alone(step) -> None:
    logits, rows = step
    together = Sampler().alternatives(padded(logits), rows)
    for number, alternatives in together.items():
        alone = Sampler().alternatives(padded(logits[number : number + 1]), [rows[number]])
        assert alone == {0: alternatives}


def test_a_row_without_a_distribution_has_none() -> None:
    for logits in (torch.full((1, 5), torch.nan), torch.full((1, 5), -torch.inf)):
        row = Row(request([0], alternatives=3))
        assert Sampler().alternatives(padded(logits), [row]) == {0: []}


def asked(number: int, **changes: object) -> Request:
    """A request of some length, with or without alternatives."""
    prompt = words(4, number) * 4
    return request(
        prompt,
        f"s{number}",
        seed=number,
        max_tokens=5 + 3 * number,
        sampling=SAMPLINGS[number % len(SAMPLINGS)],
        stop_ids=frozenset([3]),
        alternatives=(0, 4, 20)[number % 3],
        **changes,
    )


@pytest.mark.parametrize("speculate", [0, 5])
def test_replies_have_them_and_are_the_same_with_and_without(speculate: int) -> None:
    requests = [asked(number) for number in range(9)]
    plain = [replace(one, alternatives=0) for one in requests]

    async def generate(engine, some):
        return await asyncio.gather(*map(engine.generate, some))

    async def one_by_one(engine):
        return [await engine.generate(one) for one in requests]

    together = run(
        LocalEngine(MODEL, speculate=speculate), lambda engine: generate(engine, requests)
    )
    without = run(LocalEngine(MODEL), lambda engine: generate(engine, plain))
    alone = run(LocalEngine(MODEL), one_by_one)

    assert bits(together) == bits(without)
    for one, reply in zip(requests, together, strict=True):
        check_generation(reply, one, "local")
        assert len(reply.alternatives) == (len(reply.ids) if one.alternatives else 0)
    assert [reply.alternatives for reply in together] == [reply.alternatives for reply in alone]
    if speculate:
        assert sum(reply.drafted for reply in together) > sum(reply.accepted for reply in together)


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(0, 16), max_size=6), speculate=st.sampled_from((0, 4)))
def test_an_interrupted_reply_has_those_of_the_whole_one(cuts, speculate) -> None:
    one = replace(asked(4), sampling=Sampling(), stop_ids=frozenset())

    async def generate(engine):
        return await whole(engine.generate, one)

    uncut = run(LocalEngine(MODEL), generate)
    engine = interrupted(MODEL, lambda _, position: position in cuts, speculate=speculate)
    cut = run(engine, generate)
    assert cut.ids == uncut.ids
    assert cut.alternatives == uncut.alternatives
    check_generation(cut, one, "local")


def test_a_number_that_is_none_is_refused() -> None:
    async def refused(engine):
        for number in (-1, True, 2.5):
            with pytest.raises(BackendContractError, match="alternatives must be a number of ids"):
                await engine.generate(request([1], alternatives=number))

    run(LocalEngine(MODEL), refused)

"""Drafts change how many ids a pass draws, and nothing else."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.local_engines import KINDS, bits, model, request, run, talk, words
from transformers import MixtralConfig

import turnwright as tw
from turnwright.config import EngineConfig, ModelConfig, RunConfig
from turnwright.engines import Generation, Request, Sampling, StopText
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.step_rows import Drafter, RowDraw
from turnwright.errors import EngineError
from turnwright.training import load_model_and_renderer, make_engine
from turnwright.training.model import models


def repetitive(count: int, seed: int, period: int = 7) -> list[int]:
    """Ids that come again and again, now and then another."""
    chance = random.Random(seed)
    round_ = words(period, seed)
    return [
        round_[at % period] if chance.random() < 0.9 else chance.randrange(97)
        for at in range(count)
    ]


def asked(number: int) -> Request:
    """Replies of all kinds: greedy, warm, cool, cut; with stop ids, banned ids, short limits."""
    sampling = (Sampling(), Sampling(0.0), Sampling(0.3), Sampling(0.5, 0.9, 20))[number % 4]
    prompt = repetitive(20 + 5 * number, number, 3 + number % 5)
    stops, banned = (
        frozenset([3] if number % 3 == 0 else []),
        frozenset(prompt[-1:] if number % 5 == 4 else []),
    )
    length = (1, 2, 3, 40, 60)[number % 5]
    return request(
        prompt,
        f"s{number}",
        max_tokens=length,
        seed=number,
        sampling=sampling,
        stop_ids=stops,
        banned_ids=banned,
    )


async def together(engine: LocalEngine) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(asked(number)) for number in range(20)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("all_ways")
def test_replies_are_those_without_drafts_to_the_bit(kind: Any) -> None:
    module = model(kind)
    plain = run(LocalEngine(module), together)
    for most, slots in ((1, None), (4, None), (15, 3)):
        engine = LocalEngine(module, speculate=most, slots=slots)
        assert engine.exact
        heard = run(engine, together)
        assert bits(heard) == bits(plain)
        assert 0 < engine.accepted < engine.drafted
        assert (engine.drafted, engine.accepted) == (
            sum(g.drafted for g in heard),
            sum(g.accepted for g in heard),
        )
    assert not any(g.drafted for g in plain)


@pytest.mark.usefixtures("all_ways")
def test_conversations_are_too_and_find_what_is_cached() -> None:
    module = model()

    async def talks(engine: LocalEngine) -> list[list[Generation]]:
        return await asyncio.gather(
            *(talk(engine, seed, turns=4, group="g" * (seed % 2)) for seed in range(12))
        )

    plain, drafted = (
        run(LocalEngine(module, speculate=most, context=256), talks) for most in (0, 5)
    )
    assert [bits(one) for one in drafted] == [bits(one) for one in plain]
    # Whether the opening prompt of a group is found depends on who comes first.
    cached = [[[g.cached_tokens for g in one[1:]] for one in some] for some in (plain, drafted)]
    assert cached[0] == cached[1]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_reply_is_the_one_without_drafts(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    sampling = data.draw(
        st.sampled_from([Sampling(), Sampling(0.0), Sampling(0.2), Sampling(1.0, 0.8, 5)])
    )
    one = request(
        prompt,
        max_tokens=data.draw(st.integers(1, 30)),
        seed=data.draw(st.integers(0, 2**32)),
        sampling=sampling,
        stop_ids=data.draw(st.frozensets(st.integers(0, 96), max_size=3)),
        banned_ids=data.draw(st.frozensets(st.integers(6, 96), max_size=60)),
    )
    assert bits(
        [run(LocalEngine(MODEL, speculate=data.draw(st.integers(1, 9))), lambda e: e.generate(one))]
    ) == bits([run(LocalEngine(MODEL), lambda e: e.generate(one))])


MODEL = model()


class Around(Sampler):
    """Draws the same three ids again and again."""

    def pick(self, cdf: torch.Tensor, draws: Sequence[RowDraw]) -> torch.Tensor:
        return torch.tensor(
            [5 + draw.position % 3 for draw in draws] + [0] * (len(cdf) - len(draws))
        )


LOOP = request([5, 6, 7] * 4, max_tokens=60)


@pytest.mark.usefixtures("all_ways")
def test_a_stop_text_ends_inside_of_a_draft() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(97 + id_ - 5) for id_ in ids)

    stop = StopText(["abcabcabcabcabcabcab"], decode)
    one = Request(LOOP.ids, 60, frozenset(), 1, "s", stop_text=stop)
    plain, engine = (
        LocalEngine(MODEL, sampler=Around()),
        LocalEngine(MODEL, sampler=Around(), speculate=8),
    )
    expected, found = (run(each, lambda e: e.generate(one)) for each in (plain, engine))
    assert found.finish == "stop"
    assert len(found.ids) == 20
    assert bits([found]) == bits([expected])
    assert found.accepted > 10


@pytest.mark.usefixtures("all_ways")
def test_a_loop_takes_few_passes() -> None:
    engine = LocalEngine(MODEL, sampler=Around(), speculate=8)
    passes, forward = [], engine._model.forward

    def counted(*parts: Any) -> torch.Tensor:
        passes.append(len(parts[0]))
        return forward(*parts)

    engine._model.forward = counted  # type: ignore[method-assign]
    found = run(engine, lambda e: e.generate(LOOP))
    assert found.ids == [5, 6, 7] * 20
    assert len(passes) == 1 + math.ceil(59 / 9)
    assert found.accepted == found.drafted == 60 - len(passes)


@pytest.mark.parametrize(("way", "times"), [("fused", 1), ("modules", 1)])
def test_what_a_wrong_draft_wrote_is_gone(way: str, times: int) -> None:
    """A word whose row overflows, in a draft, must not reach the rows that are kept: its keys lie
    behind a mask of theirs."""

    def propose(self: Drafter, reply: Sequence[int], room: int, barred: Any = ()) -> list[int]:
        self.open = [50] * min(room, 3, self._draft_length)
        return self.open

    module = model(tie_word_embeddings=False)
    with torch.no_grad():
        module.model.embed_tokens.weight[50] = torch.inf
    with pytest.MonkeyPatch.context() as patch:
        if way == "modules":
            patch.setattr("turnwright.engines.local.model.make_fused_decoder", lambda *parts: None)
        plain = run(LocalEngine(module), lambda e: e.generate(request([1, 2, 3], max_tokens=30)))
        patch.setattr(Drafter, "propose", propose)
        engine = LocalEngine(module, speculate=3)
        found = run(engine, lambda e: e.generate(request([1, 2, 3], max_tokens=30)))
    assert 50 not in plain.ids
    assert engine.drafted == 3 * times
    assert found.accepted == 0
    assert bits([found]) == bits([plain])
    assert all(math.isfinite(one) for one in found.logprobs)


def test_routes_of_drafts_that_were_not_drawn_are_not_told() -> None:
    torch.manual_seed(0)
    module = model(MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
    one = request(
        repetitive(30, 3), max_tokens=50, extras=frozenset(["routes"]), sampling=Sampling(0.5)
    )
    plain, found = (
        run(LocalEngine(module, speculate=most), lambda e: e.generate(one)) for most in (0, 6)
    )
    assert found.drafted > found.accepted
    assert found.ids == plain.ids
    assert found.extras["routes"] == plain.extras["routes"]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(
        EngineError, match="speculate must be a number of ids to draft, 0 for none; not -1"
    ):
        LocalEngine(MODEL, speculate=-1)


def test_drafts_follow_what_stood_before_and_go_on_with_themselves() -> None:
    drafter = Drafter([1, 2, 3, 9, 8, 1, 2], 6)
    assert drafter.propose([3], 6) == [9, 8, 1, 2, 3, 9]
    drafter.record_accepted(1)
    assert drafter.propose([3, 9, 7], 6) == []
    # The last place where 2, 3 stood; half as long after a wrong one.
    assert drafter.propose([3, 9, 7, 2, 3], 2) == [
        9,
        7,
    ]
    assert drafter.propose([3, 9, 7, 2, 3, 9], 6, ({8}, {7})) == []
    assert (drafter.drafted, drafter.accepted) == (6, 1)


def test_a_rollout_counts_what_was_drafted(tmp_path: Path) -> None:
    source = models.create_tiny_model(
        ModelConfig(hidden=32, heads=2, layers=1), ["say left right again " * 3], tmp_path / "model"
    )
    config = RunConfig(
        engine=EngineConfig(speculate=5), limits=tw.Limits(turns=1, turn_tokens=40, context=200)
    )
    module, renderer = load_model_and_renderer(source, source, config.model)
    engine = make_engine(config, source, module, renderer, tmp_path)
    assert isinstance(engine, LocalEngine)

    class Echo(tw.Env):
        def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
            return "left right " * 20

        def step(self, action: tw.Action) -> tw.Step:
            return tw.Step(reward=0.0, terminated=True)

    played = tw.rollout(
        Echo,
        [tw.Task("go", id="go")],
        engine,
        samples=6,
        limits=config.limits,
        sampling=Sampling(0.05),
    )
    assert engine.drafted > 0
    assert sum(t.metrics.get("draft_ids", 0) for t in played) == engine.drafted
    assert sum(t.metrics.get("draft_ids_accepted", 0) for t in played) == engine.accepted

"""The engine as its callers see it: logprobs, limits, cache, cancellation, failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.local_engines import (
    KINDS,
    VOCABULARY,
    bits,
    config,
    full_logprobs,
    model,
    request,
    run,
    words,
)

from turnwright.engines import Engine, Generation, Sampling, StopText, SupportsWeightUpdate
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.step_rows import RowDraw
from turnwright.errors import BackendContractError, EngineError, ModelError
from turnwright.types import ImageRef, MediaPlacement

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.fixture(scope="module")
def module() -> Any:
    return model()


def close_to(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_model(kind: type) -> None:
    """Contexts of one id to several chunks of keys, all at once."""
    module = model(kind)
    prompts = [words(length, length) for length in (1, 2, 15, 16, 31, 33, 250, 300, 470)]

    async def main(engine: LocalEngine) -> list[Generation]:
        calls = (
            engine.generate(request(ids, f"s{n}", max_tokens=20, seed=n))
            for n, ids in enumerate(prompts)
        )
        return await asyncio.gather(*calls)

    for ids, answer in zip(prompts, run(LocalEngine(module), main), strict=True):
        assert answer.finish == "length"
        assert len(answer.ids) == 20
        assert close_to(answer.logprobs, full_logprobs(module, ids + answer.ids, 20))


def test_rows_of_a_prompt_may_attend_together(module: Any) -> None:
    """The way of devices on which equal bits are no aim: prompts of similar
    lengths attend in one call."""
    prompts = [words(length, length) for length in (1, 20, 30, 40, 290, 300)]

    async def main(engine: LocalEngine) -> list[Generation]:
        engine._model.chunk = None
        return await asyncio.gather(
            *(engine.generate(request(ids, f"s{n}", seed=n)) for n, ids in enumerate(prompts))
        )

    for ids, answer in zip(prompts, run(LocalEngine(module), main), strict=True):
        assert close_to(answer.logprobs, full_logprobs(module, ids + answer.ids, 8))


def test_a_sliding_window_is_kept() -> None:
    module = model(
        KINDS[0],
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"],
        max_window_layers=0,
    )
    ids = words(300, 1)
    answer = run(LocalEngine(module), lambda engine: engine.generate(request(ids, max_tokens=30)))
    assert close_to(answer.logprobs, full_logprobs(module, ids + answer.ids, 30))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60), min_size=1, max_size=6
    ),
    st.integers(1, 8),
)
def test_random_turns_are_continued_exactly(
    module: Any, pieces: list[list[int]], slots: int
) -> None:
    """Every reply of a conversation has the logprobs of one full pass over all that
    came before, verbatim."""

    async def main(engine: LocalEngine) -> list[tuple[list[int], Generation]]:
        ids: list[int] = []
        heard = []
        for turn, piece in enumerate(pieces):
            ids = ids + piece
            answer = await engine.generate(request(ids, call=turn, seed=turn))
            heard.append((ids, answer))
            assert turn == 0 or answer.cached_tokens == len(ids) - len(piece) - 1
            ids = ids + answer.ids
        return heard

    for ids, answer in run(LocalEngine(module, context=512, slots=slots), main):
        assert close_to(answer.logprobs, full_logprobs(module, ids + answer.ids, len(answer.ids)))


def test_temperature_enters_the_logprobs_and_greedy_does_not(module: Any) -> None:
    ids = words(12, 3)

    async def main(engine: LocalEngine) -> list[Generation]:
        kinds = (
            Sampling(temperature=0.5),
            Sampling(temperature=0.0),
            Sampling(temperature=0.0, top_p=0.1, top_k=1),
        )
        return await asyncio.gather(
            *(engine.generate(request(ids, f"s{n}", sampling=k)) for n, k in enumerate(kinds))
        )

    cold, greedy, cut = run(LocalEngine(module), main)
    assert close_to(
        cold.logprobs, full_logprobs(module, ids + cold.ids, 8, Sampling(temperature=0.5))
    )
    assert close_to(greedy.logprobs, full_logprobs(module, ids + greedy.ids, 8))
    assert bits([greedy]) == bits([cut])
    for at in range(8):
        with torch.no_grad():
            assert greedy.ids[at] == int(
                module(torch.tensor([ids + greedy.ids[:at]])).logits[0, -1].argmax()
            )


def test_a_reply_ends_with_its_stop_id_or_at_the_context(module: Any) -> None:
    async def main(engine: LocalEngine) -> tuple[Generation, Generation]:
        free = await engine.generate(request(words(5, 1), max_tokens=10**6))
        stop = frozenset(free.ids[3:4])
        return free, await engine.generate(
            request(words(5, 1), "t", max_tokens=10**6, stop_ids=stop)
        )

    free, stopped = run(LocalEngine(module, context=64), main)
    assert (len(free.ids), free.finish) == (59, "length")
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: free.ids.index(free.ids[3]) + 1]


def test_the_sampled_ids_depend_on_the_seed(module: Any) -> None:
    async def main(engine: LocalEngine) -> list[Generation]:
        seeds = (1, 2, 1, 2**64 - 1, -1)
        return await asyncio.gather(
            *(engine.generate(request(words(9, 1), f"s{n}", seed=s)) for n, s in enumerate(seeds))
        )

    one, two, again, top, minus = run(LocalEngine(module), main)
    assert bits([one]) == bits([again])
    assert one.ids != two.ids
    assert bits([top]) == bits([minus])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ids": []}, "no ids"),
        ({"ids": [1, VOCABULARY]}, f"id {VOCABULARY} is not in the vocabulary"),
        ({"ids": [-1, 2]}, "id -1"),
        ({"ids": [1] * 64}, "64 ids fill the context of 64"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, not 0"),
        ({"media": (MediaPlacement(ImageRef("a" * 64), 0, 1),)}, "no vision tower"),
        ({"min_version": 4}, "version 4, the engine has 3"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    module: Any, changes: dict[str, Any], says: str
) -> None:
    asked = request(**{"ids": [1, 2, 3], "session": "who", **changes})
    with pytest.raises(BackendContractError, match=says):
        run(LocalEngine(module, context=64, version=3), lambda engine: engine.generate(asked))


def test_siblings_that_go_on_alike_compute_it_once(module: Any) -> None:
    """All sampled the same id; then five got the same long observation, and one another."""
    prompt, seen = words(20, 3), words(25, 4)

    async def main(engine: LocalEngine) -> tuple[list[int], list[Generation]]:
        given: dict[str, Any] = {
            "group": "g",
            "sampling": Sampling(temperature=0.0),
            "max_tokens": 1,
        }
        first = await asyncio.gather(
            *(engine.generate(request(prompt, f"s{n}", **given)) for n in range(6))
        )
        after = [[*prompt, *first[0].ids, *(words(25, 9) if n == 5 else seen)] for n in range(6)]
        calls = (
            engine.generate(request(ids, f"s{n}", seed=n, group="g", call=1))
            for n, ids in enumerate(after)
        )
        return first[0].ids, await asyncio.gather(*calls)

    reply, answers = run(LocalEngine(module), main)
    assert sorted(answer.cached_tokens for answer in answers) == [20, 20] + [45] * 4
    for n, answer in enumerate(answers):
        ids = [*prompt, *reply, *(words(25, 9) if n == 5 else seen)]
        alone = run(
            LocalEngine(module), lambda engine, ids=ids, n=n: engine.generate(request(ids, seed=n))
        )
        assert bits([alone]) == bits([answer])


def test_siblings_compute_their_prompt_once(module: Any) -> None:
    prompt = words(60, 5)

    async def main(engine: LocalEngine) -> list[Generation]:
        calls = (engine.generate(request(prompt, f"s{n}", seed=n, group="g")) for n in range(8))
        return await asyncio.gather(*calls)

    answers = run(LocalEngine(module), main)
    assert sorted(answer.cached_tokens for answer in answers) == [0] + [59] * 7


def test_a_branch_is_cut_back_to_what_it_shares(module: Any) -> None:
    trunk, other = words(50, 6), words(9, 7)

    async def main(engine: LocalEngine) -> tuple[Generation, Generation, Generation]:
        first = await engine.generate(request(trunk, max_tokens=12))
        branch = await engine.generate(request(trunk[:40] + other, call=1))
        return first, branch, await engine.generate(request(trunk, max_tokens=12, call=2))

    first, branch, again = run(LocalEngine(module), main)
    assert branch.cached_tokens == 40
    assert close_to(branch.logprobs, full_logprobs(module, trunk[:40] + other + branch.ids, 8))
    assert bits([again]) == bits([first])


def test_two_calls_of_one_session_at_once(module: Any) -> None:
    prompt = words(30, 8)
    contexts = [prompt + words(5, n) for n in range(4)] + [words(30, 9)]

    async def main(engine: LocalEngine) -> list[Generation]:
        await engine.generate(request(prompt))
        return await asyncio.gather(
            *(engine.generate(request(ids, call=n)) for n, ids in enumerate(contexts))
        )

    answers = run(LocalEngine(module), main)
    for ids, answer in zip(contexts, answers, strict=True):
        assert close_to(answer.logprobs, full_logprobs(module, ids + answer.ids, 8))
    assert [answer.cached_tokens for answer in answers] == [30, 30, 30, 30, 0]


def test_more_sessions_than_slots_all_get_an_answer(module: Any) -> None:
    async def main(engine: LocalEngine) -> list[Generation]:
        return await asyncio.gather(
            *(engine.generate(request(words(9, n), f"s{n}", seed=n)) for n in range(40))
        )

    few, many = run(LocalEngine(module, slots=2), main), run(LocalEngine(module, slots=64), main)
    assert bits(few) == bits(many)


class Waiting(Sampler):
    """Counts the rows of each step and lets a test fail one."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.fail = False

    def pick(self, cdf: torch.Tensor, draws: Any) -> torch.Tensor:
        self.rows.append(len(draws))
        if self.fail:
            raise RuntimeError("the sampler is broken")
        return super().pick(cdf, draws)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_abort_returns_what_was_sampled(module: Any) -> None:
    sampler = Waiting()

    async def main(engine: LocalEngine) -> tuple[list[Generation], Generation]:
        calls = [
            asyncio.ensure_future(engine.generate(request([n, 1], f"s{n}", max_tokens=400)))
            for n in range(3)
        ]
        await until(lambda: len(sampler.rows) > 5)
        late = asyncio.ensure_future(engine.generate(request([9, 1], "late", max_tokens=400)))
        await asyncio.sleep(0)
        engine.abort()
        ended = [await call for call in [*calls, late]]
        return ended, await engine.generate(request([0, 1], "s0", seed=7))

    ended, after = run(LocalEngine(module, slots=2, sampler=sampler), main)
    assert {answer.finish for answer in ended} == {"abort"}
    assert [len(answer.ids) > 0 for answer in ended] == [True, True, False, False]
    assert all(len(answer.ids) == len(answer.logprobs) for answer in ended)
    assert after.finish == "length"


def test_a_cancelled_call_frees_its_row(module: Any) -> None:
    sampler = Waiting()

    async def main(engine: LocalEngine) -> Generation:
        call = asyncio.ensure_future(engine.generate(request([1, 2], "gone", max_tokens=500)))
        await until(lambda: sampler.rows)
        waiting = asyncio.ensure_future(engine.generate(request([3, 4], "next", max_tokens=3)))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await asyncio.wait_for(waiting, 30)

    assert len(run(LocalEngine(module, slots=1, sampler=sampler), main).ids) == 3
    assert len(sampler.rows) < 400


def test_a_failing_step_reaches_every_caller(module: Any) -> None:
    sampler = Waiting()

    async def main(engine: LocalEngine) -> list[Any]:
        calls = [
            asyncio.ensure_future(engine.generate(request([n, 1], f"s{n}", max_tokens=400)))
            for n in range(3)
        ]
        await until(lambda: sampler.rows)
        sampler.fail = True
        ended = await asyncio.gather(*calls, return_exceptions=True)
        return [
            *ended,
            *await asyncio.gather(engine.generate(request([1])), return_exceptions=True),
        ]

    *ended, later = run(LocalEngine(module, slots=2, sampler=sampler), main)
    assert all(
        isinstance(error, EngineError) and "the sampler is broken" in str(error)
        for error in [*ended, later]
    )
    assert all(isinstance(error.__cause__, RuntimeError) for error in ended)


def test_weights_that_overflow_fail_their_calls_and_no_others() -> None:
    module = model()
    with torch.no_grad():
        module.model.embed_tokens.weight[5] = torch.nan
        module.lm_head.weight = torch.nn.Parameter(
            module.model.embed_tokens.weight.nan_to_num().clone()
        )

    async def main(engine: LocalEngine) -> list[Any]:
        bad = await asyncio.gather(
            engine.generate(request([1, 5, 2], "bad")), return_exceptions=True
        )
        return [*bad, await engine.generate(request([1, 2], "good", banned_ids=frozenset([5])))]

    bad, good = run(LocalEngine(module, slots=1), main)
    assert isinstance(bad, EngineError)
    assert "logprob nan" in str(bad)
    assert len(good.ids) == 8


def test_a_closed_engine_aborts_and_refuses(module: Any) -> None:
    async def main() -> Generation:
        engine = LocalEngine(module)
        call = asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=500)))
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        engine.release("s")
        engine.abort()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request([1]))
        return await call

    assert asyncio.run(main()).finish in ("abort", "length")


def test_the_engine_is_one_and_can_be_made_from_a_config_or_a_directory(
    tmp_path: Any, module: Any
) -> None:
    made = LocalEngine(config(), context=32, renderer="the renderer")
    assert isinstance(made, Engine)
    assert isinstance(made, SupportsWeightUpdate)
    assert (made.context, made.version, made.renderer) == (32, 0, "the renderer")
    module.save_pretrained(tmp_path)
    loaded = LocalEngine.load(tmp_path, renderer=None, version=5)
    loaded.set_renderer("bound")
    assert (loaded.context, loaded.version, loaded.renderer) == (512, 5, "bound")
    ids = words(8, 1)
    assert bits([run(loaded, lambda e: e.generate(request(ids)))]) == bits(
        [run(LocalEngine(module), lambda e: e.generate(request(ids)))]
    )
    with pytest.raises(ModelError, match="nowhere"):
        LocalEngine.load(tmp_path / "nowhere")


def test_the_copy_is_its_own(module: Any) -> None:
    engine = LocalEngine(module)
    assert module.config._attn_implementation != engine._model.module.config._attn_implementation
    own = {p.data_ptr() for p in module.parameters()}
    assert not own & {p.data_ptr() for p in engine._model.module.parameters()}


def test_a_sampler_sees_request_and_position(module: Any) -> None:
    class Forced(Sampler):
        def pick(self, cdf: torch.Tensor, draws: list[RowDraw]) -> torch.Tensor:  # type: ignore[override]
            drawn = super().pick(cdf, draws)
            for row, draw in enumerate(draws):
                drawn[row] = draw.request.seed + draw.position
            return drawn

    answer = run(
        LocalEngine(module, sampler=Forced()),
        lambda engine: engine.generate(request([1, 2], seed=10, max_tokens=4)),
    )
    assert answer.ids == [10, 11, 12, 13]
    assert close_to(answer.logprobs, full_logprobs(module, [1, 2, 10, 11, 12, 13], 4))


def test_a_reply_ends_behind_the_id_that_completes_a_stop_text():
    """The same ids as without, up to there; beside calls that are not stopped."""

    def decode(ids):
        return "".join(f"{i:02d}" for i in ids)

    async def main(engine):
        free = await engine.generate(request(words(9, 1), "a", max_tokens=20))
        at = decode(free.ids)[13:17]  # the middle of one id to the middle of the next but one
        stop = StopText([at], decode)
        both = [
            engine.generate(request(words(9, 1), "b", max_tokens=20, stop_text=stop)),
            engine.generate(request(words(9, 1), "c", max_tokens=20)),
        ]
        return free, await asyncio.gather(*both), stop.first_completion(free.ids)

    free, (stopped, other), count = run(LocalEngine(model()), main)
    assert 2 <= count <= 9
    assert (stopped.ids, stopped.logprobs, stopped.finish) == (
        free.ids[:count],
        free.logprobs[:count],
        "stop",
    )
    assert other.ids == free.ids

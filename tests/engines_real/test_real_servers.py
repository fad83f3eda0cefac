"""vLLM, SGLang and llama.cpp, the real ones, each serving a tiny model on this machine's
CPU: `make test-engines`."""

from __future__ import annotations

import asyncio

import pytest
import torch
from kit import real_servers as kit
from kit.real_servers import CLOSE, PROMPT, adapter, play, well

from turnwright.engines import Request, Sampling, check_generation
from turnwright.engines.local import fingerprint
from turnwright.engines.remote import Fleet, probe_server
from turnwright.errors import SyncError
from turnwright.training import unique_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def running(request, tmp_path_factory):
    """A server that takes new weights, and the model that it began with; every test
    leaves them in agreement."""
    model = kit.Model(tmp_path_factory.mktemp(request.param))
    with kit.server(request.param, model.untied, model.root) as server:
        yield model, server, kit.CLIENTS[request.param]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp("llama"))
    with kit.server("llamacpp", kit.llama_file(model), model.root) as server:
        yield model, server


def test_what_it_can_do_is_found(running):
    _, server, make = running

    async def work():
        engine = make(server.url)
        try:
            return await probe_server(engine)
        finally:
            await engine.close()

    found = asyncio.run(work())
    assert found.trainable, list(found.findings())
    assert found.updates
    assert found.context == kit.CONTEXT
    assert found.logprob_error < CLOSE


def test_rollouts_of_several_turns_have_the_trainers_logprobs(running):
    model, server, make = running

    async def work():
        engine = kit.fleet(model, make, server)
        await engine.update(unique_weights(model.module), 1)
        trajectories = await play(engine, model)
        counts = engine.members[0].engine.counts
        await engine.close()
        return trajectories, counts

    trajectories, counts = asyncio.run(work())
    well(trajectories)
    gap, ids = model.gap(trajectories)
    print(
        f"{make.kind}: max |dlogp| {gap:.2g} over {ids} ids, {counts['cached_tokens']} of "
        f"{counts['prompt_tokens']} ids cached"
    )
    assert gap < CLOSE
    assert {span.version for t in trajectories for span in t.spans if span.sampled} == {1}


@pytest.mark.parametrize(("temperature", "banned"), [(0.7, ()), (1.0, (11, 12, 13)), (0.0, ())])
def test_logprobs_are_of_what_is_sampled_from(running, temperature, banned):
    model, server, make = running

    async def work():
        engine = make(server.url)
        request = Request(
            PROMPT,
            48,
            frozenset(),
            1,
            "a",
            sampling=Sampling(temperature),
            banned_ids=frozenset(banned),
        )
        found = await engine.generate(request)
        check_generation(found, request, engine.who)
        await engine.close()
        return found

    found = asyncio.run(work())
    wanted = model.forward([*PROMPT, *found.ids], len(PROMPT), temperature or 1.0, banned)
    assert max(abs(p - w) for p, w in zip(found.logprobs, wanted, strict=True)) < CLOSE
    assert not set(found.ids) & set(banned)


def test_replies_that_are_aborted_go_on_where_they_were(running):
    model, server, make = running

    async def work():
        engine = kit.fleet(model, make, server)
        playing = asyncio.create_task(play(engine, model, tasks=16))
        client = engine.members[0].engine
        aborts = 0
        while not playing.done() and aborts < 12:
            await asyncio.sleep(0.1)
            if not engine.members[0].calls:
                continue
            await client.pause("abort")
            await client.resume()
            aborts += 1
        trajectories = await playing
        await engine.close()
        return trajectories, client.counts

    trajectories, counts = asyncio.run(work())
    well(trajectories)
    assert counts["aborted"] > 0
    assert any(len(turn.spans) > 1 for t in trajectories for turn in t.turns)
    assert model.gap(trajectories)[0] < CLOSE


def test_new_weights_arrive_between_two_turns_and_are_proven(running):
    model, server, make = running
    torch.manual_seed(3)

    async def work():
        engine = kit.fleet(model, make, server)
        before = await engine.update(unique_weights(model.module), 2)
        old = await engine.members[0].engine.weights_label()
        model.nudge()
        after = await engine.update(unique_weights(model.module), 3)
        new = await engine.members[0].engine.weights_label()
        trajectories = await play(engine, model)
        model.nudge()
        with pytest.raises(SyncError, match="differ from the trainer's by up to"):
            # The trainer moved on, and the server did not.
            await engine.load_from_disk(model.directories.root / "policy-3", 4)
        await engine.update(unique_weights(model.module), 5)
        await engine.close()
        return before, after, old, new, trajectories

    before, after, old, new, trajectories = asyncio.run(work())
    assert before != after
    assert old.scores != new.scores
    if new.name is not None:
        assert new.name == "3"
    well(trajectories)


def test_the_newest_weights_are_those_that_train(running):
    """What was sampled behind an update is the updated trainer's, to the last test's margin."""
    model, server, make = running
    torch.manual_seed(4)
    model.nudge()

    async def work():
        engine = kit.fleet(model, make, server)
        assert await engine.update(unique_weights(model.module), 6) == fingerprint(
            unique_weights(model.module)
        )
        trajectories = await play(engine, model)
        await engine.close()
        return trajectories

    assert model.gap(asyncio.run(work()))[0] < CLOSE


def test_llamacpp_gives_ids_and_what_logprobs_it_has(llama):
    model, server = llama

    async def work():
        engine = Fleet(
            [kit.CLIENTS["llamacpp"](server.url, renderer=model.renderer, missing_logprobs="mask")]
        )
        trajectories = await play(engine, model)
        client = engine.members[0].engine
        found, counts = await probe_server(client), client.counts.copy()
        plain = await client.generate(Request(PROMPT, 48, frozenset(), 1, "a"))
        await engine.close()
        return trajectories, found, counts, plain

    trajectories, found, counts, plain = asyncio.run(work())
    well(trajectories)
    gap, ids = model.gap(trajectories)
    print(
        f"llama.cpp: max |dlogp| {gap:.2g} over {ids} ids, {counts['logprobs_missing']} without one"
    )
    assert gap < CLOSE
    assert ids > 100
    assert not found.updates
    masked = sum(t.metrics.get("logprobs_masked", 0) for t in trajectories)
    assert 0 < masked <= counts["logprobs_missing"]
    # Of the model itself, where nothing is banned.
    wanted = model.forward([*PROMPT, *plain.ids], len(PROMPT))
    known = [abs(p - w) for p, w in zip(plain.logprobs, wanted, strict=True) if p is not None]
    assert known
    assert max(known) < CLOSE


def test_llamacpp_is_greedy_at_temperature_zero(llama):
    model, server = llama

    async def work():
        client = kit.CLIENTS["llamacpp"](
            server.url, renderer=model.renderer, missing_logprobs="mask"
        )
        greedy = Sampling(temperature=0.0)
        asked = [
            Request(PROMPT, 24, frozenset(), seed, f"s{seed}", sampling=greedy) for seed in range(3)
        ]
        found = [await client.generate(request) for request in asked]
        await client.close()
        return found

    found = asyncio.run(work())
    assert len({tuple(generation.ids) for generation in found}) == 1
    for place, token in enumerate(found[0].ids[:8]):
        likeliest = model.forward([*PROMPT, *found[0].ids[:place], token], len(PROMPT) + place)[0]
        others = [
            model.forward([*PROMPT, *found[0].ids[:place], other], len(PROMPT) + place)[0]
            for other in range(20, 40)
        ]
        assert likeliest >= max(others) - CLOSE


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_adapter_answers_and_its_versions_are_told_apart(kind, tmp_path):
    model = kit.Model(tmp_path)
    adapters = [adapter(model, tmp_path / f"a{seed}", seed) for seed in (1, 2)]
    with kit.server(kind, model.source, tmp_path, lora=8) as server:

        async def work():
            engine, found = kit.CLIENTS[kind](server.url), []
            assert (await probe_server(engine)).lora
            for version, (directory, _) in enumerate(adapters, 1):
                await engine.load_adapter("policy", directory, version)
                for _ in range(3):
                    found.append(
                        (version, await engine.generate(Request(PROMPT, 32, frozenset(), 1, "a")))
                    )
            await engine.close()
            return found

        for version, generation in asyncio.run(work()):
            ids = [*PROMPT, *generation.ids]
            wanted = model.forward(ids, len(PROMPT), module=adapters[version - 1][1])
            assert max(abs(p - w) for p, w in zip(generation.logprobs, wanted, strict=True)) < CLOSE
            other = model.forward(ids, len(PROMPT), module=adapters[2 - version][1])
            assert max(abs(p - w) for p, w in zip(generation.logprobs, other, strict=True)) > CLOSE
            assert generation.version == version

"""Replies in flight during weight updates: they keep their bits, name the weights of each id,
and cost no time-out."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import remote_engines as kit

pytest.importorskip("torch")
from kit.fleets import QUICK, question, weights
from kit.interrupts import interrupt, leaky, on_thread, whole
from kit.serving import CLIENTS, PROMPT, beginning, run

from turnwright.engines import Generation, Request, StopText
from turnwright.engines.remote import Fleet, SglangEngine, VllmEngine
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.response import ExpectedWeights, version_runs
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.errors import BackendContractError, ConfigError, EngineError, StaleWeights
from turnwright.training import create_tiny_model, score_with_model, unique_weights  # noqa: F401
from turnwright.training.model.models import load

WAYS = [("vllm", {"route": "generate"}), ("vllm", {"route": "completions"}), ("sglang", {})]
MODES = {
    "recompute": ("abort", "abort", True),
    "salt": ("abort&clear_cache=false", "abort", False),
    "keep": ("keep&clear_cache=false", "in_place", False),
}
"""Pause of vLLM, pause of SGLang, and whether the cache is dropped, by `in_flight`."""


async def compare(generate, app, cuts):
    """Compare replies that are cut after some ids (`cuts`) with those that
    are not; return the former.

    One server for all examples: each cuts the replies of one seed.
    """
    loop, made = asyncio.get_running_loop(), []

    @settings(max_examples=15, deadline=None)
    @given(seed=st.integers(0, 2**63), chosen=st.sets(st.integers(0, 23)), stop=st.booleans())
    def check(seed, chosen, stop):
        def ask(where):
            cuts.clear()
            cuts.update(where)
            text = StopText(["er 7", "a"], app.decode) if stop else None
            request = Request(PROMPT, 24, app.end_ids, seed, "a", stop_text=text)
            return asyncio.run_coroutine_threadsafe(generate(request), loop).result(60)

        plain, found = ask(()), ask(chosen)
        assert (found.ids, found.logprobs, found.finish) == (
            plain.ids,
            plain.logprobs,
            plain.finish,
        )
        made.append(found)

    await asyncio.to_thread(check)
    return made


@pytest.mark.parametrize(("kind", "options"), WAYS)
def test_interrupted_replies_of_a_server_have_the_bits_of_others(directory, kind, options):
    cuts: set[int] = set()

    async def work(client, app, url):
        sampler = interrupt(app.engine, lambda _, position: position in cuts)
        made = await compare(lambda request: whole(client.generate, request), app, cuts)
        return sampler.interruptions, made

    interruptions, found = run(directory, kind, work, speculate=3, **options)
    assert interruptions > 20
    assert len(found) >= 15


@pytest.mark.parametrize(("kind", "options"), WAYS)
def test_held_replies_go_on_with_the_bits_of_others(directory, kind, options):
    """Each pause comes over the socket while the engine computes the step after
    which it holds the reply."""
    cuts: set[int] = set()
    holds = {"vllm": "keep", "sglang": "retract"}[kind]

    async def work(client, app, url):
        loop, pauses = asyncio.get_running_loop(), []

        def after(_, position):
            if position in cuts:
                cuts.discard(position)
                pauses.append(position)
                asyncio.run_coroutine_threadsafe(client.pause(holds), loop).result(60)
                asyncio.run_coroutine_threadsafe(client.resume(), loop)
            return False

        interrupt(on_thread(app.engine), after)
        made = await compare(client.generate, app, cuts)
        return pauses, made, client.counts["aborted"]

    pauses, found, aborted = run(directory, kind, work, speculate=3, **options)
    assert len(pauses) > 20
    assert {(made.version, *made.later_versions, made.cache_version) for made in found} == {
        (0, None)
    }
    assert not aborted


def test_parts_of_a_reply_join_with_the_weights_of_each_id():
    def part(count, version, *later):
        return Generation([7] * count, [-1.0] * count, "abort", version, later_versions=list(later))

    assert (
        part(0, 1).joined(part(2, 2)).version,
        part(0, 1).joined(part(2, 2)).later_versions,
    ) == (2, [])
    made = part(2, 1).joined(part(3, 2, (1, 3))).joined(part(1, 3)).joined(part(1, 4))
    assert (made.version, made.later_versions, len(made.ids)) == (1, [(2, 2), (3, 3), (6, 4)], 7)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_pause_that_ends_replies_ends_those_that_another_holds(directory, kind):
    async def work(client, app, url):
        begun = beginning(app)
        asked = asyncio.create_task(
            client.generate(Request(PROMPT, 170, frozenset(), 1, "a", banned_ids=app.end_ids))
        )
        await begun.wait()
        await client.pause("keep" if kind == "vllm" else "retract")
        await client.pause("abort")
        made = await asyncio.wait_for(asked, 60)
        await client.resume()
        return made

    made = run(directory, kind, work)
    assert made.finish == "abort"
    assert len(made.ids) < 170


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_call_on_its_way_waits_out_the_update_and_costs_it_nothing(
    directory,
    kind,
    tmp_path,
    monkeypatch,
):
    """The calls reach the server after its pause; waiting for them would take
    longer than the test may."""
    monkeypatch.setattr("turnwright.engines.remote.replica.DRAIN_S", 1000.0)
    monkeypatch.setattr("turnwright.engines.remote.replica.ANSWER_S", 1000.0)
    model, _ = load(directory)

    async def work(client, app, url):
        engine = Fleet(
            [client],
            delivery=WeightDelivery(
                directories=ModelDirectories(tmp_path / "weights", directory),
                expected_logprobs=score_with_model(model),
            ),
        )
        await engine.update(unique_weights(model), 1)
        sample, paused, pause = client._sample, asyncio.Event(), app.replies.pause
        update_came = threading.Event()

        def after(_, position):
            # However fast the server is, no reply ends before the update.
            if position >= len(PROMPT) + 20:
                update_came.wait(60)
            return False

        interrupt(on_thread(app.engine), after)

        async def later(*call):
            await paused.wait()
            return await sample(*call)

        async def noted(mode):
            update_came.set()
            await pause(mode)
            paused.set()

        app.replies.pause = noted
        begun = beginning(app, 4)
        running = [
            asyncio.create_task(
                engine.generate(
                    Request(PROMPT, 170, frozenset(), n, f"r{n}", banned_ids=app.end_ids)
                )
            )
            for n in range(4)
        ]
        await begun.wait()
        client._sample = later
        sent = [
            asyncio.create_task(
                engine.generate(Request(PROMPT, 9, frozenset(), n, f"s{n}", banned_ids=app.end_ids))
            )
            for n in range(64)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.update(unique_weights(model), 2)
        found = await asyncio.gather(*running), await asyncio.gather(*sent)
        counts = engine.counts.copy()
        await engine.close()
        return found, counts

    (running, sent), counts = run(directory, kind, work)
    assert {(made.version, made.finish, len(made.ids)) for made in running} == {(1, "length", 170)}
    assert all([version for _, version in made.later_versions] == [2] for made in running)
    assert all(0 < made.later_versions[0][0] < 170 for made in running)
    assert {(made.version, made.finish, len(made.ids)) for made in sent} == {(2, "length", 9)}
    assert not [name for name in counts if name.startswith("asked_again")]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_pauses_and_drops_caches_as_it_says(directories, kind, mode):
    of_vllm, of_sglang, drops = MODES[mode]
    with kit.servers(kind) as server:

        async def work():
            client = CLIENTS[kind](server.url, in_flight=mode)
            engine = Fleet([client], QUICK, delivery=WeightDelivery(directories=directories))
            for version in (3, 4):
                await engine.update(weights(version), version)
                made = await engine.generate(question(f"s{version}"))
                assert (made.version, made.later_versions, made.cache_version) == (
                    version,
                    [],
                    None,
                )
            await engine.close()

        kit.run(work())
        asked = [
            row["body"]
            for row in server.seen("/inference/v1/generate" if kind == "vllm" else "/generate")
        ]
        salts = {
            body.get("cache_salt" if kind == "vllm" else "extra_key")
            for body in asked
            if "logprob_start_len" in body
        }
        if kind == "vllm":
            assert {row["path"] for row in server.seen("/pause")} == {f"/pause?mode={of_vllm}"}
            assert bool(server.seen("/reset_prefix_cache")) is drops
        else:
            assert {row["body"]["mode"] for row in server.seen("/pause_generation")} == {of_sglang}
            loads = [row["body"] for row in server.seen("/update_weights_from_disk")]
            assert {(body["flush_cache"], body["abort_all_requests"]) for body in loads} == {
                (drops, mode != "keep")
            }
            assert salts >= ({None} if drops else {"turnwright-3", "turnwright-4"})


def test_a_server_without_what_a_mode_needs_is_refused_by_name(directory):
    def refused(client, words):
        with pytest.raises(ConfigError, match=words):
            kit.run(client.open())

    with kit.servers("sglang", KIT_OLD="1") as server:
        refused(
            SglangEngine(server.url, in_flight="salt"),
            r"SGLang 0\.5\.19 .*engine\.in_flight = salt: needs the field extra_key",
        )
    with kit.servers("vllm", KIT_PLAIN="1") as server:
        refused(
            VllmEngine(server.url, in_flight="keep"),
            r"vLLM 0\.32\.0 .*engine\.in_flight = keep: needs /inference",
        )
    with kit.servers("llamacpp") as server:
        from turnwright.engines.remote import LlamaCppEngine

        refused(LlamaCppEngine(server.url, in_flight="salt"), "takes no new weights")

    async def work(client, app, url):
        await client.open()
        with pytest.raises(
            EngineError, match=r"mode must be abort, wait, keep, retract, not 'in_place'"
        ):
            await client.pause("in_place")
        keeps = type(client)(url, in_flight="keep")
        with pytest.raises(
            ConfigError, match="turnwright serve computes the cache of replies in flight again"
        ):
            await keeps.open()
        await keeps.close()
        salted = type(client)(url, in_flight="salt")
        made = await salted.generate(Request(PROMPT, 5, frozenset(), 1, "a"))
        await salted.close()
        return made

    for kind in CLIENTS:
        assert len(run(directory, kind, work).ids) == 5


# The wire formats of both kinds


def answer(kind, names, cached=0):
    """A response whose ids were sampled with weights of these names, in the
    form of a kind of server."""
    ids = list(range(1, len(names) + 1))
    spans = [
        {
            "version": name,
            "start": at,
            "end": next((n for n in range(at, len(names)) if names[n] != name), len(names)),
        }
        for at, name in enumerate(names)
        if not at or names[at - 1] != name
    ]
    if kind == "vllm":
        choice = {"token_ids": ids, "finish_reason": "length", "weight_versions": spans}
        choice["logprobs"] = {"content": [{"token_id": one, "logprob": -1.0} for one in ids]}
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"request_id": "r", "prompt_token_ids": PROMPT, "choices": [choice], "usage": usage}
    meta = {
        "id": "r",
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(PROMPT),
        "cached_tokens": cached,
    }
    meta |= {"weight_version": names[-1], "weight_versions": spans}
    return {
        "output_ids": ids,
        "meta_info": meta | {"output_token_logprobs": [[-1.0, one, None] for one in ids]},
    }


def read(kind, raw, mode, sent, updates):
    client = CLIENTS[kind](
        "http://127.0.0.1:1", in_flight=mode, **({"route": "generate"} if kind == "vllm" else {})
    )
    expected = ExpectedWeights(
        sent, str(sent), "r", {str(version): version for version in updates}, mode
    )
    return client._read(raw, Request(PROMPT, 99, frozenset(), 1, "a"), expected)


@pytest.mark.parametrize("kind", CLIENTS)
@given(
    sent=st.integers(0, 5),
    steps=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    mode=st.sampled_from(sorted(MODES)),
    cached=st.sampled_from((0, 4)),
)
def test_every_id_has_the_version_of_its_weights(kind, sent, steps, mode, cached):
    versions = [sent + sum(steps[: n + 1]) for n in range(len(steps))]
    found = read(
        kind, answer(kind, [str(one) for one in versions], cached), mode, sent, range(40)
    ).versions
    runs = [(0, found.version), *found.later, (len(versions), -1)]
    told = [version for (start, version), (end, _) in pairwise(runs) for _ in range(start, end)]
    assert told == versions
    assert all(one != other for (_, one), (_, other) in pairwise(runs))
    outlived = versions[-1] > sent and (mode == "keep" or (mode == "salt" and cached > 0))
    assert found.cache == (sent if outlived else None)


@pytest.mark.parametrize("kind", CLIENTS)
@given(
    sent=st.integers(1, 5),
    name=st.sampled_from(("default", "0", "7-unfinished", "9")),
    first=st.booleans(),
)
def test_names_that_no_update_gave_are_refused(kind, sent, name, first):
    names = [name, str(sent)] if first else [str(sent), name]
    with pytest.raises(StaleWeights, match=f"'{name}', but policy {sent} is '{sent}'"):
        read(kind, answer(kind, names), "keep", sent, (*range(7), 7))


@pytest.mark.parametrize("spans", [[("2", 1, 3)], [("2", 0, 1), ("3", 2, 3)]])
def test_spans_with_gaps_are_a_breach(spans):
    told = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    with pytest.raises(BackendContractError, match="must start where the one before ends"):
        version_runs(told, VllmEngine("http://127.0.0.1:1").breach)


def test_keep_needs_the_weights_of_each_id():
    raw = answer("sglang", ["1", "1"])
    del raw["meta_info"]["weight_versions"]
    assert read("sglang", raw, "salt", 1, ()).versions.version == 1
    with pytest.raises(
        BackendContractError, match=r"engine\.in_flight = keep needs the weights of each id"
    ):
        read("sglang", raw, "keep", 1, ())


# Only its client names the session, by which `turnwright serve` finds a cache.
@pytest.mark.parametrize("kind", ["sglang"])
def test_a_server_whose_cache_outlives_its_weights_is_seen_by_its_logprobs(
    directory,
    kind,
    tmp_path,
):
    import torch

    torch.manual_seed(0)
    model, _ = load(directory)

    async def work(client, app, url, plant):
        plant(app.engine)
        engine = Fleet(
            [client],
            delivery=WeightDelivery(
                directories=ModelDirectories(tmp_path / plant.__name__, directory)
            ),
        )
        await engine.generate(Request(PROMPT, 9, frozenset(), 1, "a"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
        await engine.update(unique_weights(model), 1)
        made = await engine.generate(Request(PROMPT, 9, frozenset(), 1, "a"))
        scores = await client.score([*PROMPT, *made.ids])
        await engine.close()
        return made, np.abs(np.subtract(made.logprobs, scores[-len(made.ids) :])).max()

    def well(engine):
        return engine

    for plant in (well, leaky):
        made, gap = run(directory, kind, lambda *parts, plant=plant: work(*parts, plant))
        assert made.version == 1
        assert (made.cached_tokens > 0) is (plant is leaky)
        assert bool(gap > 1e-2) is (plant is leaky)

"""Each client against a server process over a real socket: what is asked, what is answered, and
every way to get it wrong."""

from __future__ import annotations

import asyncio
import math
import os
import time

import pytest
import test_remote_liars as liars
from kit import remote_engines as kit

from turnwright.engines import Engine, Request, Sampling, StopText, check_generation
from turnwright.engines.remote import (
    ChatEngine,
    LlamaCppEngine,
    SglangEngine,
    VllmEngine,
    connect,
    probe_server,
)
from turnwright.engines.remote.remote_engine import CANARY, KNOWN_TEXT
from turnwright.errors import (
    BackendContractError,
    ConfigError,
    EngineError,
    EngineUnavailable,
    NotTrainable,
    StaleWeights,
    SyncError,
)

KINDS = {
    "generate": ("vllm", lambda url, **o: VllmEngine(url, **o)),
    "completions": ("vllm", lambda url, **o: VllmEngine(url, route="completions", **o)),
    "sglang": ("sglang", lambda url, **o: SglangEngine(url, **o)),
    "llamacpp": ("llamacpp", lambda url, **o: LlamaCppEngine(url, **o)),
}


@pytest.fixture(scope="module")
def running():
    with kit.servers("vllm", "sglang", "llamacpp", "chat") as found:
        yield {server.kind: server for server in found}


@pytest.fixture(params=list(KINDS))
def client(request, running):
    kind, make = KINDS[request.param]
    return running[kind], make


def ask(make, server, request=None, times=1, **options):
    async def work():
        engine = make(server.url, **options)
        try:
            found = [await engine.generate(request or question()) for _ in range(times)]
        finally:
            await engine.close()
        return found if times > 1 else found[0]

    return kit.run(work())


def question(tokens=24, **more) -> Request:
    return Request(
        kit.PROMPT, tokens, more.pop("stop_ids", frozenset({kit.END})), 7, "train/0/a/0/0", **more
    )


def test_ids_and_logprobs_are_those_that_were_sampled(client):
    server, make = client
    for temperature, banned in ((1.0, ()), (0.7, ()), (1.0, (2, 5)), (1.4, (1,))):
        request = question(sampling=Sampling(temperature), banned_ids=frozenset(banned))
        for found in ask(make, server, request, times=5):
            check_generation(found, request, "test")
            rows, last = kit.table(1), kit.PROMPT[-1]
            for token, logprob in zip(found.ids, found.logprobs, strict=True):
                assert logprob == pytest.approx(
                    kit.tempered(rows[last], temperature, banned)[token], abs=1e-9
                )
                last = token
            assert (found.finish == "stop") == (found.ids[-1] == kit.END)


@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_every_default_of_the_server_is_set_and_no_seed_reaches_vllm(client, min_p):
    server, make = client
    ask(make, server, question(9, sampling=Sampling(min_p=min_p)))
    body = [
        row["body"]
        for row in server.seen()
        if row["path"] != "gone" and "tokens" not in row["path"]
    ]
    sent = next(
        row
        for row in reversed(body)
        if "max_tokens" in str(row)
        or "max_new_tokens" in row
        or "n_predict" in row
        or "sampling_params" in row
    )
    sampling = sent.get("sampling_params", sent)
    wanted = {"temperature": 1.0, "top_p": 1.0, "min_p": min_p}
    assert {key: sampling[key] for key in wanted} == wanted
    assert sampling["top_k"] in (-1, 0)
    assert sampling.get("repetition_penalty", sampling.get("repeat_penalty")) == 1.0
    assert 9 in (
        sampling.get("max_tokens"),
        sampling.get("max_new_tokens"),
        sampling.get("n_predict"),
    )
    if server.kind == "vllm":
        assert "seed" not in sampling
        assert sampling["stop_token_ids"] == [kit.END]
        assert sampling["ignore_eos"] is True
        assert "stop" not in sampling
    if server.kind == "sglang":
        assert sampling["stop_token_ids"] == [kit.END]
        assert sampling["ignore_eos"] is False


FAULTS = {
    "echo": "prompt",
    "no_logprobs": "logprob",
    "nan": "logprob|JSON",
    "finish": "finish",
    "count": "logprob|completion_probabilities",
    "long": "ids",
    "garbage": "JSON",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_breach_is_an_error_that_names_server_version_and_field(client, fault):
    server, make = client
    server.fault(fault)
    with pytest.raises(BackendContractError, match=FAULTS[fault]) as caught:
        ask(make, server)
    assert server.url in str(caught.value)
    if fault not in ("garbage", "nan"):
        version = {"vllm": "0.32.0", "sglang": "0.5.19", "llamacpp": "b1-test"}[server.kind]
        assert version in str(caught.value)


LIKELY_KINDS = ["generate", "completions", "sglang"]
"""Routes that report the most likely ids."""


@pytest.mark.parametrize("kind", LIKELY_KINDS)
@pytest.mark.parametrize("most", [1, 3, 19, 20])
@pytest.mark.parametrize(("temperature", "banned"), [(1.0, ()), (0.7, (2, 5)), (0.0, ())])
def test_alternatives_are_the_most_likely_ids(running, kind, most, temperature, banned):
    name, make = KINDS[kind]
    request = question(
        sampling=Sampling(temperature), banned_ids=frozenset(banned), alternatives=most
    )
    for found in ask(make, running[name], request, times=4):
        check_generation(found, request, "test")
        rows, last = kit.table(1), kit.PROMPT[-1]
        for token, likely in zip(found.ids, found.alternatives, strict=True):
            row = kit.tempered(rows[last], temperature or 1.0, banned)
            best = sorted(range(kit.IDS), key=lambda id_, row=row: -row[id_])
            # Of 20 vLLM may report 19, and the sampled one in place of the last.
            count = len(likely) if (kind, most) == ("generate", 20) else most
            assert count in (most, 19)
            assert [id_ for id_, _ in likely] == best[:count]
            assert [p for _, p in likely] == pytest.approx([row[i] for i in best[:count]])
            last = token


@pytest.mark.parametrize("kind", LIKELY_KINDS)
def test_alternatives_are_asked_for_where_they_are_wanted_only(running, kind):
    name, make = KINDS[kind]
    for most, sent in ((0, (0, None)), (4, (5, 4, 4))):
        found = ask(make, running[name], question(alternatives=most))
        assert len(found.alternatives) == (len(found.ids) if most else 0)
        body = [row["body"] for row in running[name].seen() if "abort" not in row["path"]][-1]
        asked = body.get("top_logprobs_num"), body.get("sampling_params", body).get("logprobs")
        assert set(asked) - {None} <= set(sent)


@pytest.mark.parametrize("kind", LIKELY_KINDS)
@pytest.mark.parametrize("fault", ["no_likely", "twice_likely"])
def test_alternatives_that_do_not_fit_are_a_breach(running, kind, fault):
    name, make = KINDS[kind]
    if (kind, fault) == ("completions", "twice_likely"):
        fault = "no_likely"  # a table has no id twice
    running[name].fault(fault)
    with pytest.raises(BackendContractError, match=r"top_logprobs|most likely ids") as caught:
        ask(make, running[name], question(alternatives=3))
    assert running[name].url in str(caught.value)


@pytest.mark.parametrize("make", [KINDS["generate"][1], KINDS["completions"][1]])
def test_vllms_word_for_no_logprob_is_none(running, make):
    running["vllm"].fault("floor")
    with pytest.raises(BackendContractError, match="-9999"):
        ask(make, running["vllm"])


@pytest.mark.parametrize(
    "fault",
    [
        dict(kind="status", status=500),
        dict(kind="status", status=503),
        dict(kind="reset"),
        dict(kind="truncated"),
    ],
)
def test_what_may_pass_is_told_apart(client, fault):
    server, make = client
    server.fault(**fault)
    with pytest.raises(EngineUnavailable, match=server.url):
        ask(make, server)
    assert ask(make, server).ids  # and it does pass


def test_a_refusal_is_no_fault_of_the_line(client):
    server, make = client
    server.fault("status", status=400)
    with pytest.raises(EngineError, match="400") as caught:
        ask(make, server)
    assert not isinstance(caught.value, (EngineUnavailable, BackendContractError))


def test_a_server_that_hangs_meets_its_deadline_and_is_told(client):
    server, make = client
    server.fault("hang", seconds=20)
    before = len(server.seen("gone"))
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match="did not answer"):
        ask(make, server, request_s=0.2)
    assert time.monotonic() - began < 19  # the server hangs for 20
    # The connection was closed, which ends the request in the server.
    wait_for(lambda: len(server.seen("gone")) > before)


def test_cancelling_ends_the_request_in_the_server(client):
    server, make = client
    server.fault("hang", seconds=20)
    before, aborts = (
        len(server.seen("gone")),
        len([row for row in server.seen() if "abort" in row["path"]]),
    )

    async def work():
        engine = make(server.url)
        await engine.open()
        asked = len(server.seen())
        task = asyncio.create_task(engine.generate(question()))
        await asyncio.to_thread(wait_for, lambda: len(server.seen()) > asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if server.kind != "llamacpp":
            await asyncio.to_thread(
                wait_for,
                lambda: len([row for row in server.seen() if "abort" in row["path"]]) > aborts,
            )
        await engine.close()

    kit.run(work())
    wait_for(lambda: len(server.seen("gone")) > before)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["generate", "sglang"])
def test_an_answer_of_other_weights_is_refused(running, name):
    kind, make = KINDS[name]
    running[kind].fault("version")
    with pytest.raises(StaleWeights, match="another"):
        ask(make, running[kind])


def test_an_older_policy_than_asked_for_is_refused(client):
    server, make = client
    with pytest.raises(StaleWeights, match="policy 0"):
        ask(make, server, question(min_version=3))


def test_an_end_that_is_not_ours_goes_on_as_an_abort(running):
    """llama.cpp and SGLang end at end tokens of their own; where those are not asked for,
    the reply is not over."""
    found = [
        ask(LlamaCppEngine, running["llamacpp"], question(200, stop_ids=frozenset({17})))
        for _ in range(8)
    ]
    assert {f.finish for f in found} <= {"abort", "stop", "length"}
    for generation in found:
        if generation.ids[-1] == kit.END:
            assert generation.finish == "abort"
        if 17 in generation.ids:
            # What was sampled behind it is left out.
            assert generation.ids.index(17) == len(generation.ids) - 1
            assert generation.finish == "stop"
    assert any(f.finish == "abort" for f in found)


def test_a_stop_text_ends_a_reply_at_the_id_that_completes_it(client):
    server, make = client

    def decode(ids):
        return "".join("abcdefghijklmnopqrstuvwxyzABCDEF"[token] for token in ids)

    stop = StopText(["c", "f", "k", "q"], decode)
    request = question(200, stop_text=stop)
    for found in ask(make, server, request, times=4):
        check_generation(found, request, "test")
        assert stop.first_completion(found.ids) in (0, len(found.ids))


def test_a_context_that_leaves_no_room_is_said(client):
    server, make = client
    with pytest.raises(EngineError, match="256 ids fill the context of 256"):
        ask(make, server, Request([1] * 256, 5, frozenset(), 1, "s"))
    found = ask(
        make, server, Request([1] * 250, 50, frozenset(), 1, "s", banned_ids=frozenset({kit.END}))
    )
    assert len(found.ids) == 6
    assert found.finish == "length"


def test_llamacpp_leaves_logprobs_out_and_nothing_is_made_up(running):
    server = running["llamacpp"]
    # Its own end would leave it as few as one id, and nothing to leave out.
    full = question(banned_ids=frozenset({kit.END}))
    server.fault("drop")
    with pytest.raises(BackendContractError, match="missing_logprobs"):
        ask(LlamaCppEngine, server, full)
    for rule in ("mask", "recompute"):
        server.fault("drop")
        found = ask(LlamaCppEngine, server, full, missing_logprobs=rule)
        assert len(found.ids) == 24
        assert None in found.logprobs
        assert found.missing_logprobs == rule
        rows, last = kit.table(1), kit.PROMPT[-1]
        for token, logprob in zip(found.ids, found.logprobs, strict=True):
            assert logprob is None or logprob == pytest.approx(
                kit.tempered(rows[last], 1.0, (kit.END,))[token]
            )
            last = token


def test_llamacpps_logprobs_are_behind_the_samplers_only_where_that_differs(running):
    server = running["llamacpp"]
    ask(LlamaCppEngine, server, question())
    ask(LlamaCppEngine, server, question(sampling=Sampling(0.5)))
    ask(LlamaCppEngine, server, question(banned_ids=frozenset({1})))
    ask(LlamaCppEngine, server, question(sampling=Sampling(0.0)))
    asked = [row["body"] for row in server.seen("/completion")][-4:]
    assert [body["post_sampling_probs"] for body in asked] == [False, True, True, False]
    # Else llama.cpp draws at temperature 1, greedy or not.
    assert all("temperature" in body["samplers"] for body in asked)
    assert asked[2]["logit_bias"] == [[1, False]]


def test_a_chat_endpoint_says_why_it_cannot_train(running):
    engine = ChatEngine(running["chat"].url, "m")
    with pytest.raises(NotTrainable, match="cannot be trained with"):
        kit.run(engine.update([], 1))
    with pytest.raises(NotTrainable, match="logprob"):
        kit.run(engine.load_from_disk("x", 1))


def test_kinds_are_told_apart_and_what_they_can_do_is_found(running):
    async def work(url):
        engine = await connect(url)
        try:
            return engine, await probe_server(engine)
        finally:
            await engine.close()

    for kind, version in (("vllm", "0.32.0"), ("sglang", "0.5.19"), ("llamacpp", "b1-test")):
        engine, found = kit.run(work(running[kind].url))
        assert found.server_version == version
        assert found.trainable, found
        assert found.distribution == "sampled"
        assert found.context == 256
        assert found.updates == (kind != "llamacpp")
        assert isinstance(engine, Engine)
        assert all(ok is not False for ok, _ in found.findings())
    with pytest.raises(EngineError, match=r"is not vLLM, SGLang or llama\.cpp"):
        kit.run(work(running["chat"].url))


def test_logprobs_of_the_model_are_told_from_those_of_what_is_sampled():
    with kit.servers("vllm", KIT_RAW="1") as server:

        async def work():
            engine = VllmEngine(server.url)
            found = await probe_server(engine)
            await engine.close()
            return found

        found = kit.run(work())
        assert found.distribution == "model"
        assert not found.trainable


def test_a_server_without_the_tokens_route_is_asked_the_other_way():
    with kit.servers("vllm", KIT_PLAIN="1") as server:
        engine = VllmEngine(server.url)

        async def work():
            found = await engine.generate(question())
            with pytest.raises(SyncError, match="VLLM_SERVER_DEV_MODE"):
                await engine.load_from_disk("x", 1)
            await engine.close()
            return found

        assert kit.run(work()).ids
        assert engine.route == "completions"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: VllmEngine("localhost:8000"), "http://"),
        (lambda: VllmEngine("http://x", missing_logprobs="zero"), "error, mask or recompute"),
        (lambda: VllmEngine("http://x", route="other"), "route"),
        (lambda: SglangEngine("http://x", key_env="TURNWRIGHT_NO_SUCH"), "TURNWRIGHT_NO_SUCH"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, told):
    os.environ.pop("TURNWRIGHT_NO_SUCH", None)
    with pytest.raises(ConfigError, match=told):
        make()


def test_a_key_is_sent_and_never_told(running, monkeypatch):
    monkeypatch.setenv("KIT_KEY", "hush-hush")
    server = running["sglang"]
    server.fault("status", status=500)
    with pytest.raises(EngineUnavailable) as caught:
        ask(SglangEngine, server, key_env="KIT_KEY")
    assert "hush-hush" not in str(caught.value)
    assert server.seen("/generate")[-1]["headers"]["authorization"] == "Bearer hush-hush"


def test_the_table_is_a_distribution():
    assert all(math.isclose(sum(map(math.exp, row)), 1.0) for row in kit.table(1))


@pytest.mark.parametrize("make", [VllmEngine, SglangEngine])
def test_adapters_are_loaded_listed_and_have_prefixes_of_their_own(make):
    with kit.servers("vllm" if make is VllmEngine else "sglang") as server:

        async def work():
            engine = make(server.url)
            await engine.generate(question(3))
            for version in (1, 2):
                await engine.load_adapter("policy", f"/adapters/{version}", version)
                assert (await engine.generate(question(3, min_version=version))).version == version
            with pytest.raises(SyncError, match="does not list it"):
                await engine.load_adapter("other", "lost", 3)
            await engine.close()

        kit.run(work())
        told = [row["path"].removeprefix("/v1") for row in server.seen() if "lora" in row["path"]]
        assert told[:4] == ["/unload_lora_adapter", "/load_lora_adapter"] * 2
        if make is SglangEngine:  # its cache knows of itself whose a prefix is
            assert [row["body"].get("lora_path") for row in server.seen("/generate")] == [
                None,
                "policy",
                "policy",
            ]
            return
        asked = [row["body"] for row in server.seen("/inference/v1/generate")]
        assert [body["model"] for body in asked] == ["tiny", "policy", "policy"]
        assert len({body["cache_salt"] for body in asked}) == 3
        # One that was loaded in place is read from its files in every step of
        # the engine (vLLM 0.32.0).
        assert not any(
            row["body"].get("load_inplace") for row in server.seen("/v1/load_lora_adapter")
        )


def test_the_last_id_of_a_vocabulary_is_scored_whatever_sglang_calls_it():
    async def work(url):
        engine = SglangEngine(url)
        try:
            return await engine.score([3, kit.IDS - 1, 4])
        finally:
            await engine.close()

    with kit.servers("sglang") as server:
        rows = kit.table(1)
        assert kit.run(work(server.url)) == [rows[3][kit.IDS - 1], rows[kit.IDS - 1][4]]


def test_weights_are_told_apart_by_a_text_where_the_tokenizer_is_known():
    """And by the same ids for the life of a client, whose scores are compared with earlier ones."""
    known, unknown = (
        VllmEngine("http://localhost:1", renderer=liars.renderer()),
        VllmEngine("http://localhost:1"),
    )
    expected = tuple(liars.renderer().codec.encode_plain(KNOWN_TEXT))[: len(CANARY)]
    assert known.known_ids == expected != CANARY
    assert unknown.known_ids == CANARY
    unknown.set_renderer(liars.renderer())
    assert unknown.known_ids == CANARY

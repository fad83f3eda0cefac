"""`turnwright serve` asked by the clients of vLLM and SGLang over real
sockets, and trained through."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
import torch
from kit.fleets import until
from kit.forks import Forked
from kit.serving import CLIENTS, PROMPT, TEXTS, beginning, run

from turnwright.cli.main import main
from turnwright.config import ModelConfig
from turnwright.engines import Request, Sampling, StopText, check_generation, tokens
from turnwright.engines.remote import Fleet, probe_server
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.remote_engine import EngineLoad
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.errors import ConfigError, EngineError, SyncError
from turnwright.training import create_tiny_model, score_with_model, unique_weights
from turnwright.training.model.models import load
from turnwright_serve.serve import serve


def access(url):
    return {"authorization": f"Bearer {tokens.lookup(url)}"}


def forward(directory, ids, start, temperature=1.0, banned=()):
    model, _ = load(directory)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1] / temperature
    logits[:, sorted(banned)] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("kind", CLIENTS)
def test_it_is_found_to_be_what_it_says(directory, kind):
    async def work(client, app, url):
        return await probe_server(client)

    found = run(directory, kind, work)
    assert found.trainable, list(found.findings())
    assert found.updates
    assert found.context == 200
    assert found.logprob_error < 1e-4


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(("temperature", "banned"), [(1.0, ()), (0.6, (11, 12)), (0.0, ())])
def test_ids_and_logprobs_are_the_models(directory, kind, temperature, banned):
    async def work(client, app, url):
        request = Request(
            PROMPT,
            24,
            frozenset({5}),
            1,
            "a",
            sampling=Sampling(temperature),
            banned_ids=frozenset(banned),
        )
        found = await asyncio.gather(*(client.generate(request) for _ in range(4)))
        for generation in found:
            check_generation(generation, request, "served")
        return found

    for generation in run(directory, kind, work):
        wanted = forward(
            directory, [*PROMPT, *generation.ids], len(PROMPT), temperature or 1.0, banned
        )
        assert generation.logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "route"), [("vllm", "generate"), ("vllm", "completions"), ("sglang", None)]
)
def test_alternatives_are_those_of_the_engine_behind_it(directory, kind, route):
    """To the bit, also of a reply that a pause holds."""

    def asked(seed, **more):
        return Request(
            PROMPT,
            24,
            frozenset({5}),
            seed,
            f"s{seed}",
            sampling=Sampling(0.9, top_k=30),
            banned_ids=frozenset({11, 12}),
            **more,
        )

    async def work(client, app, url):
        generate = app.engine.generate
        inside = [await generate(asked(seed, alternatives=4)) for seed in range(3)]
        begun = beginning(app, 3)
        sampling = [
            asyncio.ensure_future(client.generate(asked(seed, alternatives=4))) for seed in range(3)
        ]
        await begun.wait()
        await app.replies.pause("hold")
        app.replies.resume()
        served = await asyncio.gather(*sampling)
        plain = await client.generate(asked(0))
        return inside, served, plain

    options = {"route": route} if route else {}
    inside, served, plain = run(directory, kind, work, **options)
    assert [reply.ids for reply in served] == [reply.ids for reply in inside]
    for seed, (reply, own) in enumerate(zip(served, inside, strict=True)):
        check_generation(reply, asked(seed, alternatives=4), "served")
        assert reply.alternatives == own.alternatives
    assert plain.ids == inside[0].ids
    assert plain.alternatives == ()


@pytest.mark.parametrize("kind", CLIENTS)
def test_its_queue_and_its_cache_are_reported_in_the_servers_own_forms(
    directory, kind, monkeypatch
):
    async def work(client, app, url):
        idle, slots = await client.load(), app.engine.slots
        monkeypatch.setattr(app.engine._scheduler, "running", [None] * 3)
        monkeypatch.setattr(app.engine._scheduler, "waiting", [None] * 2)
        busy = await client.load()
        monkeypatch.undo()
        return idle, busy, slots

    idle, busy, slots = run(directory, kind, work)
    assert idle == EngineLoad(0, 0, 0.0)
    assert busy == EngineLoad(3, 2, pytest.approx(3 / slots))


@pytest.mark.parametrize(
    ("kind", "route"), [("vllm", "generate"), ("vllm", "completions"), ("sglang", None)]
)
def test_what_it_drafts_is_told_and_changes_no_reply(directory, kind, route):
    async def work(client, app, url):
        again = Request(
            PROMPT * 4, 100, frozenset(), 1, "a", sampling=Sampling(0.0), banned_ids=frozenset({11})
        )
        drawn = [Request(PROMPT, 60, frozenset(), seed, f"s{seed}") for seed in range(4)]
        found = [await client.generate(request) for request in (again, *drawn)]
        said = [(g.ids, g.logprobs, g.finish) for g in found]
        totals = client.counts["draft_ids"], client.counts["draft_ids_accepted"]
        return said, found[0], totals, (app.engine.drafted, app.engine.accepted)

    options = {"route": route} if route else {}
    plain, without, none, _ = run(directory, kind, work, **options)
    said, with_drafts, told, counted = run(directory, kind, work, speculate=5, **options)
    assert said == plain  # to the bit
    assert none == (without.drafted, without.accepted) == (0, 0)
    assert with_drafts.drafted > with_drafts.accepted > 20  # a greedy reply repeats itself
    assert told == counted


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_pause_gives_back_what_was_sampled_and_holds_what_comes(directory, kind):
    async def work(client, app, url):
        async def ask():
            return await client.generate(
                Request(PROMPT, 170, frozenset(), 1, "a", banned_ids=app.end_ids)
            )

        begun = beginning(app)
        first = asyncio.create_task(ask())
        await begun.wait()
        await client.pause("abort")
        aborted = await first
        second = asyncio.create_task(ask())
        await asyncio.sleep(0.2)
        held = not second.done()
        await client.resume()
        return aborted, held, await second

    aborted, held, second = run(directory, kind, work)
    assert aborted.finish == "abort"
    assert len(aborted.ids) < 170
    assert held
    assert len(second.ids) == 170


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_that_goes_away_ends_its_reply(directory, kind):
    async def work(client, app, url):
        await client.open()
        begun = beginning(app)
        asking = asyncio.create_task(
            client.generate(Request(PROMPT, 170, frozenset(), 1, "a", banned_ids=app.end_ids))
        )
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not app.replies.names)
        return await client.generate(Request(PROMPT, 3, frozenset(), 1, "a"))

    assert len(run(directory, kind, work).ids) == 3


@pytest.mark.parametrize("kind", CLIENTS)
def test_stop_texts_end_replies(directory, kind):
    async def work(client, app, url):
        stop = StopText(["e", "o"], app.decode)
        request = Request(PROMPT, 100, frozenset(), 1, "a", stop_text=stop)
        return stop, await client.generate(request)

    stop, found = run(directory, kind, work)
    assert found.finish == "stop"
    assert stop.first_completion(found.ids) == len(found.ids)


@pytest.mark.parametrize("kind", CLIENTS)
def test_new_weights_arrive_whole_or_not_at_all(directory, kind, tmp_path):
    model, _ = load(directory)
    other = create_tiny_model(ModelConfig(hidden=64, layers=1), TEXTS, tmp_path / "other", seed=1)

    async def work(client, app, url):
        engine = Fleet(
            [client],
            delivery=WeightDelivery(
                directories=ModelDirectories(tmp_path / "weights", directory),
                expected_logprobs=score_with_model(model),
            ),
        )
        await engine.update(unique_weights(model), 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape)
        await engine.update(unique_weights(model), 2)
        name = await client.weights_name()
        with pytest.raises(SyncError):
            await engine.load_from_disk(other, 3)
        with pytest.raises(SyncError):
            await engine.load_from_disk(tmp_path / "nowhere", 3)
        scores = await client.score(PROMPT)
        await engine.close()
        return name, scores

    torch.manual_seed(0)
    name, scores = run(directory, kind, work)
    assert name == "2"
    assert scores == pytest.approx(score_with_model(model)(PROMPT), abs=1e-4)


def test_what_it_cannot_answer_is_refused_with_a_reason(directory):
    async def work(client, app, url):
        import httpx2

        told = {}
        async with httpx2.AsyncClient(trust_env=False, verify=False, headers=access(url)) as http:
            for name, path, content in (
                ("text", "/v1/completions", json.dumps({"prompt": "hello"})),
                ("model", "/v1/completions", json.dumps({"prompt": [1], "model": "other"})),
                (
                    "penalty",
                    "/v1/completions",
                    json.dumps({"prompt": [1], "repetition_penalty": 1.2}),
                ),
                ("bias", "/v1/completions", json.dumps({"prompt": [1], "logit_bias": {"3": 2.0}})),
                ("long", "/v1/completions", json.dumps({"prompt": [1] * 200})),
                ("vocabulary", "/v1/completions", json.dumps({"prompt": [10**6]})),
                ("garbage", "/v1/completions", "{"),
                ("missing", "/inference/v1/generate", "{}"),
                ("route", "/nothing", "{}"),
            ):
                answer = await http.post(
                    url + path, content=content, headers={"content-type": "application/json"}
                )
                told[name] = answer.status_code
            assert (await http.get(url + "/health")).status_code == 200
        return told

    told = run(directory, "vllm", work)
    assert told.pop("model") == told.pop("route") == 404
    assert set(told.values()) == {400}


def test_a_token_is_asked_for_and_needed_beyond_this_machine(directory, monkeypatch):
    monkeypatch.setenv("KIT_KEY", "hush")

    async def right(client, app, url):
        return await client.generate(Request(PROMPT, 3, frozenset(), 1, "a"))

    assert len(run(directory, "vllm", right, token="hush", key_env="KIT_KEY").ids) == 3
    with pytest.raises(EngineError, match="401"):
        run(directory, "vllm", right, token="hush")
    with pytest.raises(ConfigError, match="TURNWRIGHT_SERVE_TOKEN"):
        asyncio.run(serve(directory, "vllm", print, host="0.0.0.0", port=0))


def test_a_negative_number_of_drafts_is_refused(directory, capsys):
    assert main(["serve", str(directory), "--speculate", "-1"]) == 2
    assert "--speculate -1" in capsys.readouterr().err


def test_a_run_is_trained_through_it(directory, tmp_path, capsys):
    """The whole way: a server of its own process, listed, found to be one, given weights in chunks,
    sampled from, compared."""
    import httpx2

    command = [
        sys.executable,
        "-m",
        "turnwright.cli.main",
        "serve",
        str(directory),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    command += ["--speculate", "3"]
    with Forked(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[0]
            words = [
                "train",
                "--env.use",
                "hop",
                "--model.path",
                str(directory),
                "--engine.kind",
                "auto",
                "--display",
                "none",
            ]
            (tmp_path / "engines.txt").write_text(url)
            words += [
                "--engine.urls-file",
                str(tmp_path / "engines.txt"),
                "--engine.tree",
                "true",
                "--out",
                str(tmp_path / "run"),
                "--train.steps",
                "2",
            ]
            words += [
                "--rollout.groups",
                "2",
                "--rollout.group-size",
                "2",
                "--eval.tasks",
                "2",
                "--limits.turn-tokens",
                "12",
            ]
            assert main(words) == 0, capsys.readouterr().err
            assert main(["check", "--engine", url]) == 0, capsys.readouterr().err
            asking = {"trust_env": False, "verify": False, "headers": access(url)}
            asked = {
                "token_ids": PROMPT * 4,
                "sampling_params": {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True},
            }
            chunks = httpx2.get(f"{url}/weights/counts", **asking).json()
            assert chunks["bytes_fetched"] > 100_000
            told = httpx2.post(
                f"{url}/inference/v1/generate", json=asked, timeout=60, **asking
            ).json()
            assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        finally:
            server.terminate()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["phase"] == "train"]
    assert len(steps) == 2
    assert all(row["mismatch_max"] < 1e-3 for row in steps if "mismatch_max" in row)
    episodes = [
        json.loads(line)
        for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    ]
    trained = [row for row in episodes if row["key"]["phase"] == "train"]
    assert {
        span["version"] for row in trained for span in row["spans"] if span["origin"] == "model"
    } == {0, 1}

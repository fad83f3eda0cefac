"""Weights in parts, by process group (real ones, gloo) or in requests, to `turnwright serve`; a
side can die at any step."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("torch")
import torch
from kit.fleets import until
from kit.forks import Forked
from kit.serving import CLIENTS, PROMPT, TEXTS, run

from turnwright.cli.main import main
from turnwright.config import ModelConfig
from turnwright.engines import Request
from turnwright.engines.local import LocalEngine, fingerprint
from turnwright.engines.remote import Fleet
from turnwright.engines.remote.fleet_settings import FleetSettings, WeightDelivery
from turnwright.engines.remote.weight_sync import UNFINISHED
from turnwright.errors import StaleWeights, SyncError
from turnwright.training import (
    GroupWeightPacker,
    RequestWeightPacker,
    create_tiny_model,
    score_with_model,
    unique_weights,
)
from turnwright.training.model.models import load
from turnwright.training.weight_transfer import GroupConnection, RequestWeights, decode_tensors
from turnwright_serve import make_service
from turnwright_serve.server import JsonHttpServer

SMALL = 3000
"""Bytes of a part, so that a tiny model takes many."""
PARTS = [("vllm", "group"), ("sglang", "group"), ("sglang", "tensors")]
"""Format, and how weights go in parts."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return create_tiny_model(
        ModelConfig(hidden=32, layers=1), TEXTS, tmp_path_factory.mktemp("groups") / "model", seed=3
    )


def nudge(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)


def make_packer(way):
    return (
        GroupWeightPacker(bucket=SMALL, seconds=20)
        if way == "group"
        else RequestWeightPacker(max_bytes=SMALL, seconds=20)
    )


def gone_at_third(monkeypatch, way):
    """The trainer is gone before it sends the third part."""

    def gone(meeting):
        meeting.close()
        raise SyncError("gone before part 3 of many")

    def write(mail, index):
        if index == 2:
            raise SyncError("gone before part 3 of many")
        return written(mail, index)

    if way == "group":
        at_bucket(monkeypatch, 2, gone)
    else:
        written = RequestWeights.encode_body
        monkeypatch.setattr(RequestWeights, "encode_body", write)


def at_bucket(monkeypatch, number, do, url=""):
    """Do something as this bucket is about to be sent to this server, or any, once."""
    sent, done = GroupConnection.send, []

    async def send(self, index):
        if index == number and url in self._url and not done:
            done.append(1)
            if (awaited := do(self)) is not None:
                await awaited
        await sent(self, index)

    monkeypatch.setattr(GroupConnection, "send", send)


@pytest.mark.parametrize(("kind", "way"), PARTS)
def test_weights_arrive_part_by_part_and_are_proven(directory, kind, way):
    model, _ = load(directory)
    packer = make_packer(way)

    async def work(client, app, url):
        engine = Fleet(
            [client],
            delivery=WeightDelivery(packer=packer, expected_logprobs=score_with_model(model)),
        )
        found = []
        for version in (1, 2):
            nudge(model, version)
            told = await engine.update(unique_weights(model), version)
            found.append((told == fingerprint(unique_weights(model)), await client.weights_name()))
        scores = await client.score(PROMPT)
        made = await engine.generate(Request(PROMPT, 8, frozenset(), 1, "a", min_version=2))
        await engine.close()
        return found, scores, made.version, app.receiver._groups

    found, scores, version, left = run(directory, kind, work)
    source, _ = packer.pack(unique_weights(model), 1)
    if way == "group":
        parts = [bucket.names for bucket in source.buckets]
    else:
        parts = [
            [name for name, _ in decode_tensors(source.encode_body(index))]
            for index in range(source.request_count)
        ]
    assert len(parts) > 4
    assert [name for part in parts for name in part] == [name for name, _ in unique_weights(model)]
    assert found == [(True, "1"), (True, "2")]
    assert scores == pytest.approx(score_with_model(model)(PROMPT), abs=1e-4)
    assert version == 2
    assert not left


@pytest.mark.parametrize(("kind", "way"), PARTS)
def test_a_trainer_that_is_gone_in_the_middle_leaves_nothing_half_updated(
    directory, kind, way, monkeypatch
):
    model, _ = load(directory)
    packer = make_packer(way)

    async def work(client, app, url):
        engine = Fleet(
            [client],
            FleetSettings(check_s=0.3),
            delivery=WeightDelivery(packer=packer, expected_logprobs=score_with_model(model)),
        )
        await engine.update(unique_weights(model), 1)
        before = await client.score(PROMPT)
        nudge(model, 5)
        gone_at_third(monkeypatch, way)
        with pytest.raises(SyncError, match=r"policy 2.*part 3 of") as caught:
            await engine.update(unique_weights(model), 2)
        assert url in str(caught.value)
        half = await client.weights_name(), await client.score(PROMPT)
        with pytest.raises(StaleWeights):
            await client.generate(Request(PROMPT, 4, frozenset(), 1, "a"))
        monkeypatch.undo()
        # The fleet gave it the last whole ones again.
        await until(lambda: engine.members[0].state == "up")
        again = await client.weights_name(), await client.score(PROMPT)
        await engine.update(unique_weights(model), 3)
        last = await client.weights_name(), await client.score(PROMPT)
        await engine.close()
        return before, half, again, last

    before, half, again, last = run(directory, kind, work)
    assert half == (UNFINISHED.format(2), before)
    assert again == ("1", before)
    assert last[0] == "3"
    assert last[1] == pytest.approx(score_with_model(model)(PROMPT), abs=1e-4)


@pytest.mark.parametrize(("kind", "way"), PARTS)
def test_weights_that_do_not_fit_or_do_not_all_come_change_nothing(directory, kind, way, tmp_path):
    model, _ = load(directory)
    other, _ = load(
        create_tiny_model(ModelConfig(hidden=64, layers=1), TEXTS, tmp_path / "other", seed=1)
    )

    async def work(client, app, url):
        engine, before = (
            Fleet([client], delivery=WeightDelivery(packer=make_packer(way))),
            await client.score(PROMPT),
        )
        with pytest.raises(SyncError, match="does not fit the served model"):
            await engine.update(unique_weights(other), 1)
        with pytest.raises(SyncError, match="weights are missing"):
            await engine.update(list(unique_weights(model))[:-1], 2)
        after = await client.score(PROMPT)
        await engine.close()
        return before, after

    before, after = run(directory, kind, work)
    assert before == after


class Process:
    """`turnwright serve`, started anew on the same port."""

    def __init__(self, directory, kind):
        self.kind, self.port = kind, 0
        self.words = [
            sys.executable,
            "-m",
            "turnwright.cli.main",
            "serve",
            str(directory),
            "--formats",
            kind,
            "--device",
            "cpu",
        ]
        self.start()

    def start(self):
        self.process = Forked(
            [*self.words, "--port", str(self.port)], stdout=subprocess.PIPE, text=True
        )

    def wait(self):
        self.url = self.process.stdout.readline().split()[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def processes(directory, *kinds):
    found = [Process(directory, kind) for kind in kinds]
    try:
        for one in found:
            one.wait()
        yield found
    finally:
        for one in found:
            one.end()


@pytest.mark.slow
def test_a_server_process_that_is_killed_or_hangs_in_the_middle_is_told_and_given_them_when_it_is_back(  # noqa: E501
    directory, monkeypatch
):
    model, _ = load(directory)

    with processes(directory, "sglang", "vllm") as (killed, stopped):

        async def work():
            clients = [CLIENTS[one.kind](one.url) for one in (killed, stopped)]
            packer = GroupWeightPacker(bucket=SMALL, seconds=20)
            engine = Fleet(
                clients,
                FleetSettings(check_s=0.3, health_s=5.0, patience_s=60.0),
                delivery=WeightDelivery(packer=packer, expected_logprobs=score_with_model(model)),
            )
            await engine.update(unique_weights(model), 1)
            nudge(model, 1)
            at_bucket(monkeypatch, 1, lambda _: killed.process.kill(), killed.url)
            await engine.update(unique_weights(model), 2)  # one of two has them
            assert [member.state for member in engine.members] == ["doubted", "up"]
            assert killed.url in engine.members[0].fault
            asked = await asyncio.gather(
                *(engine.generate(Request(PROMPT, 4, frozenset(), 1, f"s{n}")) for n in range(4))
            )
            await asyncio.to_thread(killed.end)
            killed.start()
            await asyncio.to_thread(killed.wait)
            await until(lambda: engine.members[0].state == "up")
            scores = await clients[0].score(PROMPT)
            packer.seconds = 1.0
            nudge(model, 2)
            at_bucket(
                monkeypatch, 1, lambda _: stopped.process.send_signal(signal.SIGSTOP), stopped.url
            )
            monkeypatch.setattr("turnwright.engines.remote.vllm.SPARE_S", 0.5)
            await engine.update(unique_weights(model), 3)
            states = [member.state for member in engine.members]
            told, reloaded = engine.members[1].fault, engine.members[0].counts["reloaded"]
            await engine.close()
            return asked, scores, states, told, reloaded

        async def bounded():
            async with asyncio.timeout(100):
                return await work()

        asked, scores, states, told, reloaded = asyncio.run(bounded())
    assert {generation.version for generation in asked} == {2}
    assert reloaded == 1
    assert len(scores) == len(PROMPT) - 1
    assert states == ["up", "doubted"]
    assert stopped.url in told
    assert "policy 3" in told


def test_a_server_that_goes_away_in_the_middle_holds_up_no_other(directory, monkeypatch):
    """As above in one process: the sockets of one of two servers are closed under it."""
    model, _ = load(directory)

    async def work():
        made = [make_service(directory, context=200, device="cpu") for _ in CLIENTS]
        servers = [
            JsonHttpServer(app.routes(kind), host="127.0.0.1", port=0)
            for kind, (app, _) in zip(CLIENTS, made, strict=True)
        ]
        for server in servers:
            await server.start()
        clients = [make(server.url) for make, server in zip(CLIENTS.values(), servers, strict=True)]
        engine = Fleet(
            clients,
            FleetSettings(check_s=0.3),
            delivery=WeightDelivery(
                packer=GroupWeightPacker(bucket=SMALL, seconds=20),
                expected_logprobs=score_with_model(model),
            ),
        )
        await engine.update(unique_weights(model), 1)
        nudge(model, 1)
        closing = []
        gone = clients[0].url

        async def close(
            _,
        ):
            # Until nobody is let in: the request of this bucket is answered all the same.
            closing.append(asyncio.ensure_future(servers[0].close()))
            with suppress(ConnectionRefusedError):
                while True:
                    _, writer = await asyncio.open_connection(
                        "127.0.0.1", int(gone.rpartition(":")[2])
                    )
                    writer.close()
                    await asyncio.sleep(0.01)

        at_bucket(monkeypatch, 1, close, gone)
        await engine.update(unique_weights(model), 2)
        states = (
            [member.state in ("doubted", "down") for member in engine.members],
            engine.members[0].fault,
        )
        asked = await asyncio.gather(
            *(engine.generate(Request(PROMPT, 4, frozenset(), 1, f"s{n}")) for n in range(4))
        )
        await asyncio.gather(*closing)
        await engine.close()
        await servers[1].close()
        for _, local in made:
            await local.close()
        return states, gone, asked

    (states, fault), gone, asked = asyncio.run(work())
    assert states == [True, False]
    assert gone in fault
    assert {generation.version for generation in asked} == {2}


WAYS = [
    ("sglang", "group", "true"),
    ("vllm", "group", "true"),
    ("sglang", "disk", "false"),
    ("sglang", "tensors", "false"),
]
"""Format, `engine.update`, `engine.colocate`."""


@contextmanager
def serving(directory, kind):
    """A server on a thread of this process."""
    ready, end, told = threading.Event(), None, []

    async def work():
        nonlocal end
        app, engine = make_service(directory, context=512, device="cpu")
        server = JsonHttpServer(app.routes(kind), host="127.0.0.1", port=0)
        await server.start()
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        told.append((server.url, loop))
        ready.set()
        await end.wait()
        await server.close()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        assert ready.wait(60)
        yield told[0][0]
    finally:
        told[0][1].call_soon_threadsafe(end.set)
        thread.join()


def test_a_run_through_a_server_is_the_run_without_one_whatever_way_weights_go(
    directory, tmp_path, capsys, monkeypatch
):
    """Servers of this house draw from the seeds that they are sent, so all ways of
    sampling give the same ids."""

    def trained(name, *more):
        words = [
            "train",
            "--env.use",
            "hop",
            "--model.path",
            str(directory),
            "--display",
            "none",
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
        words += [
            "--train.lr",
            "0.01",
            "--limits.context",
            "512",
            *more,
            "--out",
            str(tmp_path / name),
        ]
        assert main(words) == 0, capsys.readouterr().err
        rows = [
            json.loads(line)
            for line in (tmp_path / name / "trajectories.jsonl").read_text().splitlines()
        ]
        spans = {json.dumps(row["key"]): [span["ids"] for span in row["spans"]] for row in rows}
        versions = {
            span["version"] for row in rows for span in row["spans"] if span["origin"] == "model"
        }
        return spans, versions

    slept = []
    rest = LocalEngine.sleep

    async def sleep(engine):
        await rest(engine)
        slept.append(engine.cache_bytes)

    monkeypatch.setattr(LocalEngine, "sleep", sleep)
    found = {"local": trained("local")}
    found["local in turns"] = trained("turns", "--engine.colocate", "true")
    assert slept == [0, 0]  # before each of two steps
    for kind, update, turns in WAYS:
        with serving(directory, kind) as url:
            servers = [
                "--engine.kind",
                "auto",
                "--engine.urls",
                json.dumps([url]),
                "--engine.update",
                update,
            ]
            found[f"{kind} {update}"] = trained(
                f"{kind}-{update}", *servers, "--engine.colocate", turns
            )
    assert slept == [0] * 6
    spans, versions = found.pop("local")
    assert len(versions) == 3
    assert {name: each == (spans, versions) for name, each in found.items()} == dict.fromkeys(
        found, True
    )
    assert [path.parent.name for path in tmp_path.glob("*/weights")] == ["sglang-disk"]


def test_a_server_that_never_joins_is_an_error_that_says_so(directory):
    model, _ = load(directory)

    async def work(client, app, url):
        async def join(*given):
            await asyncio.sleep(3600)

        app.receiver.join = join
        engine = Fleet([client], delivery=WeightDelivery(packer=GroupWeightPacker(seconds=0.5)))
        try:
            with pytest.raises(
                SyncError,
                match=r"did not take the weights of policy 4.*to connect \(within 0\.5 s\)",
            ) as caught:
                await engine.update(unique_weights(model), 4)
        finally:
            await engine.close()
        return str(caught.value), url

    from turnwright.engines.remote import weight_sync

    before, weight_sync.FINAL_REQUEST_TIMEOUT_S = weight_sync.FINAL_REQUEST_TIMEOUT_S, 0.2
    try:
        told, url = run(directory, "sglang", work)
    finally:
        weight_sync.FINAL_REQUEST_TIMEOUT_S = before
    assert url in told


def test_a_server_without_the_routes_is_told_what_to_do(directory):
    model, _ = load(directory)

    async def work(client, app, url):
        await client.open()
        client.routes -= {"/init_weight_transfer_engine"}
        with pytest.raises(SyncError, match="start it with"):
            await Fleet([client], delivery=WeightDelivery(packer=GroupWeightPacker())).update(
                unique_weights(model), 1
            )

    run(directory, "vllm", work)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_backend_that_is_not_there_is_an_error_that_says_so(directory, kind):
    if torch.distributed.is_nccl_available():
        pytest.skip("this build of torch has NCCL")
    model, _ = load(directory)

    async def work(client, app, url):
        engine = Fleet(
            [client], delivery=WeightDelivery(packer=GroupWeightPacker("nccl", seconds=20))
        )
        try:
            with pytest.raises(SyncError, match="this build of torch has no 'nccl'"):
                await engine.update(unique_weights(model), 1)
        finally:
            await engine.close()

    run(directory, kind, work)

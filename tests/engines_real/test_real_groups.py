"""New weights into real servers: by process group (gloo), for vLLM by the module put into it; to
SGLang also in requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
import torch
from kit import real_servers as kit

from turnwright.cli.main import main
from turnwright.engines import Request
from turnwright.engines.remote import Fleet, SglangEngine
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.managed import ManagedFleet, how_to_install
from turnwright.engines.remote.weight_sync import UNFINISHED
from turnwright.errors import StaleWeights, SyncError
from turnwright.training import GroupWeightPacker, RequestWeightPacker, unique_weights
from turnwright.training.weight_transfer import GroupConnection

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
CLOSE = 1e-3
PROMPT = list(range(10, 42))


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def running(request, tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp(request.param))
    with kit.server(request.param, model.untied, model.root, group=True) as server:
        yield model, server, kit.CLIENTS[request.param]


def far(model, scores):
    return max(abs(a - b) for a, b in zip(scores, model.expect()(PROMPT), strict=True))


def make_packer(way, model, size):
    """What sends weights by process group or in requests, so many bytes at a time."""
    if way == "group":
        return GroupWeightPacker(bucket=size, source=model.source, seconds=60)
    return RequestWeightPacker(max_bytes=size, source=model.source, seconds=60)


@pytest.mark.parametrize("way", ["group", "tensors"])
def test_weights_arrive_and_are_the_trainers(running, way):
    model, server, make = running
    if way == "tensors" and make is not SglangEngine:
        pytest.skip("takes no weights in requests")
    torch.manual_seed(1)
    packer = make_packer(way, model, 100_000)

    async def work():
        client = make(server.url, renderer=model.renderer)
        engine, found = (
            Fleet(
                [client], delivery=WeightDelivery(packer=packer, expected_logprobs=model.expect())
            ),
            [],
        )
        for version in (1, 2, 3):
            before = far(model, await client.score(PROMPT))
            model.nudge()
            off = far(model, await client.score(PROMPT))
            await engine.update(unique_weights(model.module), version)
            found.append(
                (before, off, far(model, await client.score(PROMPT)), await client.weights_name())
            )
            made = await engine.generate(
                Request(PROMPT, 24, frozenset(), 1, "a", min_version=version)
            )
            wanted = model.forward([*PROMPT, *made.ids], len(PROMPT))
            assert max(abs(p - w) for p, w in zip(made.logprobs, wanted, strict=True)) < CLOSE
        await engine.close()
        return found

    source = packer.pack(unique_weights(model.module), 0)[0]
    parts = len(source.buckets) if way == "group" else source.request_count
    found = asyncio.run(work())
    print(
        f"{make.kind} by {way}: {parts} parts; off the trainer before and after: "
        f"{[row[1:3] for row in found]}"
    )
    assert parts > 3
    assert all(before < CLOSE < off for before, off, _, _ in found)
    assert all(after < CLOSE for *_, after, _ in found)
    assert [name for *_, name in found] == ["1", "2", "3"]


def test_a_trainer_that_is_gone_in_the_middle_is_told_and_the_next_update_goes_through(
    running, monkeypatch
):
    model, server, make = running
    torch.manual_seed(2)
    send = GroupConnection.send

    async def gone(self, index):
        if index == 2:
            self.close()
            raise SyncError("gone before the third bucket")
        await send(self, index)

    async def work():
        client = make(server.url, renderer=model.renderer)
        engine = Fleet(
            [client],
            delivery=WeightDelivery(
                packer=GroupWeightPacker(bucket=100_000, source=model.source, seconds=60),
                expected_logprobs=model.expect(),
            ),
        )
        await engine.update(unique_weights(model.module), 11)
        model.nudge()
        monkeypatch.setattr(GroupConnection, "send", gone)
        with pytest.raises(SyncError, match="gone before the third bucket"):
            await engine.update(unique_weights(model.module), 12)
        name = await client.weights_name()
        with pytest.raises(StaleWeights):
            await client.generate(Request(PROMPT, 4, frozenset(), 1, "a"))
        monkeypatch.undo()
        await engine.update(unique_weights(model.module), 13)
        scores, last = await client.score(PROMPT), await client.weights_name()
        await engine.close()
        return name, scores, last

    name, scores, last = asyncio.run(work())
    assert name == UNFINISHED.format(12)
    assert last == "13"
    assert far(model, scores) < CLOSE


@pytest.mark.parametrize("way", ["group", "tensors", "disk"])
def test_a_server_that_slept_answers_from_the_weights_that_wake_it(running, way):
    """On a CPU no memory goes; what is seen is that the routes take the order, and that the
    server is well after it."""
    model, server, make = running
    if way == "tensors" and make is not SglangEngine:
        pytest.skip("takes no weights in requests")
    torch.manual_seed(3)
    options = (
        {"directories": model.directories}
        if way == "disk"
        else {"packer": make_packer(way, model, 2**28)}
    )

    async def work():
        client = make(server.url, renderer=model.renderer)
        delivery = WeightDelivery(expected_logprobs=model.expect(), **options)
        engine, found = Fleet([client], delivery=delivery), []
        await engine.update(unique_weights(model.module), 20)
        for version in (21, 22):
            playing = asyncio.gather(
                *(engine.generate(Request(PROMPT, 400, frozenset(), n, f"s{n}")) for n in range(4))
            )
            await asyncio.sleep(0.2)
            await engine.sleep()
            assert engine.members[0].state == "asleep"
            model.nudge()
            await engine.update(unique_weights(model.module), version)
            made = await engine.generate(
                Request(PROMPT, 24, frozenset(), 1, "a", min_version=version)
            )
            wanted = model.forward([*PROMPT, *made.ids], len(PROMPT))
            found.append(max(abs(p - w) for p, w in zip(made.logprobs, wanted, strict=True)))
            # Cut off, or asked again of the new weights.
            assert all(one.ids or one.finish == "abort" for one in await playing)
        await engine.close()
        return found

    assert max(asyncio.run(work())) < CLOSE


@pytest.mark.parametrize(
    ("kind", "way"), [("sglang", "group"), ("vllm", "group"), ("sglang", "tensors")]
)
def test_a_run_takes_turns_with_a_server_that_dies_asleep(kind, way, tmp_path, monkeypatch, capsys):
    """The server is a process of the run's own: it is killed once while the trainer trains."""
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed; `{how_to_install(kind, gpu=False)}`")
    slept, sleep = [], ManagedFleet.sleep

    async def noted(fleet):
        await sleep(fleet)
        slept.append(fleet.members[0].state)
        if len(slept) == 2:
            os.kill(fleet.started[0].pid, signal.SIGKILL)

    monkeypatch.setattr(ManagedFleet, "sleep", noted)
    words = kit.train_long_world(tmp_path)
    words += [
        "--engine.kind",
        kind,
        "--engine.install-dir",
        str(kit.PLACE),
        "--engine.update",
        way,
        "--engine.colocate",
        "true",
    ]
    words += [
        "--train.steps",
        "3",
        "--rollout.groups",
        "4",
        "--rollout.group-size",
        "4",
        "--eval.tasks",
        "4",
    ]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert slept == ["asleep"] * 3
    # It started with them.
    assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == ["policy-0"]
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    gaps = [
        row["mismatch_max"] for row in rows if row["phase"] == "train" and "mismatch_max" in row
    ]
    print(f"{kind} by {way}: max |dlogp| {max(gaps, default=None)} in {len(gaps)} of 3 steps")
    assert len(gaps) == 3
    assert max(gaps) < CLOSE
    episodes = [
        json.loads(line)
        for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert {
        span["version"] for row in episodes for span in row["spans"] if span["origin"] == "model"
    } == {0, 1, 2, 3}

"""New weights by process group (gloo) into real servers: SGLang by its own routes, vLLM by the module put into it."""

from __future__ import annotations

import asyncio

import pytest
import real_kit as kit
import torch

from turnwise.engine import Request
from turnwise.engine.remote import Fleet
from turnwise.engine.remote.groups import UNFINISHED
from turnwise.errors import StaleWeights, SyncError
from turnwise.train.groups.send import Courier, Meeting
from turnwise.train.served import unique

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


def test_weights_arrive_and_are_the_trainers(running):
    model, server, make = running
    torch.manual_seed(1)
    courier = Courier(bucket=100_000, source=model.source, seconds=60)

    async def work():
        client = make(server.url, renderer=model.renderer)
        engine, found = Fleet([client], courier=courier, expect=model.expect()), []
        for version in (1, 2, 3):
            before = far(model, await client.score(PROMPT))
            model.nudge()
            off = far(model, await client.score(PROMPT))
            await engine.update(unique(model.module), version)
            found.append((before, off, far(model, await client.score(PROMPT)), await client.weights_name()))
            made = await engine.generate(Request(PROMPT, 24, frozenset(), 1, "a", min_version=version))
            wanted = model.forward([*PROMPT, *made.ids], len(PROMPT))
            assert max(abs(p - w) for p, w in zip(made.logprobs, wanted, strict=True)) < CLOSE
        await engine.close()
        return found

    buckets = courier.pack(unique(model.module), 0)[0].buckets
    found = asyncio.run(work())
    print(f"{make.kind}: {len(buckets)} buckets; off the trainer before and after: {[row[1:3] for row in found]}")
    assert len(buckets) > 3
    assert all(before < CLOSE < off for before, off, _, _ in found)
    assert all(after < CLOSE for *_, after, _ in found)
    assert [name for *_, name in found] == ["1", "2", "3"]


def test_a_trainer_that_is_gone_in_the_middle_is_told_and_the_next_update_goes_through(running, monkeypatch):
    model, server, make = running
    torch.manual_seed(2)
    send = Meeting.send

    async def gone(self, index):
        if index == 2:
            self.close()
            raise SyncError("gone before the third bucket")
        await send(self, index)

    async def work():
        client = make(server.url, renderer=model.renderer)
        engine = Fleet([client], courier=Courier(bucket=100_000, source=model.source, seconds=60))
        await engine.update(unique(model.module), 11)
        model.nudge()
        monkeypatch.setattr(Meeting, "send", gone)
        with pytest.raises(SyncError, match="gone before the third bucket"):
            await engine.update(unique(model.module), 12)
        name = await client.weights_name()
        with pytest.raises(StaleWeights):
            await client.generate(Request(PROMPT, 4, frozenset(), 1, "a"))
        monkeypatch.undo()
        engine.expect = model.expect()
        await engine.update(unique(model.module), 13)
        scores, last = await client.score(PROMPT), await client.weights_name()
        await engine.close()
        return name, scores, last

    name, scores, last = asyncio.run(work())
    assert name == UNFINISHED.format(12)
    assert last == "13"
    assert far(model, scores) < CLOSE


@pytest.mark.parametrize("way", ["group", "disk"])
def test_a_server_that_slept_answers_from_the_weights_that_wake_it(running, way):
    """On a CPU no memory goes; what is seen is that the routes take the order, and that the server is well after it."""
    model, server, make = running
    torch.manual_seed(3)
    options = {"courier": Courier(source=model.source, seconds=60)} if way == "group" else {"shelf": model.shelf}

    async def work():
        client = make(server.url, renderer=model.renderer)
        engine, found = Fleet([client], expect=model.expect(), **options), []
        await engine.update(unique(model.module), 20)
        for version in (21, 22):
            playing = asyncio.gather(
                *(client.generate(Request(PROMPT, 400, frozenset(), n, f"s{n}")) for n in range(4)), return_exceptions=True
            )
            await asyncio.sleep(0.2)
            await engine.sleep()
            await playing
            assert engine.members[0].state == "asleep"
            model.nudge()
            await engine.update(unique(model.module), version)
            made = await engine.generate(Request(PROMPT, 24, frozenset(), 1, "a", min_version=version))
            wanted = model.forward([*PROMPT, *made.ids], len(PROMPT))
            found.append(max(abs(p - w) for p, w in zip(made.logprobs, wanted, strict=True)))
        await engine.close()
        return found

    assert max(asyncio.run(work())) < CLOSE

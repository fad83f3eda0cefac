"""Weight updates of the real vLLM and SGLang with calls in flight, in each mode: every id has the
version that sampled it."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from itertools import pairwise

import pytest
import torch
from kit import real_servers as kit
from kit.interrupts import whole
from kit.real_servers import CLOSE, PROMPT

from turnwright.engines import Request
from turnwright.engines.remote import Fleet
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.training import unique_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def running(request, tmp_path_factory):
    model = kit.Model(tmp_path_factory.mktemp(request.param))
    with kit.server(request.param, model.untied, model.root) as server:
        yield model, server, kit.CLIENTS[request.param]


MODES = ["recompute", "salt", "keep"]


@pytest.mark.parametrize("mode", MODES)
def test_updates_with_calls_in_flight(running, mode):
    model, server, make = running
    torch.manual_seed(3)
    modules, made, seconds = {}, [], []
    # No prefix is in the cache that another mode's weights left.
    opening = [
        20 + MODES.index(mode),
        *PROMPT,
    ]

    async def work():
        client = make(server.url, renderer=model.renderer, in_flight=mode)
        engine = Fleet(
            [client],
            delivery=WeightDelivery(
                directories=model.directories, expected_logprobs=model.expect()
            ),
        )

        async def update(version):
            model.nudge()
            modules[version] = copy.deepcopy(model.module)
            began = time.perf_counter()
            await engine.update(unique_weights(model.module), version)
            seconds.append(round(time.perf_counter() - began, 2))

        async def one(request):
            made.append((list(request.ids), await engine.generate(request)))
            return made[-1][1]

        await update(1)
        await engine.generate(Request(opening, 4, frozenset(), 1, "first"))
        banned = frozenset(model.renderer.banned_ids | model.renderer.stop_ids)
        over, found = asyncio.Event(), []

        async def play(n):
            """Call until the last update, so that each meets calls in flight,
            however fast the server is."""
            for seed in itertools.count(n, 100):
                request = Request(
                    [*opening, 10 + n], 700, frozenset(), seed, f"s{seed}", banned_ids=banned
                )
                found.append(await whole(one, request))
                if over.is_set():
                    return

        calls = [asyncio.create_task(play(n)) for n in range(16)]
        for version in (2, 3, 4):
            await asyncio.sleep(0.6)
            await update(version)
        over.set()
        await asyncio.gather(*calls)
        counts = engine.counts.copy(), client.counts.copy()
        await engine.close()
        return banned, found, counts

    banned, found, counts = asyncio.run(work())
    assert {len(one.ids) for one in found} == {700}
    own, other, several = 0.0, 0.0, 0
    for context, one in made:
        ids = [*context, *one.ids]
        runs = [(0, one.version), *one.later_versions, (len(one.ids), -1)]
        several += len(runs) > 2
        assert (
            (one.cache_version is not None)
            if len(runs) > 2
            else (one.cache_version is None or mode == "keep")
        )
        for (start, version), (end, _) in pairwise(runs):
            assert version in modules
            wanted = model.forward(
                ids[: len(context) + end],
                len(context) + start,
                banned=banned,
                module=modules[version],
            )
            gap = max(
                (abs(p - w) for p, w in zip(one.logprobs[start:end], wanted, strict=True)),
                default=0.0,
            )
            if one.cache_version is not None and one.cache_version < version:
                other = max(other, gap)  # of ids on a cache of older weights
            else:
                own = max(own, gap)
    versions = sorted(
        {
            version
            for _, one in made
            for version in (one.version, *(v for _, v in one.later_versions))
        }
    )
    print(
        f"{make.kind} {mode}: versions {versions}, {several} of {len(made)} calls of several; max "
        f"|dlogp| {own:.2g} on a cache of the same weights, {other:.2g} on older ones; seconds of "
        f"updates {seconds}; {dict(counts[0])}"
    )
    assert own < CLOSE
    assert len(versions) > 1
    assert (several > 0) is (mode == "keep")
    assert not any(name.startswith("asked_again") for name in counts[0])

"""Two policies on one vLLM or SGLang, the real ones: each has its own adapter, and an update or
a death loses nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial

import pytest
import torch
from kit import real_servers as kit
from kit.interrupts import whole
from kit.real_servers import CLOSE, adapter, play, well

from turnwright.cli.main import main
from turnwright.config import EngineConfig, Limits, LoraConfig, RunConfig, TrainConfig
from turnwright.engines import Request
from turnwright.engines.remote.managed import how_to_install
from turnwright.records import read_json_lines
from turnwright.training import Trainer, add_lora, make_adapter_engines
from turnwright.training.model.models import load

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
LONG = 950
"""Ids of a reply that lasts some seconds beside 23 others; the first load beside calls
takes vLLM up to two."""


class Policy:
    """A LoRA of the tiny model, its trainer, and its engine."""

    def __init__(self, model, seed):
        self.module, _ = load(model.source)
        self.version = 0
        self.modules = {}
        """Merged models by version."""
        add_lora(self.module, LoraConfig(rank=4), seed=seed)
        self.trainer = Trainer(self.module, TrainConfig(), banned_ids=model.renderer.banned_ids)

    async def update(self):
        """Train, so to speak, and send it; return the seconds that sending took."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if ".lora_" in name:
                    parameter += 0.1 * torch.randn(parameter.shape)
        self.version += 1
        weights, began = list(self.trainer.adapter_weights()), time.perf_counter()
        await self.engine.update(weights, self.version)
        self.modules[self.version] = {
            name: value.clone() for name, value in self.module.state_dict().items()
        }
        return time.perf_counter() - began

    def as_of(self, version):
        self.module.load_state_dict(self.modules[version])
        return self.module

    @property
    def client(self):
        return self.engine.members[0].engine


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def running(request, tmp_path_factory):
    """Two policies with engines of one server, which is started by whichever needs it first."""
    pytest.importorskip("peft")
    kind, root = request.param, tmp_path_factory.mktemp(request.param)
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed; `{how_to_install(kind, gpu=False)}`")
    torch.manual_seed(1)
    model = kit.Model(root)
    policies = {name: Policy(model, seed) for seed, name in enumerate(("asker", "answerer"))}
    engine = EngineConfig(kind=kind, install_dir=str(kit.PLACE), update="lora")
    config = RunConfig(engine=engine, lora=LoraConfig(rank=4), limits=Limits(context=kit.CONTEXT))
    modules = {name: policy.module for name, policy in policies.items()}
    engines = make_adapter_engines(config, model.source, modules, model.renderer, root)
    for name, policy in policies.items():
        policy.engine = engines[name]
    yield model, *policies.values()
    asyncio.run(close(*policies.values()))


async def close(*policies):
    for policy in policies:
        await policy.engine.close()


def ending(model):
    """Ids that no reply of a certain length may have."""
    return frozenset(model.renderer.banned_ids | model.renderer.stop_ids)


def gap(model, policy, context, reply):
    """Largest |dlogp| of a reply to a context, against the adapter of its version."""
    ids, module = [*context, *reply.ids], policy.as_of(reply.version)
    wanted = model.forward(ids, len(context), banned=ending(model), module=module)
    policy.as_of(policy.version)
    return max((abs(p - w) for p, w in zip(reply.logprobs, wanted, strict=True)), default=0.0)


def test_each_policy_samples_from_its_own_adapter(running):
    model, a, b = running

    async def work():
        leftovers = [adapter(model, model.root / f"left{n}", n)[0] for n in range(6)]
        await a.update()
        for number, directory in enumerate(leftovers):
            # A run that was killed left more than the server has room for.
            await a.client.http.post_status(
                a.client.lora_api.load, {"lora_name": f"l{number}", "lora_path": str(directory)}, 60
            )
        await b.update()
        return await asyncio.gather(*(play(policy.engine, model) for policy in (a, b)))

    made = asyncio.run(work())
    for trajectories in made:
        well(trajectories)
    own = [
        kit.gap(policy.trainer, trajectories)[0]
        for policy, trajectories in zip((a, b), made, strict=True)
    ]
    swapped = [
        kit.gap(policy.trainer, trajectories)[0]
        for policy, trajectories in zip((b, a), made, strict=True)
    ]
    print(
        f"{a.client.kind}: max |dlogp| {own[0]:.2g} and {own[1]:.2g}; against the other's trainer "
        f"{min(swapped):.2g}"
    )
    assert max(own) < CLOSE
    assert min(swapped) > 100 * CLOSE


def test_no_prefix_is_shared_and_none_is_dropped_by_the_others_update(running):
    model, a, b = running
    prompt = [40, *range(10, 100), *range(10, 100)]

    async def work():
        async def ask(policy):
            found = await policy.engine.generate(
                Request(prompt, 24, frozenset(), 1, "p", banned_ids=ending(model))
            )
            assert gap(model, policy, prompt, found) < CLOSE
            return found.cached_tokens

        cached = [await ask(a), await ask(b), await ask(a), await ask(b)]
        await a.update()
        return [*cached, await ask(b), await ask(a), await ask(a)]

    cached = asyncio.run(work())
    print(
        f"{a.client.kind}: {cached} of {len(prompt)} ids cached: a, b, a, b; behind a's update: b, "
        "a, a"
    )
    assert [count > 100 for count in cached] == [False, False, True, True, True, False, True]


def test_an_update_ends_no_call_of_the_other_policy(running):
    model, a, b = running
    context, made = [41, *range(10, 42)], {a: [], b: []}

    async def work():
        async def one(policy, request):
            found = await policy.engine.generate(request)
            made[policy].append((list(request.ids), found))
            return found

        calls, seconds = [], []
        for policy in (a, b):
            for n in range(12):
                request = Request(
                    [*context, 50 + n], LONG, frozenset(), n, f"{n}", banned_ids=ending(model)
                )
                calls.append(asyncio.create_task(whole(partial(one, policy), request)))
        for _ in range(3):
            await asyncio.sleep(0.5)
            seconds.append(round(await a.update(), 2))
        return (
            await asyncio.gather(*calls),
            seconds,
            a.client.counts["aborted"],
            b.client.counts["aborted"],
        )

    found, seconds, ended, others = asyncio.run(work())
    assert {len(one.ids) for one in found} == {LONG}
    largest = max(
        gap(model, policy, ids, one) for policy, rows in made.items() for ids, one in rows
    )
    versions = {policy: sorted({one.version for _, one in rows}) for policy, rows in made.items()}
    print(
        f"{a.client.kind}: updates in {seconds} s; calls of the policy updated {len(made[a])}, "
        f"ended {ended}, versions {versions[a]}; of the other {len(made[b])}, ended {others}; max "
        f"|dlogp| {largest:.2g}"
    )
    assert largest < CLOSE
    assert len(versions[a]) > 1
    assert len(versions[b]) == 1
    assert (len(made[b]), others) == (12, 0)
    assert ended > 0


def test_a_server_that_is_killed_within_a_step_comes_back_with_both_adapters(running):
    model, a, b = running
    (server,) = a.engine.started

    async def work():
        starts = server.starts
        playing = [asyncio.create_task(play(policy.engine, model, tasks=16)) for policy in (a, b)]
        while (
            not all(policy.client.counts["requests"] for policy in (a, b))
            or not a.engine.members[0].calls
        ):
            await asyncio.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        made = await asyncio.gather(*playing)
        seconds = [round(await policy.update(), 2) for policy in (b, a)]
        made += await asyncio.gather(*(play(policy.engine, model) for policy in (a, b)))
        return server.starts - starts, made, seconds

    starts, made, seconds = asyncio.run(work())
    assert starts == 1
    for trajectories in made:
        well(trajectories)
    found = []
    for policy, before, after in zip((a, b), made[:2], made[2:], strict=True):
        for version, trajectories in ((policy.version - 1, before), (policy.version, after)):
            policy.as_of(version)
            found.append(kit.gap(policy.trainer, trajectories)[0])
    print(
        f"{a.client.kind}: killed once; max |dlogp| {max(found):.2g} over {len(found)} batches; "
        f"updates behind it {seconds} s"
    )
    assert max(found) < CLOSE


PLAY = """\
import turnwright as tw

def tasks(split, n, seed):
    return [tw.Task(f"Say {split} {number}.") for number in range(12)]

async def play(task, model):
    replies = [await model.generate(task.messages, agent=agent) for agent in ("asker", "solver")]
    values = [float(sum(reply.ids) % 3) for reply in replies]
    return tw.Scores(sum(values), agents=dict(zip(("asker", "solver"), values)))
"""
RUN = """\
[model]
heads = 2
kv_heads = 2
[[env]]
tasks = "play.py:tasks"
[[policy]]
name = "asker"
[[policy]]
name = "solver"
[rollout]
function = "play.py:play"
groups = 4
group_size = 4
[limits]
turn_tokens = 4
on_turn_length = "continue"
[train]
steps = 3
lr = 1e-2
[lora]
rank = 4
[eval]
tasks = 4
"""


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_trains_two_policies_through_a_server_that_it_starts(kind, tmp_path):
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed")
    (tmp_path / "play.py").write_text(PLAY)
    (tmp_path / "run.toml").write_text(RUN)
    out = tmp_path / "run"
    words = [
        "--engine.kind",
        kind,
        "--engine.update",
        "lora",
        "--engine.install-dir",
        str(kit.PLACE),
        "--display",
        "none",
    ]
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(out), *words]) == 0
    rows = [row for row in read_json_lines(out / "metrics.jsonl") if row["phase"] == "train"]
    gaps = {
        name: [row.get(f"policy/{name}/mismatch_max", 0.0) for row in rows]
        for name in ("asker", "solver")
    }
    print(f"a run of two policies, {kind}: max |dlogp| {gaps}")
    assert all(0 < max(found) < 1e-3 for found in gaps.values())
    for row in read_json_lines(out / "trajectories.jsonl"):
        if row["key"]["phase"] == "train":
            assert {span["version"] for span in row["spans"] if span["mask"]} == {
                row["key"]["step"]
            }

"""Several policies on the same servers, each with an adapter and a fleet of its own: no
update disturbs the others."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from kit import remote_engines as kit
from kit.fleets import (
    CONFIG,
    GENERATE,
    LOAD,
    both,
    fingerprint,
    fleet,
    question,
    right,
    scores,
    until,
    weights,
)
from kit.own_servers import alive
from kit.own_servers import fleet as own_fleet

from turnwright.engines.remote import managed
from turnwright.engines.remote.weight_files import AdapterDirectories
from turnwright.errors import ConfigError

UNLOAD = {kind: path.replace("/load", "/unload") for kind, path in LOAD.items()}
ABORT = {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}
PAUSES = (
    "/pause",
    "/pause_generation",
    "/reset_prefix_cache",
    "/flush_cache",
    "/resume",
    "/continue_generation",
)


class Policy:
    """A policy's fleet, and the weights that its trainer has."""

    def __init__(self, name, servers, root, **options):
        self.current = 0
        directories = AdapterDirectories(root / name, lambda: CONFIG, fingerprint=fingerprint)
        options |= {
            "directories": directories,
            "expected_logprobs": lambda ids: scores(self.current)(ids),
        }
        self.engine = servers(**options) if callable(servers) else fleet(servers, **options)

    async def update(self, seed, version):
        self.current = seed
        await self.engine.update(weights(seed), version)

    async def asks(self, count, name="s"):
        """Replies, each of which must be by the weights of now."""
        made = await asyncio.gather(
            *(self.engine.generate(question(f"{name}{n}")) for n in range(count))
        )
        assert all(right(one, self.current) and one.version == self.engine.version for one in made)
        return made


def endless(session):
    """A call that no id ends."""
    return replace(question(session), stop_ids=frozenset())


@pytest.fixture
def root(tmp_path):
    pytest.importorskip("safetensors.torch")
    return tmp_path


@both
def test_updates_in_any_order_leave_the_other_policys_adapter_where_it_is(root, kind):
    with kit.servers(kind, kind) as servers:

        async def work():
            a, b = (Policy(name, servers, root) for name in "ab")
            for policy, seed, version in (
                (a, 3, 1),
                (b, 4, 1),
                (a, 5, 2),
                (a, 6, 3),
                (b, 7, 2),
                (b, 8, 2),
            ):
                await policy.update(seed, version)
                await asyncio.gather(*(one.asks(6) for one in (a, b) if one.current))
            names = [{one.engine.members[n].engine.adapter[0] for one in (a, b)} for n in range(2)]
            listed = [
                await one.http.get("/v1/models", 5)
                for one in (member.engine for member in a.engine.members)
            ]
            await asyncio.gather(a.engine.close(), b.engine.close())
            return names, [{row["id"] for row in page["data"] if row["parent"]} for page in listed]

        names, listed = kit.run(work())
        assert names == listed
        for server in servers:
            loaded = [row["body"]["lora_name"] for row in server.seen(LOAD[kind])]
            # A name of its own for every load, of the same version too.
            assert len(set(loaded)) == 6
            assert {row["body"]["lora_name"] for row in server.seen(UNLOAD[kind])} == set(loaded)
            assert not [
                row["path"] for row in server.seen() if row["path"].partition("?")[0] in PAUSES
            ]


@both
def test_an_update_ends_its_own_policys_calls_and_no_others(root, kind):
    with kit.servers(kind) as server:

        async def work():
            a, b = (Policy(name, [server], root) for name in "ab")
            await a.update(3, 1)
            await b.update(4, 1)
            await asyncio.gather(a.asks(1), b.asks(1))
            server.fault("endless", times=4, seconds=2.0)
            flying = [
                asyncio.create_task(one.engine.generate(endless(f"f{n}")))
                for n in range(2)
                for one in (a, b)
            ]
            await until(
                lambda: len(a.engine.members[0].calls) + len(b.engine.members[0].calls) == 4
            )
            await asyncio.sleep(0.2)
            await a.update(5, 2)
            assert len(b.engine.members[0].calls) == 2
            after = await a.asks(2)
            found = await asyncio.gather(*flying)
            counts = [one.engine.members[0].engine.counts for one in (a, b)]
            await asyncio.gather(a.engine.close(), b.engine.close())
            return found, after, counts

        found, _, counts = kit.run(work())
        for one in found[::2]:
            assert (one.finish, one.version, len(one.ids)) == ("abort", 1, 3)
            assert right(one, 3)
        assert all(
            right(one, 4) and one.finish != "abort" and one.version == 1 for one in found[1::2]
        )
        assert [count["aborted"] for count in counts] == [2, 0]
        assert server.seen(ABORT[kind])


def test_an_adapter_that_sglang_can_never_unload_stays_and_holds_up_nobody(root):
    """It lost count of a call that was aborted before it ran; told to unload that adapter, it
    would load no other again."""
    with kit.servers("sglang") as server:

        async def work():
            a, b = (Policy(name, [server], root) for name in "ab")
            await a.update(3, 1)
            await a.asks(1)
            server.fault("queued", seconds=5.0)
            flying = asyncio.create_task(a.engine.generate(endless("f")))
            await until(lambda: a.engine.members[0].calls)
            await asyncio.sleep(0.2)
            await a.update(4, 2)
            late = await flying
            async with asyncio.timeout(20):
                await b.update(5, 1)
                await a.update(6, 3)
            await asyncio.gather(a.asks(3), b.asks(3))
            counts = a.engine.members[0].engine.counts, a.engine.counts
            await asyncio.gather(a.engine.close(), b.engine.close())
            return late, counts

        late, (counts, of_fleet) = kit.run(work())
        assert (late.finish, list(late.ids)) == ("abort", [])
        assert counts["adapters_left"] == 1
        assert not any(name.startswith("asked_again") for name in of_fleet)
        loaded = [row["body"]["lora_name"] for row in server.seen(LOAD["sglang"])]
        unloaded = [row["body"]["lora_name"] for row in server.seen(UNLOAD["sglang"])]
        assert set(loaded) - set(unloaded) == {loaded[0]}


@both
def test_each_policy_finds_out_that_a_server_was_started_anew(root, kind):
    """One of the two policies is idle meanwhile."""
    with kit.servers(kind, kind) as servers:

        async def work():
            a, b = (Policy(name, servers, root) for name in "ab")
            await a.update(3, 1)
            await b.update(4, 1)
            await asyncio.gather(a.asks(4), b.asks(4))
            playing = asyncio.create_task(repeat(a))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(servers[0].kill)
            await asyncio.sleep(0.2)
            await asyncio.to_thread(servers[0].start)
            made = await playing
            await b.asks(16, "t")
            members = [*a.engine.members, *b.engine.members]
            await until(lambda: all(member.state == "up" for member in members))
            await asyncio.gather(a.asks(16, "u"), b.asks(16, "u"))
            await asyncio.gather(a.engine.close(), b.engine.close())
            return made

        async def repeat(policy):
            return [await policy.asks(4, f"r{turn}") for turn in range(40)]

        assert len(kit.run(work())) == 40
        assert len(servers[0].seen(LOAD[kind])) == 2
        named = {
            row["body"]["model" if kind == "vllm" else "lora_path"]
            for row in servers[0].seen(GENERATE[kind])
        }
        assert named >= {row["body"]["lora_name"] for row in servers[0].seen(LOAD[kind])}


@both
def test_servers_of_a_run_are_started_once_for_all_policies_and_end_with_their_owner(
    home,
    root,
    kind,
):
    from safetensors.torch import save_file

    base = home / "base"
    base.mkdir()
    save_file(dict(weights(1)), base / "model.safetensors")

    async def work():
        a = Policy("a", lambda **options: own_fleet(home, kind, base=base, **options), root)
        started = a.engine.started

        def beside(**options):
            other = own_fleet(home, kind, base=base, owner=False, started=started, **options)
            assert other.started == started
            return other

        b = Policy("b", beside, root)
        await asyncio.gather(a.update(3, 1), b.update(4, 1))  # whichever is first starts it
        await asyncio.gather(a.asks(4), b.asks(4))
        (server,) = started
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.gather(a.asks(4, "t"), b.asks(4, "t"))
        await b.update(5, 2)
        await asyncio.gather(a.asks(4), b.asks(4))
        starts, pid = server.starts, server.pid
        await b.engine.close()
        assert alive(pid)
        await a.asks(2, "u")
        await a.engine.close()
        return starts, pid

    starts, pid = kit.run(work())
    assert starts == 2
    assert not alive(pid)


def test_servers_have_room_for_two_adapters_of_each_policy(tmp_path):
    for kind, option in (("vllm", "--max-loras"), ("sglang", "--max-loras-per-batch")):
        (tmp_path / kind).mkdir()
        for count in (1, 3):
            options = dict(host="127.0.0.1", port=1, lora=8, adapters=count, gpu=True)
            (command,) = managed.start_command(kind, tmp_path, tmp_path, **options).commands
            assert command[command.index(option) + 1] == str(2 * count)


def test_one_engine_for_each_policy_over_the_servers_of_a_recipe(tmp_path):
    torch = pytest.importorskip("torch")
    from turnwright.config import EngineConfig, LoraConfig, RunConfig
    from turnwright.training import make_adapter_engines

    models = {name: torch.nn.Linear(1, 1) for name in ("asker", "answerer")}
    with kit.servers("vllm", "sglang") as servers:
        urls = tuple(server.url for server in servers)
        config = RunConfig(
            engine=EngineConfig(kind="auto", urls=urls, update="lora"), lora=LoraConfig(rank=2)
        )
        engines = make_adapter_engines(config, tmp_path, models, None, tmp_path)
        assert list(engines) == list(models)
        for name, engine in engines.items():
            assert [member.engine.url for member in engine.members] == list(urls)
            assert engine.delivery.directories.root == tmp_path / "weights" / name
        owners = {member.engine.owner for engine in engines.values() for member in engine.members}
        assert len(owners) == 4
    for changed, wrong in (
        ({"update": "disk"}, 'engine.update = "lora"'),
        ({"tree": True}, "engine.tree sends the weights of one"),
    ):
        config = RunConfig(
            engine=EngineConfig(**{"kind": "vllm", "urls": urls, "update": "lora"} | changed),
            lora=LoraConfig(rank=2),
        )
        with pytest.raises(ConfigError, match=wrong):
            make_adapter_engines(config, tmp_path, models, None, tmp_path)

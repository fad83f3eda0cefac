"""Servers that a run starts on machines that do not see its directories: each gets what it
starts with from its relay."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from kit import remote_engines as kit
from kit.fleets import QUICK, many, right, until, weights
from kit.weight_trees import SMALL, content, directory, on_host, relays

from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.fleet_settings import ListedServers, WeightDelivery
from turnwright.engines.remote.managed import start_command
from turnwright.engines.remote.placed import PlacedFleet, PlacedServers
from turnwright.engines.remote.weight_files import AdapterDirectories
from turnwright.errors import UsageError
from turnwright_serve.server import JsonHttpServer
from turnwright_serve.sharing import Manifest, WeightRelay, WeightTree


class Placer:
    """Places servers on loopback hosts; their relays listen there, and the directories that
    they start with are kept."""

    token, host = "of-the-run", "127.0.0.1"

    def __init__(self, folder, urls):
        self.folder, self.urls, self.directories, self.found = folder, urls, {}, {}
        self.stack = AsyncExitStack()

    def relays(self):
        return self.found

    async def add(self, host):
        relay = WeightRelay(self.folder / host, token=self.token)
        server = JsonHttpServer(relay.routes(), host=host, port=0, token=self.token)
        await server.start()
        self.stack.push_async_callback(relay.close)
        self.stack.push_async_callback(server.close)
        self.found[host] = server.url

    async def place(self, servers):
        for host in {url.split("/")[2].split(":")[0] for url in self.urls} - self.found.keys():
            await self.add(host)

    async def start(self, servers, directory, listed):
        for url in self.urls:
            host = url.split("/")[2].split(":")[0]
            self.directories[url] = content(await directory(host))
            listed.add(url)

    async def close(self):
        await self.stack.aclose()


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_what_servers_start_with_and_each_update_come_through_the_relay_of_their_machine(
    tmp_path, directories, kind
):
    base = directory(tmp_path / "base-model", 5)
    (base / ".hidden").write_text("not sent")
    if kind == "adapter":
        directories = AdapterDirectories(
            tmp_path / "adapters", lambda: {"r": 1}, fingerprint=directories._fingerprint
        )
    with kit.servers("vllm", "vllm") as servers:
        hosts = {
            server.url.replace("127.0.0.1", f"127.0.0.{n}"): (server, f"127.0.0.{n}")
            for n, server in enumerate(servers, 2)
        }
        placer = Placer(tmp_path / "nodes", list(hosts))

        async def connect(url):
            return on_host(*hosts[url])

        async def work():
            tree = WeightTree(chunk=SMALL, relays=placer.relays, token=placer.token)
            delivery = WeightDelivery(directories=directories, tree=tree)
            placed = PlacedServers("vllm", 2, tmp_path, tmp_path, 60.0, {}, relays=True)
            listed = ListedServers(EngineList(tmp_path / "list"), connect)
            start = base if kind == "adapter" else None
            engine = PlacedFleet(
                placer, placed, QUICK, delivery=delivery, listed=listed, base=start
            )
            await engine.update(weights(3), 3)
            started = content(directories.root / "policy-3")
            for version in range(3, 7):
                await engine.update(weights(version), version)
                await until(lambda: all(member.state == "up" for member in engine.members))
                found = await many(engine, 6, turns=2)
                assert all(
                    right(generation, version, last) for rows in found for generation, last in rows
                )
            kept = {path.name for path in (tmp_path / "nodes" / "127.0.0.2").iterdir()}
            # Another relay takes over a machine, as after the end of an actor.
            await placer.add("127.0.0.2")
            await engine.update(weights(7), 7)
            states = [member.state == "up" and not member.outdated for member in engine.members]
            await engine.close()
            return kept, states, started

        kept, states, started = kit.run(work())
        bodies = [str([row["body"] for row in server.seen()]) for server in servers]
    assert states == [True, True]
    assert kept == {"policy-5", "policy-6"} | ({"base"} if kind == "adapter" else set())
    first, second = placer.directories.values()
    (base / ".hidden").unlink()
    assert first == second == (content(base) if kind == "adapter" else started)
    for host, body in zip(("127.0.0.2", "127.0.0.3"), bodies, strict=True):
        assert str(tmp_path / "nodes" / host / "policy-7") in body
        assert str(directories.root) not in body  # no server was sent to a directory of the run


def test_a_policy_of_another_run_replaces_the_one_of_the_same_number(tmp_path):
    async def work(made, urls):
        for seed in (1, 2):
            source = directory(tmp_path / f"run-{seed}", seed)
            manifest = Manifest.of(source, 4, SMALL)
            made[0].offer(source, manifest)
            got = await made[1].fetch(manifest, [[urls[0]]])
            assert content(got) == content(source)

    asyncio.run(relays(tmp_path, 2, work))


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("vllm", "--tensor-parallel-size 4 --distributed-executor-backend mp"),
        ("sglang", "--tp-size 4"),
    ],
)
def test_a_model_is_split_over_the_gpus_of_its_server(tmp_path, kind, option):
    (tmp_path / kind).mkdir()
    command = {
        gpus: start_command(
            kind, tmp_path, tmp_path, host="h", port=1, gpu=True, gpus=gpus
        ).commands[0]
        for gpus in (1, 4)
    }
    assert " ".join(command[4]) == f"{' '.join(command[1])} {option}"


def test_llamacpp_splits_no_model(tmp_path):
    (tmp_path / "llamacpp").mkdir()
    with pytest.raises(UsageError, match="2 GPUs"):
        start_command("llamacpp", tmp_path, tmp_path, host="h", port=1, gpus=2)

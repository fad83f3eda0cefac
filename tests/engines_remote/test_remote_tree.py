"""Weights that go from node to node: real relay processes, chunks that are
damaged, peers that die."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import remote_engines as kit
from kit.fleets import QUICK, many, right, weights
from kit.weight_trees import SMALL, content, directory, on_host, relays
from pydantic import ValidationError

from turnwright.engines.remote import Fleet, VllmEngine
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.http import HttpClient
from turnwright.engines.remote.weight_files import AdapterDirectories
from turnwright.engines.remote.weight_sync import DiskWeights
from turnwright.errors import SyncError
from turnwright_serve.server import Endpoint, JsonHttpServer
from turnwright_serve.sharing import Manifest, WeightRelay, WeightTree
from turnwright_serve.sharing.difference import apply_difference, encode_difference
from turnwright_serve.sharing.tree import parents


@given(st.integers(1, 300))
def test_in_two_trees_every_node_sends_the_weights_at_most_once(count):
    nodes = [f"http://n{number}:1" for number in range(count)]
    found = {node: [[*above, "root"] for above in trees] for node, trees in parents(nodes).items()}
    children = dict.fromkeys([*nodes, "root"], 0)
    for node, trees in found.items():
        for above in trees:
            assert above[-1] == "root"
            assert node not in above
            assert len(set(above)) == len(above) <= count.bit_length()
            children[above[0]] += 1  # of half of the chunks
    assert max(children.values()) <= 3
    assert children["root"] == 2
    assert sum(children.values()) == 2 * count


def test_a_manifest_names_plain_files_and_as_many_chunks_as_they_have(tmp_path):
    manifest = Manifest.of(directory(tmp_path / "one", 1), 3, SMALL)
    assert manifest.size == sum(len(data) for data in content(tmp_path / "one").values())
    assert [chunk.size for chunk in manifest.chunks()] == [2, *[SMALL] * 9, 17]
    given = manifest.model_dump()
    for name in ("../x", "a/b", ".hidden", ""):
        with pytest.raises(ValidationError):
            Manifest.model_validate(given | {"files": [given["files"][0] | {"name": name}]})
    assert Manifest.model_validate(given | {"files": given["files"] * 2}).fault()
    assert Manifest.model_validate(
        given | {"files": [given["files"][0] | {"size": 5 * SMALL}]}
    ).fault()


def test_chunks_go_from_peer_to_peer_while_they_arrive_and_unchanged_ones_are_not_sent(tmp_path):
    first, second = directory(tmp_path / "one", 1), directory(tmp_path / "two", 1, changed=4)

    async def work(made, urls):
        found = []
        for version, source in enumerate((first, second)):
            manifest = Manifest.of(source, version, SMALL)
            made[0].offer(source, manifest)
            # Each knows the one before it alone, and all begin at once.
            got = await asyncio.gather(
                *(r.fetch(manifest, [[urls[n]]]) for n, r in enumerate(made[1:]))
            )
            assert [content(path) for path in got] == [content(source)] * 3
            found.append([relay.counts["bytes_fetched"] for relay in made[1:]])
        return found, [relay.counts["bytes_served"] for relay in made], manifest.size

    found, served, size = asyncio.run(relays(tmp_path, 4, work))
    assert found[0] == [size] * 3
    more = found[1][0] - size
    assert 0 < more < SMALL / 10  # of the second, the difference of one chunk
    assert found[1] == [size + more] * 3
    assert served == [size + more] * 3 + [0]


def bfloat16_words(seed, count=40 * SMALL, changed=0.0):
    """Random words, of which a share moved by one in its last place."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**16, count, dtype=np.uint16)
    moved = np.random.default_rng(seed + 1).random(count) < changed
    return (
        np.where(moved, words + rng.choice(np.array([1, 2**16 - 1], np.uint16), count), words)
        .astype("<u2")
        .tobytes()
    )


@given(data=st.data(), length=st.integers(0, 300))
def test_a_difference_turns_the_old_bytes_into_the_new_ones_whatever_they_are(data, length):
    old = data.draw(st.binary(min_size=length, max_size=length))
    new = bytearray(old)
    for place in (
        data.draw(st.lists(st.integers(0, max(0, length - 1)), max_size=20)) if length else ()
    ):
        new[place] = data.draw(st.integers(0, 255))
    found = encode_difference(old, bytes(new))
    if found is not None:
        assert len(found) < length
        assert apply_difference(old, found) == new
    assert encode_difference(old, bytes(new) + b"x") is None


@given(data=st.binary(max_size=200), length=st.integers(0, 200))
def test_what_is_no_difference_of_these_bytes_is_an_error(data, length):
    old = bytes(length)
    for bad in (zlib.compress(bytes(10**6)), zlib.compress(data)[:-1]):
        with pytest.raises(ValueError, match="difference"):
            apply_difference(old, bad)
    for given_ in (zlib.compress(data), data):
        try:
            found = apply_difference(old, given_)
        except ValueError:
            continue
        assert len(found) == length


def test_a_hundredth_of_changed_elements_takes_less_than_a_thirtieth_and_most_of_them_the_bytes_themselves():  # noqa: E501
    old, new = bfloat16_words(1), bfloat16_words(1, changed=0.02)
    assert 0.01 < np.mean(np.frombuffer(old, "<u2") != np.frombuffer(new, "<u2")) < 0.03
    assert len(encode_difference(old, new)) < len(new) / 30
    assert encode_difference(old, bfloat16_words(1, changed=0.5)) is None


def test_a_node_that_lost_or_damaged_the_old_bytes_gets_the_new_ones_whole(tmp_path):
    sources = [tmp_path / f"source-{number}" for number in range(3)]
    for number, source in enumerate(sources):
        source.mkdir()
        (source / "model.safetensors").write_bytes(bfloat16_words(7, changed=0.02 * number))
    size = len(bfloat16_words(7))

    async def work(made, urls):
        fetched = []

        async def fetch(node, version):
            manifest = Manifest.of(sources[version], version, 8 * SMALL)
            made[0].offer(sources[version], manifest)
            before = made[node].counts["bytes_fetched"]
            assert content(await made[node].fetch(manifest, [[urls[0]]])) == content(
                sources[version]
            )
            fetched.append(made[node].counts["bytes_fetched"] - before)

        await fetch(1, 0)
        await fetch(1, 1)  # the difference
        path = made[1].root / "policy-1" / "model.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[5] ^= 255
        path.write_bytes(damaged)
        await fetch(1, 2)  # one chunk whole, after a difference that gave other bytes
        await fetch(2, 2)  # a node that was away
        return fetched, [dict(relay.counts) for relay in made]

    fetched, counts = asyncio.run(relays(tmp_path, 3, work))
    assert fetched[0] == fetched[3] == size
    assert fetched[1] < size / 20
    assert fetched[1] + 8 * SMALL <= fetched[2] < size / 4
    assert counts[1]["chunks_rejected"] == 1
    assert counts[1]["differences"] == 19


def test_a_peer_that_sends_other_bytes_or_none_is_replaced_by_the_next(tmp_path):
    source = directory(tmp_path / "one", 1)

    async def work(made, urls):
        from starlette.responses import Response

        manifest = Manifest.of(source, 1, SMALL)
        made[0].offer(source, manifest)

        async def damaged(call):
            return Response(b"x" * SMALL, media_type="application/octet-stream")

        liar = JsonHttpServer(
            {("GET", "/weights/chunks/{digest}"): Endpoint(damaged)}, host="127.0.0.1", port=0
        )
        await liar.start()
        try:
            got = await made[1].fetch(
                manifest, [[liar.url, urls[0]], ["http://127.0.0.1:9", urls[0]]]
            )
            assert content(got) == content(source)
            with pytest.raises(SyncError, match="sent other bytes"):
                await made[2].fetch(manifest, [[liar.url]])
            assert list(made[2].root.iterdir()) == []  # nothing of it stays
            await made[2].fetch(manifest, [[urls[1]]])
        finally:
            await liar.close()
        return made[1].counts

    counts = asyncio.run(relays(tmp_path, 3, work))
    assert counts["chunks_rejected"] == 6
    assert counts["peers_failed"] == 5


def test_a_transfer_is_shared_by_all_who_ask_and_old_policies_are_deleted(tmp_path):
    async def work(made, urls):
        for version in range(4):
            source = directory(tmp_path / f"source-{version}", version)
            manifest = Manifest.of(source, version, SMALL)
            made[0].offer(source, manifest)
            await asyncio.gather(*(made[1].fetch(manifest, [[urls[0]]]) for _ in range(5)))
        return (
            made[1].counts["bytes_fetched"],
            4 * manifest.size,
            sorted(path.name for path in made[1].root.iterdir()),
        )

    fetched, once, kept = asyncio.run(relays(tmp_path, 2, work))
    assert fetched <= once
    assert kept == ["policy-2", "policy-3"]


class Relay:
    """`turnwright engines relay` in a process of its own."""

    def __init__(self, root: Path, host: str, port: int) -> None:
        command = [
            sys.executable,
            "-m",
            "turnwright",
            "engines",
            "relay",
            str(root),
            "--host",
            host,
            "--port",
            str(port),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_each_node_reads_once_from_another_and_its_servers_load_what_it_stored(
    tmp_path, directories, kind, monkeypatch
):
    """Three hosts with a relay each and two servers each, and a relay that is killed
    before the last update."""
    monkeypatch.setenv("TURNWRIGHT_SERVE_TOKEN", "tree")  # other machines may connect, with it
    hosts, port = ["127.0.0.2", "127.0.0.3", "127.0.0.4"], 0
    if kind == "adapter":
        directories = AdapterDirectories(
            tmp_path / "adapters", lambda: {"r": 1}, fingerprint=directories._fingerprint
        )
    with ExitStack() as stack:
        started = []
        for host in hosts:  # one port on all hosts
            started.append(Relay(tmp_path / host, host, port))
            stack.callback(started[-1].end)
            port = port or int(started[0].url.rpartition(":")[2])
        servers = [
            stack.enter_context(kit.servers("vllm" if number % 2 else "sglang"))
            for number in range(6)
        ]

        async def work():
            engines = [on_host(server, hosts[number // 2]) for number, server in enumerate(servers)]
            tree = WeightTree(relay_port=port, chunk=64)
            engine = Fleet(
                engines, QUICK, delivery=WeightDelivery(directories=directories, tree=tree)
            )
            await engine.update(weights(3), 3)
            found = await many(engine, 12, turns=2)
            assert all(right(generation, 3, last) for rows in found for generation, last in rows)
            counts = []
            for relay in started:
                http = HttpClient(relay.url, key_env="TURNWRIGHT_SERVE_TOKEN")
                counts.append(await http.get("/weights/counts", 5))
                await http.close()
            started[1].end()
            await engine.update(weights(4), 4)
            states = [member.state == "up" and not member.outdated for member in engine.members]
            found = await many(engine, 12, turns=2)
            assert all(right(generation, 4, last) for rows in found for generation, last in rows)
            await engine.close()
            return counts, states

        counts, states = kit.run(work())
        seen = [row["body"] for row in servers[1].seen()]
    size = sum(file.stat().st_size for file in (directories.root / "policy-3").iterdir())
    assert [row["bytes_fetched"] for row in counts] == [size] * 3  # once per node, for two servers
    assert sum(row.get("bytes_served", 0) for row in counts) > 0
    assert states == [True, True, False, False, True, True]
    assert str(tmp_path / hosts[0] / "policy-4") in str(seen)


def test_a_relay_takes_orders_by_its_token_only(tmp_path):
    relay = Relay(tmp_path / "node", "127.0.0.1", 0)
    try:
        body = {
            "manifest": {"version": 1, "chunk": 8, "files": []},
            "sources": [["http://127.0.0.1:9"]],
        }
        command = [
            sys.executable,
            "-c",
            "import sys, httpx2; print(httpx2.post(sys.argv[1], json={}).status_code)",
        ]
        plain = subprocess.run(
            [*command, f"{relay.url}/weights/fetch"], capture_output=True, text=True, check=True
        )
        assert plain.stdout.strip() == "401"

        async def work():
            http = HttpClient(relay.url)
            try:
                with pytest.raises(Exception, match="at least 1 item"):
                    await http.post("/weights/fetch", body, 5)
            finally:
                await http.close()

        asyncio.run(work())
    finally:
        relay.end()


def test_turnwright_serve_passes_weights_on(tmp_path):
    pytest.importorskip("torch")
    from turnwright.config import ModelConfig
    from turnwright.training import create_tiny_model, score_with_model
    from turnwright.training.model.models import load
    from turnwright_serve import make_service

    texts = [f"lookup birch {n}" for n in range(30)]
    start = create_tiny_model(ModelConfig(hidden=32, layers=1), texts, tmp_path / "start", seed=3)
    later = create_tiny_model(ModelConfig(hidden=32, layers=1), texts, tmp_path / "later", seed=4)

    async def work():
        app, engine = make_service(start, context=64, device="cpu")
        relay = WeightRelay(tmp_path / "node")
        server = JsonHttpServer(app.routes("vllm") | relay.routes(), host="127.0.0.1", port=0)
        await server.start()
        client, tree = VllmEngine(server.url), WeightTree(chunk=4096)
        try:
            before = await client.score(range(3, 20))
            source = await tree.share(DiskWeights(later, 7), [server.url])
            await source.send_to(client)
            return before, await client.score(range(3, 20)), client.version
        finally:
            await client.close()
            await tree.close()
            await server.close()
            await relay.close()
            await engine.close()

    before, after, version = asyncio.run(work())
    wanted = score_with_model(load(later)[0])(range(3, 20))
    assert version == 7
    assert after != before
    assert after == pytest.approx(wanted, abs=1e-5)


def test_the_trainer_serves_the_latest_weights_from_a_later_event_loop_too(tmp_path):
    tree, source = WeightTree(chunk=SMALL), directory(tmp_path / "one", 1)
    shared = asyncio.run(tree.share(DiskWeights(source, 1), ["http://127.0.0.1:9"]))

    async def work(made, urls):
        manifest = Manifest.model_validate_json(shared.manifest)
        got = await made[0].fetch(manifest, [[await tree.start()]])
        await tree.close()
        return content(got)

    for number in range(2):
        (tmp_path / str(number)).mkdir()
        assert asyncio.run(relays(tmp_path / str(number), 1, work)) == content(source)

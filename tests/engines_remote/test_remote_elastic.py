"""Servers that join and leave a fleet while it plays."""

from __future__ import annotations

import asyncio
import threading

import pytest
from kit import remote_engines as kit
from kit.fleets import QUICK, described, fleet, many, question, right, until, weights

from turnwright.cli.main import main
from turnwright.engines.remote import Fleet, SglangEngine, VllmEngine
from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.fleet_settings import FleetSettings, ListedServers
from turnwright.engines.remote.remote_engine import EngineLoad
from turnwright.engines.remote.replica import Replica
from turnwright.errors import ConfigError, EngineUnavailable, SyncError, UsageError

CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine}


def listed(path, servers, **options):
    """A fleet of the servers in a list."""
    kinds = {server.url: server.kind for server in servers}

    async def connect(url):
        return CLIENTS[kinds[url]](url)

    return Fleet([], listed=ListedServers(EngineList(path), connect), **described(**options))


def test_a_list_has_each_server_once_and_keeps_its_comments(tmp_path, capsys):
    path = tmp_path / "lists" / "engines.txt"
    assert main(["engines", "join", "http://a:1/", "--list", str(path)]) == 0
    with path.open("a") as file:
        file.write("# the big one\nhttp://b:2\n")
    assert main(["engines", "join", "http://b:2", "--list", str(path)]) == 0
    assert "was listed already" in capsys.readouterr().out
    assert EngineList(path).urls() == ("http://a:1", "http://b:2")
    assert main(["engines", "leave", "http://a:1", "--list", str(path)]) == 0
    assert path.read_text() == "# the big one\nhttp://b:2\n"
    assert main(["engines", "join", "b:2", "--list", str(path)]) == 2
    assert main(["engines", "join", "http://b:2"]) == 2
    path.write_text("b:2\n")
    with pytest.raises(UsageError, match="is no URL"):
        EngineList(path).urls()


def test_writers_of_a_list_take_turns(tmp_path):
    path = tmp_path / "engines.txt"
    threads = [
        threading.Thread(target=lambda n=n: EngineList(path).add(f"http://h{n}:1"))
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(EngineList(path).urls()) == sorted(f"http://h{n}:1" for n in range(16))


def test_weights_that_are_there_are_not_written_again_while_a_server_that_joins_may_read_them(
    directories,
):
    def files():
        return {path.name: path.stat().st_ino for path in (directories.root / "policy-3").iterdir()}

    first = directories.write(weights(3), 3)
    written = files()
    assert directories.write(weights(3), 3) == first
    assert files() == written
    assert directories.write(weights(4), 3) != first  # other weights of the same version
    assert files() != written
    (directories.root / "policy-3").rename(directories.root / "gone")
    directories.write(weights(4), 3)
    assert files().keys() == written.keys()


def test_servers_join_and_leave_while_sessions_play(tmp_path, directories):
    path = tmp_path / "engines.txt"
    with kit.servers("vllm", "sglang", "vllm") as servers:
        for server in servers[:2]:
            EngineList(path).add(server.url)

        async def work():
            engine = listed(path, servers, directories=directories)
            await engine.update(weights(3), 3)
            playing = asyncio.create_task(many(engine, 24, turns=16, pause=0.1))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(servers[0].kill)  # it dies, and leaves
            EngineList(path).remove(servers[0].url)
            EngineList(path).add(servers[2].url)
            await until(
                lambda: (
                    engine.counts["left"] == 1 and engine.members[-1].engine.url == servers[2].url
                )
            )
            fresh = engine.members[-1]
            await until(lambda: fresh.state == "up")
            found = await many(engine, 8, turns=2) + await playing
            homes = dict(engine._homes)
            await engine.close()
            return found, fresh, homes, engine.counts

        found, fresh, homes, counts = kit.run(work())
    assert [len(rows) for rows in found] == [2] * 8 + [16] * 24
    # Never by its first weights.
    assert all(right(generation, 3, last) for rows in found for generation, last in rows)
    assert fresh.counts["answers"] > 0
    assert not homes
    assert counts["joined"] == 3


def test_a_server_that_joins_gets_the_weights_at_once_and_one_that_ignores_them_gets_no_call(
    tmp_path, directories, monkeypatch
):
    with kit.servers("vllm", "vllm", "vllm") as servers:

        async def work():
            engine = fleet(servers[:1], directories=directories)
            await engine.update(weights(3), 3)
            await engine.generate(question())
            good, liar = VllmEngine(servers[1].url), VllmEngine(servers[2].url)

            async def load(directory, version):  # it takes their name alone
                await liar.http.post("/update_weight_version", {"new_version": str(version)}, 5)

            monkeypatch.setattr(liar, "_load_from_disk", load)
            engine.add(good)
            engine.add(liar)
            with pytest.raises(ConfigError, match="already"):
                engine.add(VllmEngine(servers[1].url))
            await until(
                lambda: (
                    engine.members[1].state == "up"
                    and engine.members[2].counts["checks_failed"] >= 2
                )
            )
            found = await many(engine, 8)
            faults = [member.fault for member in engine.members]
            answers = [member.counts["answers"] for member in engine.members]
            await engine.close()
            return found, faults, answers

        found, faults, answers = kit.run(work())
    assert all(right(generation, 3, last) for rows in found for generation, last in rows)
    assert "other weights than the fleet" in faults[2]
    assert answers[1] > 0
    assert answers[2] == 0


def test_weights_that_no_server_takes_now_are_those_of_the_next_that_joins(tmp_path, directories):
    path = tmp_path / "engines.txt"
    with kit.servers("vllm", "sglang") as servers:
        EngineList(path).add(servers[0].url)

        async def work():
            engine = listed(path, servers, directories=directories)
            await engine.update(weights(3), 3)
            await asyncio.to_thread(servers[0].kill)
            EngineList(path).remove(servers[0].url)
            await until(lambda: not engine.members)
            updating = asyncio.create_task(engine.update(weights(4), 4))
            await asyncio.sleep(0.5)
            assert not updating.done()
            EngineList(path).add(servers[1].url)
            await updating
            found = await engine.generate(question(min_version=4))
            await engine.close()
            return found

        assert right(kit.run(work()), 4)

        async def alone():
            engine = listed(path, servers, directories=directories, patience_s=1.0)
            EngineList(path).remove(servers[1].url)
            with pytest.raises(EngineUnavailable, match="it lists none"):
                await engine.generate(question())
            EngineList(path).add(servers[1].url)
            await engine.open()
            await asyncio.to_thread(servers[1].kill)
            with pytest.raises(SyncError, match="no server has the weights of policy 5"):
                await engine.update(weights(5), 5)
            await engine.close()

        kit.run(alone())


def test_an_update_that_ends_while_a_server_is_given_the_one_before_is_sent_too(directories):
    with kit.servers("vllm", "vllm") as servers:

        async def work():
            engine = fleet(servers[:1], directories=directories)
            await engine.update(weights(3), 3)
            late = VllmEngine(servers[1].url)
            load, begun, go = late._load_from_disk, asyncio.Event(), asyncio.Event()

            async def slow(directory, version):
                begun.set()
                await go.wait()
                await load(directory, version)

            late._load_from_disk = slow
            engine.delivery.directories.keep = 3
            updating = None
            update = engine.members[0].update

            async def first_begun(*args, **options):
                # The newcomer is no member when the update begins.
                engine.add(late)
                await begun.wait()
                return await update(*args, **options)

            engine.members[0].update = first_begun
            updating = asyncio.create_task(engine.update(weights(4), 4))
            await begun.wait()
            await updating
            go.set()
            await until(lambda: engine.members[1].state == "up")
            version = late.version
            found = [await late.generate(question(min_version=4))]
            await engine.close()
            return version, found

        version, found = kit.run(work())
    assert version == 4
    assert right(found[0], 4)


@pytest.mark.parametrize(
    ("kind", "env", "wanted"),
    [
        ("vllm", {"KIT_LOAD": "12 3 0.5"}, EngineLoad(12, 3, 0.5)),
        ("vllm", {}, None),
        ("sglang", {"KIT_LOAD": "12 3 0.5"}, EngineLoad(12, 3, 0.5)),
        ("sglang", {"KIT_LOAD": "12 3 0.5", "KIT_OLD": "1"}, EngineLoad(12, 3, None)),
        ("sglang", {}, None),
    ],
)
def test_a_servers_load_is_read_as_it_writes_it(kind, env, wanted):
    async def work(url):
        engine = CLIENTS[kind](url)
        await engine.open()
        found = [await engine.load(), await engine.load()]
        await engine.close()
        return found

    with kit.servers(kind, **env) as server:
        assert kit.run(work(server.url)) == [wanted, wanted]


def test_a_server_with_a_queue_gets_fewer_sessions_and_more_again_later():
    member, ready = Replica(VllmEngine("http://a:1"), 64, 3), EngineLoad(32, 0, 0.5)
    member.calls = set(range(64))
    member.adapt(EngineLoad(48, 16, 0.9))
    assert member.limit == 48
    assert member.available is False  # 64 of 64
    member.calls = set(range(48))
    # Sessions that it has the cache of go on.
    assert (member.available, member.accepts_sessions) == (
        True,
        False,
    )
    member.adapt(EngineLoad(48, 0, 0.99))
    assert member.limit == 42
    member.adapt(EngineLoad(0, 500, 1.0))
    assert member.limit == 21  # at most by half
    for _ in range(40):
        member.calls = set(range(member.limit))
        member.adapt(ready)
    assert member.limit == 64
    member.calls = set()
    member.adapt(EngineLoad(0, 0, 0.0))
    assert member.limit == 64


def test_reports_of_load_bound_the_sessions_of_a_fleet():
    with (
        kit.servers("vllm", KIT_LOAD="1 40 1.0") as busy,
        kit.servers("vllm", KIT_LOAD="1 0 0.1") as idle,
    ):

        async def work():
            engine = fleet([busy, idle], most=16)
            await engine.open()
            await until(lambda: engine.members[0].limit == 1)
            await many(engine, 12, turns=2)
            counts = [member.counts["answers"] for member in engine.members]
            await engine.close()
            return counts

        first, second = kit.run(work())
    assert first + second == 24
    assert second > first


def test_a_listed_server_that_does_not_respond_keeps_no_other_from_joining(tmp_path):
    path = tmp_path / "engines.txt"
    with kit.servers("vllm", "vllm") as servers:
        for url in ("http://hangs:1", "http://127.0.0.1:9", servers[0].url):
            EngineList(path).add(url)
        asked = []

        async def connect(url):
            asked.append(url)
            if "hangs" in url:
                await asyncio.Event().wait()
            engine = VllmEngine(url)
            if url.endswith(":9"):
                await engine.check_health(1.0)
            return engine

        async def work():
            engine = Fleet([], QUICK, listed=ListedServers(EngineList(path), connect))
            assert right(await engine.generate(question()), 1)
            EngineList(path).add(servers[1].url)
            await until(lambda: len(engine.members) == 2 and engine.members[1].state == "up")
            await until(lambda: asked.count("http://127.0.0.1:9") > 1)  # it may start later
            EngineList(path).remove(servers[0].url)
            await until(
                lambda: [member.engine.url for member in engine.members] == [servers[1].url]
            )
            assert right(await engine.generate(question()), 1)
            await engine.close()

        kit.run(work())
    assert asked.count("http://hangs:1") == 1


@pytest.mark.parametrize("cancelled", ["by the fleet", "by the caller", "by both"])
def test_a_call_that_the_fleet_ends_is_no_cancellation_of_its_caller(cancelled):
    async def work():
        engine = VllmEngine("http://127.0.0.1:9")
        member, waits = Replica(engine, 4, 3), asyncio.Event()
        engine.generate = lambda request: waits.wait()

        async def call():
            try:
                await member.generate(question())
            except EngineUnavailable:
                left = asyncio.current_task().cancelling()
                await asyncio.sleep(0)  # raises if the cancellation were still there
                return left

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        assert member.calls == {task}
        if cancelled != "by the caller":
            member.abort_calls()
            member.abort_calls()  # ends it once
        if cancelled != "by the fleet":
            task.cancel()
        found = (await asyncio.gather(task, return_exceptions=True))[0]
        assert not member.calls
        return found

    found = kit.run(work())
    assert found == 0 if cancelled == "by the fleet" else isinstance(found, asyncio.CancelledError)


def test_sessions_spread_over_many_servers_and_find_the_only_free_one():
    async def work():
        engine = Fleet(
            [VllmEngine(f"http://127.0.0.1:{port}") for port in range(1, 301)],
            FleetSettings(most=8),
        )
        for number in range(300):
            member = await engine._choose_replica(f"s{number}", ())
            member.calls.add(number)
        busiest = max(len(member.calls) for member in engine.members)
        for member in engine.members[:-1]:
            member.calls = set(range(8))
        engine.members[-1].calls = set()
        return busiest, await engine._choose_replica("late", ()) is engine.members[-1]

    busiest, found = kit.run(work())
    assert busiest <= 2
    assert found

"""A fleet of server processes that die, hang, answer nonsense and forget their weights: no call is
lost, no id is wrong."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from itertools import pairwise

import pytest
from kit import remote_engines as kit
from kit.fleets import QUICK, fingerprint, fleet, many, question, right, until, weights

import turnwright as tw
from turnwright.engines.remote import ChatEngine, Fleet, VllmEngine
from turnwright.engines.remote.fleet_settings import FleetSettings
from turnwright.errors import (
    BackendContractError,
    ConfigError,
    EngineError,
    EngineUnavailable,
    NotTrainable,
    SyncError,
)


def test_sessions_stay_where_they_began_and_spread_over_all():
    with kit.servers("vllm", "sglang") as servers:

        async def work():
            engine = fleet(servers)
            placed = {}
            for turn in range(3):
                await asyncio.gather(*(engine.generate(question(f"s{n}")) for n in range(8)))
                now = {name: member.engine.url for name, member in engine._homes.items()}
                placed = placed or now
                assert now == placed, turn
            for n in range(8):
                engine.release(f"s{n}")
            assert not engine._homes
            await engine.close()
            return Counter(placed.values())

        assert sorted(kit.run(work()).values()) == [4, 4]


@pytest.mark.parametrize(
    "fault",
    [
        "status",
        "garbage",
        "truncated",
        "reset",
        "count",
        "nan",
        "echo",
        "version",
        "no_logprobs",
        "hang",
    ],
)
def test_what_one_server_gets_wrong_is_asked_again_elsewhere(fault):
    with kit.servers("vllm", "sglang") as servers:

        async def work():
            engine = fleet(servers)
            for member in engine.members:
                member.engine.request_s = 1.0
            found = await many(engine, 6, turns=2)
            await engine.close()
            return found, engine.counts

        servers[0].fault(fault, times=3, status=500, seconds=20)
        found, counts = kit.run(work())
        assert all(right(generation, 1, last) for rows in found for generation, last in rows)
        assert sum(count for name, count in counts.items() if name.startswith("asked_again")) >= 1


def test_a_server_that_is_killed_stopped_or_started_again_loses_no_call():
    with kit.servers("vllm", "sglang", "vllm") as servers:

        async def work():
            engine = fleet(servers)
            await engine.open()
            playing = asyncio.create_task(many(engine, 24, turns=12, pause=0.1))
            await asyncio.sleep(0.4)
            await asyncio.to_thread(servers[0].kill)
            servers[1].signal(signal.SIGSTOP)
            await asyncio.sleep(2.0)
            await asyncio.to_thread(servers[0].start)
            servers[1].signal(signal.SIGCONT)
            found = await playing
            await until(lambda: all(member.state == "up" for member in engine.members))
            states = [member.state for member in engine.members]
            await engine.close()
            return found, states, engine

        found, states, engine = kit.run(work())
        assert [len(rows) for rows in found] == [12] * 24
        assert all(right(generation, 1, last) for rows in found for generation, last in rows)
        assert states == ["up"] * 3
        assert engine.members[0].counts["recovered"] >= 1


def test_new_weights_reach_every_server_and_are_proven(directories):
    with kit.servers("vllm", "sglang") as servers:

        async def work():
            engine = fleet(servers, directories=directories)
            for version in (3, 4):
                assert await engine.update(weights(version), version) == fingerprint(
                    weights(version)
                )
                assert engine.version == version
                found = await asyncio.gather(
                    *(engine.generate(question(f"s{n}", min_version=version)) for n in range(6))
                )
                assert all(right(generation, version) for generation in found)
                assert {generation.version for generation in found} == {version}
            await engine.close()

        kit.run(work())
    assert sorted(path.name for path in directories.root.iterdir()) == ["policy-3", "policy-4"]
    assert (directories.root / "policy-4" / "config.json").is_file()


def test_a_server_that_says_yes_and_keeps_its_old_weights_is_found_out(directories, monkeypatch):
    with kit.servers("vllm") as server:

        async def work(**options):
            engine = fleet([server], directories=directories, **options)
            await engine.update(weights(3), 3)
            lie = engine.members[0].engine

            async def _load(directory, version):
                # The weights are not read, and their name is set all the same.
                await lie.http.post("/update_weight_version", {"new_version": str(version)}, 5)

            monkeypatch.setattr(lie, "_load_from_disk", _load)
            try:
                await engine.update(weights(4), 4)
            finally:
                await engine.close()

        with pytest.raises(SyncError, match="bit-identical to before"):
            kit.run(work())

        def expect(ids):
            """What the trainer says: it knows the newest weights."""
            rows = kit.table(asked[0])
            return [rows[a][b] for a, b in pairwise(ids)]

        asked = [3]
        monkeypatch.undo()

        async def proven():
            engine = fleet([server], directories=directories, expected_logprobs=expect)
            await engine.update(weights(3), 3)
            asked[0] = 5
            try:
                await engine.update(weights(4), 4)  # the server reads 4, and the trainer has 5
            finally:
                await engine.close()

        with pytest.raises(SyncError, match="differ from the trainer's by up to"):
            kit.run(proven())


def test_a_server_that_comes_back_with_old_weights_is_given_the_new_ones(directories):
    with kit.servers("sglang", "vllm") as servers:

        async def work():
            engine = fleet(servers, directories=directories)
            await engine.update(weights(3), 3)
            for server in servers:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            found = await many(engine, 8, turns=4)
            reloaded = [member.counts["reloaded"] for member in engine.members]
            await engine.close()
            return found, reloaded

        found, reloaded = kit.run(work())
        assert all(right(generation, 3, last) for rows in found for generation, last in rows)
        assert sum(reloaded) >= 1


def test_a_fault_that_is_found_during_a_glance_has_the_weights_looked_at(directories):
    with kit.servers("vllm") as server:

        async def work():
            engine = fleet([server], directories=directories, check_s=3600.0)
            await engine.update(weights(3), 3)
            (member,) = engine.members
            name, look, looked = member.engine.weights_name, member.engine.weights_label, []

            async def found():
                member.engine.weights_name = name
                member.mark_suspect("a call found that it has other weights")
                member.check_now.clear()  # by this check alone
                return await name()

            async def noted():
                looked.append(member.state)
                return await look()

            member.engine.weights_name, member.engine.weights_label = found, noted
            well = await member.check(5.0, lambda: engine._latest_for(member))
            state = member.state
            await engine.close()
            return well, state, looked

        assert kit.run(work()) == (True, "up", ["doubted"])


def test_a_restart_is_seen_where_a_server_has_no_name_for_its_weights():
    with kit.servers("vllm", KIT_PLAIN="1") as server:

        async def work():
            engine = fleet([server], patience_s=1.5)
            assert right(await engine.generate(question()), 1)
            await asyncio.to_thread(server.kill)
            server.weights = 2
            await asyncio.to_thread(server.start)
            await until(lambda: engine.members[0].state != "up")
            try:
                with pytest.raises(EngineUnavailable, match="other weights under the same name"):
                    await engine.generate(question())
            finally:
                await engine.close()

        kit.run(work())


def test_calls_in_flight_end_before_new_weights_are_read(directories):
    with kit.servers("vllm") as server:

        async def work():
            engine = fleet([server], directories=directories)
            await engine.open()
            playing = asyncio.create_task(many(engine, 16, turns=20, pause=0.01))
            await engine.update(weights(3), 3)
            await engine.update(weights(4), 4)
            found = await playing
            await engine.close()
            return found

        found = [pair for rows in kit.run(work()) for pair in rows]
        assert {generation.version for generation, _ in found} >= {4}
        for generation, last in found:
            assert right(generation, {0: 1}.get(generation.version, generation.version), last)


def test_calls_wait_in_a_line_that_has_an_end():
    with kit.servers("vllm") as server:

        async def work():
            engine = fleet([server], most=2, most_waiting=3)
            await engine.open()
            most = 0

            async def look():
                nonlocal most
                while True:
                    most = max(most, len(engine.members[0].calls))
                    await asyncio.sleep(0)

            looking = asyncio.create_task(look())
            found = await asyncio.gather(
                *(engine.generate(question(f"s{n}")) for n in range(12)), return_exceptions=True
            )
            looking.cancel()
            assert len(engine.members[0].calls) == 0
            fine = await asyncio.gather(*(engine.generate(question(f"t{n}")) for n in range(5)))
            await engine.close()
            return found, fine, most

        found, fine, most = kit.run(work())
        refused = [error for error in found if isinstance(error, EngineError)]
        assert len(refused) == 7
        assert "most_waiting" in str(refused[0])
        assert most <= 2
        assert len(fine) == 5


def test_a_fleet_without_a_server_says_what_each_of_them_said():
    with kit.servers("vllm", "sglang") as servers:

        async def work():
            engine = fleet(servers, patience_s=0.6)
            await engine.generate(question())
            for server in servers:
                await asyncio.to_thread(server.kill)
            try:
                await engine.generate(question("b"))
            finally:
                await engine.close()

        with pytest.raises(EngineUnavailable) as caught:
            kit.run(work())
        assert all(server.url in str(caught.value) for server in servers)


def test_a_server_that_always_breaks_the_contract_is_told_after_a_few():
    with kit.servers("vllm") as server:
        server.fault("count", times=1000)

        async def work():
            engine = fleet([server])
            try:
                await engine.generate(question())
            finally:
                await engine.close()

        with pytest.raises(BackendContractError, match=r"no response after 5 attempts.*logprobs"):
            kit.run(work())


def test_a_chat_endpoint_is_good_for_evaluation_alone():
    with kit.servers("chat") as server:

        class Ask(tw.Env):
            def reset(self, task, *, seed=None):
                return "What is 3 + 4?"

            def step(self, action):
                return tw.Step(reward=float(action.text == "7"), terminated=True)

        engine = Fleet([ChatEngine(server.url, "m")], QUICK)
        (trajectory,) = tw.rollout(Ask, [tw.Task("go")], engine=engine)
        assert trajectory.reward == 1.0
        assert trajectory.sampled_tokens
        assert not any(any(sample.weights) for sample in trajectory.samples())
        assert trajectory.metrics["logprobs_masked"] == trajectory.sampled_tokens
        with pytest.raises(NotTrainable):
            kit.run(engine.update([], 1))


def test_fleets_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="at least one"):
        Fleet([])
    with pytest.raises(ConfigError, match="twice"):
        Fleet([VllmEngine("http://a"), VllmEngine("http://a/")])
    with pytest.raises(ConfigError, match="misses"):
        Fleet([VllmEngine("http://a")], FleetSettings(misses=0))


def test_closing_ends_the_checks_even_where_one_is_asked_for_at_that_moment():
    """A check that is hurried in the same step of the loop in which the fleet is closed took its
    cancellation for its turn."""
    with kit.servers("vllm") as server:

        async def work():
            engine = fleet([server], check_s=60.0)
            await engine.open()
            await asyncio.sleep(0.05)  # the checks wait for their time
            engine.members[0].check_now.set()
            async with asyncio.timeout(30):
                await engine.close()

        kit.run(work())

"""Servers and a trainer take turns: asleep they hold nothing and are asked nothing, and
new weights wake them."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from kit import remote_engines as kit
from kit.fleets import QUICK, fingerprint, question, right, until, weights
from kit.fleets import fleet as fleet_of
from kit.own_servers import fleet as own_fleet

from turnwright.engines.remote import ChatEngine, Fleet, LlamaCppEngine, SglangEngine, VllmEngine
from turnwright.engines.remote.sglang import ASLEEP
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.errors import EngineError, EngineUnavailable, SyncError

CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine}
LOOKS = (
    "/health",
    "/v1/completions",
    "/generate",
    "/inference/v1/generate",
    "/abort_requests",
    "/abort_request",
)


@pytest.fixture
def directories(tmp_path):
    pytest.importorskip("safetensors.torch")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    return ModelDirectories(tmp_path / "directories", tmp_path / "source", fingerprint=fingerprint)


ORDER = {
    "vllm": [
        "/sleep?level=2&mode=abort",
        "/wake_up?tags=weights",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/wake_up?tags=kv_cache",
    ],
    "sglang": [
        "/pause_generation",
        "/flush_cache",
        "/update_weight_version",
        '/release_memory_occupation ["kv_cache", "weights"]',
        '/resume_memory_occupation ["weights"]',
        "/pause_generation",
        "/update_weights_from_disk",
        '/resume_memory_occupation ["kv_cache"]',
        "/continue_generation",
    ],
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_memory_goes_and_comes_back_in_order(kind, directories):
    with kit.servers(kind) as server:

        async def work():
            engine = fleet_of([server], directories=directories)
            await engine.update(weights(3), 3)
            before = len(server.seen())
            await engine.sleep()
            await engine.sleep()  # once is enough
            await asyncio.sleep(1.0)  # time for three checks, which do not come
            asleep = [row["path"] for row in server.seen()[before:]]
            await engine.update(weights(4), 4)
            assert right(await engine.generate(question(min_version=4)), 4)
            await engine.close()
            told = [row for row in server.seen()[before:] if row["path"] not in LOOKS]
            return asleep, [
                f"{row['path']} {json.dumps(tags)}"
                if (tags := row["body"].get("tags"))
                else row["path"]
                for row in told
            ]

        asleep, found = kit.run(work())
    assert found == ORDER[kind]
    assert asleep == [path.partition(" ")[0] for path in ORDER[kind][: len(asleep)]]
    assert len(asleep) == {"vllm": 1, "sglang": 4}[kind]


def test_a_fleet_that_sleeps_asks_nobody_and_calls_wait_for_new_weights(directories):
    with kit.servers("vllm", "sglang") as servers:

        async def work():
            engine = fleet_of(servers, directories=directories)
            await engine.update(weights(3), 3)
            playing = [
                asyncio.create_task(engine.generate(question(f"a{n}", tokens=200)))
                for n in range(4)
            ]
            await asyncio.sleep(0)
            await engine.sleep()
            states = [member.state for member in engine.members]
            await asyncio.gather(*playing, return_exceptions=True)
            waiting = [
                asyncio.create_task(engine.generate(question(f"s{n}", min_version=4)))
                for n in range(6)
            ]
            await asyncio.sleep(0.3)
            early = [task.done() for task in waiting]
            await engine.update(weights(4), 4)
            found = await asyncio.gather(*waiting)
            await engine.close()
            return states, early, found

        states, early, found = kit.run(work())
    assert states == ["asleep", "asleep"]
    assert not any(early)
    assert all(right(generation, 4) for generation in found)


def test_a_call_to_a_fleet_that_nobody_wakes_is_an_error_that_says_so(directories):
    with kit.servers("vllm") as server:

        async def work():
            engine = fleet_of([server], directories=directories, patience_s=0.5)
            await engine.update(weights(3), 3)
            await engine.sleep()
            try:
                with pytest.raises(EngineUnavailable, match=r"is asleep \(engine.colocate\)"):
                    await engine.generate(question())
            finally:
                await engine.close()

        kit.run(work())


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_server_that_was_started_again_while_it_slept_is_not_told_to_wake(kind, directories):
    """SGLang would end itself at it."""
    with kit.servers(kind) as server:

        async def work():
            engine = fleet_of([server], directories=directories)
            await engine.update(weights(3), 3)
            await engine.sleep()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await engine.update(weights(4), 4)
            found = await engine.generate(question(min_version=4))
            await engine.close()
            return found

        assert right(kit.run(work()), 4)


@pytest.mark.parametrize("kind", CLIENTS)
def test_weights_that_fail_to_come_leave_it_asleep_and_the_next_ones_wake_it(
    kind, directories, monkeypatch
):
    with kit.servers(kind) as server:

        async def work():
            engine = fleet_of([server], directories=directories, check_s=30.0)
            client = engine.members[0].engine
            await engine.update(weights(3), 3)
            await engine.sleep()

            async def _load(directory, version):
                raise EngineError("the disk is gone")

            monkeypatch.setattr(client, "_load_from_disk", _load)
            with pytest.raises(SyncError, match="the disk is gone"):
                await engine.update(weights(4), 4)
            monkeypatch.undo()
            still = client.asleep
            await engine.update(weights(5), 5)
            found = await engine.generate(question(min_version=5))
            await engine.close()
            return still, found

        still, found = kit.run(work())
    assert still
    assert right(found, 5)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_server_that_a_killed_trainer_left_asleep_is_woken_by_the_next(kind, directories):
    with kit.servers(kind) as server:

        async def first():
            engine = fleet_of([server], directories=directories)
            await engine.update(weights(3), 3)
            await engine.sleep()
            await engine.close()

        async def second():
            engine = fleet_of([server], directories=directories)
            await engine.open()
            state, name = engine.members[0].state, await engine.members[0].engine.weights_name()
            await engine.update(weights(4), 1)
            found = await engine.generate(question(min_version=1))
            await engine.close()
            return state, name, found

        kit.run(first())
        state, name, found = kit.run(second())
    assert state == "asleep"
    assert name == (ASLEEP if kind == "sglang" else "3")
    assert right(found, 4)


def test_servers_of_a_run_that_die_asleep_are_started_again_with_the_weights_that_wake_the_others(
    home,
):
    async def work():
        engine = own_fleet(home, "vllm", "sglang")
        await engine.sleep()  # nothing runs yet
        await engine.update(weights(3), 3)
        await engine.sleep()
        for server in engine.started:
            os.kill(server.pid, signal.SIGKILL)
        await until(lambda: all(server.ended for server in engine.started))
        await asyncio.sleep(1.0)  # time for checks
        left = [server.ended for server in engine.started]
        await engine.update(weights(5), 5)
        await engine.sleep()
        for server in engine.started:  # and once more, with no time to be seen
            os.kill(server.pid, signal.SIGKILL)
        await engine.update(weights(4), 4)
        found = await asyncio.gather(
            *(engine.generate(question(f"s{n}", min_version=4)) for n in range(6))
        )
        # One may have answered all.
        await until(lambda: {member.state for member in engine.members} == {"up"})
        await engine.close()
        return left, found

    left, found = kit.run(work())
    assert left == [True, True], "a server that starts beside a trainer takes its memory"
    assert all(right(generation, 4) for generation in found)


def test_a_check_that_was_under_way_starts_no_server_beside_the_trainer(home):
    async def work():
        engine = own_fleet(home, "vllm")
        await engine.update(weights(3), 3)
        (member,), (server,) = engine.members, engine.started
        check, begun, go = member.check, asyncio.Event(), asyncio.Event()

        async def slow(*args):
            begun.set()
            await go.wait()
            return await check(*args)

        member.check = slow
        await begun.wait()
        await engine.sleep()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.ended)
        go.set()
        await asyncio.sleep(0.5)
        left = server.ended
        await engine.update(weights(4), 4)
        found = await engine.generate(question(min_version=4))
        await engine.close()
        return left, found

    left, found = kit.run(work())
    assert left
    assert right(found, 4)


def test_new_weights_wait_for_a_server_that_was_started_again_and_does_not_answer_yet(home):
    async def work():
        engine = own_fleet(home, "vllm")
        await engine.update(weights(3), 3)
        (server,) = engine.started
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.starts == 2)  # by a check
        await engine.update(weights(4), 4)
        found = await engine.generate(question(min_version=4))
        await engine.close()
        return found

    assert right(kit.run(work()), 4)


def test_what_cannot_sleep_says_so():
    with kit.servers("llamacpp", "chat") as (llama, chat):

        async def work():
            for engine in (LlamaCppEngine(llama.url), ChatEngine(chat.url, "m")):
                with pytest.raises(EngineError, match=r"engine\.colocate"):
                    await Fleet([engine], QUICK).sleep()
                await engine.close()

        kit.run(work())


def test_a_server_that_says_yes_and_stays_awake_is_found_out(directories, monkeypatch):
    with kit.servers("vllm") as server:

        async def work():
            engine = fleet_of([server], directories=directories)
            await engine.update(weights(3), 3)
            client = engine.members[0].engine

            async def nothing(path, query):
                assert path == "/sleep"

            monkeypatch.setattr(client, "_control", nothing)
            with pytest.raises(EngineError, match="but /is_sleeping is false"):
                await engine.sleep()
            await engine.close()

        kit.run(work())

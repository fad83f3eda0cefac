"""Programs in a sandbox: they reach their endpoint and nothing else, and their files
are copied in and out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.proxy import RecordingEngine, account, play
from kit.proxy_programs import ASK, TWO_CALLS, script

import turnwright as tw
from turnwright.envs.isolation.sandbox import sandbox_problem
from turnwright.errors import ConfigError, UsageError
from turnwright_serve.proxy import ProgramResult, program, sandboxed
from turnwright_serve.proxy.sandbox_launcher import Relay

needs_walls = pytest.mark.skipif(
    sandbox_problem() is not None, reason="the sandbox does not work on this machine"
)
EXPLORES = """
import json, os, socket, sys, urllib.request
found = {"given": open("in/data.txt", "rb").read().hex(), "cwd": os.getcwd(), "uid": os.getuid()}
for path in (sys.argv[2], "/etc/passwd", "/root", "/home"):
    try:
        found[path] = open(path).read() if os.path.isfile(path) else os.listdir(path)
    except OSError as error:
        found[path] = type(error).__name__
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=2)
    found["port"] = "open"
except OSError as error:
    found["port"] = type(error).__name__
open("made.txt", "w").write("made")
os.makedirs("a/b", mode=0o700)
os.chmod(os.open("a/b/own.bin", os.O_CREAT | os.O_WRONLY, 0o600), 0o600)
os.symlink("/etc/passwd", "link")
os.mkfifo("pipe")
os.remove("in/data.txt")
found["reply"] = ask(messages)["content"]
print(json.dumps(found))
"""
HANGS = (
    ASK
    + """
import subprocess, time
open("begun.txt", "w").write(ask(messages)["content"])
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"], env={})
time.sleep(600)
"""
)


@needs_walls
def test_it_reaches_its_endpoint_and_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    results: list[ProgramResult] = []
    left: list[dict[str, bytes]] = []

    def score(result: ProgramResult) -> float:
        results.append(result)
        files = [
            path
            for path in result.directory.rglob("*")
            if not path.is_dir() and ".home" not in path.parts
        ]
        left.append({str(path.relative_to(result.directory)): path.read_bytes() for path in files})
        return 1.0

    with socket.create_server(("127.0.0.1", 0)) as other:
        # The path is the task's text, which is data: only paths that the command
        # itself names are readable.
        command = [
            "{python}",
            "-c",
            ASK + EXPLORES,
            "Begin.",
            "{task}",
            str(other.getsockname()[1]),
        ]
        trajectory = play(
            command,
            RecordingEngine(["Yes."]),
            score=score,
            sandbox=True,
            files={"in/data.txt": b"\xff\x00"},
            tasks=[tw.Task(str(secret))],
        )
    assert trajectory.error is None, trajectory.error.traceback
    assert trajectory.reward == 1.0
    found = json.loads(results[0].output)
    assert found["reply"] == "Yes."
    assert (found["given"], found["cwd"]) == ("ff00", "/tmp/work")
    assert found[str(secret)] == "FileNotFoundError"
    assert found["/etc/passwd"] == "FileNotFoundError"
    assert found["/home"] == "FileNotFoundError"
    assert found["port"] == "ConnectionRefusedError"
    assert left == [{"made.txt": b"made", "a/b/own.bin": b""}]
    assert os.geteuid() != 0 or found["uid"] != 0
    account(trajectory)


@needs_walls
def test_a_file_that_the_command_names_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(TWO_CALLS)
    (tmp_path / "other.py").write_text("secret")
    command = ["{python}", str(tmp_path / "agent.py"), "{task}"]
    trajectory = play(
        command, RecordingEngine(["One.", "Two."]), files={"in/data.txt": "given"}, sandbox=True
    )
    assert trajectory.error is None, trajectory.error.traceback
    assert len(trajectory.turns) == 2
    failing = play(
        ["{python}", "-c", f"open({str(tmp_path / 'other.py')!r})"],
        RecordingEngine([]),
        sandbox=True,
    )
    assert "status 1: FileNotFoundError" in failing.error.message


@needs_walls
@pytest.mark.parametrize("end", ["deadline", "limit"])
def test_what_hangs_is_killed_with_its_processes_and_scored_by_its_files(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwright_serve.proxy.programs.END_S", 0.5)
    left: list[str] = []

    def score(result: ProgramResult) -> float:
        left.append((result.directory / "begun.txt").read_text())
        assert result.exit_code is None
        return 0.5

    # At a limit the program asks once more, is refused, and hangs all the same.
    again = "try: ask(messages)\nexcept Exception: time.sleep(600)\n"
    source = HANGS if end == "deadline" else HANGS.removesuffix("time.sleep(600)\n") + again
    seconds, turns = (3.0, 8) if end == "deadline" else (60.0, 1)
    began = time.monotonic()
    trajectory = play(
        script(source),
        RecordingEngine(["One."]),
        score=score,
        sandbox=True,
        seconds=seconds,
        limits=tw.Limits(turns=turns),
    )
    assert trajectory.error is None, trajectory.error.traceback
    assert (trajectory.reward, trajectory.stop) == (
        0.5,
        "wall_clock" if end == "deadline" else "max_turns",
    )
    assert left == ["One."]
    assert time.monotonic() - began < 40
    account(trajectory)


@needs_walls
def test_limits_of_the_sandbox_hold() -> None:
    source = "bytearray(400 << 20)"
    small: dict[str, Any] = {"memory": 200 << 20}
    assert "MemoryError" in play(script(source), RecordingEngine([]), sandbox=small).error.message
    assert play(script(source), RecordingEngine([]), sandbox=True).error is None


@needs_walls
def test_memory_of_a_program_is_bounded_as_a_whole() -> None:
    source = """
import os, time

def child():
    kept = bytearray(b"x") * (100 << 20)
    time.sleep(60)
    del kept

for _ in range(4):
    os.fork() or child()
os.wait()
"""
    trajectory = play(
        script(source), RecordingEngine([]), sandbox={"memory": 200 << 20}, seconds=60.0
    )
    assert trajectory.reward is None
    assert "together held more than 200 MiB" in trajectory.error.message


MANY = (
    ASK
    + """
import socket
port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
kept = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
del kept[100:]
print(ask(messages)["content"])
"""
)


@needs_walls
def test_many_connections_do_not_end_the_relay() -> None:
    trajectory = play(script(MANY), RecordingEngine(["Yes."]), sandbox=True, seconds=60.0)
    assert trajectory.error is None, trajectory.error.traceback
    assert [turn.reply.text for turn in trajectory.turns] == ["Yes."]


@needs_walls
def test_without_its_relay_a_program_has_failed_and_is_not_done() -> None:
    kills = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time\ntime.sleep(60)"
    trajectory = play(script(kills), RecordingEngine([]), sandbox=True, seconds=60.0)
    assert (trajectory.reward, trajectory.stop) == (None, "env_error")
    assert "first process in the sandbox was ended by SIGKILL" in trajectory.error.message


@needs_walls
def test_a_relay_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = sandboxed._launcher().replace("key.data.work()", "raise RuntimeError('broken')")
    monkeypatch.setattr(sandboxed, "_launcher", lambda: broken)
    trajectory = play(script(MANY), RecordingEngine(["Yes."]), sandbox=True, seconds=60.0)
    assert trajectory.reward is None
    assert (
        "SIGABRT: the relay to the endpoint ended: RuntimeError: broken" in trajectory.error.message
    )


RELAYED = """
import resource, socket, sys
from turnwright_serve.proxy.sandbox_launcher import Relay
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
Relay(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], 100).run()
"""


def test_a_relay_without_descriptors_waits_for_them(tmp_path: Path) -> None:
    """A relay that may have 16 open files, and is told that there is room for 100 connections."""
    path = str(tmp_path / "proxy")
    with socket.socket(socket.AF_UNIX) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.bind(path)
        proxy.listen(128)
        command = [sys.executable, "-c", RELAYED, str(listener.fileno()), path]
        relay = subprocess.Popen(command, pass_fds=(listener.fileno(),))
        try:
            held = [socket.create_connection(listener.getsockname(), timeout=30) for _ in range(40)]
            for number, one in enumerate(held):
                one.sendall(b"%d" % number)
            for number in range(40):
                proxy.settimeout(30)
                served = proxy.accept()[0]
                served.settimeout(30)
                assert served.recv(10) == b"%d" % number
                served.sendall(b"yes")
                assert held[number].recv(10) == b"yes"
                served.close()
                held[number].close()
            assert relay.poll() is None
        finally:
            relay.kill()
            relay.wait()


def test_a_relay_passes_every_byte_and_the_end_of_each_side(tmp_path: Path) -> None:
    path = str(tmp_path / "proxy")
    with socket.socket(socket.AF_UNIX) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.bind(path)
        proxy.listen(8)
        address = listener.getsockname()
        threading.Thread(target=Relay(listener.dup(), path, 2).run, daemon=True).start()
        body = os.urandom(1 << 20)
        with socket.create_connection(address, timeout=30) as client:
            sending = threading.Thread(
                target=lambda: (client.sendall(body), client.shutdown(socket.SHUT_WR))
            )
            sending.start()
            served = proxy.accept()[0]
            with served, served.makefile("rb") as file:
                assert file.read() == body  # to the end: the client closed its side
                served.sendall(body)
            sending.join()
            with client.makefile("rb") as file:
                assert file.read() == body

        # A server that refuses a body and closes is heard, as without a relay.
        with socket.create_connection(address, timeout=30) as client:
            served = proxy.accept()[0]
            served.sendall(b"413")
            served.close()
            with client.makefile("rb") as file:
                assert file.read() == b"413"


@needs_walls
def test_a_sandbox_in_a_recipe_is_a_word_or_a_table() -> None:
    assert sandboxed.check_sandbox(False) is None
    default = sandboxed.check_sandbox(True)
    assert default is not None
    assert sandboxed.check_sandbox(
        {"processes": 9, "readable": ["/usr"]}, ["x", "/etc", "{task}"]
    ) == replace(default, processes=9, readable=("/usr", *default.readable, "/etc"))
    with pytest.raises(UsageError, match="no limit 'seconds'"):
        sandboxed.check_sandbox({"seconds": 3})
    with pytest.raises(ConfigError, match="is not the absolute path"):
        sandboxed.check_sandbox({"readable": ["/"]})
    with pytest.raises(UsageError, match="cannot be in a sandbox"):
        program(lambda endpoint: None, score=lambda result: 1.0, sandbox=True)


def test_without_walls_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sandboxed, "sandbox_problem", lambda: "no sandbox: bubblewrap (bwrap) is not installed"
    )
    with pytest.raises(UsageError) as raised:
        program(["x"], score=lambda result: 1.0, sandbox=True)
    assert "\n" not in str(raised.value)
    assert "bubblewrap" in str(raised.value)

"""MCP: real servers of the official package, in processes of their own,
over stdio and over HTTP."""

import asyncio
import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import turnwright as tw
from turnwright.envs.tools.tool_schema import ToolSchemaError
from turnwright.errors import ConfigError

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
LIMITS = tw.Limits(turns=6, turn_tokens=3000)


def counts(info):
    """What a turn counted, without the log of its calls, whose seconds differ each time."""
    return {name: value for name, value in info.items() if name != "tool_log"}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(tools, replies, n=1, limits=LIMITS, **info):
    tasks = [tw.Task("Go.", id=f"t{number}", info=info) for number in range(n)]
    return tw.rollout(tw.tool_env(tools), tasks, engine=tw.ScriptedEngine(replies), limits=limits)


def heard(trajectory):
    return [message.text for message in trajectory.messages if message.role == "tool"]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def nothing_left():
    """Whether neither a server nor a thread of ours is there any more."""
    for _ in range(200):
        if not any(thread.name == "turnwright-mcp" for thread in threading.enumerate()):
            return not children()
        time.sleep(0.01)
    return False


def children():
    pids = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            pids += (task / "children").read_text().split()
    return [
        pid
        for pid in pids
        if lives(pid)
        and str(SERVER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        and pid != HTTP
    ]


HTTP = ""


@pytest.fixture(scope="module")
def url():
    """A server that listens on a port of this machine."""
    global HTTP
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    HTTP = str(process.pid)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


SCRIPT = [
    call("note", text="a", times=2) + call("fail"),
    call("note", text=3) + call("note", txt="b") + call("picture"),
    "done",
]


def check_script(trajectory):
    assert trajectory.error is None
    said = heard(trajectory)
    assert said[0].endswith("a a")
    assert said[1].startswith("Error: ")
    assert "fail" in said[1]
    assert said[2] == "Error: argument 'text' of note must be a string, not 3"
    assert said[3].startswith("Error: note has no argument 'txt'; did you mean 'text'")
    assert said[4] == "[left out: image/png]"
    assert counts(trajectory.turns[0].info) == {
        "tool_calls": 2,
        "tool_errors": 1,
        "tool_errors/raised": 1,
    }


def test_a_rollout_over_stdio_has_a_process_for_each_episode():
    trajectories = play([tw.mcp_tools(COMMAND)], [SCRIPT[0], SCRIPT[1] + call("pid"), "done"], n=3)
    for trajectory in trajectories:
        check_script(trajectory)
        assert heard(trajectory)[0] == "a a"  # nobody else's notes
    pids = {heard(trajectory)[5] for trajectory in trajectories}
    assert len(pids) == 3
    assert not any(map(lives, pids))
    assert nothing_left()


def test_a_rollout_over_http(url):
    for session in ("trajectory", "shared"):
        trajectories = play(
            [tw.mcp_tools(url, session=session, headers={"X-Who": "me"})], SCRIPT, n=2
        )
        for trajectory in trajectories:
            check_script(trajectory)
    assert nothing_left()


def test_a_shared_session_is_one_process_and_ends_with_the_last_episode():
    replies = [call("note", text="x"), call("pid"), "done"]
    trajectories = play([tw.mcp_tools(COMMAND, session="shared")], replies, n=16)
    assert [t.error for t in trajectories] == [None] * 16
    pids = {heard(t)[1] for t in trajectories}
    assert len(pids) == 1
    # One notebook for all.
    assert sorted(len(heard(t)[0].split()) for t in trajectories) == list(range(1, 17))
    assert not any(map(lives, pids))
    assert nothing_left()


def test_what_the_model_is_told_and_which_tools_there_are():
    async def told(given, **info):
        env = tw.tool_env(given)()
        try:
            await env.reset(tw.Task("Go.", info=info))
            return {schema["function"]["name"]: schema["function"] for schema in env.tools}
        finally:
            await env.close()

    def read(text: str) -> str:
        """Read."""
        return text

    source = tw.mcp_tools(
        COMMAND,
        session="shared",
        prefix="toy_",
        only=["note", "pid"],
        rename={"pid": "process"},
        name="toys",
    )
    found = asyncio.run(told([read, source]))
    assert list(found) == ["read", "toy_note", "toy_process"]
    assert found["toy_note"]["description"] == "Write a note."
    assert found["toy_note"]["parameters"]["properties"]["times"] == {
        "type": "integer",
        "default": 1,
    }
    assert found["toy_note"]["parameters"]["required"] == ["text"]
    assert list(asyncio.run(told([read, source], tools=["toy_note"]))) == ["toy_note"]
    assert list(asyncio.run(told([read, source], tools=["toys", "read"]))) == [
        "read",
        "toy_note",
        "toy_process",
    ]
    # Not even begun.
    assert list(asyncio.run(told([read, tw.mcp_tools(["/nowhere"])], tools=["read"]))) == ["read"]
    assert nothing_left()


def note(text: str) -> str:
    """Write a note, too."""
    return text


@pytest.mark.parametrize(
    ("tools", "kind", "said"),
    [
        (
            lambda: [note, tw.mcp_tools(COMMAND)],
            "ToolSchemaError",
            "two tools are called 'note': .*test_mcp.note and MCP server mcp_server.py",
        ),
        (
            lambda: [tw.mcp_tools(COMMAND, only=["not"])],
            "ToolSchemaError",
            "has no tool 'not', which only names; did you mean 'note'",
        ),
        (
            lambda: [tw.mcp_tools(COMMAND, prefix="a.")],
            "ToolSchemaError",
            "'a.note' cannot be a tool's name",
        ),
        (
            lambda: [tw.mcp_tools(["/nowhere/server"])],
            "ToolFailure",
            "MCP server server failed: FileNotFoundError",
        ),
        (
            lambda: [tw.mcp_tools("http://127.0.0.1:9/mcp")],
            "ToolFailure",
            "MCP server http://127.0.0.1:9/mcp failed: ",
        ),
        (
            lambda: [tw.mcp_tools([sys.executable, "-c", "exit('no key')"])],
            "ToolFailure",
            r"stderr: no key\)",
        ),
        (
            lambda: [
                tw.mcp_tools(
                    [sys.executable, "-c", "import time; time.sleep(99)"],
                    name="mute",
                    connect_s=0.5,
                )
            ],
            "ToolFailure",
            r"MCP server mute could not be reached within 0\.5 s",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_that_cannot_be_used_is_a_typed_failure(tools, kind, said):
    (trajectory,) = play(tools(), ["done"])
    assert trajectory.error.type == kind
    assert re.search(said, trajectory.error.message), trajectory.error.message
    assert trajectory.reward is None
    assert nothing_left()


@pytest.mark.parametrize("session", ["trajectory", "shared"])
@pytest.mark.parametrize("fate", ["die", "hang"])
def test_a_server_that_dies_or_hangs_fails_its_episodes_and_no_other(fate, session):
    def speak(messages, rng):
        turn = sum(message.role == "assistant" for message in messages)
        return [call(f"s_{fate}") if messages[0].text == "bad" else call("note", text="x"), "done"][
            turn
        ]

    other = tw.mcp_tools(COMMAND, name="healthy", session="shared")
    sick = tw.mcp_tools(
        COMMAND, name="sick", session=session, env={"STUBBORN": "1"}, call_s=1.0, prefix="s_"
    )
    tasks = [tw.Task("bad", id="bad"), *(tw.Task("good", id=f"good{n}") for n in range(2))]
    began = time.monotonic()
    bad, *good = tw.rollout(
        tw.tool_env([other, sick]), tasks, engine=tw.ScriptedEngine(speak), limits=LIMITS
    )
    assert (bad.error.type, bad.error.kind, bad.stop) == (
        "ToolFailure",
        "tool",
        tw.StopReason.TOOL_ERROR,
    )
    ends = {"die": "MCP server sick failed: MCPError: Connection closed (stderr: out of memory)"}
    assert bad.error.message == ends.get(
        fate, "MCP server sick did not answer a call of 'hang' within 1 s"
    )
    assert [t.error for t in good] == [None] * 2
    assert [t.reward for t in good] == [0.0] * 2
    assert time.monotonic() - began < 60
    assert nothing_left()


def test_episodes_behind_a_dead_shared_session_get_a_new_one():
    source = tw.mcp_tools(COMMAND, session="shared")
    env = tw.tool_env([source])
    tasks = [tw.Task("Go.", id=f"t{n}") for n in range(4)]
    engine = tw.ScriptedEngine([call("die"), "done"])
    assert {t.error.type for t in tw.rollout(env, tasks, engine=engine, limits=LIMITS)} == {
        "ToolFailure"
    }
    engine = tw.ScriptedEngine([call("pid"), "done"])
    assert [t.error for t in tw.rollout(env, tasks, engine=engine, limits=LIMITS)] == [None] * 4
    assert nothing_left()


@pytest.mark.parametrize("session", ["trajectory", "shared"])
def test_an_episode_whose_server_died_is_tried_again_with_a_new_one(session, tmp_path):
    replies = [
        call("note", text="x"),
        call("die_once", path=str(tmp_path / "died")),
        call("note", text="y"),
        "done",
    ]
    env = tw.tool_env([tw.mcp_tools(COMMAND, session=session)])
    rules = tw.EnvRules(retries=tw.RetryRules(turn=1, wait_s=0.01))
    (trajectory,) = tw.rollout(
        env, [tw.Task("Go.")], engine=tw.ScriptedEngine(replies), limits=LIMITS, rules=rules
    )
    assert trajectory.error is None
    # The new server was told all that the old one was.
    assert heard(trajectory) == [
        "x",
        "alive",
        "x y",
    ]
    (failure,) = trajectory.failures
    assert (failure.kind, failure.turn, failure.recovery) == ("tool", 1, "replayed")
    assert nothing_left()


@pytest.mark.parametrize("when", [0.1, 2.0])
def test_a_cancelled_run_leaves_no_server(when):
    env = tw.tool_env([tw.mcp_tools(COMMAND, env={"STUBBORN": "1"})])

    async def main():
        work = asyncio.create_task(
            tw.arollout(
                env,
                [tw.Task("Go.")],
                engine=tw.ScriptedEngine([call("hang"), "x"]),
                samples=2,
                limits=LIMITS,
            )
        )
        await asyncio.sleep(when)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    assert nothing_left()


def test_a_deadline_of_the_episode_s_own_leaves_no_server():
    limits = tw.Limits(turns=6, turn_tokens=3000, env_s=0.3)
    (trajectory,) = play(
        [tw.mcp_tools([sys.executable, "-c", "import time; time.sleep(99)", str(SERVER)])],
        ["x"],
        limits=limits,
    )
    assert trajectory.error.type == "TimeoutError"
    for _ in range(60):  # closing goes on behind the deadline, in a thread of its own
        if not children():
            break
        time.sleep(0.1)
    assert nothing_left()


def anywhere():
    """Servers of ours, whoever their parent is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != HTTP:
            with contextlib.suppress(OSError):
                if str(SERVER).encode() in (entry / "cmdline").read_bytes() and lives(entry.name):
                    found.append(entry.name)
    return found


class Isolated:
    """A factory that the process of an environment can be given."""

    def __call__(self):
        return tw.tool_env([tw.mcp_tools(COMMAND, env={"STUBBORN": "1"})])()


@pytest.mark.parametrize("bad", [False, True])
def test_an_environment_in_a_process_of_its_own_takes_its_servers_with_it(bad):
    limits = tw.Limits(turns=6, turn_tokens=3000, env_s=8.0 if bad else 60.0)
    replies = [call("note", text="x"), call("hang") if bad else call("note", text="y"), "done"]
    rules = tw.EnvRules(isolation="process")
    (trajectory,) = tw.rollout(
        Isolated(), [tw.Task("Go.")], engine=tw.ScriptedEngine(replies), limits=limits, rules=rules
    )
    if bad:
        assert trajectory.error.kind == "timeout"
    else:
        assert (trajectory.error, heard(trajectory)) == (None, ["x", "x y"])
    for _ in range(30):
        if not anywhere():
            break
        time.sleep(0.1)
    assert anywhere() == []


def test_a_process_that_ends_ends_its_servers():
    code = (
        "import asyncio, sys, turnwright as tw\n"
        f"source = tw.mcp_tools({COMMAND!r})\n"
        "async def main():\n"
        "    env = tw.tool_env([source])()\n"
        "    await env.reset(tw.Task('Go.'))\n"
        "    outcome = await env._tools.call(tw.ToolCall('pid', {}))\n"
        "    print(outcome.message.text)\n"
        "asyncio.run(main())\n"  # and nobody closes it
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=os.getcwd()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not lives(done.stdout.strip())


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ("python server.py", {}, "a command is a list"),
        ([], {}, "give a command"),
        (["x"], {"session": "run"}, "session = 'run'"),
        (["x"], {"call_s": 0}, "call_s is 0"),
        (["x"], {"headers": {}}, "headers are for URLs"),
        ("http://x", {"cwd": "/"}, "env and cwd are for commands"),
    ],
)
def test_a_wrong_setting_says_why(args, kwargs, said):
    with pytest.raises(ConfigError, match=said):
        tw.mcp_tools(args, **kwargs)


def test_its_settings_travel_and_its_sessions_do_not():
    source = tw.mcp_tools(COMMAND, session="shared", prefix="a_")
    session = source.acquire()
    try:
        twin = pickle.loads(pickle.dumps(source))
        assert (twin.server, twin.prefix, twin._session_thread, twin._shared) == (
            tuple(COMMAND),
            "a_",
            None,
            None,
        )
    finally:
        source.release(session)
        session.over.result(20)
    assert nothing_left()


def test_a_name_that_cannot_be_a_tool_s_asks_for_another():
    with pytest.raises(ToolSchemaError, match="rename="):
        tw.mcp_tools(COMMAND).convert(
            [type("T", (), {"name": "a.b", "input_schema": {}, "description": None})()], None
        )

"""`turnwright record`: programs come to a port, each session is an episode, in front of our engines
or of a chat service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kit.proxy import TOOL, RecordingEngine, account, called, client, contexts

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import load
from turnwright.engines.remote import ChatEngine
from turnwright.errors import ConfigError
from turnwright.evaluation import evaluate_config
from turnwright.records import RunDir
from turnwright.renderers import byte_renderer
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.runner import Rollout
from turnwright.rollouts.standalone import make_episode_specs
from turnwright_serve.proxy import ProxyServer, ProxySession, recording
from turnwright_serve.proxy.recording import record_sessions
from turnwright_view.recompute import steps_of

TOOLS = [{"type": "function", "function": TOOL}]


def script(messages: Any, rng: Any) -> str:
    """Call the tool twice, then answer."""
    return (
        called("look_up", key="é")
        if sum(message.role == "tool" for message in messages) < 2
        else "Found."
    )


def record(
    work: Callable[[str], Awaitable[Any]],
    engine: Any,
    *,
    out: Path | None = None,
    idle_s: float = 600.0,
    notes: list[str] | None = None,
    key: str | None = None,
    keyed_sampling: bool = True,
) -> tuple[list[tw.Trajectory], list[str]]:
    """Record while `work(url)` runs; return the episodes and the notes."""
    notes = [] if notes is None else notes

    async def run() -> list[tw.Trajectory]:
        run_dir = RunDir(out) if out is not None else None
        rollout = Rollout(
            engine,
            byte_renderer(),
            RolloutSettings(limits=tw.Limits(turns=100, turn_tokens=500), sanity="off"),
            run=run_dir,
        )
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        recording = asyncio.ensure_future(
            record_sessions(
                rollout,
                port=0,
                idle_s=idle_s,
                on_start=started.set_result,
                note=notes.append,
                key=key,
                keyed_sampling=keyed_sampling,
            )
        )
        try:
            await work(await started)
        finally:
            recording.cancel()
            played = await recording
            await engine.close()
            if run_dir is not None:
                run_dir.close()
        return played

    return asyncio.run(run()), notes


async def talk(url: str, path: str = "", headers: dict[str, str] | None = None) -> list[Any]:
    """Ask, answer the calls, and ask again until the end; return the messages."""
    messages: list[Any] = [{"role": "user", "content": f"What is é? {headers or ''}"}]
    async with client(url + path) as http:
        for _ in range(3):
            body = {"model": "any", "messages": messages, "tools": TOOLS}
            response = await http.post("/v1/chat/completions", json=body, headers=headers or {})
            assert response.status_code == 200, response.text
            messages.append(response.json()["choices"][0]["message"])
            for call in messages[-1].get("tool_calls") or ():
                assert json.loads(call["function"]["arguments"]) == {"key": "é"}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a letter"})
    return messages


def test_each_session_is_an_episode_by_path_header_or_key() -> None:
    engine = RecordingEngine(script)

    async def work(url: str) -> None:
        await asyncio.gather(
            talk(url, "/s/one"),
            talk(url, "/s/two"),
            talk(url, headers={"session-id": "codex-1"}),
            talk(url, headers={"authorization": "Bearer secret-key"}),
        )
        await talk(url, headers={"x-session-id": "ses_1"})
        await talk(url, headers={"x-session-id": "ses_2", "x-parent-session-id": "ses_1"})
        await talk(url, headers={"x-session-id": "ses_3", "x-parent-session-id": "ses_2"})

    played, notes = record(work, engine)
    names = sorted(trajectory.key.task for trajectory in played)
    assert [name for name in names if not name.startswith("key-")] == [
        "codex-1",
        "one",
        "ses_1",
        "two",
    ]
    assert len(names) == len(notes) == 5
    assert not any("secret" in line for line in [*names, *notes])
    for trajectory in played:
        account(trajectory)
        received = [
            ids for session, ids in engine.received if session.split("/")[2] == trajectory.task.id
        ]
        assert contexts(trajectory) == received
        with_sub_agents = trajectory.key.task == "ses_1"
        assert len(trajectory.turns) == (9 if with_sub_agents else 3)
        assert trajectory.branches == ({"subagent": 2} if with_sub_agents else {})
        assert (trajectory.key.phase, trajectory.reward) == ("record", None)


def test_a_session_ends_by_a_request_with_its_reward() -> None:
    async def work(url: str) -> None:
        await talk(url, "/s/one")
        async with client(url) as http:
            for wrong in ("much", True, [1.0]):
                assert (await http.post("/s/one/end", json={"reward": wrong})).status_code == 400
            assert (await http.post("/s/one/end", json={"reward": 0.5})).json() == {"ended": "one"}
            assert (await http.post("/s/one/end", json={})).status_code == 404
            assert (await http.post("/s/never/end", json={})).status_code == 404
            assert (await http.get("/s/no%20name/v1/models")).status_code == 404
        await talk(url, "/s/one")  # the name again: another episode

    played, _ = record(work, RecordingEngine(script))
    assert [(t.key.task, t.key.sample, t.reward) for t in played] == [
        ("one", 0, 0.5),
        ("one", 1, None),
    ]
    assert {len(trajectory.turns) for trajectory in played} == {3}


@pytest.mark.parametrize(
    "interrupts", [signal.SIG_IGN, signal.default_int_handler], ids=["background", "terminal"]
)
def test_sigterm_ends_a_recording_with_every_open_session_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupts: Any,
) -> None:
    """A program opens sessions and then ends the recorder, which has a process to itself in life
    and shares this one here."""
    started: list[str] = []

    def program() -> None:
        for name in "abc":
            body = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
            request = urllib.request.Request(
                f"{started[0]}/s/{name}/v1/chat/completions", json.dumps(body).encode()
            )
            request.add_header("content-type", "application/json")
            urllib.request.urlopen(request).close()
        os.kill(os.getpid(), signal.SIGTERM)

    def began(line: str, **_: Any) -> None:
        if line.startswith("http"):
            started.append(line.split()[0])
            threading.Thread(target=program).start()

    engine = RecordingEngine(lambda messages, rng: "Found.")
    monkeypatch.setattr(
        "turnwright.training.configured_rollout.make_rollout",
        lambda *_, run, **__: Rollout(
            engine, byte_renderer(), RolloutSettings(sanity="off"), run=run
        ),
    )
    monkeypatch.setattr("builtins.print", began)
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        status = main(
            ["record", "--port", "0", "--out", str(tmp_path / "run"), "--env.use", "program"]
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert sorted((row["key"]["task"], row["stop"]) for row in rows) == [
        ("a", "done"),
        ("b", "done"),
        ("c", "done"),
    ]


def test_a_session_without_requests_ends() -> None:
    notes: list[str] = []

    async def work(url: str) -> None:
        async with client(url) as http:
            for number in (1, 2):
                body = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
                assert (
                    await http.post("/s/silent/v1/chat/completions", json=body)
                ).status_code == 200
                while len(notes) < number:
                    await asyncio.sleep(0.01)

    played, _ = record(work, RecordingEngine(script), idle_s=0.1, notes=notes)
    assert [(t.key.task, t.key.sample, len(t.turns)) for t in played] == [
        ("silent", 0, 1),
        ("silent", 1, 1),
    ]


def test_a_chat_service_is_recorded_and_nothing_of_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is a proxy of ours: it gets tools and calls in its own API, with ids that are
    unique in a conversation."""
    served: list[Any] = []
    posted: list[Any] = []

    async def work(url: str) -> None:
        messages = await talk(url, "/s/one")
        assert messages[-1]["content"] == "Found."

    async def service(task: tw.Task, model: tw.Model) -> float:
        session = ProxySession(model)
        async with ProxyServer() as server:
            engine = ChatEngine(server.open(session) + "/v1", "any")
            post = engine.http.post

            async def noted(path: str, body: Any, *given: Any) -> Any:
                posted.append(body)
                return await post(path, body, *given)

            monkeypatch.setattr(engine.http, "post", noted)
            loop = asyncio.get_running_loop()
            served.append(
                await loop.run_in_executor(None, lambda: record(work, engine, out=tmp_path / "run"))
            )
        await session.end()
        return 1.0

    (behind,) = tw.rollout(service, [tw.Task("x")], RecordingEngine(script), sanity="off")
    assert behind.error is None, behind.error.traceback
    assert behind.branches == {}  # what the service gets back is what it sent
    ((trajectory,), _) = served[0]
    assert trajectory.error is None, trajectory.error.traceback
    assert [turn.reply.tool_calls != () for turn in trajectory.turns] == [True, True, False]
    sent = posted[-1]["messages"]
    assert posted[-1]["tools"] == TOOLS
    calls = [call for message in sent for call in message.get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == ['{"key": "é"}'] * 2
    assert len({call["id"] for call in calls}) == 2
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == [
        call["id"] for call in calls
    ]
    for span in trajectory.spans:
        assert not span.sampled or (span.trained, span.untrained) == (0, "no_logprob")
    assert not any(any(row.weights) for row in trajectory.samples())
    (recorded,) = [one for _, _, played in steps_of(tmp_path / "run") for one in played]
    assert [turn.reply.text for turn in recorded.turns] == [
        turn.reply.text for turn in trajectory.turns
    ]


def test_an_engine_that_fails_ends_its_session_and_not_the_recording() -> None:
    async def work(url: str) -> None:
        async with client(url) as http:
            body = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
            for name, status in (("one", 400), ("two", 400)):
                response = await http.post(f"/s/{name}/v1/chat/completions", json=body)
                assert response.status_code == status
                assert "the model failed" in response.json()["error"]["message"]

    played, notes = record(work, RecordingEngine([]))
    assert [(trajectory.stop, trajectory.reward) for trajectory in played] == [
        ("engine_error", None)
    ] * 2
    assert all("engine_error" in line for line in notes)


def test_a_port_in_use_is_named() -> None:
    async def run() -> None:
        async with ProxyServer() as server:
            port = int(server.url.rpartition(":")[2])
            rollout = Rollout(RecordingEngine([]), byte_renderer())
            with pytest.raises(ConfigError, match="choose another --port"):
                await record_sessions(rollout, port=port, idle_s=1, on_start=print, note=print)

    asyncio.run(run())


def test_the_command_writes_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its limits fit sessions of unknown length, unless limits were given; the
    viewer opens what it wrote."""
    limits: list[tw.Limits] = []

    async def one_session(
        rollout: Rollout, *, on_start: Any, note: Any, **given: Any
    ) -> list[tw.Trajectory]:
        limits.append(rollout.limits)
        rollout.engine = RecordingEngine(script)
        rollout.engine.set_renderer(rollout.renderer)

        async def play(task: tw.Task, model: tw.Model) -> float:
            await model.generate([{"role": "user", "content": "x"}])
            return 1.0

        on_start("http://127.0.0.1:1")
        return await rollout.play(
            make_episode_specs(play, [tw.Task("one")], phase="record", step=0)
        )

    monkeypatch.setattr(recording, "record_sessions", one_session)
    engine = [
        "--engine.kind",
        "chat",
        "--engine.urls",
        '["http://127.0.0.1:9/v1"]',
        "--engine.model",
        "m",
    ]
    out = ["--out", str(tmp_path / "run")]
    assert main(["record", *engine, *out, "--limits.turns", "7"]) == 0
    said = capsys.readouterr().out
    assert "http://127.0.0.1:1/s/NAME/v1" in said
    assert "none can be trained on" in said
    assert (limits[0].turns, limits[0].turn_tokens, limits[0].wall_clock_s) == (
        7,
        16_384,
        604_800.0,
    )
    assert main(["view", str(tmp_path / "run"), "--html", str(tmp_path / "view.html")]) == 0
    assert "record" in (tmp_path / "view.html").read_text()
    assert main(["record", *engine, *out]) == 2
    assert "already contains a run" in capsys.readouterr().err


ASK = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": os.environ["TURNWRIGHT_TASK"]}]}).encode()
head = {"content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""  # noqa: E501
EVALUATED = """
[[env]]
use = "program"
tasks = "tasks.jsonl"
eval_tasks = "eval.jsonl"

[env.args]
command = ["{python}", "{recipe}/ask.py"]
score = "scores.py:score"

[engine]
kind = "chat"
model = "m"

[eval]
tasks = 4
greedy = false
"""


def test_programs_are_evaluated_in_front_of_a_chat_service(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(EVALUATED)
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "scores.py").write_text(
        "def score(result):\n    return float(result.output.strip() == 'Right.')\n"
    )
    for name in ("tasks", "eval"):
        rows = ({"prompt": f"{name} {number}", "answer": ""} for number in range(4))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: list[Any] = []

    async def service(task: tw.Task, model: tw.Model) -> float:
        session = ProxySession(model)
        async with ProxyServer() as server:
            words = [f'--engine.urls=["{server.open(session)}/v1"]']
            resolved = load(tmp_path / "r.toml", words, envs=[], training=False)
            loop = asyncio.get_running_loop()
            found.append(await loop.run_in_executor(None, lambda: evaluate_config(resolved)))
        await session.end()
        return 1.0

    engine = RecordingEngine(
        lambda messages, rng: "Wrong." if "eval 3" in messages[-1].text else "Right."
    )
    (behind,) = tw.rollout(
        service, [tw.Task("x")], engine, sanity="off", limits=tw.Limits(turns=1000)
    )
    assert behind.error is None, behind.error.traceback
    assert (found[0].success, len(found[0].row()["counts"])) == (0.75, 4)

"""Programs as episodes: processes and functions, their files, ends, limits and scores."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from kit.proxy import RecordingEngine, account, in_order, play
from kit.proxy_programs import ASK, TWO_CALLS, script

import turnwright as tw
import turnwright_serve
from turnwright.errors import EnvError, UsageError
from turnwright.records.journal import InterruptedEpisodes
from turnwright.records.run_dir import read_json_lines
from turnwright.renderers import byte_renderer
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.runner import Rollout
from turnwright.rollouts.standalone import make_episode_specs
from turnwright_serve.proxy import ProgramResult, program
from turnwright_serve.proxy.programs import ProgramEndpoint, fill, kill_marked, write_files

FOREVER = (
    ASK
    + """
import subprocess, time
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
while True:
    try:
        messages += [ask(messages), {"role": "user", "content": "next"}]
    except Exception:
        time.sleep(0.1)
"""
)


def test_a_process_is_played_and_scored_by_what_it_left() -> None:
    seen: list[ProgramResult] = []

    def score(result: ProgramResult) -> tw.Scores:
        seen.append(result)
        return tw.Scores(
            float((result.directory / "made.txt").read_text() == "made"),
            metrics={"length": len(result.output)},
        )

    trajectory = play(
        script(TWO_CALLS),
        RecordingEngine(["One.", "Two."]),
        score=score,
        files={"in/data.txt": "given"},
    )
    assert trajectory.error is None, trajectory.error.traceback
    assert trajectory.reward == 1.0
    assert trajectory.stop == "done"
    assert len(trajectory.turns) == 2
    assert len(list(trajectory.samples())) == 1
    assert seen[0].output.split()[:2] == ["given", "One."]
    assert seen[0].errors == "words\n"
    assert seen[0].exit_code == 0
    assert not seen[0].directory.exists()
    account(trajectory)


def test_a_limit_ends_the_program_and_it_is_scored() -> None:
    stops: list[Any] = []

    def score(result: ProgramResult) -> float:
        stops.append((result.stop, result.exit_code))
        return 0.25

    began = time.monotonic()
    trajectory = play(
        script(TWO_CALLS), RecordingEngine(["One.", "Two."]), score=score, limits=tw.Limits(turns=1)
    )
    assert time.monotonic() - began < 60
    assert (trajectory.reward, trajectory.stop, len(trajectory.turns)) == (0.25, "max_turns", 1)
    assert stops == [("max_turns", 1)]


def test_a_program_that_does_not_end_is_killed_with_all_its_processes() -> None:
    mark = f"OWN_MARK={uuid4().hex}"  # other tests on this machine run programs too
    seen: list[int] = []

    def alive() -> list[Path]:
        return [
            one
            for one in Path("/proc").glob("[0-9]*/environ")
            if mark.encode() in _environ(one).split(b"\0")
        ]

    def score(result: ProgramResult) -> float:
        assert alive() == []
        return 1.0

    class Noting(RecordingEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            seen.append(len(alive()))
            return await super().generate(request)

    trajectory = play(
        script(FOREVER),
        Noting(lambda messages, rng: "Go on."),
        score=score,
        seconds=2.0,
        env={"OWN_MARK": mark.partition("=")[2]},
        limits=tw.Limits(turns=10**6),
    )
    assert (trajectory.error, trajectory.reward, trajectory.stop) == (None, 1.0, "wall_clock")
    assert max(seen) == 2
    account(trajectory)


def _environ(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["{python}", "-c", "import sys; sys.exit('it broke')"], "status 1: it broke"),
        (["/does/not/exist"], "cannot be started"),
    ],
)
def test_a_program_that_fails_is_a_failure_and_not_a_reward(
    command: list[str], message: str
) -> None:
    trajectory = play(command, RecordingEngine([]))
    assert trajectory.reward is None
    assert trajectory.error is not None
    assert message in trajectory.error.message


def test_another_exit_status_can_be_allowed() -> None:
    command = ["{python}", "-c", "import sys; sys.exit(3)"]
    assert (
        play(
            command, RecordingEngine([]), exit_codes=(0, 3), score=lambda r: float(r.exit_code)
        ).reward
        == 3.0
    )


def test_the_programs_variables_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "hunter2")
    source = "import os; print(sorted(os.environ.items()))"
    outputs: list[str] = []
    play(
        ["{python}", "-c", source],
        RecordingEngine([]),
        score=lambda r: outputs.append(r.output) or 1.0,
        env={"URL": "{server} {task}"},
    )
    assert "hunter2" not in outputs[0]
    assert "Begin." in outputs[0]
    assert "('URL', 'http://127.0.0.1:" in outputs[0]
    home = os.path.expanduser("~")
    assert f"('HOME', '{home}')" not in outputs[0]


def test_an_engine_that_fails_fails_the_episode_and_ends_the_program() -> None:
    trajectory = play(script(TWO_CALLS), RecordingEngine(["One."]), files={"in/data.txt": ""})
    assert trajectory.stop == "engine_error"
    assert trajectory.reward is None
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_function_takes_the_place_of_a_command(kind: str) -> None:
    def body(endpoint: ProgramEndpoint) -> dict[str, Any]:
        return {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": endpoint.task.messages[0].text}],
        }

    async def asynchronous(endpoint: ProgramEndpoint) -> str:
        async with httpx2.AsyncClient(trust_env=False, verify=False) as http:
            answer = await http.post(f"{endpoint.base_url}/chat/completions", json=body(endpoint))
        return answer.json()["choices"][0]["message"]["content"]

    def synchronous(endpoint: ProgramEndpoint) -> str:
        assert threading.current_thread() is not threading.main_thread()
        answer = httpx2.post(
            f"{endpoint.base_url}/chat/completions",
            json=body(endpoint),
            trust_env=False,
            verify=False,
        )
        return answer.json()["choices"][0]["message"]["content"]

    agent = asynchronous if kind == "async" else synchronous
    trajectory = play(
        agent,
        RecordingEngine(["Forty-two."]),
        score=lambda r: float(r.output == "Forty-two." == r.returned),
    )
    assert trajectory.error is None, trajectory.error.traceback
    assert trajectory.reward == 1.0


def test_a_function_that_raises_fails_the_episode() -> None:
    def agent(endpoint: ProgramEndpoint) -> None:
        raise ValueError("no idea")

    trajectory = play(agent, RecordingEngine([]))
    assert trajectory.error is not None
    assert (trajectory.error.type, trajectory.error.message) == ("ValueError", "no idea")


def test_sixty_four_at_once_do_not_meet() -> None:
    async def agent(endpoint: ProgramEndpoint) -> str:
        messages = [{"role": "user", "content": endpoint.task.messages[0].text}]
        async with httpx2.AsyncClient(trust_env=False, verify=False, timeout=60) as http:
            for _ in range(3):
                answer = await http.post(
                    f"{endpoint.base_url}/chat/completions",
                    json={"model": "m", "messages": messages},
                )
                messages += [
                    answer.json()["choices"][0]["message"],
                    {"role": "user", "content": "next"},
                ]
        return " ".join(one["content"] for one in messages if one["role"] == "assistant")

    engine = RecordingEngine(lambda messages, rng: f"{messages[0].text} {len(messages)}")
    tasks = [tw.Task(f"task{number}") for number in range(64)]
    player = program(
        agent,
        score=lambda r: float(
            r.output == " ".join(f"{r.task.messages[0].text} {n}" for n in (1, 3, 5))
        ),
    )
    trajectories = tw.rollout(player, tasks, engine)
    assert [t.error for t in trajectories] == [None] * 64
    assert [t.reward for t in trajectories] == [1.0] * 64
    for trajectory in trajectories:
        account(trajectory)


def test_files_stay_inside_and_braces_are_replaced_once(tmp_path: Path) -> None:
    for name in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(EnvError, match="not inside"):
            write_files(tmp_path, {name: "x"})
    assert (
        fill("{task} {other} {{x} {", {"task": "{key}", "key": "secret"}) == "{key} {other} {{x} {"
    )
    assert kill_marked("0" * 32) == 0


def test_it_is_a_public_name() -> None:
    assert turnwright_serve.program is program
    with pytest.raises(AttributeError, match=r"turnwright\.program is turnwright_serve\.program"):
        tw.program  # noqa: B018


@pytest.mark.parametrize("command", ["python agent.py", [], [1]])
def test_a_command_is_a_list_of_texts(command: Any) -> None:
    with pytest.raises(UsageError, match="list of texts"):
        program(command, score=lambda result: 1.0)


def test_an_interrupted_program_gets_the_recorded_replies_first(tmp_path: Path) -> None:
    """The journal is cut after two turns, as by a kill: the program plays once more, and only
    the third is sampled."""

    async def agent(endpoint: ProgramEndpoint) -> str:
        messages = [{"role": "user", "content": endpoint.task.messages[0].text}]
        async with httpx2.AsyncClient(trust_env=False, verify=False) as http:
            for number in range(3):
                body = {"model": "m", "messages": messages, "max_tokens": 40 + number}
                answer = await http.post(f"{endpoint.base_url}/chat/completions", json=body)
                reply = answer.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": f" {reply['content']}"},
                    {"role": "user", "content": "next"},
                ]
        return messages[-2]["content"]

    player, task = program(agent, score=lambda r: float(r.output == " Three.")), tw.Task("Begin.")
    first = tw.rollout(
        player, [task], RecordingEngine(in_order(["One.", "Two.", "Three."])), out=tmp_path / "run"
    )[0]
    assert first.reward == 1.0

    interrupted, turns = InterruptedEpisodes(), 0
    for event in read_json_lines(tmp_path / "run" / "journal.jsonl"):
        turns += event.get("e") == "turn"
        if turns < 3:
            interrupted.read(event)
    engine = RecordingEngine(in_order(["Three."]))
    rollout = Rollout(
        engine,
        byte_renderer(),
        earlier=EarlierEpisodes(interrupted=interrupted.episodes({task.id: task}.get)),
    )
    second = asyncio.run(rollout.play(make_episode_specs(player, [task], phase="rollout", step=0)))[
        0
    ]
    assert second.error is None, second.error.traceback
    assert len(engine.received) == 1
    assert second.reward == 1.0
    assert [span.ids for span in second.spans] == [span.ids for span in first.spans]
    assert [turn.info for turn in second.turns] == [turn.info for turn in first.turns]

"""Claude Code, Codex and OpenCode at one port of `turnwright record`, distinguished by their
headers: `make test-agents`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from kit.programs import AGENTS, STEPS, TASK, Agent, check, reason_of, replies
from kit.proxy import RecordingEngine

import turnwright as tw
from tests.agents.real_programs import installed
from turnwright.renderers import byte_renderer
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.runner import Rollout
from turnwright_serve.proxy.programs import fill
from turnwright_serve.proxy.recording import record_sessions

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]


async def start(agent: Agent, url: str, folder: Path) -> int:
    """Run an agent in a directory of its own until its end; return its exit status."""
    (folder / "home").mkdir(parents=True)
    (folder / "numbers.txt").write_text("12\n30\n")
    for name, text in agent.files.items():
        (folder / name).write_text(text)
    values = {"task": TASK, "model": "turnwright", "base_url": f"{url}/v1"}
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "ANTHROPIC_BASE_URL": url,
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_API_KEY": "key",
    }
    env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **variables, **agent.env}
    command = [installed(agent.command[0]), *(fill(one, values) for one in agent.command[1:])]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.DEVNULL)
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=env, **quiet)
    return await process.wait()


def test_three_programs_at_one_port_are_three_episodes(tmp_path: Path) -> None:
    scripts = {name: replies(agent) for name, agent in AGENTS.items()}
    tools = {"claude": "Claude Code", "codex": "Codex CLI", "opencode": "opencode"}

    def script(messages: object, rng: object) -> str:
        opening = " ".join(message.text for message in messages[:3])  # type: ignore[index]
        title = AGENTS["opencode"].title in opening
        name = (
            "opencode" if title else next(name for name, words in tools.items() if words in opening)
        )
        return scripts[name](messages, rng)

    engine = RecordingEngine(script)

    async def run() -> tuple[list[int], list[tw.Trajectory]]:
        rollout = Rollout(
            engine, byte_renderer(), RolloutSettings(limits=tw.Limits(turns=40, turn_tokens=4000))
        )
        engine.set_renderer(rollout.renderer)
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        recording = asyncio.ensure_future(
            record_sessions(
                rollout, port=0, idle_s=600, on_start=started.set_result, note=lambda line: None
            )
        )
        url = await started
        codes = await asyncio.gather(
            *(start(agent, url, tmp_path / name) for name, agent in AGENTS.items())
        )
        recording.cancel()
        return list(codes), await recording

    codes, played = asyncio.run(run())
    assert codes == [0, 0, 0]
    assert [(tmp_path / name / "total.txt").read_text().strip() for name in AGENTS] == ["42"] * 3
    assert len(played) == 3
    for trajectory in played:
        check(
            trajectory,
            [
                ids
                for session, ids in engine.received
                if session.split("/")[2] == trajectory.task.id
            ],
        )
        assert sum(reason_of(turn) != "side" for turn in trajectory.turns) == len(STEPS) + 1
    assert sorted(len(list(trajectory.samples())) for trajectory in played) == [1, 1, 2]

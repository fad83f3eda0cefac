"""Unmodified Claude Code, Codex and OpenCode, offline, against the proxy over a scripted
engine: `make test-agents`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kit.programs import (
    AGENTS,
    END,
    LIMITS,
    STEPS,
    Agent,
    counts,
    reason_of,
    replies,
    run_agent,
)
from kit.proxy import RecordingEngine, called

import turnwright as tw
from turnwright_serve.proxy import ProxySession, server

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]
every_agent = pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
SUMMARY = (
    "<analysis>\nI read it.\n</analysis>\n<summary>\nThe file numbers.txt holds 12 and 30.\nTheir "
    "sum 42 is still to be written to total.txt.\n</summary>"
)
ASIDE = {"claude": {}, "codex": {}, "opencode": {"side": 1}}
"""Branches of an episode that only appends: OpenCode asks for a title."""


@every_agent
def test_a_program_that_only_appends_is_one_row(agent: Agent) -> None:
    outcome = run_agent(agent)
    trajectory = outcome.trajectory
    assert (trajectory.reward, trajectory.stop) == (1.0, "done")
    assert END in outcome.results[0].output
    main = [turn for turn in trajectory.turns if reason_of(turn) != "side"]
    assert len(main) == len(STEPS) + 1
    assert trajectory.branches == ASIDE[agent.name]
    forms = {} if agent.name != "opencode" else {"arguments_form": len(STEPS)}
    assert counts(trajectory) == forms


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_eight_at_once(name: str) -> None:
    outcome = run_agent(AGENTS[name], episodes=8)
    assert [trajectory.reward for trajectory in outcome.trajectories] == [1.0] * 8
    assert [len(list(trajectory.samples())) for trajectory in outcome.trajectories] == [1] * 8
    assert [len(trajectory.turns) for trajectory in outcome.trajectories] == [len(STEPS) + 1] * 8


@every_agent
def test_a_stream_that_is_cut_is_served_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third stream ends after three pieces: the program asks again and gets the
    turn that was sampled."""
    whole, begun = server._stream, 0

    async def cut(*given: Any) -> AsyncIterator[bytes]:
        nonlocal begun
        begun += 1
        number, sent = begun, 0
        async for piece in whole(*given):
            if number == 3 and sent == 3:
                raise ConnectionResetError("cut by the test")
            sent += 1
            yield piece

    monkeypatch.setattr(server, "_stream", cut)
    trajectory = run_agent(agent).trajectory
    assert (trajectory.reward, trajectory.branches) == (1.0, ASIDE[agent.name])
    assert counts(trajectory)["served_again"] == 1
    assert begun == len(trajectory.turns) + 1


@every_agent
@pytest.mark.parametrize("begun", [False, True], ids=["status", "event"])
def test_a_limit_ends_the_program(
    agent: Agent, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a status, or by an event where the stream had begun: the program ends by itself,
    in less than `END_S`."""
    requests, events = 0, 0
    answer, stream, generate = server.ProxyServer._answer, server._stream, ProxySession._generate

    async def counted(*given: Any) -> Any:
        nonlocal requests
        requests += 1
        return await answer(*given)

    async def streamed(*given: Any) -> AsyncIterator[bytes]:
        nonlocal events
        async for piece in stream(*given):
            events += b"the episode is over" in piece
            yield piece

    async def late(*given: Any) -> Any:
        await asyncio.sleep(0.2)
        return await generate(*given)

    monkeypatch.setattr(server.ProxyServer, "_answer", counted)
    monkeypatch.setattr(server, "_stream", streamed)
    if begun:
        monkeypatch.setattr(server, "HEARTBEAT_S", 0.05)
        monkeypatch.setattr(ProxySession, "_generate", late)
    outcome = run_agent(agent, limits=tw.Limits(turns=3, turn_tokens=4000))
    trajectory = outcome.trajectory
    assert (trajectory.stop, len(trajectory.turns), trajectory.reward) == (
        "max_turns",
        3,
        0.0 if agent.title else 1.0,
    )
    assert outcome.results[0].exit_code == 1
    again = begun and agent.name == "claude"  # it asks once more after an error that is an event
    assert (requests, events) == (4 + again, int(begun))


@every_agent
def test_sub_agents_are_recorded_by_name(agent: Agent) -> None:
    def reply(messages: Sequence[tw.Message], rng: Any) -> str:
        if agent.title and any(agent.title in message.text for message in messages):
            return "Sum of numbers"
        said = [message.text for message in messages if message.role == "user"]
        done = sum(message.role == "assistant" for message in messages)
        if not any("Add the numbers" in text for text in said):
            return (
                agent.shell("cat numbers.txt")
                if done == 0
                else "The numbers are 12 and 30, and nothing else is in it."
            )
        if done == 0:
            return "\n".join(
                agent.delegate(f"Read numbers.txt, copy {number}.") for number in (1, 2)
            )
        if agent.name == "codex" and done == 1:
            started = [
                json.loads(message.text)["agent_id"]
                for message in messages
                if message.role == "tool"
            ]
            return called("multi_agent_v1.wait_agent", targets=started)
        calls = str([dict(call.arguments) for message in messages for call in message.tool_calls])
        return END if "echo 42" in calls else agent.shell("echo 42 > total.txt")

    trajectory = run_agent(agent, reply).trajectory
    assert trajectory.reward == 1.0
    assert trajectory.branches == {"subagent": 2} | ASIDE[agent.name]
    assert {turn.agent for turn in trajectory.turns} == {"main", "agent1", "agent2"}
    for name in ("agent1", "agent2"):
        own = [turn for turn in trajectory.turns if turn.agent == name]
        assert [reason_of(turn) for turn in own] == ["subagent", None]


@every_agent
def test_compaction_is_recorded_by_name(agent: Agent) -> None:
    steps = iter(["cat long.txt", "cat numbers.txt", "ls", "ls"])

    def reply(messages: Sequence[tw.Message], rng: Any) -> str:
        if agent.title and any(agent.title in message.text for message in messages):
            return "Sum of numbers"
        if any(agent.compaction in messages[at].text for at in (0, -1)):
            return SUMMARY
        if not any("Their sum 42" in message.text for message in messages):
            return agent.shell(next(steps))
        calls = str([dict(call.arguments) for message in messages for call in message.tool_calls])
        return END if "echo 42" in calls else agent.shell("echo 42 > total.txt")

    long = {"long.txt": "\n".join(f"line {number} is of no use" for number in range(1100))}
    outcome = run_agent(agent.with_window(), reply, files=long)
    trajectory = outcome.trajectory
    assert trajectory.reward == 1.0
    asked = {"claude": "dropped_reply", "codex": "tools_changed", "opencode": "side"}[agent.name]
    expected = [*ASIDE[agent.name], asked, "compacted"]
    assert trajectory.branches == {name: expected.count(name) for name in expected}
    summaries = [turn for turn in trajectory.turns if turn.info.get("proxy", {}).get("summary")]
    assert [reason_of(turn) for turn in summaries] == [asked]
    assert summaries[0].reply.text == SUMMARY
    assert counts(trajectory)["summaries"] == 1


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_reply_may_take_half_a_minute(name: str) -> None:
    """With the heartbeat as it is; the reply is sampled once."""

    class Late(RecordingEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            if len(self.received) == 1:
                await asyncio.sleep(30)
            return await super().generate(request)

    agent = AGENTS[name]
    began = time.monotonic()
    trajectory = run_agent(agent, engine=Late(replies(agent)), limits=LIMITS).trajectory
    assert time.monotonic() - began > 30
    assert (trajectory.reward, len(trajectory.turns), counts(trajectory)) == (
        1.0,
        len(STEPS) + 1,
        {},
    )


def test_codex_joins_the_reply_in_flight_where_it_waits_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat in comments is nothing to Codex: after its idle time (300 s by
    default) it asks again."""
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.5)

    class Late(RecordingEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            if len(self.received) == 1:
                await asyncio.sleep(5)
            return await super().generate(request)

    agent = AGENTS["codex"]
    patient = tuple(
        one.replace('"responses"}', '"responses",stream_idle_timeout_ms=2000}')
        for one in agent.command
    )
    trajectory = run_agent(replace(agent, command=patient), engine=Late(replies(agent))).trajectory
    assert (trajectory.reward, len(trajectory.turns), trajectory.branches) == (
        1.0,
        len(STEPS) + 1,
        {},
    )
    assert counts(trajectory)["joined"] >= 1

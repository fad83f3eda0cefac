"""Real programs as episodes of a scripted engine, and what is checked of every one of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import turnwright as tw
from kit.proxy import RecordingEngine, account, called, contexts
from tests.agents.real_programs import installed
from turnwright_serve.proxy import ProgramResult, program

TASK = "Add the numbers of numbers.txt and write the sum to total.txt."
STEPS = ["ls", "cat numbers.txt", "echo 42 > total.txt", "cat total.txt"]
END = "The total is 42."
LIMITS = tw.Limits(turns=40, turn_tokens=4000)
OPENCODE: dict[str, Any] = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"turnwright": {"limit": {"context": 200_000, "output": 8_000}}},
}
MINI = (
    "mini",
    "--task",
    "{task}",
    "--yolo",
    "--exit-immediately",
    "--model",
    "openai/turnwright",
    "--cost-limit",
    "0",
)
MINI_ENV = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
CODEX = '{name="turnwright",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'


@dataclass(frozen=True)
class Agent:
    """A coding agent: how it is started, and how a model speaks to its tools."""

    name: str
    command: tuple[str, ...]
    shell: Callable[[str], str]
    """Text of a reply that runs a shell command."""
    delegate: Callable[[str], str]
    """Text of a reply that starts a sub-agent."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    """What a request for a title contains."""
    compaction: str = ""
    """What a request for a summary of the conversation contains."""

    def with_window(self) -> Agent:
        """Return the agent with so small a window that the first long output makes it compact."""
        if self.name == "claude":
            return replace(self, env={**self.env, "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "102000"})
        if self.name == "codex":
            return replace(
                self,
                command=(
                    *self.command[:2],
                    "-c",
                    "model_auto_compact_token_limit=48200",
                    *self.command[2:],
                ),
            )
        return replace(self, files=opencode_settings(63_000))


def opencode_settings(context: int) -> dict[str, str]:
    """Return OpenCode's settings file with a context of so many tokens."""
    provider = OPENCODE | {
        "models": {"turnwright": {"limit": {"context": context, "output": 8_000}}}
    }
    return {"opencode.json": json.dumps({"provider": {"turnwright": provider}})}


AGENTS = {
    "claude": Agent(
        "claude",
        (
            "claude",
            "-p",
            "{task}",
            "--model",
            "{model}",
            "--allowedTools",
            "Bash,Read,Edit,Write,Agent",
        ),
        lambda command: called("Bash", command=command, description="Run"),
        lambda task: called(
            "Agent", description="Look", prompt=task, subagent_type="general-purpose"
        ),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
        compaction="Respond with TEXT ONLY",
    ),
    "codex": Agent(
        "codex",
        (
            *(
                "codex",
                "exec",
                "--skip-git-repo-check",
                "--sandbox",
                "danger-full-access",
                "-c",
                "model_provider=turnwright",
            ),
            *("-c", f"model_providers.turnwright={CODEX}", "--model", "{model}", "{task}"),
        ),
        lambda command: called("exec_command", cmd=command),
        lambda task: called("multi_agent_v1.spawn_agent", message=task),
        compaction="CONTEXT CHECKPOINT COMPACTION",
    ),
    "opencode": Agent(
        "opencode",
        ("opencode", "run", "--model", "turnwright/{model}", "{task}"),
        lambda command: called("bash", command=command, description="Run"),
        lambda task: called("task", description="Look", prompt=task, subagent_type="general"),
        files=opencode_settings(200_000),
        title="Generate a title for this conversation",
        compaction="You are a context summarization agent",
    ),
}


def replies(agent: Agent, steps: Sequence[str] = STEPS) -> Callable[..., str]:
    """Return a script that runs a step in each reply, then ends; a title is answered by one."""

    def reply(messages: Sequence[tw.Message], rng: Any) -> str:
        if agent.title and any(agent.title in message.text for message in messages):
            return "Sum of numbers"
        done = sum(message.role == "assistant" for message in messages)
        return agent.shell(steps[done]) if done < len(steps) else END

    return reply


@dataclass
class Outcome:
    """Episodes of a program, and what it left."""

    trajectories: list[tw.Trajectory]
    engine: RecordingEngine
    results: list[ProgramResult]
    left: list[str]
    """Processes of the programs when they were scored."""
    scored_at: float = 0.0

    @property
    def trajectory(self) -> tw.Trajectory:
        """The one episode."""
        (trajectory,) = self.trajectories
        return trajectory


def run_program(
    command: Sequence[str],
    script: Any,
    *,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    episodes: int = 1,
    limits: tw.Limits = LIMITS,
    engine: RecordingEngine | None = None,
    **given: Any,
) -> Outcome:
    """Play a program on the task, and check what holds of every program: ids once,
    contexts, a reason for each row."""
    outcome = Outcome([], engine or RecordingEngine(script), [], [])

    def score(result: ProgramResult) -> float:
        outcome.scored_at = time.monotonic()
        outcome.results.append(result)
        outcome.left += _processes_in(result.directory)
        total = result.directory / "total.txt"
        return float(total.exists() and total.read_text().strip() == "42")

    files = {"numbers.txt": "12\n30\n", **(files or {})}
    player = program(
        [installed(command[0]), *command[1:]], score=score, files=files, env=env, **given
    )
    tasks = [tw.Task(TASK, id=f"task{number}") for number in range(episodes)]
    outcome.trajectories = list(tw.rollout(player, tasks, outcome.engine, limits=limits))
    for trajectory in outcome.trajectories:
        if trajectory.error is not None:
            raise AssertionError(trajectory.error.traceback)
        check(
            trajectory,
            [
                ids
                for session, ids in outcome.engine.received
                if session.split("/")[2] == trajectory.task.id
            ],
        )
    assert outcome.left == []
    return outcome


def run_agent(agent: Agent, script: Any = None, **given: Any) -> Outcome:
    """Play a coding agent."""
    files = {**agent.files, **given.pop("files", {})}
    return run_program(agent.command, script or replies(agent), env=agent.env, files=files, **given)


def check(trajectory: tw.Trajectory, received: list[list[int]]) -> None:
    """Check that every sampled id is in one row with a weight or a named reason, that the contexts
    are what the engine received, and that every row but one has a reason."""
    account(trajectory)
    assert sorted(contexts(trajectory)) == sorted(received)
    branches = [reason_of(turn) for turn in trajectory.turns]
    assert sum(reason is not None for reason in branches) >= len(list(trajectory.samples())) - 1
    assert sum(trajectory.branches.values()) == sum(reason is not None for reason in branches)
    for turn, reason in zip(trajectory.turns, branches, strict=True):
        assert (turn.weights is not None) == (reason == "side"), "a weight of 0 without a reason"


def reason_of(turn: Any) -> str | None:
    """Return the reason of a turn that begins a row."""
    return turn.info.get("proxy", {}).get("branch")


def counts(trajectory: tw.Trajectory) -> dict[str, float]:
    """Return what the proxy counted, but for tools that it cannot offer."""
    return {
        name[6:]: n
        for name, n in trajectory.metrics.items()
        if name.startswith("proxy_") and name != "proxy_tools_left_out"
    }


def _processes_in(directory: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if Path(os.readlink(path)).is_relative_to(directory):
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found

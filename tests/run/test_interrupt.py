"""Ctrl-C, episodes that fail, and runs without a signal."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import turnwright as tw
from turnwright.errors import TurnwrightError
from turnwright.rollouts.stream import RolloutStream

SETTINGS: dict[str, Any] = {
    "limits": {"turns": 3, "turn_tokens": 6},
    "rollout": {"groups": 2, "group_size": 2},
    "train": {"steps": 3},
    "eval": {"tasks": 2},
    "display": "none",
}


class Echo(tw.Env):
    """Rewards a reply by its length."""

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        return "Say something."

    def step(self, action: tw.Action) -> tw.Step:
        return tw.Step("more", reward=float(len(action.text) % 3), terminated=len(action.text) > 3)

    @staticmethod
    def tasks(split: str, n: int, seed: int) -> list[tw.Task]:
        return [tw.Task(f"{split} {i}") for i in range(n)]


class Broken(Echo):
    """Fails as it opens."""

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        raise RuntimeError("the world is flat")


def spans(run: Path) -> dict[str, list[Any]]:
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    return {json.dumps(row["key"]): row["spans"] for row in rows if row["stop"] != "aborted"}


def test_ctrl_c_then_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes that were cut off are played again, and come out as in a run
    that was not stopped."""
    tw.train(env=Echo, out=tmp_path / "peace", **SETTINGS)
    original = RolloutStream.submit
    calls = 0

    def interrupted(self: RolloutStream, episodes: Any, **asked: Any) -> asyncio.Task[Any]:
        nonlocal calls
        calls += 1
        task = original(self, episodes, **asked)
        if calls == 4:
            asyncio.get_running_loop().call_later(0.02, signal.raise_signal, signal.SIGINT)
        return task

    monkeypatch.setattr(RolloutStream, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        tw.train(env=Echo, out=tmp_path / "war", **SETTINGS)
    monkeypatch.setattr(RolloutStream, "submit", original)
    tw.train(env=Echo, out=tmp_path / "war", resume=True, display="none")
    assert spans(tmp_path / "war") == spans(tmp_path / "peace")
    summary = json.loads((tmp_path / "war" / "summary.json").read_text())
    assert summary["resumed"] == 1
    assert "2 processes" in summary["times_cover"]


def test_too_many_failures_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        TurnwrightError,
        match=r"episodes of the eval-before-sampled episodes failed.*the world is flat",
    ):
        tw.train(env=Broken, out=tmp_path / "run", **SETTINGS)


def test_no_signal_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One task, no demonstrator: all groups tie, the run ends well and says
    why nothing was learned."""
    tasks = [tw.Task("What is 6 * 7?", answer="42")]
    env = tw.tool_env(
        tools=[],
        reward=lambda trajectory: float(trajectory.final_text.strip() == "42"),
        max_turns=2,
    )
    settings = SETTINGS | {"display": "plain"}
    tw.train(model=tw.tiny(hidden=32), env=env, tasks=tasks, out=tmp_path / "run", **settings)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"nothing was learned: no group of 3 steps had a signal", said)
    assert "no held-out tasks; skipping evaluation" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["success_after"] is None


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="warmup"):
        tw.train(env=Echo, out=tmp_path / "a", warmup={"demo": 3}, **SETTINGS)
    with pytest.raises(ValueError, match=r"no such|does not exist"):
        tw.train(env=Echo, model=tmp_path / "nowhere", out=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()

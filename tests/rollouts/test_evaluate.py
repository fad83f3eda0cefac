"""`turnwright.evaluate`, the same evaluation as `turnwright eval`; progress of episodes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.runs import SMALL

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import ModelConfig
from turnwright.errors import ConfigError, UsageError
from turnwright.records import ProgressListener
from turnwright.records.episode_metrics import wilson
from turnwright.rollouts import episode_progress
from turnwright.rollouts.episode_progress import EpisodeProgress, ProgressBar, progress_listener


class Guess(tw.Env):
    def reset(self, task: tw.Task, *, seed: int | None = None) -> Any:
        self.answer = task.answer
        return task.messages

    def step(self, action: tw.Action) -> tw.Step:
        return tw.Step(reward=float(action.text == self.answer), terminated=True)


TASKS = [tw.Task(f"Guess {number}.", answer="yes") for number in range(6)]


def sometimes(messages: Any, rng: Any) -> str:
    return "yes" if rng.random() < 0.5 else "no"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.toml").write_text(SMALL)
    out = folder / "out"
    assert main(["train", str(folder / "recipe.toml"), "--out", str(out), "--quiet"]) == 0
    return out


def test_success_its_interval_and_pass_at_k_are_those_of_the_episodes() -> None:
    result = tw.evaluate(Guess, tasks=TASKS, engine=tw.ScriptedEngine(sometimes), samples=4)
    won = [trajectory.reward == 1 for trajectory in result.episodes]
    assert result.n == len(won) == 24
    assert 0 < sum(won) < 24
    assert result.success == sum(won) / 24
    assert result.ci == wilson(sum(won), 24)
    assert sum(result.stops.values()) == 24
    assert [trajectory.task.id for trajectory in result.episodes[::4]] == [t.id for t in TASKS]

    assert list(result.pass_at_k) == [1, 2, 4]
    assert result.pass_at_k[1].value == pytest.approx(result.success)
    solved = {t.task.id for t in result.episodes if t.reward == 1}
    assert result.pass_at_k[4].value == pytest.approx(len(solved) / 6)
    assert repr(result).startswith(f"<Evaluation sampled {result.success:.1%} [")


def test_the_same_seed_gives_the_same_evaluation_and_another_another() -> None:
    def texts(seed: int) -> list[str]:
        engine = tw.ScriptedEngine(sometimes)
        result = tw.evaluate(Guess, tasks=TASKS, engine=engine, samples=4, seed=seed)
        return [trajectory.final_text for trajectory in result.episodes]

    assert texts(1) == texts(1) != texts(2)


def test_a_play_function_an_environment_by_name_and_a_solver_are_evaluated() -> None:
    async def play(task: tw.Task, model: tw.Model) -> float:
        reply = await model.generate(task.messages)
        return float(reply.text == task.answer)

    assert tw.evaluate(play, tasks=TASKS, engine=tw.ScriptedEngine(["yes"])).success == 1
    solved = tw.evaluate("hop", engine="scripted", eval={"tasks": 5})
    assert (solved.success, solved.n) == (1, 5)


def test_a_run_is_evaluated_as_the_command_does(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", "--run", str(trained), "--samples", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    result = tw.evaluate(run=trained, samples=2)
    assert result.row() == printed
    assert set(result.scores) == {"sampled", "greedy"}
    assert len(result.episodes) == 8
    assert len(result.trajectories["greedy"]) == 4

    # What is given with the run replaces what it has, also its history and its model.
    assert tw.evaluate(run=trained, samples=1, history="template", eval={"greedy": False}).n == 4
    with pytest.raises(ConfigError, match="history"):
        tw.evaluate(run=trained, history="no such history")
    with pytest.raises(ConfigError, match="elsewhere"):
        tw.evaluate(run=trained, model=ModelConfig(path="elsewhere"))

    by_model = tw.evaluate("hop", model=trained, samples=2, eval={"tasks": 4}, limits={"turns": 3})
    assert by_model.n == 8


def test_limits_and_rules_are_those_that_are_given() -> None:
    class Long(Guess):
        def step(self, action: tw.Action) -> tw.Step:
            return tw.Step("Go on.")

    result = tw.evaluate(
        Long, tasks=TASKS[:1], engine=tw.ScriptedEngine(["no"] * 3), limits={"turns": 3}
    )
    assert [len(trajectory.turns) for trajectory in result.episodes] == [3]
    assert result.stops == {"max_turns": 1}


def test_what_only_training_needs_is_not_asked_of_an_evaluation() -> None:
    result = tw.evaluate(
        Guess, tasks=TASKS[:1], engine=tw.ScriptedEngine(["yes"]), train={"algorithm": "gone"}
    )
    assert result.n == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "needs an environment"),
        ({"env": Guess, "tasks": []}, "has no tasks"),
        ({"env": Guess, "tasks": ["x"]}, "tasks must be a list of turnwright.Task"),
        ({"env": Guess, "tasks": TASKS[0]}, "tasks must be a list of turnwright.Task"),
        ({"env": Guess, "tasks": TASKS, "evall": {}}, r"evaluate\(\) has no setting 'evall'"),
        ({"env": Guess, "tasks": TASKS, "engine": "vllm"}, "unknown engine"),
        ({"env": Guess, "tasks": TASKS}, "no model"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=expected):
        tw.evaluate(**arguments)


class Watch(ProgressListener):
    def __init__(self) -> None:
        self.phases: list[tuple[str, int, str]] = []
        self.figures: list[tuple[int, dict[str, Any]]] = []

    def phase(self, name: str, total: int, unit: str) -> None:
        self.phases.append((name, total, unit))

    def progress(self, done: int, metrics: Mapping[str, Any]) -> None:
        self.figures.append((done, dict(metrics)))


def test_each_episode_counts_once_however_often_it_is_played() -> None:
    played = tw.rollout(Guess, TASKS[:2], tw.ScriptedEngine(["yes"]))
    watch = Watch()
    counted = EpisodeProgress(watch)
    counted.finished(played[0])  # before the phase: of another one
    counted.begin("rollout", 2)
    for trajectory in (played[0], played[1], played[0]):
        counted.finished(trajectory)
    assert watch.phases == [("rollout", 2, "episodes")]
    assert [done for done, _ in watch.figures] == [1, 2, 2]
    assert watch.figures[-1][1] == {"turns": 1.0, "reward": 1.0}


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(-3, 3))))
def test_figures_are_means_over_the_last_plays(plays: list[tuple[int, int | None]]) -> None:
    [played] = tw.rollout(Guess, TASKS[:1], tw.ScriptedEngine(["yes"]))
    watch = Watch()
    counted = EpisodeProgress(watch)
    counted.begin("rollout", 5)
    last = {}
    for sample, reward in plays:
        played.key = replace(played.key, sample=sample)
        played.reward = None if reward is None else float(reward)
        counted.finished(played)
        last[sample] = reward
        rewards = [value for value in last.values() if value is not None]
        figures = {"turns": 1.0}
        if rewards:
            figures["reward"] = sum(rewards) / len(rewards)
        assert watch.figures[-1] == (len(last), figures)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_rollout_has_a_bar_on_a_terminal_and_none_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(stream: io.StringIO, **options: Any) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        tw.rollout(Guess, TASKS, tw.ScriptedEngine(["yes"]), **options)
        return stream.getvalue()

    bar = shown(Terminal())
    assert "rollout: 100%" in bar
    assert "6/6" in bar
    assert "reward=1" in bar
    assert shown(Terminal(), progress=False) == ""
    assert shown(io.StringIO()) == ""
    assert "6/6" in shown(io.StringIO(), progress=True)


def test_a_bar_that_cannot_be_drawn_stops_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    played = tw.rollout(Guess, TASKS, tw.ScriptedEngine(["yes"]), progress=True)
    assert len(played) == 6


def test_a_bar_is_shown_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(progress_listener(None), ProgressBar)
    monkeypatch.setattr(episode_progress, "_in_notebook", lambda: True)
    assert isinstance(progress_listener(None), ProgressBar)
    assert not isinstance(progress_listener(False), ProgressBar)


def test_commands_show_the_progress_of_episodes(
    capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    assert main(["eval", "--run", str(trained), "--display", "plain"]) == 0
    said = capsys.readouterr().err
    assert "evaluate sampled: 4 episodes" in said
    assert "evaluate greedy 4/4 episodes" in said
    assert main(["eval", "--run", str(trained), "--quiet"]) == 0
    assert capsys.readouterr().err == ""

"""Mistakes in a person's code: a record each, and the end of a run that would meet nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from kit.rollouts import AsyncTalk, Sampler, Talk, tasks

import turnwright as tw
from turnwright.envs.user_code import failure_kind, user_location
from turnwright.records import RunDir
from turnwright.records.serialization import rebuild_trajectories
from turnwright.renderers import CHATML, MARKUP, SPECIAL, ByteTokenizer, ChatRenderer, ChatTemplate
from turnwright.renderers.parsers import PARSERS
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import FailureKind


class Wrong(AsyncTalk):
    """Breaks on some tasks, at one of two lines."""

    broken: frozenset[str] = frozenset()
    closed = 0

    async def reset(self, task, *, seed=None):
        self.task = task.id
        return Talk.reset(self, task, seed=seed)

    async def step(self, action):
        if self.task in self.broken:
            return self.one() if int(self.task[1:]) % 2 else self.other()
        return Talk.step(self, action)

    def one(self):
        return {}["one"]

    def other(self):
        return {}["other"]

    async def close(self):
        type(self).closed += 1


def run(broken, n, samples=1, stop=True):
    world = type("Wrong", (Wrong,), {"broken": frozenset(broken), "closed": 0})
    rollout = Rollout(
        Sampler(), tw.byte_renderer(), RolloutSettings(environments=4, stop_on_bugs=stop)
    )
    todo = make_episode_specs(world, tasks(n), phase="rollout", step=0, samples=samples)
    return rollout, todo, world


def test_the_same_mistake_at_the_same_line_in_three_tasks_stops_the_run_with_it():
    rollout, todo, world = run(["t1", "t3", "t5"], 40)
    with pytest.raises(tw.RepeatedUserError) as stopped:
        asyncio.run(rollout.play(todo))
    said = str(stopped.value)
    assert said.startswith("KeyError at ")
    assert "test_rollout_bugs.py:" in said
    assert "in step, in 3 tasks (t1, t3, t5)" in said
    assert "\n" not in said
    assert world.closed == rollout.finished + 3, "those that were cut off are closed too"


def test_mistakes_at_different_lines_or_in_two_tasks_do_not():
    rollout, todo, _ = run(["t1", "t3", "t2", "t4"], 40)
    rows = asyncio.run(rollout.play(todo))
    assert sum(row.error is not None for row in rows) == 4
    assert {row.error.kind for row in rows if row.error} == {FailureKind.USER_BUG}


def test_a_mistake_in_a_fifth_of_the_first_episodes_stops_also_a_run_of_one_task():
    rollout, todo, _ = run(["t0"], 1, samples=32)
    with pytest.raises(tw.RepeatedUserError, match=r"in 7 of the first \d+ episodes"):
        asyncio.run(rollout.play(todo))


def test_without_being_asked_a_rollout_only_records():
    rollout, todo, _ = run(["t1", "t3", "t5"], 8, stop=False)
    assert sum(row.error is not None for row in asyncio.run(rollout.play(todo))) == 3


@pytest.mark.parametrize(("error", "phase", "kind"), [
    (TypeError("x"), "step", "user_bug"), (KeyError("x"), "reset", "user_bug"), (NameError("x"), "reward", "user_bug"),  # noqa: E501
    (ZeroDivisionError("x"), "play", "user_bug"), (tw.EnvError("x"), "step", "user_bug"),
    (ConnectionError("x"), "step", "environment"), (RuntimeError("x"), "step", "environment"),
    (MemoryError(), "step", "environment"), (tw.ProcessDied("x"), "step", "environment"),
    (tw.ToolFailure("x"), "step", "tool"), (TimeoutError(), "step", "timeout"), (OSError("x"), "reward", "reward"),  # noqa: E501
    (tw.RewardError("x"), "step", "reward"), (tw.EngineError("x"), "generate", "engine"),
])  # fmt: skip
def test_whose_doing_an_exception_is(error, phase, kind):
    assert failure_kind(error, phase) == kind


def test_a_librarys_own_exception_is_no_mistake_of_the_environment():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert failure_kind(caught.value, "step") == "environment"
    assert "test_rollout_bugs.py:" in user_location(caught.value)


BROKEN = """
import turnwright as tw

class Broken(tw.Env):
    def reset(self, task, *, seed=None):
        return "Go."

    def step(self, action):
        return tw.Step(reward=action.no_such_thing, terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"go {split}", id=split)]

    @staticmethod
    def solver(messages, rng):
        return "x"
"""


def test_the_command_line_says_a_mistake_in_one_line_and_fails(tmp_path, monkeypatch, capsys):
    from turnwright.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "recipe.toml").write_text('[[env]]\nuse = "broken.py:Broken"\n')
    assert main(["eval", "recipe.toml", "--engine", "scripted"]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("turnwright: error: AttributeError at ")
    assert "broken.py:9 in step, in 7 of the first 7 episodes: " in said
    assert "Traceback" not in said


class BrokenParser:
    """A parser of a stranger, which breaks on one word; other than that it is another format's."""

    name = "broken"

    def __getattr__(self, name):
        return getattr(PARSERS["hermes"], name)

    def parse(self, text, tools=(), *, thinking=False):
        if "boom" in text:
            raise KeyError("boom")
        return PARSERS["hermes"].parse(text, tools, thinking=thinking)


def test_what_a_parser_breaks_on_is_recorded_first_and_the_parser_named(tmp_path, monkeypatch):
    monkeypatch.setitem(PARSERS, "broken", BrokenParser())
    renderer = ChatRenderer(ByteTokenizer(SPECIAL, MARKUP), ChatTemplate(CHATML), parser="broken")
    engine = tw.ScriptedEngine(["fine", "boom"])
    with RunDir(tmp_path / "run") as run:
        rollout = Rollout(engine, renderer, run=run)
        (played,) = asyncio.run(
            rollout.play(make_episode_specs(Talk, tasks(1), phase="rollout", step=0))
        )
    assert played.error.kind == FailureKind.USER_BUG
    assert played.error.place.startswith(f"{__file__}:")
    assert played.error.type == "KeyError"
    sampled = [renderer.decode(span.ids) for span in played.spans if span.sampled]
    assert [text.removesuffix("<|im_end|>") for text in sampled] == ["fine", "boom"]
    with RunDir(tmp_path / "run") as run:
        (rebuilt,) = rebuild_trajectories(run.events(), {"t0": played.task}.get).values()
    assert [span.ids for span in rebuilt.spans] == [span.ids for span in played.spans]
    assert rebuilt.sampled_tokens == played.sampled_tokens


def test_what_a_parser_breaks_on_is_not_trained_where_the_function_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(PARSERS, "broken", BrokenParser())
    renderer = ChatRenderer(ByteTokenizer(SPECIAL, MARKUP), ChatTemplate(CHATML), parser="broken")

    async def play(task, model):
        with pytest.raises(KeyError):
            await model.generate("Say it.")
        reply = await model.generate("Say it.")
        return float(reply.message.text == "fine")

    engine = tw.ScriptedEngine(["boom", "fine"])
    (played,) = tw.rollout(play, [tw.Task("go")], engine, renderer=renderer, out=tmp_path / "run")
    assert (played.reward, played.stop, len(played.turns)) == (1.0, "done", 1)
    first, second = (span for span in played.spans if span.sampled)
    assert (renderer.decode(first.ids)[:4], first.trained, first.untrained) == (
        "boom",
        0,
        "failed_attempt",
    )
    assert second.trained == len(second.ids)
    # Nothing of it is in the next context.
    assert renderer.decode(played.prompt_ids(0)).count("assistant") == 1
    weights = [weight for row in played.samples() for weight in row.weights]
    assert sum(weights) == len(second.ids)
    with RunDir(tmp_path / "run") as run:
        (rebuilt,) = rebuild_trajectories(run.events(), {played.task.id: played.task}.get).values()
    assert [(span.ids, span.trained) for span in rebuilt.spans] == [
        (span.ids, span.trained) for span in played.spans
    ]


def test_ids_that_no_tokenizer_has_are_still_the_engines_fault():
    class Strange(Sampler):
        async def generate(self, request):
            made = await super().generate(request)
            return dataclasses.replace(made, ids=[10**9, *made.ids[1:]])

    (played,) = tw.rollout(Talk, tasks(1), Strange())
    assert played.stop == "engine_error"
    assert not played.sampled_tokens

"""How a run finds its own footing: a gate relative to its demonstrations, an early end, and the way
back to a better policy."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import replace

import pytest

import turnwright as tw
from turnwright.cli.train import closing_lines
from turnwright.config import Limits, RunConfig, WarmupConfig
from turnwright.config.dump import load_run_config
from turnwright.config.recipe import from_python
from turnwright.display.diagnosis import diagnose
from turnwright.envs.check import check_env
from turnwright.envs.resolve import as_env_spec
from turnwright.envs.tool_env import NO_REWARD
from turnwright.errors import ConfigError, TurnwrightError, UsageError
from turnwright.records import NullListener
from turnwright.runs import run_training
from turnwright.training import Trainer
from turnwright.training.checkpoint import Checkpoints
from turnwright.training.evaluation import EvalResult, summarize
from turnwright.training.task_plan import TaskPlan, eval_samples
from turnwright.training.warmup import NO_START, cannot_learn, cut_note, demonstrations
from turnwright.training.warmup_gate import GATE_SHARE, NO_DEMONSTRATOR, Gate
from turnwright.types import StopReason, Trajectory

TINY = {"hidden": 16, "heads": 1, "kv_heads": 1, "layers": 1}


class Echo(tw.Env):
    """Say the word of the task."""

    def reset(self, task, *, seed=None):
        self.word = task.info["word"]
        return f"say {self.word}"

    def step(self, action):
        return tw.Step(reward=self.pay(action.text.strip()), terminated=True)

    def pay(self, said):
        return float(said == self.word)

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed} {n}")  # another number of tasks is another list
        return [
            tw.Task(info={"word": rng.choice("abcd"), "number": f"{split} {rng.random()}"})
            for _ in range(n)
        ]

    @staticmethod
    def solver(messages, rng):
        return messages[-1].text.split()[-1]


class Coin(Echo):
    """Pays half of what is said, whatever it is; its demonstrations say what is always paid."""

    def pay(self, said):
        return float(said == self.word or len(said) % 2)


class Spoiled(Echo):
    """Pays until the first reinforcement step was trained."""

    spoiled = False

    def pay(self, said):
        return float(not Spoiled.spoiled)

    def reward(self, trajectory):
        Spoiled.spoiled |= trajectory.key.phase == "train" and trajectory.key.step == 1
        return 0.0


def train(env, out, **sections):
    """Train a tiny model for a few steps; return the summary and the notes of the journal."""
    given = {
        "limits": {"turns": 1, "turn_tokens": 4, "on_turn_length": "continue"},
        "rollout": {"groups": 2, "group_size": 4},
        "warmup": {"demos": 8, "steps": 2, "batch": 4, "gate_every": 2, "gate_tasks": 16},
        "train": {"steps": 3, "lr": 0.0},
        "eval": {"tasks": 16, "greedy": False},
    }
    merged = {
        name: {**value, **sections.get(name, {})} for name, value in {**sections, **given}.items()
    }
    tw.train(model=tw.tiny(**TINY), env=env, out=out, display="none", **merged)
    return json.loads((out / "summary.json").read_text())


def demo(reward, stop=StopReason.DONE):
    found = Trajectory(tw.Task("t"), key=None)
    found.reward, found.stop = reward, stop
    return found


def test_a_gate_is_relative_to_the_demonstrations_unless_it_is_given():
    demos = [demo(1.0), demo(0.0), demo(1.0), demo(0.0)]
    gate = Gate.of(RunConfig(), demos)
    assert gate.demo_success == 0.5
    assert gate.success == GATE_SHARE * 0.5
    given = RunConfig(warmup=WarmupConfig(demos=1, gate_success=0.2))
    assert (Gate.of(given, demos).success, Gate.of(given, demos).demo_success) == (0.2, None)
    assert Gate.of(RunConfig(), [demo(None)]).success == NO_DEMONSTRATOR
    score = EvalResult(n=10, successes=3, turns=1.0, reward=0.3, failed=0, counts=())
    assert "success is 0.30, the gate 0.38 (0.75 of the demonstrations' 0.50)" in gate.unmet(
        score, 0.0
    )


def test_rewards_that_differ_are_counted():
    assert summarize([demo(1.0), demo(0.0), demo(0.0), demo(0.5)]).differing == 0.5
    assert summarize([demo(1.0)] * 3).differing == 0.0
    assert summarize([]).differing == 0.0


def test_demonstrations_do_not_depend_on_the_steps():
    spec = as_env_spec(Echo)
    plans = [TaskPlan([spec], steps=steps, groups=2, held_out=4, seed=0) for steps in (1, 50)]
    few, many = ([choice.task.id for choice in plan.demonstrated(spec, 20)] for plan in plans)
    assert few == many
    assert len(set(few)) == 20
    assert [choice.task.id for choice in plans[0].train] != [
        choice.task.id for choice in plans[1].train
    ][:2]


def test_demonstrations_are_played_in_the_environment_that_a_function_replaces():
    async def elsewhere(task, model):
        raise AssertionError("a function plays what the policy learns from, not demonstrations")

    spec = replace(as_env_spec(Echo), agent_function=elsewhere)
    plan = TaskPlan([spec], steps=1, groups=2, held_out=4, seed=0)
    played = asyncio.run(
        demonstrations(
            [spec], plan, tw.byte_renderer(), RunConfig(warmup=WarmupConfig(demos=8)), "append"
        )
    )
    assert [trajectory.reward for trajectory in played] == [1.0] * 8


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (StopReason.TURN_LENGTH, "limits.turn_tokens = 8;"),
        (StopReason.CONTEXT, "limits.context = "),
        (StopReason.MAX_TURNS, "the environment's max_turns;"),
        (StopReason.DONE, ""),
    ],
)
def test_demonstrations_that_a_limit_cuts(stop, says):
    config = RunConfig(limits=Limits(turn_tokens=8))
    assert says in cut_note(config, [demo(0.0, stop)] * 2 + [demo(1.0)] * 8)
    assert not cut_note(config, [demo(0.0, stop)] + [demo(1.0)] * 19)


def test_a_missed_gate_goes_on_where_rewards_differ(tmp_path):
    summary = train(Coin, tmp_path / "run")
    assert summary["warmup_steps"] == 2
    gates = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["gate_passed"] for row in gates if row["phase"] == "gate"] == [False]


def test_a_missed_gate_stops_the_run_where_all_rewards_are_equal(tmp_path):
    class Nothing(Echo):
        solved = True

        @staticmethod
        def solver(messages, rng):
            return messages[-1].text.split()[-1] * 2

        def pay(self, said):
            return float(said == self.word * 2)

    with pytest.raises(
        TurnwrightError, match=r"the gate 0.75 \(0.75 of the demonstrations' 1.00\)"
    ):
        train(Nothing, tmp_path / "run")


def test_a_gate_that_is_met_is_asked_again(tmp_path):
    class Paid(Echo):
        def pay(self, said):
            return 1.0

    train(Paid, tmp_path / "run", train={"steps": 1})
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(row.get("name"), row["gate_passed"]) for row in rows if row["phase"] == "gate"] == [
        (None, True),
        ("again", True),
    ]


def test_reinforcement_ends_once_the_success_is_reached(tmp_path):
    class Paid(Echo):
        def pay(self, said):
            return 1.0

    summary = train(Paid, tmp_path / "run", train={"steps": 9, "lr": 0.0, "stop_success": 0.9})
    assert summary["rl_steps"] == 5
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))] == [
        "step-00005"
    ]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    tw.train(model=tw.tiny(**TINY), env=Paid, out=tmp_path / "run", display="none", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_run_goes_back_to_the_policy_before_reinforcement(tmp_path):
    Spoiled.spoiled = False
    summary = train(Spoiled, tmp_path / "run")
    assert summary["success_before"] > 0.8 > summary["success_after"] == 0.0
    assert summary["best"] == ["warmed", summary["success_before"]]
    assert summary["rolled_back"] == "warmed"
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", tmp_path)
    assert checkpoints.policy().path.name == "warmed"
    assert checkpoints.newest().path.name == "step-00003"


def rows_of(run, phase):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == phase]


def resume(env, out, **sections):
    tw.train(model=tw.tiny(**TINY), env=env, out=out, display="none", resume=True, **sections)
    return json.loads((out / "summary.json").read_text())


class Noting(NullListener):
    """Keeps the notes of a run."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_finished_run_goes_on_with_more_steps(tmp_path, mode):
    lr = {"lr": 1e-3, "schedule": "linear"} | ({} if mode == "sync" else {"correction": "tis"})
    run = tmp_path / "run"
    train(Coin, run, train={"steps": 2, **lr}, schedule={"mode": mode})
    before = rows_of(run, "train")
    summary = resume(Coin, run, train={"steps": 4})
    rows = rows_of(run, "train")
    assert summary["rl_steps"] == 4
    assert rows[:2] == before
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["lr"] for row in rows] == [1e-3, 5e-4, 5e-4, 2.5e-4]
    assert json.loads((run / "config.json").read_text())["extended"] == {"train.steps": [2]}
    assert resume(Coin, run, train={"steps": 5})["rl_steps"] == 5
    assert load_run_config(run).extended == {"train.steps": (2, 4)}


def test_an_extended_run_that_is_interrupted_equals_one_that_was_not(tmp_path):
    """The steps since the last checkpoint are trained again on their episodes, at
    their learning rates."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run in (whole, broken):
        train(
            Coin,
            run,
            train={"steps": 2, "lr": 1e-3, "schedule": "linear"},
            checkpoint={"every": 2, "keep": 9},
        )
        resume(Coin, run, train={"steps": 5})
    for name in ("step-00004", "step-00005"):
        shutil.rmtree(broken / "checkpoints" / name)
    (broken / "summary.json").unlink()
    resume(Coin, broken)
    weights = [
        (run / "checkpoints" / "step-00005" / "model.safetensors").read_bytes()
        for run in (whole, broken)
    ]
    assert weights[0] == weights[1]


def test_an_extension_keeps_the_tasks_of_the_steps_before():
    spec = as_env_spec(Echo)
    short, longer = (
        TaskPlan([spec], steps=steps, groups=2, held_out=4, seed=0) for steps in (3, (3, 6))
    )
    ids = [
        [choice.task.id for step in range(3) for choice in plan.step(step)]
        for plan in (short, longer)
    ]
    assert ids[0] == ids[1]
    assert not set(ids[0]) & {
        choice.task.id for step in range(3, 6) for choice in longer.step(step)
    }


def test_a_finished_run_says_so_and_how_to_extend_it(tmp_path):
    run, watch = tmp_path / "run", Noting()
    train(Coin, run)
    before, metrics = (run / "journal.jsonl").read_bytes(), (run / "metrics.jsonl").read_bytes()
    run_training(load_run_config(run), resume=run, watch=watch, env_specs=[as_env_spec(Coin)])
    line = (
        f"{run} is finished after 3 steps; extend it with: turnwright train --resume {run} "
        "--train.steps 6"
    )
    assert watch.notes == [line]
    after = (run / "journal.jsonl").read_bytes()
    assert after.startswith(before)
    assert [json.loads(line)["e"] for line in after[len(before) :].splitlines()] == ["resumed"]
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_reinforcement_ends_when_gradients_show_nothing(tmp_path):
    run, watch = tmp_path / "run", Noting()
    summary = train(
        Coin, run, train={"steps": 9, "lr": 1e-3, "gradient_signal_steps": 20, "patience": 3}
    )
    assert (summary["rl_steps"], summary["stopped_by"]) == (3, "train.patience")
    assert [row["lr"] for row in rows_of(run, "train")] == [0.0] * 3
    run_training(load_run_config(run), resume=run, watch=watch, env_specs=[as_env_spec(Coin)])
    assert "after 3 steps (train.patience = 3 was reached)" in watch.notes[0]
    assert watch.notes[0].endswith("--train.steps 18 --train.patience none")
    summary = resume(Coin, run, train={"patience": None})
    assert summary["rl_steps"] == 9
    assert "stopped_by" not in summary


def test_a_step_with_an_update_starts_the_patience_anew(tmp_path, monkeypatch):
    def share(trainer):
        return float(trainer.updates == 2)

    monkeypatch.setattr(Trainer, "signal_share", property(share))
    train(
        Coin,
        tmp_path / "run",
        train={"steps": 9, "lr": 1e-3, "gradient_signal_steps": 20, "patience": 2},
    )
    assert [row["lr"] > 0 for row in rows_of(tmp_path / "run", "train")] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"train": {"steps": 2}}, "train.steps = 2: the run has 3 steps; more extend it"),
        ({"train": {"lr": 1.0}}, "uses the run's own settings; leave out --train.lr"),
        ({"warmup": {"steps": 9}}, "the warm-up is over, so warmup.steps has no effect"),
    ],
)
def test_what_an_extension_cannot_change(tmp_path, sections, says):
    run = tmp_path / "run"
    train(Coin, run)
    before = (run / "config.json").read_text()
    with pytest.raises(ConfigError, match=says):
        resume(Coin, run, **sections)
    assert (run / "config.json").read_text() == before


def test_a_warm_up_that_missed_its_gate_goes_on(tmp_path):
    class Later(Echo):
        """Pays the demonstrations alone at first."""

        paid = False

        @staticmethod
        def solver(messages, rng):
            return "x" * 3

        def pay(self, said):
            return float(Later.paid or said == "xxx")

    run = tmp_path / "run"
    with pytest.raises(TurnwrightError, match=r"resume with --resume .* --warmup.steps 8"):
        train(Later, run)
    Later.paid = True
    summary = resume(Later, run, warmup={"steps": 8})
    assert (summary["warmup_steps"], summary["rl_steps"]) == (8, 3)
    assert [row["step"] for row in rows_of(run, "warmup")] == list(range(1, 9))


class Four(Echo):
    """Has one training task and three held-out ones, and paid for any text of odd length."""

    def pay(self, said):
        return float(said == self.word or len(said) % 2)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(info={"word": word}) for word in ("abc" if split == "eval" else "d")]


def test_few_tasks_are_played_more_often(tmp_path):
    summary = train(
        Four, tmp_path / "run", eval={"tasks": 64}, train={"steps": 1}, warmup={"gate_success": 0.0}
    )
    assert (summary["n_eval"], summary["eval_tasks"]) == (66, 3)
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert sum(row["key"]["phase"] == "train" for row in rows) == 8
    names = [found.name for found in diagnose([], summary)]
    assert names == ["few held-out tasks"]
    (line,) = [
        line for line in closing_lines(tmp_path / "run", "again") if line.startswith("success")
    ]
    assert line.endswith("on 66 episodes of 3 held-out tasks")


def test_a_step_has_as_many_episodes_with_fewer_tasks_than_groups():
    plan = TaskPlan([as_env_spec(Four)], steps=2, groups=16, held_out=3, seed=0)
    assert (plan.size(0), plan.group_size(0, 8)) == (1, 128)
    plan = TaskPlan([as_env_spec(Echo)], steps=2, groups=16, held_out=3, seed=0)
    assert (plan.size(0), plan.group_size(0, 8)) == (16, 8)
    assert [
        eval_samples(*given)
        for given in ((3, 256, 1), (40, 256, 1), (256, 256, 1), (4, 4, 2), (3, 4, 2))
    ] == [
        22,
        2,
        1,
        2,
        3,
    ]


def test_tasks_of_the_evaluation_are_trained_where_that_is_allowed_and_labeled(tmp_path):
    eval, warmup = {"tasks": 8, "overlap": "allowed"}, {"gate_success": 0.0}
    summary = train(Four, tmp_path / "run", eval=eval, train={"steps": 2}, warmup=warmup)
    assert summary["overlap"] == "allowed"
    phases = {}
    for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines():
        key = json.loads(line)["key"]
        phases.setdefault(key["phase"], set()).add(key["task"])
    assert phases["eval-after-sampled"] < phases["train"]
    assert len(phases["train"]) == 4
    assert "evaluated on trained tasks" in [found.name for found in diagnose([], summary)]
    (line,) = [
        line for line in closing_lines(tmp_path / "run", "again") if line.startswith("success")
    ]
    assert line.endswith("episodes of tasks that were trained too")
    with pytest.raises(UsageError, match="is in training and held out"):
        TaskPlan([as_env_spec(Both)], steps=2, groups=2, held_out=2, seed=0)
    plan = TaskPlan([as_env_spec(Both)], steps=2, groups=2, held_out=2, seed=0, overlap=True)
    assert {choice.task.id for choice in plan.held_out} <= {choice.task.id for choice in plan.train}


class Both(Echo):
    """Evaluates on what it trains on."""

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(info={"word": word}) for word in "abcd"]


def count(text: str) -> int:
    """Count characters."""
    return len(text)


class Shop:
    """A tool that is paid at the end."""

    def buy(self, thing: str) -> str:
        """Buy a thing."""
        return thing

    def calc_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize(("lifetime", "warned"), [("trajectory", False), ("call", True)])
def test_a_class_that_is_paid_at_the_end_needs_no_reward_function(lifetime, warned):
    tasks = [tw.Task(f"buy {n}") for n in range(9)]
    spec = as_env_spec(tw.tool_env([Shop], lifetime=lifetime, solver=Echo.solver, tasks=tasks))
    assert bool(cannot_learn(RunConfig(warmup=WarmupConfig(demos=9)), [spec])) == warned
    assert any(NO_REWARD in finding.text for finding in check_env(spec)) == warned


def test_what_cannot_learn_is_named_before_the_start():
    unpaid = as_env_spec(
        tw.tool_env([count], solver=Echo.solver, tasks=[tw.Task(f"count {n}") for n in range(9)]),
        name="counts",
    )
    silent = as_env_spec(Echo)
    fresh, warm = RunConfig(), RunConfig(warmup=WarmupConfig(demos=9))
    assert cannot_learn(fresh, [silent]) == [NO_START]
    assert cannot_learn(warm, [silent]) == []
    assert [f"counts: {NO_REWARD}"] == cannot_learn(warm, [unpaid])
    assert NO_REWARD in "".join(finding.text for finding in check_env(unpaid))
    with pytest.raises(
        ConfigError, match=r"warmup.demos = 9, but Echo has no demonstrator or solver"
    ):
        cannot_learn(warm, [replace(silent, solver=None)])


def test_a_run_begins_with_why_it_may_learn_nothing(tmp_path):
    watch = Noting()
    given = {
        "out": str(tmp_path / "run"),
        "train": {"steps": 1},
        "eval": {"tasks": 2},
        "model": tw.tiny(**TINY),
    }
    run_training(from_python(given, "a test"), watch=watch, env_specs=[as_env_spec(Echo)])
    assert watch.notes[0] == f"warning: {NO_START}"


def test_few_tasks_are_played_more_often_from_python_too(tmp_path):
    few = [tw.Task(info={"word": word}, id=word) for word in "ab"]
    tw.train(
        env=Echo,
        tasks=few,
        eval_tasks=[tw.Task(info={"word": "c"}, id="c")],
        model=tw.tiny(**TINY),
        out=tmp_path / "run",
        display="none",
        limits={"turn_tokens": 2},
        rollout={"groups": 4, "group_size": 3},
        train={"steps": 1},
        eval={"tasks": 1},
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["trajectories"] for row in rows if row["phase"] == "train"] == [12]

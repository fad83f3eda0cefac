"""Each diagnosis is made of runs that have the fault: real episodes, real updates, real files."""

import json

import pytest
import torch
from kit.training import ANY, random_groups, with_logprobs

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.display.diagnosis import LAST, diagnose
from turnwright.errors import TurnwrightError
from turnwright.training import Trainer
from turnwright.training.metrics import step_row


def names(rows, summary=None):
    return [one.name for one in diagnose(rows, summary)]


def row(played, **more):
    """The row of metrics that a step with these episodes has."""
    trained = dict.fromkeys(("optimizer_steps", "train_s", "tokens_per_s"), 0.0)
    return {"phase": "train"} | step_row(played, trained, 1.0, 1.0) | more


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: what.
    """
    return str(tw.arithmetic(expression))


@pytest.mark.parametrize(
    ("say", "fires"),
    [("42", True), ('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', False)],
)
def test_a_model_that_never_calls_its_tool(say, fires):
    env = tw.tool_env(
        tools=[calculator],
        reward=lambda trajectory: len(trajectory.key.task) / 100 + trajectory.key.sample,
        max_turns=2,
    )
    tasks = [tw.Task("6 * 7?"), tw.Task("6 * 8?")]
    played = tw.rollout(env, tasks, engine=tw.ScriptedEngine([say, "42"]), samples=2)
    found = names([row(played, tools_offered=1)] * LAST)
    assert ("the tool is never called" in found) == fires


class Talks(tw.Env):
    max_turns = 3
    ends = True

    def reset(self, task, *, seed=None):
        return "Go."

    def step(self, action):
        return tw.Step("on", terminated=self.ends)

    def reward(self, trajectory):
        return float(trajectory.key.sample % 2)


class Endless(Talks):
    ends = False


def play(env):
    tasks = [tw.Task(f"t{n}") for n in range(4)]
    return tw.rollout(env, tasks, engine=tw.ScriptedEngine(["x", "y", "z"]), samples=4)


def test_one_part_of_the_reward_and_ties_and_truncation():
    reward = tw.rewards(
        form=lambda trajectory: 1.0, right=lambda trajectory: float(trajectory.key.sample % 2)
    )
    assert names([row(play(tw.tool_env(tools=[calculator], reward=reward)))] * LAST) == [
        "one part of the reward dominates"
    ]
    assert names([row(play(Talks))] * LAST) == []
    found = names([row(play(Endless))] * LAST)
    assert "everything truncated" in found

    class Same(Talks):
        def reward(self, trajectory):
            return 0.0

    assert names([row(play(Same))] * LAST) == ["all groups tie"]


def steps(model, spoil):
    """Rows of a trainer's steps, whose engine or policy is spoiled from step `LAST` on."""
    trainer = Trainer(model, TrainConfig(lr=0.0, schedule="constant", max_mismatch_kl=1e9, **ANY))
    rows = []
    for number in range(2 * LAST):
        groups = with_logprobs(model, random_groups(number, groups=2))
        if number == LAST:
            spoil(model, None)
        if number >= LAST:
            spoil(None, groups)
        rows.append(
            {"phase": "train", "success": 0.5}
            | trainer.step(groups, step=number, steps=2 * LAST).metrics
        )
    return rows


def test_an_engine_that_drifts_from_the_trainer(tiny_model):
    def noise(model, groups):
        for trajectory in (t for g in groups or () for t in g.trajectories):
            for span in trajectory.spans:
                if span.sampled:
                    span.logprobs = [logprob - 0.01 for logprob in span.logprobs]

    assert names(steps(tiny_model, noise)) == ["mismatch rises"]
    assert names(steps(tiny_model, lambda model, groups: None)) == []


def test_a_policy_that_has_become_sure(tiny_model):
    def sharpen(model, groups):
        if model is not None:
            with torch.no_grad():
                model.lm_head.weight *= 400

    rows = steps(tiny_model, sharpen)
    assert "entropy collapsed" in names(rows)


TINY = {"hidden": 16, "heads": 1, "kv_heads": 1, "layers": 1}


def test_a_warm_up_that_cannot_meet_its_gate(tmp_path):
    with pytest.raises(TurnwrightError, match="without meeting its gate"):
        tw.train(
            model=tw.tiny(**TINY),
            env=tw.resolve_env("hop").factory,
            out=tmp_path / "run",
            display="none",
            warmup={"demos": 4, "steps": 2, "gate_every": 1, "gate_success": 0.9, "gate_tasks": 2},
            train={"steps": 1},
            eval={"tasks": 2},
        )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert names(rows) == ["the warmup gate is not met"]


def test_a_model_whose_task_needs_no_looking(tmp_path, capfd):
    class Blind(tw.Env):
        """Pays whatever is said, seen or not."""

        def reset(self, task, *, seed=None):
            return [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": tw_image()},
                        {"type": "text", "text": "Say."},
                    ],
                }
            ]

        def step(self, action):
            return tw.Step("so", reward=1.0, terminated=True)

        @staticmethod
        def tasks(split, n, seed):
            return [tw.Task(f"{split} {number}") for number in range(n)]

    tw.train(
        model=tw.tiny(vision=True, **TINY),
        env=Blind,
        out=tmp_path / "run",
        display="plain",
        limits={"turns": 1, "turn_tokens": 4},
        rollout={"groups": 1, "group_size": 2},
        warmup={"demos": 0},
        train={"steps": 1},
        eval={"tasks": 2},
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "the model is blind" in names([], summary)
    told = "".join(capfd.readouterr())
    assert "evaluate after: 2 passes" in told
    assert "evaluate blind: 1 passes" in told
    assert "3/2" not in told


def tw_image():
    from PIL import Image

    return Image.new("RGB", (28, 28), (200, 30, 30))

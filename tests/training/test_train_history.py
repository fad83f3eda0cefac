"""Training on what branches leave: every sampled id in the context that the engine saw, equal
to a row for each call."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from kit.double_precision import Model64
from kit.gradients import loss_and_gradient
from kit.training import STILL, branched, distance

import turnwright as tw
from turnwright.config import EnvConfig, ModelConfig, TrainConfig
from turnwright.engines.local import LocalEngine
from turnwright.training import Trainer
from turnwright.training.model import models
from turnwright.types import Group

STRIPS = "qwen3_without_thinking"


def hop(name="hop"):
    return tw.resolve_env(EnvConfig(use=name, args={"think": True}))


@pytest.fixture(scope="module")
def thinking_dir(tmp_path_factory):
    texts = hop().texts(100, 0)
    return models.create_tiny_model(
        ModelConfig(hidden=32, layers=2), texts, tmp_path_factory.mktemp("thinks") / "model"
    )


def renderer(directory):
    return tw.load_renderer(directory, template=STRIPS)


def groups_of(rows):
    """Groups of two, one of which was rewarded."""
    made = {}
    for row in rows:
        row.reward = float(row.key.sample % 2)
        made.setdefault(row.task.id, Group(row.task, [])).trajectories.append(row)
    return list(made.values())


def per_call(made):
    """The slow reference: each call of the model is a row of its own, prompt and reply."""
    rows = [[branched(row) for row in group.trajectories] for group in made]
    for group, own in zip(made, rows, strict=True):
        for row, alone in zip(group.trajectories, own, strict=True):
            assert len(list(alone.samples())) == len(row.turns)
    return [Group(group.task, own) for group, own in zip(made, rows, strict=True)]


def solved(directory, history, name="hop", count=3):
    world = hop(name)

    def speak(messages, rng):
        # Samples of one task think different things, or their gradients would cancel.
        return world.solver(messages, rng).replace(
            "</think>", f"{rng.choice(('amber', 'birch', 'cedar'))}\n</think>"
        )

    engine = tw.ScriptedEngine(speak)
    tasks = world.tasks("train", count, 0)
    limits = tw.Limits(turn_tokens=200)
    rows = tw.rollout(
        world.factory,
        tasks,
        engine,
        samples=2,
        renderer=renderer(directory),
        limits=limits,
        history=history,
    )
    assert all(row.error is None for row in rows)
    return rows


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "fixed"])
@pytest.mark.parametrize("history", ["append", "template", "drop_reasoning:1"])
def test_a_tree_of_branches_has_the_loss_and_the_gradient_of_a_row_per_call(
    thinking_dir, history, aggregation
):
    rows = solved(thinking_dir, history)
    assert history == "append" or any(row.branches for row in rows)
    made = groups_of(rows)
    model = Model64(vocabulary=1100, context=512)
    loss, grad = loss_and_gradient(model, made, aggregation=aggregation)
    model.zero_grad()
    slow_loss, slow_grad = loss_and_gradient(model, per_call(made), aggregation=aggregation)
    assert abs(loss - slow_loss) < 1e-12
    assert distance(grad, slow_grad) < 1e-10


def test_one_chain_and_five_branches_of_an_episode_have_equal_gradients(thinking_dir):
    class Talk(tw.Env):
        def reset(self, task, *, seed=None):
            self.left = 5
            return "Begin."

        def step(self, action):
            self.left -= 1
            return tw.Step("On.", terminated=self.left == 0)

    engine = tw.ScriptedEngine(
        lambda messages, rng: " ".join(rng.choices(("one", "two", "three", "four"), k=3))
    )
    rows = tw.rollout(Talk, [tw.Task("go")], engine, samples=2, renderer=renderer(thinking_dir))
    made = groups_of(rows)
    assert [len(list(row.samples())) for row in rows] == [1, 1]
    apart = [Group(made[0].task, [rows[0], branched(rows[1])])]
    assert len(list(apart[0].trajectories[1].samples())) == 5
    model = Model64(vocabulary=1100, context=512)
    loss, grad = loss_and_gradient(model, made)
    model.zero_grad()
    other_loss, other_grad = loss_and_gradient(model, apart)
    assert abs(loss - other_loss) < 1e-12
    assert distance(grad, other_grad) < 1e-10


def test_the_trainer_has_the_engines_logprobs_in_every_branch(thinking_dir):
    def forgets(conversation, replies):
        return [
            replace(m, content="said") if i in replies[:-1] else m
            for i, m in enumerate(conversation)
        ]

    model, _ = models.load(thinking_dir)
    text = renderer(thinking_dir)
    engine = LocalEngine(model, renderer=text)
    limits = tw.Limits(turn_tokens=12, on_turn_length="continue")
    world = hop()
    tasks = world.tasks("train", 4, 0)
    rows = tw.rollout(
        world.factory, tasks, engine, samples=2, renderer=text, limits=limits, history=forgets
    )
    asyncio.run(engine.close())
    assert sum(row.branches.get("policy:forgets", 0) for row in rows) > 8
    trainer = Trainer(
        model, TrainConfig(**{**STILL, "max_mismatch": 1e-4}), banned_ids=text.banned_ids
    )
    figures = trainer.step(groups_of(rows), step=0, steps=10).metrics
    assert 0 < figures["mismatch_max"] < 1e-4


def test_a_run_trains_in_template_mode(tmp_path):
    tw.train(
        env=tw.resolve_env(EnvConfig(use="hop", args={"think": True})),
        model=replace(tw.tiny(hidden=32), template=STRIPS),
        out=tmp_path / "run",
        history="template",
        display="none",
        limits={"turns": 4, "turn_tokens": 40},
        rollout={"groups": 4, "group_size": 4},
        warmup={
            "demos": 200,
            "steps": 60,
            "batch": 16,
            "gate_success": 0.0,
            "gate_tasks": 8,
            "gate_every": 60,
        },
        train={"steps": 2, "max_mismatch": 1e-4},
        eval={"tasks": 8, "greedy": False},
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if row["key"]["phase"] == "train"]
    assert len(trained) == 2 * 4 * 4
    branches = sum(row["branches"].get("thinking_stripped", 0) for row in trained)
    assert branches > 0, "nobody thought twice, so this proved little"
    assert set().union(*(row["branches"] for row in trained)) <= {
        "thinking_stripped",
        "prefix_changed",
        "reply_rewritten",
    }
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["rollout"]["history"] == "template"

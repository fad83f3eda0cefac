"""One step moves the policy at most so far away from episodes that succeeded."""

import json
import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.training.credit import Credit
from turnwright.training.forward.ranks import Ranks
from turnwright.training.trainer.optimizer import Optimizer
from turnwright.training.trainer.step_limit import MAX_GOOD_KL, MOST, StepLimit, good_episodes
from turnwright.training.trainer.trainer import Trainer
from turnwright.training.untrained_reasons import NO_SIGNAL
from turnwright.types import Task, Trajectory


def credit(number, reward, reason=None):
    trajectory = Trajectory(Task(str(number)), key=None)
    trajectory.reward = reward
    return Credit(trajectory, None if reason else 0.5, reason, 1)


REASONS = st.sampled_from([None, None, NO_SIGNAL, "failed", "group_too_small"])
EPISODES = st.lists(st.tuples(st.sampled_from([None, 0.0, 0.25, 1.0]), REASONS), max_size=100)


@given(EPISODES)
def test_good_episodes_are_those_at_the_mean_or_above_spread_over_the_step(episodes):
    credits = [credit(number, *episode) for number, episode in enumerate(episodes)]
    good = good_episodes(credits)
    usable = [
        one
        for one in credits
        if one.reason in (None, NO_SIGNAL) and one.trajectory.reward is not None
    ]
    if not usable:
        assert not good
        return
    mean = math.fsum(one.trajectory.reward for one in usable) / len(usable)
    allowed = [one for one in usable if one.trajectory.reward >= mean]
    assert len(good) == min(MOST, len(allowed))
    assert all(one.reason is None and one.advantage == 1.0 for one in good)
    places = [
        next(i for i, one in enumerate(allowed) if one.trajectory is found.trajectory)
        for found in good
    ]
    assert places == sorted(set(places))
    gaps = [after - before for before, after in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1


class Batch:
    """Six ids of three episodes."""

    trajectory_n = torch.tensor([0, 0, 0, 1, 2, 2])


def shares(before, after):
    """Return what is measured, with the policy before the step scored, and with the
    engine's logprobs for it."""
    before, after = (torch.tensor(scores, dtype=torch.float64) for scores in (before, after))
    scores = iter([before, after])
    scored = StepLimit(Batch(), lambda batch: next(scores), exact=False).share()
    batch = Batch()
    batch.engine_n = before
    assert StepLimit(batch, lambda batch: after, exact=True).share() == pytest.approx(
        scored, nan_ok=True
    )
    return scored


def test_a_policy_that_stays_is_not_shortened():
    assert shares([-1.0] * 6, [-1.0] * 6) == (1.0, 0.0)


def test_the_divergence_is_the_k3_of_an_episode():
    share, divergence = shares([-1.0] * 6, [-1.5, *[-1.0] * 5])
    assert divergence == pytest.approx((math.exp(-0.5) - 1.0 + 0.5) / 3)
    assert share == 1.0


def test_a_step_that_moves_too_far_keeps_the_share_that_a_quadratic_allows():
    share, divergence = shares([-1.0] * 6, [-3.0] * 6)
    assert divergence > MAX_GOOD_KL
    assert share**2 * divergence == pytest.approx(MAX_GOOD_KL)


def test_a_step_to_no_number_is_taken_back():
    share, _ = shares([-1.0] * 6, [math.nan] * 6)
    assert share == 0.0
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(model, TrainConfig(lr=0.1), Ranks())
    before = optimizer.parameters()
    kept = [parameter.clone() for parameter in before]
    with torch.no_grad():
        model.weight.fill_(math.inf)
    optimizer.shorten(before, share)
    assert all(
        torch.equal(parameter, old) for parameter, old in zip(model.parameters(), kept, strict=True)
    )


@given(st.floats(0.0, 1.0), st.integers(0, 99))
def test_shortening_keeps_that_share_of_every_parameter(share, seed):
    rng = random.Random(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(model, TrainConfig(lr=0.1), Ranks())
    before = optimizer.parameters()
    kept = [parameter.clone() for parameter in before]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rng.uniform(-1.0, 1.0))
    optimizer.step(0.1)
    moved = [
        parameter.detach() - old for parameter, old in zip(model.parameters(), kept, strict=True)
    ]
    optimizer.shorten(before, share)
    for parameter, old, step in zip(model.parameters(), kept, moved, strict=True):
        torch.testing.assert_close(parameter.detach() - old, share * step)


class Letters(tw.Env):
    """Pays two letters of four."""

    def reset(self, task, *, seed=None):
        return "say"

    def step(self, action):
        return tw.Step(reward=float(action.text.strip() in ("a", "b")), terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(info={"number": f"{split} {number}"}) for number in range(n)]

    @staticmethod
    def demonstrator(messages, rng):
        return rng.choice("abcd")


@pytest.mark.parametrize("lr", [1e-4, 0.3])
def test_a_step_that_breaks_the_policy_is_shortened_and_recorded(tmp_path, monkeypatch, lr):
    monkeypatch.setattr(Trainer, "signal_share", property(lambda trainer: 1.0))
    tw.train(
        model=tw.tiny(hidden=32, heads=2, kv_heads=2, layers=1),
        env=Letters,
        out=tmp_path / "run",
        display="none",
        limits={"turns": 1, "turn_tokens": 2, "on_turn_length": "continue"},
        rollout={"groups": 4, "group_size": 8},
        warmup={
            "demos": 100,
            "steps": 40,
            "batch": 16,
            "lr": 1e-2,
            "gate_tasks": 16,
            "gate_success": 0.1,
        },
        train={"steps": 3, "lr": lr, "gradient_signal_steps": 20},
        eval={"tasks": 8, "greedy": False},
    )
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if row["phase"] == "train"]
    shortened = [row for row in steps if row["step_kl"] > MAX_GOOD_KL]
    assert all(row["step_share"] == 1.0 for row in steps if row not in shortened)
    assert all(
        row["step_share"] == pytest.approx((MAX_GOOD_KL / row["step_kl"]) ** 0.5)
        for row in shortened
    )
    assert bool(shortened) == (lr > 0.1)

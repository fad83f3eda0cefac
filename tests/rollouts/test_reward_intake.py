"""A reward that sums, statistics of a group or float32 could not hold is refused
where it is taken in."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
from kit.rollouts import Sampler
from kit.training import credit_settings

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.envs.user_code import LARGEST
from turnwright.errors import ConfigError
from turnwright.training.advantages import advantages
from turnwright.types.trajectory import Group

HUGE = [
    1e308,
    -1e308,
    1e39,
    1.1e15,
    math.inf,
    -math.inf,
    math.nan,
    10**400,
    -(10**16),
    np.float64(1e300),
    Decimal("1e400"),
]
LIMITS = tw.Limits(turns=2, turn_tokens=3)


class Pays(tw.Env):
    """Gives the value of its task in the place of its task."""

    def reset(self, task, *, seed=None):
        self.place, self.value = task.info["place"], HUGE[task.info["at"]]
        return "Go."

    def step(self, action):
        return tw.Step(reward=self.value if self.place == "step" else 0.0, terminated=True)

    def reward(self, trajectory):
        scores = {
            "reward": self.value,
            "own": tw.Scores(self.value),
            "turns": tw.Scores(0.0, turns=(self.value,)),
            "parts": tw.Scores(0.0, parts={"part": self.value}),
            "agents": tw.Scores(0.0, agents={"main": self.value}),
            "metrics": tw.Scores(0.0, metrics={"count": self.value}),
        }
        return scores.get(self.place, 0.0)


PLACES = ("step", "reward", "own", "turns", "parts", "agents", "metrics")


def check(trajectory, env):
    assert trajectory.reward is None
    assert trajectory.stop == "reward_error"
    assert trajectory.error.type == "RewardError"
    assert f"environment {env!r}" in trajectory.error.message
    assert "1e+15" in trajectory.error.message


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_environment_cannot_give_it(isolation):
    rows = [
        tw.Task("Go.", info={"place": p, "at": at}, env="pays")
        for p in PLACES
        for at in range(len(HUGE))
    ]
    for trajectory in tw.rollout(
        Pays, rows, Sampler(), limits=LIMITS, rules=tw.EnvRules(isolation=isolation)
    ):
        check(trajectory, "pays")


@pytest.mark.parametrize("at", range(len(HUGE)))
def test_functions_parts_tools_and_agents_cannot_give_it(at):
    value = HUGE[at]

    def pay() -> tuple[str, float]:
        """Pay."""
        return "paid", value

    async def play(task, model):
        await model.generate(task.messages)
        return value

    async def rows(task, model):
        reply = await model.generate(task.messages)
        return tw.Scores(0.0, rows=((value, (reply,)),))

    call = '<tool_call>{"name": "pay", "arguments": {}}</tool_call>'
    environments = {
        "function": (tw.tool_env([], reward=lambda trajectory: value), "x"),
        "part": (tw.tool_env([], reward=tw.rewards(part=lambda trajectory: value)), "x"),
        "turn": (
            tw.tool_env(
                [], reward=tw.rewards(part=tw.RewardPart(lambda t, turn: value, of="turn"))
            ),
            "x",
        ),
        "group": (
            tw.tool_env(
                [], reward=tw.rewards(part=tw.RewardPart(lambda ts: [value] * len(ts), of="group"))
            ),
            "x",
        ),
        "tool": (tw.tool_env([pay], reward=lambda trajectory: 0.0), call),
        "agent": (play, "x"),
        "rows": (rows, "x"),
    }
    for name, (env, reply) in environments.items():
        task = tw.Task("Go.", env=name)
        (trajectory,) = tw.rollout(
            env, [task], tw.ScriptedEngine([reply, "x"]), limits=tw.Limits(turns=2, turn_tokens=80)
        )
        check(trajectory, name)


def test_weights_cannot_make_it():
    for weight in (1e16, math.inf, math.nan):
        with pytest.raises(ConfigError, match="weight"):
            tw.rewards(part=(lambda trajectory: 1.0, weight))
    env = tw.tool_env([], reward=tw.rewards(one=(lambda trajectory: 1e10, 1e10)))
    (trajectory,) = tw.rollout(env, [tw.Task("Go.", env="weighed")], Sampler(), limits=LIMITS)
    check(trajectory, "weighed")


def test_one_of_a_group_is_an_error_of_that_episode_alone():
    numbers = itertools.count()
    env = tw.tool_env([], reward=lambda trajectory: 1e308 if next(numbers) == 1 else 1.0)
    rows = tw.rollout(env, [tw.Task("Go.")] * 4, Sampler(), limits=LIMITS)
    assert sorted(str(one.stop) for one in rows).count("reward_error") == 1
    assert [one.reward for one in rows if one.error is None] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("advantage", ["std", "mean", "rloo", "batch", "group_batch"])
def test_what_is_taken_in_is_held_by_statistics_sums_and_float32(advantage):
    values = itertools.cycle([LARGEST, -LARGEST, LARGEST, 0.0])
    env = tw.tool_env([], reward=lambda trajectory: next(values))
    rows = tw.rollout(env, [tw.Task("Go.")] * 64, Sampler(), limits=LIMITS)
    assert {abs(one.reward) for one in rows} == {LARGEST, 0.0}
    groups = [Group("0", list(rows))]
    config = TrainConfig(advantage=advantage)
    credits = advantages(groups, credit_settings(config)).credits
    found = np.array([credit.advantage for credit in credits], np.float32)
    assert np.isfinite(found).all()
    assert np.isfinite((found * found).sum(dtype=np.float32))


def test_an_aborted_episode_has_no_reward():
    async def play(task, model):
        await model.generate(task.messages)
        return tw.Scores(
            1.0, (1.0,), {"part": 1.0}, {"calls": 2.0}, "aborted", agents={"main": 1.0}
        )

    (trajectory,) = tw.rollout(play, [tw.Task("Go.")], Sampler(), limits=LIMITS)
    assert (trajectory.stop, trajectory.reward, trajectory.error) == ("aborted", None, None)
    assert (trajectory.rewards, trajectory.agent_rewards, trajectory.turns[0].reward) == (
        {},
        {},
        None,
    )
    assert trajectory.metrics["calls"] == 2.0


class Floods(tw.Env):
    """Shows 40 characters after each reply."""

    def reset(self, task, *, seed=None):
        return "Go."

    def step(self, action):
        return tw.Step("x" * 40, reward=1.0)


@pytest.mark.parametrize("limit", [10, 45, 60, 200])
def test_an_observation_that_does_not_fit_is_left_out_counted_and_ends_the_episode(limit):
    limits = tw.Limits(turns=50, turn_tokens=4, episode_tokens=limit, on_turn_length="continue")
    (trajectory,) = tw.rollout(Floods, [tw.Task("Go.")], Sampler(), limits=limits)
    used = trajectory.sampled_tokens + trajectory.observed_tokens
    left_out = trajectory.metrics.get("observation_tokens_left_out", 0)
    assert trajectory.stop == "episode_tokens"
    assert used <= limit
    assert used == limit or used + left_out > limit
    assert trajectory.reward == len(trajectory.turns)

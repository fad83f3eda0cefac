"""Engines and rewards that fail are asked again, within budgets: what comes of it is what
would have come without."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, facts, tasks

import turnwright as tw
from turnwright.engines import Generation
from turnwright.records import read_json_lines, rebuild_trajectories

FEW = settings(max_examples=30, deadline=None)
RULES = tw.EnvRules(retries=tw.RetryRules(engine=2, wait_s=0.0))
EPISODE = tw.EnvRules(retries=tw.RetryRules(engine=5, episode=3, wait_s=0.0))
LIMITS = tw.Limits(generate_s=0.15, turns=12)


@dataclass
class Flaky(Sampler):
    """Fails planned calls, by (task, number of the call): as often as the plan says, with
    the fault of that name."""

    plan: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    asked: list[tuple[str, int, int, int]] = field(default_factory=list)

    async def generate(self, request: tw.Request) -> Generation:
        task = request.session.split("/")[2]
        self.asked.append((task, request.call, request.seed, len(request.ids)))
        faults = self.plan.get((task, request.call))
        fault = faults.pop() if faults else ""
        if fault == "raises":
            raise tw.EngineError("no memory")
        if fault == "refuses":
            raise ConnectionError("refused")
        if fault == "hangs":
            await asyncio.sleep(3600)
        if fault == "contract":
            return Generation([65, 66], [-1.0], "length", 0)
        return await Sampler.generate(self, request)


async def two_agents(task, model):
    first = await model.generate("Begin.")
    both = await asyncio.gather(
        model.generate(
            [
                {"role": "user", "content": "Begin."},
                first.message,
                {"role": "user", "content": "On."},
            ]
        ),
        model.generate("Check.", agent="critic"),
    )
    return float(len(both[0].ids) > 3)


def without_retries(trajectory):
    """What may be compared with an episode that nothing happened to."""
    trajectory.metrics.pop("engine_retries", None)
    return facts(trajectory)


@FEW
@given(
    world=st.sampled_from((Talk, AsyncTalk, two_agents)),
    plan=st.dictionaries(
        st.tuples(st.sampled_from(("t0", "t1", "t2")), st.integers(0, 2)),
        st.lists(st.sampled_from(("raises", "refuses")), min_size=1, max_size=2),
    ),
    aborts=st.sampled_from((0.0, 0.3)),
)
def test_an_engine_that_is_asked_again_gives_what_it_would_have_given(world, plan, aborts):
    expected = tw.rollout(world, tasks(3), Sampler(aborts=aborts), limits=LIMITS)
    engine = Flaky(aborts=aborts, plan={at: list(faults) for at, faults in plan.items()})
    rows = tw.rollout(world, tasks(3), engine, limits=LIMITS, rules=RULES)
    met = {at: len(faults) - len(engine.plan[at]) for at, faults in plan.items()}
    for trajectory in rows:
        check_record(trajectory, engine.calls)
        times = sum(n for (task, _), n in met.items() if task == trajectory.key.task)
        assert [(f.phase, f.kind, f.recovery) for f in trajectory.failures] == [
            ("generate", "engine", "asked again")
        ] * times
        assert (
            trajectory.metrics.get("engine_retries", 0)
            == times
            == sum(turn.retries for turn in trajectory.turns)
        )
    by_call = {}
    for task, call, seed, context in engine.asked:  # the very same request
        assert by_call.setdefault((task, call), (seed, context)) == (seed, context)
    if world is not two_agents:  # whose branches lie in the order in which the calls came back
        assert [without_retries(t) for t in rows] == [facts(t) for t in expected]
    else:
        assert [t.reward for t in rows] == [t.reward for t in expected]


@pytest.mark.parametrize("world", [AsyncTalk, two_agents])
def test_a_call_that_hangs_is_made_again(world):
    engine = Flaky(plan={("t0", 1): ["hangs"]})
    (got,) = tw.rollout(world, tasks(1), engine, limits=LIMITS, rules=RULES)
    (expected,) = tw.rollout(world, tasks(1), Sampler())
    assert [(f.type, f.kind, f.turn, f.recovery) for f in got.failures] == [
        ("TimeoutError", "timeout", 1, "asked again")
    ]
    assert got.reward == expected.reward
    assert got.error is None


@pytest.mark.parametrize(
    ("rules", "plan", "calls", "error"),
    [
        (tw.EnvRules(), {0: ["raises"]}, 1, "EngineError"),
        (RULES, {0: ["raises"] * 3}, 3, "EngineError"),
        (RULES, {0: ["hangs"] * 3}, 3, "TimeoutError"),
        (RULES, {0: ["contract"]}, 1, "BackendContractError"),
        (RULES, {0: ["contract", "raises"]}, 2, "BackendContractError"),
        (EPISODE, {0: ["raises"] * 2, 1: ["raises"] * 2}, 5, "EngineError"),
    ],
)
def test_budgets_end_it_and_a_broken_contract_is_final(rules, plan, calls, error):
    engine = Flaky(plan={("t0", call): list(faults) for call, faults in plan.items()})
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), engine, limits=LIMITS, rules=rules)
    assert len(engine.asked) == calls
    assert (trajectory.error.type, trajectory.error.phase, trajectory.error.recovery) == (
        error,
        "generate",
        "",
    )
    assert trajectory.stop == ("timeout" if error == "TimeoutError" else "engine_error")
    assert trajectory.reward is None


def test_a_failing_engine_is_not_asked_beyond_the_clock():
    engine = Flaky(plan={("t0", 1): ["raises"] * 9})
    rules = tw.EnvRules(retries=tw.RetryRules(engine=9, wait_s=20.0))
    (trajectory,) = tw.rollout(
        AsyncTalk, tasks(1), engine, limits=tw.Limits(wall_clock_s=0.3), rules=rules
    )
    assert trajectory.stop == "wall_clock"
    assert trajectory.wall_s < 19


def test_the_failures_of_engine_and_world_have_budgets_of_their_own(tmp_path):
    class Shaky(AsyncTalk):
        turns, down = 3, 2

        async def step(self, action):
            if self.left == 2 and Shaky.down:
                Shaky.down -= 1
                raise ConnectionError("down")
            return await AsyncTalk.step(self, action)

    rules = tw.EnvRules(retries=tw.RetryRules(engine=2, turn=2, wait_s=0.0))
    engine = Flaky(plan={("t0", 1): ["raises", "refuses"]})
    rows = tasks(1)
    (got,) = tw.rollout(Shaky, rows, engine, rules=rules, out=tmp_path / "run")
    assert got.error is None
    assert [turn.retries for turn in got.turns] == [0, 4, 0]
    assert [f.recovery for f in got.failures] == ["asked again"] * 2 + ["replayed"] * 2
    found = rebuild_trajectories(
        read_json_lines(tmp_path / "run" / "journal.jsonl"), {rows[0].id: rows[0]}.get
    )[got.key]
    assert [turn.retries for turn in found.turns] == [0, 4, 0]
    assert found.failures == got.failures


# Rewards


class Scored(AsyncTalk):
    """Its reward fails as `left_faults` says."""

    turns = 2
    left_faults: ClassVar[list[str]] = []

    async def reward(self, trajectory):
        left = type(self).left_faults
        fault = left.pop(0) if left else ""
        if fault == "raises":
            raise ConnectionError("reset by peer")
        if fault == "judge":
            raise tw.JudgeError("status", "503")
        if fault == "hangs":
            await asyncio.sleep(3600)
        if fault == "bug":
            raise KeyError("mine")
        return float("nan") if fault == "nan" else 1.5


@pytest.mark.parametrize(
    ("faults", "most", "error", "failures"),
    [
        (["raises"], 0, "ConnectionError", 0),
        (["raises"], 1, None, 1),
        (["judge", "hangs"], 2, None, 2),
        (["hangs", "hangs", "raises"], 2, "ConnectionError", 2),
        (["nan"], 2, "RewardError", 0),
        (["bug"], 2, "KeyError", 0),
        (["raises", "nan"], 2, "RewardError", 1),
    ],
)
def test_a_reward_that_fails_is_asked_for_again_and_a_value_that_is_none_is_final(
    faults, most, error, failures
):
    made = type("Scored", (Scored,), {"left_faults": list(faults)})
    rules = tw.EnvRules(retries=tw.RetryRules(reward=most, wait_s=0.0))
    (trajectory,) = tw.rollout(
        made, tasks(1), Sampler(), limits=tw.Limits(reward_s=0.1), rules=rules
    )
    assert [(f.phase, f.recovery) for f in trajectory.failures] == [
        ("reward", "asked again")
    ] * failures
    assert trajectory.metrics.get("reward_retries", 0) == failures
    assert (trajectory.error and trajectory.error.type) == error
    steps = sum(turn.reward for turn in trajectory.turns)
    assert trajectory.reward == (None if error else steps + 1.5)


def test_the_reward_of_a_group_is_asked_for_again_and_each_record_says_so():
    down = [ConnectionError("down"), TimeoutError("late")]

    async def best(trajectories):
        if down:
            raise down.pop()
        return [float(n) for n in range(len(trajectories))]

    env = tw.tool_env([], reward=tw.rewards(best=tw.RewardPart(best, of="group")))
    rules = tw.EnvRules(retries=tw.RetryRules(reward=2, wait_s=0.0))
    rows = tw.rollout(env, tasks(1), tw.ScriptedEngine(["x"]), samples=3, rules=rules)
    assert [t.reward for t in rows] == [0.0, 1.0, 2.0]
    assert [[f.type for f in t.failures] for t in rows] == [["TimeoutError", "ConnectionError"]] * 3


class Fragile(Talk):
    """Its process dies, or hangs, with its first reward, by a mark that outlives it."""

    turns = 3

    def reset(self, task, *, seed=None):
        self.mark, self.fault = Path(task.info["mark"]), task.info["fault"]
        return Talk.reset(self, task, seed=seed)

    def reward(self, trajectory):
        if not self.mark.exists():
            self.mark.touch()
            if self.fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        return 10.0 + self.left


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_an_environment_whose_process_went_with_its_reward_is_brought_back(fault, tmp_path):
    rows = [tw.Task("go", info={"mark": str(tmp_path / "mark"), "fault": fault})]
    rules = tw.EnvRules(isolation="process", retries=tw.RetryRules(reward=1, wait_s=0.0))
    (got,) = tw.rollout(Fragile, rows, Sampler(), rules=rules, limits=tw.Limits(reward_s=1.0))
    (expected,) = tw.rollout(Fragile, rows, Sampler())
    assert got.error is None
    assert got.reward == expected.reward > 9
    assert [(f.type, f.phase) for f in got.failures] == [
        ({"dies": "ProcessDied", "hangs": "TimeoutError"}[fault], "reward")
    ]

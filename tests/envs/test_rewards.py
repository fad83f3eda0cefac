"""Rewards of named parts: what they add up to, where they stand in the
record, and what is refused."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turnwright as tw
from turnwright.errors import ConfigError
from turnwright.records import read_json_lines, rebuild_trajectories
from turnwright.rollouts import make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes


class Talk(tw.Env):
    """Two replies, then it is over; its step rewards and its reward are what the test says."""

    step_reward: float | None = 0.0
    says: Any = staticmethod(lambda trajectory: 0.0)

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        self.turns = 0
        return "talk"

    def step(self, action: tw.Action) -> tw.Step:
        self.turns += 1
        return tw.Step(
            "go on", self.step_reward, terminated=self.turns == 2, info={"length": len(action.text)}
        )

    async def reward(self, trajectory: tw.Trajectory) -> Any:
        found = type(self).says(trajectory)
        return await found if asyncio.iscoroutine(found) else found


def world(reward: Any, step_reward: float | None = 0.0, **more: Any) -> type[tw.Env]:
    return type("Talk", (Talk,), {"says": staticmethod(reward), "step_reward": step_reward, **more})


def play(
    env: Any, n: int = 1, replies: Any = ("one", "three"), **settings: Any
) -> list[tw.Trajectory]:
    task = tw.Task("talk", answer="three", info={"level": 2, "words": ["one"]})
    return tw.rollout(
        env,
        [task],
        tw.ScriptedEngine(list(replies) if isinstance(replies, tuple) else replies),
        samples=n,
        **settings,
    )


def test_parts_are_weighted_named_and_see_everything() -> None:
    def correct(trajectory: tw.Trajectory, task: tw.Task) -> float:
        assert [message.role for message in trajectory.messages] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert [turn.info["length"] for turn in trajectory.turns] == [3, 5]
        return float(trajectory.final_text == task.answer)

    async def level(trajectory: tw.Trajectory) -> int:
        await asyncio.sleep(0)
        return trajectory.task.info["level"]

    reward = tw.rewards(correct=correct, level=(level, 0.25), range=(0, 1.5))
    (one,) = play(world(reward))
    assert one.reward == 1.5
    assert one.rewards == {"correct": 1.0, "level": 2.0}


def test_a_part_of_turns_stands_at_the_last_token_of_each_reply(tmp_path: Path) -> None:
    def length(trajectory: tw.Trajectory, turn: int) -> int:
        return trajectory.turns[turn].info["length"]

    reward = tw.rewards(length=tw.RewardPart(length, 0.1, of="turn"), whole=lambda trajectory: 1)
    (one,) = play(world(reward, step_reward=0.5), out=tmp_path)
    (again,) = rebuild_trajectories(
        read_json_lines(tmp_path / "journal.jsonl"), lambda name: one.task
    ).values()
    assert [turn.reward for turn in again.turns] == [turn.reward for turn in one.turns]
    assert (again.rewards, again.reward) == (one.rewards, one.reward)
    assert one.rewards == {"length": 8.0, "whole": 1.0}
    assert [turn.reward for turn in one.turns] == pytest.approx([0.8, 1.0])
    assert one.reward == pytest.approx(2.8)
    (row,) = one.samples()
    at = [value for value in row.token_rewards or () if value]
    assert at == pytest.approx([0.8, 2.0])  # the last turn's, and the episode's own


def test_tool_env_takes_them(tmp_path: Path) -> None:
    reward = tw.rewards(right=lambda trajectory: float(trajectory.final_text == "three"))
    (one,) = play(tw.tool_env([], reward=reward), replies=("three",))
    assert (one.reward, one.rewards) == (1.0, {"right": 1.0})


def test_a_play_function_may_return_scores() -> None:
    async def talk(task: tw.Task, model: tw.Model) -> tw.Scores:
        await model.generate("say")
        return tw.Scores(0.5, (0.25,), {"half": 0.5})

    (one,) = play(talk)
    assert (one.reward, one.rewards, one.turns[0].reward) == (0.75, {"half": 0.5}, 0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.01, -0.01, "much", [1], 10**400])
def test_what_is_no_number_of_its_range_is_a_typed_error_and_never_a_reward(bad: Any) -> None:
    for reward in (
        tw.rewards(part=tw.RewardPart(lambda trajectory: bad, range=(0, 1))),
        tw.rewards(part=tw.RewardPart(lambda trajectory, turn: bad, of="turn", range=(0, 1))),
        tw.rewards(part=tw.RewardPart(lambda trajectories: [bad], of="group", range=(0, 1))),
        tw.rewards(part=lambda trajectory: bad, range=(0, 1)),
        tw.rewards(part=tw.RewardPart(lambda trajectories: [bad], of="group"), range=(0, 1)),
    ):
        (one,) = play(world(reward, group_reward=reward.group and staticmethod(reward.group)))
        assert one.reward is None
        assert one.stop is tw.StopReason.REWARD_ERROR
        assert one.error is not None
        assert one.error.type == "RewardError"
        assert "part" in one.error.message or "outside their range of 0 to 1" in one.error.message


def test_bad_scores_of_ones_own_leave_no_trace_of_a_reward() -> None:
    for scores in (
        tw.Scores(math.nan),
        tw.Scores(0.0, (math.inf,)),
        tw.Scores(1.0, (0.0,) * 3),
        tw.Scores(1.0, (1.0,), {"x": math.nan}),
    ):
        (one,) = play(world(lambda trajectory, scores=scores: scores))
        assert one.reward is None
        assert one.error is not None
        assert one.error.type == "RewardError"
        assert one.rewards == {}
        assert [turn.reward for turn in one.turns] == [0.0, 0.0]


def test_a_part_that_was_not_computed_leaves_the_episode_without_a_reward_and_is_counted() -> None:
    reward = tw.rewards(known=lambda trajectory: 1.0, unknown=lambda trajectory: None)
    (one,) = play(world(reward))
    assert one.reward is None
    assert one.error is None
    assert one.rewards == {"known": 1.0}
    assert one.metrics["reward_missing/unknown"] == 1
    turns = tw.rewards(
        some=tw.RewardPart(lambda trajectory, turn: None if turn else 1.0, of="turn")
    )
    (one,) = play(world(turns))
    assert one.reward is None
    assert one.turns[0].reward == 0.0


def test_an_exception_in_a_part_names_it() -> None:
    async def broken(trajectory: tw.Trajectory) -> float:
        raise OSError("no disk")

    async def slow(trajectory: tw.Trajectory) -> float:
        await asyncio.sleep(60)
        return 0.0

    for reward in (
        tw.rewards(broken=broken, slow=slow),
        tw.rewards(broken=lambda trajectory: Path("/nowhere/at/all").read_text()),
    ):
        (one,) = play(world(reward))
        assert one.error is not None
        assert (one.error.phase, one.stop) == ("reward", tw.StopReason.REWARD_ERROR)
        assert "in the reward 'broken'" in one.error.traceback


def test_async_parts_run_at_the_same_time_and_all_under_one_deadline() -> None:
    together = asyncio.Barrier(8)

    async def nap(trajectory: tw.Trajectory) -> float:
        async with asyncio.timeout(60):
            await together.wait()
        return 1.0

    (one,) = play(world(tw.rewards(**{f"nap{i}": nap for i in range(8)})))
    assert one.reward == 8.0
    hangs = tw.rewards(never=lambda trajectory: time.sleep(30))
    (one,) = play(world(hangs), limits=tw.Limits(reward_s=0.1))
    assert one.reward is None
    assert one.stop is tw.StopReason.TIMEOUT


def distinct(trajectories: Any) -> list[float]:
    texts = [trajectory.final_text for trajectory in trajectories]
    return [1 / texts.count(text) for text in texts]


def choose(messages: Any, rng: Any) -> str:
    return rng.choice(["same", "same", "other"])


def test_a_part_of_a_group_compares_all_siblings_whatever_the_concurrency(tmp_path: Path) -> None:
    reward = tw.rewards(
        base=lambda trajectory: 1.0,
        diverse=tw.RewardPart(distinct, 0.5, of="group"),
        range=(0, 1.5),
    )
    runs = [
        play(tw.tool_env([], reward=reward), 8, choose, concurrency=n, out=tmp_path / str(n))
        for n in (1, 3, 256)
    ]
    for run in runs:
        texts = [one.final_text for one in run]
        assert len(set(texts)) == 2
        for one in run:
            assert one.rewards == {"base": 1.0, "diverse": 1 / texts.count(one.final_text)}
            assert one.reward == 1.0 + 0.5 / texts.count(one.final_text)
    assert len({tuple(one.reward for one in run) for run in runs}) == 1
    task = runs[0][0].task
    again = rebuild_trajectories(
        read_json_lines(tmp_path / "3" / "journal.jsonl"), lambda name: task
    )
    assert {key: one.reward for key, one in again.items()} == {
        one.key: one.reward for one in runs[1]
    }


def test_a_group_that_was_recorded_in_part_is_played_anew_and_comes_out_the_same(
    tmp_path: Path,
) -> None:
    reward = tw.rewards(
        base=lambda trajectory: 1.0, diverse=tw.RewardPart(distinct, 0.5, of="group")
    )
    env = tw.tool_env([], reward=reward)
    tasks = [tw.Task(f"talk {n}") for n in range(3)]
    whole = tw.rollout(env, tasks, tw.ScriptedEngine(choose), samples=4, out=tmp_path)
    by_id = {task.id: task for task in tasks}
    recorded = rebuild_trajectories(read_json_lines(tmp_path / "journal.jsonl"), by_id.get)
    assert len(recorded) == 12
    for lost in (3, 4, 9):  # of the first group one is lost, of the others none; and so on
        kept = {one.key: recorded[one.key] for number, one in enumerate(whole) if number != lost}
        played: list[str] = []

        def speak(messages: Any, rng: Any, played: list[str] = played) -> str:
            played.append(messages[0].text)
            return choose(messages, rng)

        runner = tw.Rollout(
            tw.ScriptedEngine(speak), tw.byte_renderer(), earlier=EarlierEpisodes(finished=kept)
        )
        again = asyncio.run(
            runner.play(make_episode_specs(env, tasks, phase="rollout", step=0, samples=4))
        )
        assert played == [f"talk {lost // 4}"] * 4
        assert [(one.reward, one.rewards) for one in again] == [
            (one.reward, one.rewards) for one in whole
        ]


def test_group_rewards_see_rewarded_siblings_alone_and_fail_together() -> None:
    seen: list[int] = []

    def rank(trajectories: Any) -> list[float]:
        seen.append(len(trajectories))
        return [1.0] * len(trajectories)

    def some(trajectory: tw.Trajectory) -> float | None:
        return None if trajectory.key.sample % 2 else 0.0

    reward = tw.rewards(some=some, rank=tw.RewardPart(rank, of="group"))
    ones = play(tw.tool_env([], reward=reward), 6, choose)
    assert seen == [3]
    assert [one.reward for one in ones] == [1.0, None] * 3
    for wrong in (lambda trajectories: [1.0], lambda trajectories: 1.0, lambda trajectories: 1 / 0):
        ones = play(
            tw.tool_env([], reward=tw.rewards(rank=tw.RewardPart(wrong, of="group"))), 3, choose
        )
        assert [one.reward for one in ones] == [None] * 3
        assert all(one.error is not None and one.error.phase == "reward" for one in ones)


def test_a_group_reward_that_hangs_meets_its_deadline() -> None:
    async def never(trajectories: Any) -> list[float]:
        await asyncio.sleep(60)
        return []

    ones = play(
        world(lambda trajectory: 1.0, group_reward=staticmethod(never)),
        3,
        limits=tw.Limits(reward_s=0.1),
    )
    assert {one.stop for one in ones} == {tw.StopReason.TIMEOUT}
    assert [one.reward for one in ones] == [None] * 3


def test_mistakes_are_told_when_it_is_made() -> None:
    def f(trajectory: Any) -> float:
        return 0.0

    for parts, said in [
        ({}, "no parts"),
        ({"x": 1.0}, "'x' is float"),
        ({"x": (f, math.nan)}, "weight nan"),
        ({"x": tw.RewardPart(f, of="turns")}, '"episode", "turn" or "group"'),  # type: ignore[arg-type]
        ({"x": tw.RewardPart(f, of="turn")}, r"called with \(trajectory, turn\)"),
        ({"x": tw.RewardPart(lambda: 0.0, of="group")}, r"called with \(trajectories\)"),
        ({"x": lambda a, b, c: 0.0}, "is called as"),
        ({"x": f, "range": (1, 0)}, "minimum, maximum"),
        ({"x": tw.RewardPart(f, range=(1, 1))}, "minimum, maximum"),
    ]:
        with pytest.raises(ConfigError, match=said):
            tw.rewards(**parts)  # type: ignore[arg-type]


numbers = st.floats(-100, 100).map(lambda value: round(value, 3))


@settings(max_examples=60, deadline=None)
@given(
    own=st.lists(st.tuples(numbers, numbers), max_size=3),
    turns=st.lists(st.tuples(st.tuples(numbers, numbers), numbers), max_size=3),
    step=numbers,
)
def test_the_reward_is_the_weighted_sum_and_the_tokens_hold_all_of_it(
    own: Any, turns: Any, step: float
) -> None:
    parts: dict[str, Any] = {
        f"own{i}": (lambda trajectory, v=value: v, weight) for i, (value, weight) in enumerate(own)
    }
    for i, (values, weight) in enumerate(turns):
        parts[f"turn{i}"] = tw.RewardPart(
            lambda trajectory, turn, *, v=values: v[turn], weight, of="turn"
        )
    if not parts:
        return
    (one,) = play(world(tw.rewards(**parts), step_reward=step))
    expected = 2 * step + sum(v * w for v, w in own) + sum((a + b) * w for (a, b), w in turns)
    assert one.reward == pytest.approx(expected, abs=1e-6)
    (row,) = one.samples()
    assert math.fsum(row.token_rewards or ()) == pytest.approx(expected, abs=1e-6)
    for i, (values, _) in enumerate(turns):
        assert one.rewards[f"turn{i}"] == pytest.approx(sum(values), abs=1e-9)
    assert [turn.reward for turn in one.turns] == pytest.approx(
        [step + sum(v[n] * w for v, w in turns) for n in range(2)], abs=1e-6
    )


def of_answer(trajectory: tw.Trajectory, task: tw.Task) -> float | None:
    return None if trajectory.key.sample == 3 else float(trajectory.final_text == task.answer)


def of_turn(trajectory: tw.Trajectory, turn: int) -> float:
    return trajectory.turns[turn].context / 1000


APART = tw.tool_env(
    [],
    reward=tw.rewards(
        answer=of_answer,
        turn=tw.RewardPart(of_turn, of="turn"),
        diverse=tw.RewardPart(distinct, of="group"),
    ),
)


def test_parts_come_back_from_an_environment_in_a_process_of_its_own() -> None:
    here = play(APART, 4, choose)
    apart = play(APART, 4, choose, rules=tw.EnvRules(isolation="process"))
    assert [one.error for one in apart] == [None] * 4
    for one, other in zip(here, apart, strict=True):
        assert (one.reward, one.rewards, one.metrics.get("reward_missing/answer")) == (
            other.reward,
            other.rewards,
            other.metrics.get("reward_missing/answer"),
        )
        assert [turn.reward for turn in one.turns] == [turn.reward for turn in other.turns]
    assert [one.reward is None for one in apart] == [False] * 3 + [True]

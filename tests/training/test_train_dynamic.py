"""Dynamic sampling: which groups are replaced, by what, how often, and what becomes of them."""

import asyncio
from types import SimpleNamespace

import pytest
from kit.double_precision import Model64
from kit.training import STILL, M, P, chain, credit_settings

from turnwright.config import TrainConfig
from turnwright.engines.policy_engine import AgentPolicies
from turnwright.errors import ConfigError
from turnwright.training import TaskPlan, Trainer, resolve_settings
from turnwright.training.loss import Objective
from turnwright.training.policies import Policies, Policy
from turnwright.training.task_plan import TaskChoice, play_with_dynamic_sampling
from turnwright.types import Group, Task


def policies(config):
    objective = Objective(config, resolve_settings(config))
    trainer = SimpleNamespace(objective=objective, credit_settings=credit_settings(config))
    return Policies([Policy("", trainer, None)], AgentPolicies({"": ("*",)}))


def world(name, count, weight=1.0):
    made = SimpleNamespace(name=name, weight=weight)
    made.tasks = lambda split, n, seed: [
        Task(f"{name} {i}", id=f"{name}-{i}") for i in range(count)
    ]
    made.train_and_eval_tasks = lambda n, share, seed: (made.tasks("train", n, seed), [])
    return made


def plan(*worlds, groups=4):
    return TaskPlan(worlds, steps=2, groups=groups, held_out=0, seed=0)


def played(choices, rewards, lengths=(3, 3)):
    """Two trajectories a task, whose rewards `rewards` gives by the task's id."""
    return [
        chain(
            [(P, [1, 2]), (M, [3] * lengths[sample])],
            task=choice.task.id,
            sample=sample,
            reward=reward,
        )
        for choice in choices
        for sample, reward in enumerate(rewards(choice.task.id))
    ]


def groups(plan_, config, rewards, step=0):
    seen: list[list[TaskChoice]] = []

    async def play(choices):
        seen.append(list(choices))
        return played(choices, rewards)

    found, refilled = asyncio.run(play_with_dynamic_sampling(plan_, policies(config), step, play))
    return found, refilled, [[choice.task.id for choice in choices] for choices in seen]


def test_groups_without_signal_are_replaced_until_none_is_left():
    whole = plan(world("a", 20))
    hopeless = {choice.task.id for choice in whole.step(0)[:3]}
    found, refilled, turns = groups(
        whole, TrainConfig(algorithm="dapo"), lambda id_: (0.0, float(id_ not in hopeless))
    )
    assert [len(turn) for turn in turns] == [4, 3]
    assert refilled == 3
    assert len({id_ for turn in turns for id_ in turn}) == 7  # no task twice in a step
    assert len(found) == 14
    assert (
        groups(whole, TrainConfig(algorithm="dapo"), lambda id_: (0.0, float(id_ not in hopeless)))[
            2
        ]
        == turns
    )
    assert groups(whole, TrainConfig(), lambda id_: (0.0, 0.0))[1:] == (0, turns[:1])


def test_it_ends_after_so_many_times_and_where_tasks_end():
    config = TrainConfig(algorithm="dapo", refill=2)
    assert [
        len(turn) for turn in groups(plan(world("a", 50)), config, lambda _: (1.0, 1.0))[2]
    ] == [4, 4, 4]
    assert [len(turn) for turn in groups(plan(world("a", 6)), config, lambda _: (1.0, 1.0))[2]] == [
        4,
        2,
    ]
    assert [len(turn) for turn in groups(plan(world("a", 4)), config, lambda _: (1.0, 1.0))[2]] == [
        4
    ]


def test_replaced_by_tasks_of_the_same_world():
    both = plan(world("a", 20), world("b", 20))
    _, _, turns = groups(
        both, TrainConfig(refill=1), lambda id_: (0.0, float(id_.startswith("a/")))
    )
    assert turns[1]
    assert len(turns[1]) == sum(id_.startswith("b/") for id_ in turns[0])
    assert all(id_.startswith("b/") for id_ in turns[1])


def test_failures_are_not_replaced():
    made = played(
        [TaskChoice(None, Task("x", id="x")), TaskChoice(None, Task("y", id="y"))],
        lambda _: (1.0, 1.0),
    )
    made[0].reward = None
    rows = [Group(made[0].task, made[:2]), Group(made[2].task, made[2:])]
    assert policies(TrainConfig(refill=1)).tied_groups(rows) == {"y"}


def test_lengths_that_cost_reward_are_a_signal():
    made = played([TaskChoice(None, Task("x", id="x"))], lambda _: (1.0, 1.0), lengths=(3, 9))
    group = [Group(made[0].task, made)]
    assert policies(TrainConfig(algorithm="dapo", overlong_tokens=10)).tied_groups(group) == set()
    assert policies(TrainConfig(algorithm="dapo", overlong_tokens=100)).tied_groups(group) == {"x"}


def test_what_is_filtered_stands_in_no_denominator():
    signal = played([TaskChoice(None, Task("x", id="x"))], lambda _: (0.0, 1.0))
    flat = played([TaskChoice(None, Task("y", id="y"))], lambda _: (1.0, 1.0))
    alone, both = (
        [Group(signal[0].task, signal)],
        [Group(signal[0].task, signal), Group(flat[0].task, flat)],
    )

    def norm(rows, **config):
        return Trainer(Model64(), TrainConfig(**STILL | config)).step(rows, step=0, steps=1).metrics

    expected = norm(alone)
    filtered, counted = norm(both, refill=1), norm(both)
    assert filtered["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12)
    assert counted["grad_norm"] == pytest.approx(expected["grad_norm"] / 2, rel=1e-12)
    assert filtered["tokens_filtered"] == 6
    assert counted["tokens_no_signal"] == 6
    assert filtered["tokens_trained"] + filtered["tokens_filtered"] == filtered["tokens_sampled"]


def test_not_with_a_comparison_over_the_batch():
    for config in ({"algorithm": "reinforce_pp"}, {"advantage": "group_batch"}):
        with pytest.raises(ConfigError, match="compares with the complete batch"):
            policies(TrainConfig(refill=1, **config))
    assert policies(TrainConfig(algorithm="reinforce_pp", advantage="rloo", refill=1)).refill == 1

"""Curricula: what samplers draw, what they observe, and that a resumed run draws the same."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.training import M, P, chain

from turnwright.config import load
from turnwright.config.names import SAMPLERS
from turnwright.config.recipe import RunConfig
from turnwright.config.schema import EnvConfig, RolloutConfig, ScheduleConfig
from turnwright.errors import ConfigError, TraceError
from turnwright.training import TaskPlan
from turnwright.training.curriculum import Curriculum
from turnwright.training.samplers import BUILT_IN
from turnwright.types import Task

OWN = """\
class Last:
    def __init__(self): self.seen = []
    def observe(self, key, pass_rate): self.seen.append([key, pass_rate])
    def weights(self, keys): return [1.0 + (key == self.seen[-1][0] if self.seen else 0) for key in keys]
    def state(self): return {"seen": self.seen}
    def load(self, state): self.seen = state["seen"]
class Short(Last):
    def weights(self, keys): return [1.0]
class Raises(Last):
    def weights(self, keys): return [1 / 0 for key in keys]
class Other: pass
"""  # noqa: E501


def world(name, count, weight=1.0):
    made = SimpleNamespace(name=name, weight=weight)
    made.tasks = lambda split, n, seed: [
        Task(f"{name} {i}", id=f"{name}-{i}", info={"kind": i % 3}) for i in range(count)
    ]
    return made


def config_of(*samplers, key=None, adapt=None, mode="sync", staleness=2, groups=4):
    envs = tuple(
        EnvConfig(use="hop", sampler=name, key=None if name == "uniform" else key)
        for name in samplers
    )
    schedule = ScheduleConfig(mode=mode, staleness=staleness)
    return RunConfig(env=envs, rollout=RolloutConfig(groups=groups, adapt=adapt), schedule=schedule)


def plan_of(config, worlds=None, state=None, step=0):
    worlds = worlds or [world(f"w{i}", 12) for i in range(len(config.env))]
    curriculum = Curriculum.of(config, worlds)
    plan = TaskPlan(
        worlds,
        steps=9,
        groups=config.rollout.groups,
        held_out=0,
        seed=config.seed,
        curriculum=curriculum,
    )
    plan.begin(state, step)
    return plan


def played(choices, step, rate):
    """Four episodes a task, of which `rate` succeed."""
    return [
        chain(
            [(P, [1]), (M, [2])],
            task=choice.task.id,
            sample=sample,
            reward=float(sample < 4 * rate(choice.task.id)),
        )
        for choice in choices
        for sample in range(4)
    ]


def drawn(plan, steps, rate, first=0):
    found = []
    for step in range(first, steps):
        choices = plan.step(step)
        found.append([choice.task.id for choice in choices])
        plan.observe(step, played(choices, step, rate))
    return found


def test_every_name_of_a_sampler_has_one():
    assert {"uniform", *BUILT_IN} == set(SAMPLERS)


def test_uniform_without_adapt_is_no_curriculum():
    assert Curriculum.of(config_of("uniform", "uniform"), [world("a", 7), world("b", 5)]) is None


def test_draws_in_passes_are_those_of_before():
    """Written down before there were samplers."""
    plan = TaskPlan([world("a", 7), world("b", 5, 0.5)], steps=9, groups=4, held_out=0, seed=3)
    assert [[choice.task.id[2:] for choice in plan.step(step)] for step in range(4)] == [
        ["a-0", "a-1", "a-2", "b-0"],
        ["a-3", "a-4", "b-1", "b-2"],
        ["a-5", "a-6", "a-2", "b-3"],
        ["a-2", "a-6", "a-3", "b-4"],
    ]


def test_adapt_without_tables_of_environments_keeps_the_draws_of_one():
    config = RunConfig(rollout=RolloutConfig(groups=4, adapt=0.5))
    plain = TaskPlan([world("a", 7)], steps=9, groups=4, held_out=0, seed=0)
    expected = [[choice.task.id for choice in plain.step(step)] for step in range(6)]
    assert drawn(plan_of(config, [world("a", 7)]), 6, lambda id: 0.5) == expected


def test_uniform_beside_a_sampler_draws_what_it_draws_alone():
    """The environment's own draws are the passes of a run without a curriculum."""
    alone, beside = (
        plan_of(config_of("uniform", "uniform")),
        plan_of(config_of("uniform", "window")),
    )
    for step in range(8):
        first = [
            [c.task.id for c in plan.step(step) if c.task.id.startswith("w0/")]
            for plan in (alone, beside)
        ]
        assert first[0] == first[1]
        beside.observe(step, played(beside.step(step), step, lambda id: 0.5))


cases = st.tuples(
    st.lists(st.sampled_from(["uniform", *BUILT_IN]), min_size=1, max_size=2),
    st.sampled_from([None, "kind"]),
    st.sampled_from([None, 0.2]),
    st.sampled_from(["sync", "one_step_off", "async"]),
    st.integers(0, 2),
).filter(lambda case: case[2] is not None or set(case[0]) != {"uniform"})


@given(
    case=cases,
    stop=st.integers(1, 7),
    rates=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=12, max_size=12),
)
def test_a_plan_restored_at_any_step_draws_the_same(case, stop, rates):
    names, key, adapt, mode, staleness = case
    config = config_of(*names, key=key, adapt=adapt, mode=mode, staleness=staleness)

    def rate(id):
        return rates[int(id.rpartition("-")[2])]

    plan = plan_of(config)
    before = drawn(plan, stop, rate)
    state = json.loads(json.dumps(plan.state()["curriculum"]))
    resumed = plan_of(config, state=state, step=stop)
    assert resumed.state()["curriculum"] == state
    after = drawn(plan, 9, rate, stop)
    assert drawn(resumed, 9, rate, stop) == after
    assert all(len(set(ids)) == len(ids) == 4 for ids in (*before, *after))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=4, max_size=4), st.integers(0, 3))
def test_each_rewarded_group_is_observed_once_replaced_ones_too(rates, replaced):
    plan = plan_of(config_of("window"))
    seen = []
    plan._curriculum._lanes[0].sampler.observe = lambda key, rate: seen.append((key, rate))
    choices = plan.step(0)
    spare = [choice for choice in plan.train if choice not in choices][:replaced]
    by_id = dict(zip((choice.task.id for choice in choices), rates, strict=True))
    found = played([*choices, *spare], 0, lambda id: by_id.get(id) or 0.0)
    for trajectory in found:
        if by_id.get(trajectory.task.id, 0.0) is None:
            trajectory.reward = None
    plan.observe(0, found)
    assert seen == [(id, rate) for id, rate in by_id.items() if rate is not None] + [
        (one.task.id, 0.0) for one in spare
    ]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_draw_of_an_asynchronous_step_depends_on_steps_before_its_staleness_only(staleness):
    plans = [plan_of(config_of("window", mode="async", staleness=staleness)) for _ in range(2)]
    found = [
        drawn(plan, 6, rate)
        for plan, rate in zip(plans, (lambda id: 0.0, lambda id: 0.5), strict=True)
    ]
    same = [ids == others for ids, others in zip(*found, strict=True)]
    assert all(same[: staleness + 1])
    assert not all(same)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_sampler_prefers_tasks_with_signal_and_draws_every_other_one_at_last(name):
    hopeful = {f"w0-{i}" for i in range(0, 40, 5)}
    plan = plan_of(config_of(name), [world("w0", 40)])
    rises = {}

    def rate(id):
        rises[id] = rises.get(id, -0.25) + 0.25  # so that there is progress
        return (min(rises[id], 0.75) or 0.25) if id in hopeful else 0.0

    late = [id for ids in drawn(plan, 60, rate)[15:] for id in ids]
    assert sum(id in hopeful for id in late) / len(late) > 0.35  # uniform: 0.2
    assert len(set(late)) > len(hopeful) + 10


def test_tasks_of_a_key_share_statistics_and_come_once_before_any_comes_twice():
    plan = plan_of(config_of("window", key="kind"), [world("w0", 60)])
    ids = [
        id
        for step in drawn(plan, 10, lambda id: 0.5 if int(id[3:]) % 3 == 1 else 0.0)[2:]
        for id in step
    ]
    of_kind = [id for id in ids if int(id[3:]) % 3 == 1]
    assert len(of_kind) > len(ids) * 0.6
    assert max(map(of_kind.count, of_kind)) <= 1 + len(of_kind) // 20


def test_adapt_moves_weights_to_environments_with_signal_above_the_floor():
    worlds = [world("flat", 40), world("mixed", 40)]
    plan = plan_of(config_of("uniform", "uniform", adapt=0.25, groups=8), worlds)
    ids = drawn(plan, 30, lambda id: 0.5 if "mixed" in id else 1.0)
    share = plan.figures["curriculum"]["flat"]["share"]
    assert 0.25 / 1.25 <= share < 0.3
    flat = sum("flat" in id for step in ids[10:] for id in step) / 160
    assert flat < 0.4


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.usefixtures("own")
def test_a_sampler_of_ones_own_is_resumed():
    config = config_of("own.py:Last")
    plan = plan_of(config)
    drawn(plan, 3, lambda id: 0.5)
    resumed = plan_of(config, state=json.loads(json.dumps(plan.state()["curriculum"])), step=3)
    assert drawn(resumed, 6, lambda id: 0.5, 3) == drawn(plan, 6, lambda id: 0.5, 3)


def test_the_sampler_of_the_documents_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "reference" / "curriculum.md").read_text()
    (block,) = re.findall(r"```python\n(# mine.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "r.toml").write_text(recipe)
    assert load(tmp_path / "r.toml").config.env[0].sampler == "window"
    config = config_of("mine.py:Newest")
    plan = plan_of(config)
    assert len({id for ids in drawn(plan, 3, lambda id: 0.5) for id in ids}) > 7  # of 12
    resumed = plan_of(config, state=json.loads(json.dumps(plan.state()["curriculum"])), step=3)
    assert drawn(resumed, 6, lambda id: 0.5, 3) == drawn(plan, 6, lambda id: 0.5, 3)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Short", "1 numbers for 12 keys"),
        ("Raises", "division by zero"),
        ("Other", "needs the methods observe"),
        ("No", "'No'"),
    ],
)
def test_a_bad_sampler_of_ones_own_is_named_in_one_line(name, words):
    with pytest.raises(ConfigError, match=words) as error:
        plan_of(config_of(f"own.py:{name}"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(observed=3),
        lambda s: s.update(drawn={"2": ["w9-1"]}),
        lambda s: s.update(lanes=[]),
        lambda s: s["lanes"][0].update(sampler={"w0-1": [float("nan"), 1.0]}),
        lambda s: s["lanes"][0].update(sampler={"w0-1": "much"}),
        lambda s: s["lanes"][0].update(signal=[2.0, 1.0]),
        lambda s: s["lanes"][0].update(start=-1),
        lambda s: s.clear(),
    ],
)
def test_a_damaged_state_is_an_error_of_one_line(change):
    config = config_of("window")
    plan = plan_of(config)
    drawn(plan, 2, lambda id: 0.5)
    state = json.loads(json.dumps(plan.state()["curriculum"]))
    change(state)
    with pytest.raises(TraceError, match="checkpoint of step 2") as error:
        plan_of(config, state=state, step=2)
    assert "\n" not in str(error.value)


def test_a_key_that_no_task_has_is_an_error():
    with pytest.raises(ConfigError, match=r"env.key = 'level'.*'kind'"):
        plan_of(config_of("window", key="level"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('sampler = "windw"', "did you mean 'window'"),
        ('key = "kind"', "has no effect"),
        ("[rollout]\nadapt = 0.0", "above 0"),
    ],
)
def test_a_bad_recipe_is_named(tmp_path, lines, words):
    (tmp_path / "r.toml").write_text(f'[[env]]\nuse = "hop"\n{lines}\n')
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / "r.toml")

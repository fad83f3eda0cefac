"""Several policies: what each is trained on, what it is compared with, and that no
policy sees another's ids."""

import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.training import STILL, E, M, P, gradient

from turnwright.config import TrainConfig
from turnwright.engines import Generation, PolicyEngine, Request
from turnwright.engines.policy_engine import AgentPolicies, PastVersions
from turnwright.errors import UsageError
from turnwright.training import Trainer
from turnwright.training.agent_views import comparable, view_of
from turnwright.training.baselines import RUNNING_DECAY, RunningBaselines
from turnwright.training.metrics import joined, token_rows
from turnwright.training.past import PastPolicy
from turnwright.training.policies import Policies, Policy
from turnwright.types import (
    EpisodeKey,
    Group,
    Message,
    RowReward,
    Span,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

AGENTS = ("asker", "solver-1", "solver-2", "judge")
PLAYS = {"a": ("asker",), "b": ("solver-*",), "fixed": ("judge",)}


def episode(rng, task, sample, *, rewards=None, agents=AGENTS, turns=4):
    """Turns of agents in any order, each on a path of its own, some of them branches."""
    spans, made, last = [], [], {}
    for number in range(turns):
        agent = agents[0] if not number else rng.choice(agents)
        parent, turn = last.get(agent, (-1, -1))
        start = spans[parent].end if parent >= 0 else 0
        if parent >= 0 and rng.random() < 0.3:  # branches off inside the last reply
            start -= rng.randrange(len(spans[parent].ids))
        ids = [rng.randrange(50) for _ in range(rng.randint(1, 4))]
        spans.append(Span(E if parent >= 0 else P, ids, parent, start, agent=agent))
        prompt = len(spans) - 1
        ids = [rng.randrange(50) for _ in range(rng.randint(1, 5))]
        spans.append(Span(M, ids, prompt, spans[prompt].end, [-1.0] * len(ids), 0, agent=agent))
        reply = Message("assistant", "x")
        made.append(Turn(agent, prompt, spans[prompt].end, (prompt + 1,), (), reply, turn))
        last[agent] = prompt + 1, number
    played = sorted({turn.agent for turn in made})
    key = EpisodeKey("train", 0, task, sample)
    found = Trajectory(
        Task(task, id=task), key, spans, made, reward=float(rng.randint(0, 3)), stop=StopReason.DONE
    )
    if rewards:
        found.agent_rewards = {
            agent: float(rng.randint(0, 3)) for agent in played if rng.random() < 0.8
        }
    return found


def episodes(seed, *, rewards=None, groups=3, size=4):
    rng = random.Random(seed)
    return [
        episode(rng, f"t{g}", sample, rewards=rewards, turns=rng.randint(1, 6))
        for g in range(groups)
        for sample in range(size)
    ]


def policies(plays=PLAYS, **keys):
    agents = AgentPolicies(plays)
    config = TrainConfig(**STILL | keys)
    trained = [
        Policy(name, Trainer(Model64(), config, seed=0), None) for name in plays if name != "fixed"
    ]
    return Policies(trained, agents)


def step(made, trajectories):
    return made.step(trajectories, step=0, steps=1, version=None)


def changed(trajectory, agent, rng):
    """The same episode with other ids and another reward of one agent, or of several."""
    spans = [
        replace(span, ids=[rng.randrange(50) for _ in span.ids])
        if span.agent.startswith(agent)
        else span
        for span in trajectory.spans
    ]
    rewards = {
        one: value + (rng.random() if one.startswith(agent) else 0)
        for one, value in trajectory.agent_rewards.items()
    }
    return replace(trajectory, spans=spans, agent_rewards=rewards)


@given(
    seed=st.integers(0, 10**6),
    rewards=st.booleans(),
    kind=st.sampled_from(["std", "rloo", "batch", "running"]),
)
@settings(max_examples=40, deadline=None)
def test_the_account_of_sampled_ids_holds_for_each_policy_and_for_all(seed, rewards, kind):
    trajectories = episodes(seed, rewards=rewards)
    metrics, credits, batches = step(policies(advantage=kind), trajectories)
    for prefix in ("", "policy/a/", "policy/b/"):
        counts = {
            name.removeprefix(f"{prefix}tokens_"): n
            for name, n in metrics.items()
            if name.startswith(f"{prefix}tokens_")
        }
        sampled = counts.pop("sampled", 0.0)
        counts.pop("per_s", None)
        assert sum(counts.values()) == sampled
    assert metrics["tokens_sampled"] == sum(t.sampled_tokens for t in trajectories)
    judged = sum(
        len(span.ids)
        for t in trajectories
        for span in t.spans
        if span.sampled and span.agent == "judge"
    )
    assert metrics.get("tokens_frozen", 0.0) == judged
    trained = [
        (slot, t.key) for batch in batches for t, slot in zip(_of(batch), batch.slots, strict=True)
    ]
    assert len(trained) == metrics["tokens_trained"]
    rows = joined(token_rows(0, credits, batches))
    assert len({tuple(row["key"]) for row in rows}) == len(rows)
    known = {
        tuple(
            t.key.__getattribute__(name) for name in ("phase", "step", "task", "sample", "attempt")
        ): t
        for t in trajectories
    }
    for row in rows:  # a row of the record names the trajectory's own spans
        spans = known[tuple(row["key"])].spans
        for number, values in row["logprobs"].items():
            assert spans[int(number)].sampled
            assert len(values) == len(spans[int(number)].ids)
            assert (
                len(row["advantages"][number]) == len(values)
                if "advantages" in row
                else row["advantage"] is not None
            )


def _of(batch):
    return [batch.trajectories[int(number)] for number in batch.trajectory_n.tolist()]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_policys_gradient_depends_on_no_other_policys_ids_and_rewards(seed):
    trajectories, rng = episodes(seed, rewards=True), random.Random(seed)
    for t in trajectories:  # no agent without a reward of its own, which would have the episode's
        t.agent_rewards = dict.fromkeys((turn.agent for turn in t.turns), 0.0) | t.agent_rewards
    made = policies()
    step(made, trajectories)
    first = [gradient(policy.trainer.model) for policy in made]
    for other in ("solver", "judge"):
        again = policies()
        step(again, [changed(t, other, rng) for t in trajectories])
        assert torch.equal(gradient(again.trained[0].trainer.model), first[0])
    again = policies()
    step(again, [changed(t, "asker", rng) for t in trajectories])
    assert torch.equal(gradient(again.trained[1].trainer.model), first[1])


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["std", "rloo", "batch"]))
@settings(max_examples=15, deadline=None)
def test_one_policy_for_all_agents_is_a_run_without_policies_to_the_bit(seed, kind):
    trajectories = episodes(seed)
    # An episode that ended before its first reply.
    trajectories[0].spans, trajectories[0].turns = (
        [],
        [],
    )
    one, none = policies({"all": ("*",)}, advantage=kind), policies({"": ("*",)}, advantage=kind)
    (with_policy, *_), (without, *_) = step(one, trajectories), step(none, trajectories)
    assert torch.equal(
        gradient(one.trained[0].trainer.model), gradient(none.trained[0].trainer.model)
    )
    timed = ("train_s", "tokens_per_s")
    own = {
        name.removeprefix("policy/all/"): value
        for name, value in with_policy.items()
        if name.startswith("policy/all/")
    }
    assert {n: v for n, v in own.items() if n not in timed} == {
        n: v for n, v in without.items() if n not in timed
    }


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_view_has_the_paths_of_its_agents_and_nothing_else(seed):
    for t in episodes(seed, rewards=True):
        seen = 0
        for agent in AGENTS:
            view = view_of(t, agent.__eq__, agent)
            if view is None:
                assert not any(span.sampled and span.agent == agent for span in t.spans)
                continue
            seen += view.sampled_tokens
            assert {span.agent for span in view.spans} == {agent}
            assert view.reward == t.agent_rewards.get(agent, t.reward)
            for new, old in enumerate(view.numbers):
                assert view.path(new) == t.path(old)
            own = [turn for turn in t.turns if turn.agent == agent]
            assert [view.prompt_ids(number) for number in range(len(own))] == [
                t.prompt_ids(number) for number, turn in enumerate(t.turns) if turn.agent == agent
            ]
        assert seen == t.sampled_tokens


def test_agents_are_compared_with_themselves_or_within_their_group():
    rng = random.Random(0)
    plain = [
        episode(rng, "t", sample, agents=("asker", "solver-1", "solver-2"), turns=9)
        for sample in range(2)
    ]
    fits = {
        name: lambda agent, name=name: AgentPolicies(PLAYS).of(agent) == name for name in ("a", "b")
    }
    (group,) = comparable([Group(plain[0].task, plain)], fits["b"])
    assert [{span.agent for span in t.spans} for t in group.trajectories] == [
        {"solver-1", "solver-2"}
    ] * 2
    by_agent = comparable([Group(plain[0].task, plain)], fits["b"], by_agent=True)
    assert [[t.agent for t in one.trajectories] for one in by_agent] == [
        ["solver-1"] * 2,
        ["solver-2"] * 2,
    ]
    for number, t in enumerate(plain):
        t.agent_rewards = {"solver-1": 1.0, "solver-2": float(number)}
        t.agent_groups = {"solver-1": "solvers", "solver-2": "solvers"}
    named = comparable([Group(plain[0].task, plain)], fits["b"])
    assert [[(t.key.sample, t.agent, t.reward) for t in one.trajectories] for one in named] == [
        [(0, "solver-1", 1.0), (0, "solver-2", 0.0)],
        [(1, "solver-1", 1.0), (1, "solver-2", 1.0)],
    ]
    assert len(comparable([Group(plain[0].task, plain)], fits["a"])) == 1


def test_rewards_by_row_stay_with_the_agents_of_their_rows():
    t = episode(random.Random(1), "t", 0, agents=("asker", "solver-1"), turns=6)
    own = {
        agent: tuple(n for n, turn in enumerate(t.turns) if turn.agent == agent)
        for agent in ("asker", "solver-1")
    }
    t.row_rewards = [RowReward(1.0, own["asker"]), RowReward(3.0, own["solver-1"])]
    t.reward = 2.5  # the rows' mean and 0.5 for the episode
    for agent, reward in (("asker", 1.5), ("solver-1", 3.5)):
        view = view_of(t, agent.__eq__)
        assert view.reward == reward
        assert [units for _, units in view.row_units()] == [reward]


def test_an_episode_that_failed_before_an_agent_spoke_counts_as_failed_for_its_policy():
    rng = random.Random(2)
    trajectories = [
        episode(rng, "t", sample, agents=("asker", "solver-1"), turns=6) for sample in range(3)
    ]
    trajectories[0].spans = [span for span in trajectories[0].spans if span.agent == "asker"][:2]
    trajectories[0].turns, trajectories[0].stop = trajectories[0].turns[:1], StopReason.ENGINE_ERROR
    (group,) = comparable([Group(trajectories[0].task, trajectories)], "solver-1".__eq__)
    assert [t.stop for t in group.trajectories] == [
        StopReason.ENGINE_ERROR,
        StopReason.DONE,
        StopReason.DONE,
    ]
    metrics, *_ = step(policies({"a": ("asker",), "b": ("solver-*",)}), trajectories)
    assert metrics["policy/b/tokens_sibling_failed"] == metrics["policy/b/tokens_sampled"]


def test_a_policy_that_sampled_nothing_skips_its_update():
    trajectories = [episode(random.Random(n), "t", n, agents=("asker",)) for n in range(4)]
    for number, t in enumerate(trajectories):
        t.reward = float(number % 2)
    made = policies()
    metrics, *_ = step(made, trajectories)
    assert [policy.trainer.updates for policy in made] == [1, 0]
    assert not any(name.startswith("policy/b/") for name in metrics)


def test_groups_are_replaced_only_where_no_policy_has_a_signal():
    made = policies({"a": ("asker",), "b": ("solver-*",)}, refill=1)
    rng = random.Random(0)

    def group(task, asker, solver):
        found = [
            episode(rng, task, sample, agents=("asker", "solver-1"), turns=9) for sample in range(2)
        ]
        for number, t in enumerate(found):
            t.agent_rewards = {"asker": asker[number], "solver-1": solver[number]}
        return Group(found[0].task, found)

    groups = [
        group("x", (0.0, 1.0), (1.0, 1.0)),
        group("y", (1.0, 1.0), (0.0, 0.0)),
        group("z", (0.0, 0.0), (1.0, 0.0)),
    ]
    assert made.tied_groups(groups) == {"y"}
    assert made.refill == 1


def test_running_baselines_are_per_environment_and_agent_and_are_kept():
    rng, baselines = random.Random(0), RunningBaselines()
    made = [episode(rng, "t", sample, agents=("asker",)) for sample in range(4)]
    for number, t in enumerate(made):
        t.reward = float(number)
    baselines.update([Group(made[0].task, made)])
    average = 1.5
    for reward in range(4):
        average = RUNNING_DECAY * average + (1 - RUNNING_DECAY) * reward
    assert baselines.state() == [["", "asker", pytest.approx(average)]]
    other = RunningBaselines()
    other.restore(baselines.state())
    assert other.state() == baselines.state()
    policy = policies({"a": ("asker",)}, advantage="running")
    policy.restore({"baselines": {"a": [["", "asker", 1.0]]}})
    _, credits, _ = step(policy, made)
    assert [credit.advantage for credit in credits] == [-1.0, 0.0, 1.0, 2.0]
    assert policy.state()["baselines"]["a"] != [["", "asker", 1.0]]


class Named:
    """An engine whose replies tell its name."""

    context = 100

    def __init__(self, name, version=0):
        self.name, self.version, self.released, self.closed = name, version, [], False

    async def generate(self, request):
        return Generation([self.name], [0.0], "stop", self.version)

    def release(self, session):
        self.released.append(session)

    async def close(self):
        self.closed = True


def request(agent="main", group="train/0/t"):
    return Request([1], 4, frozenset([9]), 0, f"{group}/0/0", group, agent=agent)


def test_an_engine_of_policies_asks_the_policy_of_the_agent():
    engines = {"a": Named(1), "b": Named(2)}
    engine = PolicyEngine(engines, agents={"b": ["solver-*", "judge"]}, fixed=["b"])

    async def ids(agent):
        found = await engine.generate(request(agent))
        return found.ids, found.fixed

    assert asyncio.run(ids("a")) == ([1], False)
    assert asyncio.run(ids("solver-3")) == ([2], True)
    assert engine.context == 100
    engine.release("s")
    asyncio.run(engine.close())
    assert [(one.released, one.closed) for one in engines.values()] == [(["s"], True)] * 2
    with pytest.raises(
        UsageError,
        match="no policy plays the agent 'other'; the policies and their agents are a: a; b: "
        "solver",
    ):
        asyncio.run(ids("other"))
    with pytest.raises(UsageError, match="no engine for policy 'c'"):
        PolicyEngine(engines, agents={"c": ["x"]})
    with pytest.raises(UsageError, match="it needs an engine"):
        PolicyEngine({})


@given(
    every=st.integers(1, 5), keep=st.integers(1, 4), lag=st.integers(0, 4), seed=st.integers(0, 9)
)
def test_past_versions_are_drawn_among_the_last_that_exist(every, keep, lag, seed):
    past = PastVersions(lambda step: None, None, every=every, keep=keep, lag=lag, seed=seed)
    for step_ in range(40):
        drawn = {past.step_of(f"train/{step_}/task/{n}") for n in range(60)}
        known = [step for step in range(0, max(0, step_ - lag) + 1, every)][-keep:]
        assert drawn <= set(known)
        assert len(drawn) > 1 or len(known) == 1
    assert past.step_of("train/7/t") == past.step_of("train/7/t")


@given(
    every=st.integers(1, 4),
    keep=st.integers(1, 3),
    lag=st.integers(0, 3),
    saved=st.integers(1, 4),
    kept=st.integers(1, 3),
    best=st.integers(0, 18),
    stops=st.lists(st.tuples(st.integers(0, 18), st.integers(0, 3)), max_size=2),
)
@settings(max_examples=30)
def test_past_versions_stay_while_a_resume_from_a_kept_checkpoint_can_draw_them(
    every, keep, lag, saved, kept, best, stops
):
    """A run saves a checkpoint each `saved` steps, and keeps the last ones and a best one; it stops
    at some steps and resumes, each time from the newest checkpoint but some."""
    trainer = SimpleNamespace(
        adapter=None, save_weights=lambda directory, source: (directory / "weights").touch()
    )
    with tempfile.TemporaryDirectory() as name:
        root, of = Path(name), SimpleNamespace(engine=None, trainer=trainer)
        (source := root / "model").mkdir()
        options = {"every": every, "keep": keep, "lag": lag, "seed": 0}
        checkpoints, first = [0], 0
        for end, lost in [*stops, (18, 0)]:
            past = PastPolicy(of, root / "past", source, lambda directory, version: None, **options)
            for step_ in range(first, max(first, end)):
                past.save(step_, None)
                for group in range(max(0, step_ - lag), step_ + lag + 1):
                    # Those that can be in flight.
                    assert versions_in(root) >= {
                        one for one in past.engine.steps(group) if one <= step_
                    }
                if (step_ + 1) % saved == 0:
                    known = [*checkpoints, step_ + 1]
                    checkpoints = sorted({*known[-kept:], *({best} & {*known})})
                    past.prune(checkpoints)
                    needed = {
                        v
                        for one in checkpoints
                        for v in range(past.engine.oldest(one), one + 1, every)
                    }
                    assert {one for one in versions_in(root) if one <= step_} == needed - {
                        step_ + 1
                    }
            # The later ones are damaged.
            checkpoints = checkpoints[: max(1, len(checkpoints) - lost)]
            first = checkpoints[-1]


def versions_in(root):
    return {int(path.name[5:]) for path in (root / "past").iterdir()}


def test_past_versions_are_loaded_once_while_they_are_used_and_closed():
    loaded, engines = [], {}

    def load(step):
        loaded.append(step)
        engines[step] = Named(step, version=step + 100)
        return engines[step]

    past = PastVersions(load, Named(-1), every=1, keep=2)

    async def play():
        assert (await past.generate(request())).ids == [-1]
        past.begin()
        for number in range(6):
            found = await asyncio.gather(
                *(past.generate(request(group=f"train/{number}/{task}")) for task in "abcdefgh")
            )
            assert {one.ids[0] for one in found} <= set(past.steps(number))
            assert all(one.fixed and one.version == one.ids[0] + 100 for one in found)
        await past.close()

    asyncio.run(play())
    assert sorted(loaded) == sorted(set(loaded)) == list(range(6))
    assert all(engine.closed for engine in engines.values())


def test_a_version_of_a_fixed_policy_is_never_too_old():
    from turnwright.engines import check_generation
    from turnwright.errors import BackendContractError

    asked = replace(request(), min_version=5)
    check_generation(Generation([9], [0.0], "stop", 2, fixed=True), asked, "engine")
    with pytest.raises(BackendContractError, match="sampled with policy 2, older than 5"):
        check_generation(Generation([9], [0.0], "stop", 2), asked, "engine")


def test_weights_that_did_not_arrive_name_the_policy():
    from turnwright.errors import SyncError

    trainer = Trainer(Model64(), TrainConfig(**STILL), seed=0)

    async def update(weights, version):
        return "other"

    policy = Policy("asker", trainer, SimpleNamespace(update=update, version=3))
    with pytest.raises(SyncError, match="other weights than the trainer sent for policy asker"):
        asyncio.run(policy.send(3))

"""Experts of positions: aligned with the ids of every path, through appends, branches, rewinds,
aborts and failed attempts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.histories import Look
from kit.histories import renderer as speaking
from kit.inline_worlds import Wild
from kit.play_functions import Breaks, best_of_two, edited, forgets, planner_and_worker, verbatim
from kit.rollouts import AsyncTalk, Sampler, renderer, tasks
from kit.routes import LAYERS, K, Routed, Routing, Speaking, check, experts

import turnwright as tw
from turnwright.errors import BackendContractError, UsageError
from turnwright.records import read_json_lines, rebuild_trajectories
from turnwright.rollouts import Rollout
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import ExpertRoutes, SpanRoutes

FEW = settings(max_examples=15, deadline=None)
LIMITS = tw.Limits(turns=12, turn_tokens=60, on_turn_length="continue", context=900)


@FEW
@given(
    env=st.sampled_from((AsyncTalk, best_of_two, planner_and_worker, edited, verbatim)),
    seed=st.integers(0, 2**32),
    aborts=st.sampled_from((0.0, 0.3)),
)
def test_every_path_has_the_routes_of_its_own_ids(env, seed, aborts):
    engine = Routing(200, aborts=aborts)
    known = [
        check(t)
        for t in tw.rollout(env, tasks(3), engine, seed=seed, limits=LIMITS, want=["routes"])
        if t.turns
    ]
    assert sum(known)


@FEW
@given(
    history=st.sampled_from(("append", "template", "drop_reasoning:1", forgets)),
    seed=st.integers(0, 2**32),
)
def test_branches_share_the_routes_of_their_trunk(history, seed):
    text = speaking("strips_on_user", "bpe")
    engine = Speaking(250, text=text, aborts=0.2)
    rows = tw.rollout(
        Look,
        tasks(2),
        engine,
        renderer=text,
        seed=seed,
        limits=LIMITS,
        history=history,
        want=["routes"],
    )
    for trajectory in rows:
        assert trajectory.error is None
        check(trajectory)


@FEW
@given(history=st.sampled_from(("append", "inline")), seed=st.integers(0, 2**32))
def test_rewound_tails_keep_theirs_and_what_follows_has_its_own(history, seed):
    engine = Routing(250, aborts=0.2)
    for trajectory in tw.rollout(
        Wild,
        tasks(2),
        engine,
        renderer=renderer("bpe"),
        seed=seed,
        limits=LIMITS,
        history=history,
        want=["routes"],
    ):
        check(trajectory)


def test_failed_attempts_keep_theirs_and_begin_anew():
    rules = tw.EnvRules(retries=tw.RetryRules(turn=3, wait_s=0.0))
    rows = tw.rollout(
        Breaks, tasks(8), Routing(200, aborts=0.2), limits=LIMITS, rules=rules, want=["routes"]
    )
    assert any(t.failed_turns and t.turns for t in rows)
    for trajectory in rows:
        if trajectory.turns or trajectory.failed_turns:
            check(trajectory)


@FEW
@given(env=st.sampled_from((Breaks, best_of_two, planner_and_worker)), seed=st.integers(0, 2**32))
def test_the_journal_keeps_them(tmp_path_factory, env, seed):
    out = tmp_path_factory.mktemp("run")
    rules = tw.EnvRules(retries=tw.RetryRules(turn=3, wait_s=0.0)) if env is Breaks else None
    engine = Routing(200, aborts=0.2)
    rows = tw.rollout(
        env, tasks(3), engine, seed=seed, limits=LIMITS, rules=rules, want=["routes"], out=out
    )
    found = rebuild_trajectories(
        read_json_lines(out / "journal.jsonl"), {task.id: task for task in tasks(3)}.get
    )
    for trajectory in rows:
        again = found[trajectory.key]
        for one, other in zip(trajectory.samples(), again.samples(), strict=True):
            assert (one.routes, one.routes_mask) == (other.routes, other.routes_mask)
        if trajectory.turns or trajectory.failed_turns:
            assert trajectory.turns == again.turns
            check(again)


def test_each_position_is_told_once_where_the_engine_does_as_it_is_asked():
    class Exact(Routed, Sampler):
        async def generate(self, request):
            made = await super().generate(request)
            start, told = made.extras["routes"]
            made.extras = {
                "routes": (request.routes_from, np.asarray(told)[request.routes_from - start :])
            }
            self.asked = self.asked + len(made.extras["routes"][1])
            return made

        asked = 0

    engine = Exact(200)
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), engine, limits=LIMITS, want=["routes"])
    ids = trajectory.path(trajectory.turns[-1].spans[-1])
    assert engine.asked == len(ids) - 1 == check(trajectory)


def test_nothing_is_asked_or_kept_unless_it_is_wanted():
    engine = Routing(200)
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), engine)
    assert engine.told == 0
    assert [(s.routes, s.routes_mask) for s in trajectory.samples()] == [(None, [])]
    assert all(not turn.extras for turn in trajectory.turns)


def answering(told):
    class Engine(Sampler):
        async def generate(self, request):
            made = await super().generate(request)
            made.extras = {"routes": told(request, made)}
            return made

    return Engine(200)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (lambda r, g: (r.routes_from + 1, experts(r.ids)), "were requested"),
        (lambda r, g: (-1, experts(r.ids)), "were requested"),
        (lambda r, g: (0, experts([*r.ids, *g.ids, 1])), "were requested"),
        (lambda r, g: (0, experts(r.ids).astype(float)), "integers of shape"),
        (lambda r, g: (0, experts(r.ids)[0]), "integers of shape"),
        (lambda r, g: (0, experts(r.ids).astype(int) - 1000), "expert indices"),
        (lambda r, g: (0, "base64"), "integers of shape"),
    ],
)
def test_routes_that_cannot_be_right_break_the_contract(told, why):
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), answering(told), want=["routes"])
    assert trajectory.stop == "engine_error"
    assert trajectory.error.type == BackendContractError.__name__
    assert why in trajectory.error.message


def test_an_engine_that_tells_of_fewer_experts_in_the_same_reply_breaks_the_contract():
    class Aborting(Routing):
        async def generate(self, request):
            made = await super().generate(request)
            start, told = made.extras["routes"]
            if len(self.calls) > 1:
                made.extras = {"routes": (start, np.asarray(told)[:, :, :1])}
            return made

    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), Aborting(200, aborts=1.0), want=["routes"])
    assert "routes of 3 x 1 after routes of 3 x 2" in trajectory.error.message


def test_a_want_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="want names 'rotes'"):
        Rollout(Sampler(), renderer("bytes"), RolloutSettings(want=["rotes"]))


def test_what_was_told_first_stands():
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), Routing(200), limits=LIMITS, want=["routes"])
    turn = trajectory.turns[-1]
    start, routes = turn.extras["routes"]
    turn.extras["routes"] = (0, np.zeros((start + len(routes), LAYERS, K), dtype=np.uint8))
    got, _ = SpanRoutes(trajectory).for_chain(trajectory.chain(turn.spans[-1]))
    ids = trajectory.path(turn.spans[-1])
    assert (np.asarray(got)[:start] == experts(ids)[:start]).all()
    assert not np.asarray(got)[start:].any()


@given(
    numbers=st.lists(st.integers(0, 70_000), min_size=1, max_size=6),
    size=st.sampled_from((1, 2, 4, 8)),
    more=st.booleans(),
)
def test_integers_of_any_width_are_brought_to_the_least(numbers, size, more):
    fit = max(numbers) < 256**size
    if not fit:
        return
    data = b"".join(n.to_bytes(size, "little") for n in numbers)
    if max(numbers) > 65535:
        with pytest.raises(ValueError, match="over 65535"):
            ExpertRoutes.from_bytes(data, size, 1, 1)
        return
    routes = ExpertRoutes.from_bytes(data, size, 1, 1)
    assert np.asarray(routes).ravel().tolist() == numbers
    assert routes.width == (2 if max(numbers) > 255 else 1) or size == 1
    assert np.asarray(routes.concat(ExpertRoutes(b"\3", 1, 1))).ravel().tolist() == [*numbers, 3]
    assert ExpertRoutes.of(np.asarray(routes)) == routes

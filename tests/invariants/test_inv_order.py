"""Invariant 11: the same seed gives the same trajectories, whatever order they finish in and
however many run at once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.play_functions import best_of_two, edited, planner_and_worker, verbatim
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, facts, tasks

import turnwright as tw


def calls_of(trajectory):
    """What was asked and sampled, in no order: calls that run at the same time are
    written down as they finish."""
    rows = []
    for number, turn in enumerate(trajectory.turns):
        spans = [trajectory.spans[i] for i in turn.spans]
        ids = tuple(i for span in spans for i in span.ids)
        logprobs = tuple(p for span in spans for p in span.logprobs)
        rows.append((turn.agent, tuple(trajectory.prompt_ids(number)), ids, logprobs, turn.finish))
    return Counter(rows)


def play(env, seed, concurrency, delay, order=None, **settings):
    rows = tasks(5)
    if order is not None:
        random.Random(order).shuffle(rows)
    limits = tw.Limits(turns=60, **settings)
    engine = Sampler(delay=delay, ends=0.97)
    found = tw.rollout(
        env, rows, engine, samples=2, seed=seed, concurrency=concurrency, limits=limits
    )
    for trajectory in found:
        check_record(trajectory, engine.calls)
    return {trajectory.key: trajectory for trajectory in found}, engine


@settings(max_examples=12, deadline=None)
@given(
    env=st.sampled_from((Talk, AsyncTalk, edited, verbatim)),
    seed=st.integers(0, 2**64),
    concurrency=st.sampled_from((2, 7, 256)),
    order=st.integers(0, 99),
)
def test_same_seed_same_trajectories_whatever_order_they_finish_in(env, seed, concurrency, order):
    one, _ = play(env, seed, 1, 0.0)
    many, _ = play(env, seed, concurrency, 1e-3, order)
    assert {key: facts(t) for key, t in one.items()} == {key: facts(t) for key, t in many.items()}


@settings(max_examples=20, deadline=None)
@given(
    env=st.sampled_from((best_of_two, planner_and_worker)),
    seed=st.integers(0, 2**64),
    concurrency=st.sampled_from((1, 256)),
)
def test_calls_at_the_same_time_have_the_same_noise_whatever_order_they_finish_in(
    env, seed, concurrency
):
    settings = {"turn_tokens": 14, "on_turn_length": "continue"}
    still, _ = play(env, seed, 1, 0.0, **settings)
    moving, _ = play(env, seed, concurrency, 1e-3, **settings)
    assert {key: calls_of(t) for key, t in still.items()} == {
        key: calls_of(t) for key, t in moving.items()
    }


@pytest.mark.parametrize("env", [AsyncTalk, best_of_two, planner_and_worker])
def test_group_members_tasks_and_seeds_all_differ(env):
    first, engine = play(env, 0, 256, 0.0)
    other, _ = play(env, 1, 256, 0.0)
    long = [call.ids for call in engine.calls if len(call.ids) > 5]
    assert len(long) > 10
    assert len(set(long)) == len(long), "two calls drew the same noise"
    assert all(calls_of(first[key]) != calls_of(other[key]) for key in first)


def test_equal_tasks_are_more_samples_of_one_group():
    rows = tw.rollout(AsyncTalk, [tw.Task("Same."), tw.Task("Same.")], Sampler(), samples=2)
    assert [t.key.sample for t in rows] == [0, 1, 2, 3]
    assert len({t.key.task for t in rows}) == 1
    assert len({t.spans[1].ids for t in rows}) == 4


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_no_more_episodes_run_than_asked_for(concurrency):
    engine = Sampler(delay=1e-3)
    tw.rollout(AsyncTalk, tasks(12), engine, concurrency=concurrency)
    assert engine.peak <= concurrency

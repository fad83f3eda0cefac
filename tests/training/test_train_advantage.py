"""Advantages against values worked out by hand, and the account of every sampled id."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import groups, trajectories
from kit.training import E, M, P, chain

from turnwright.errors import RewardError
from turnwright.training import TRAINED, trainable_tokens
from turnwright.training.advantages import (
    CreditSettings,
    GroupChoice,
    advantages,
    without_signal,
)
from turnwright.types import Failure, Group, StopReason, Task


def group(*rewards, task="t"):
    rows = [
        chain([(P, [1]), (M, [2, 3])], task=task, sample=i, reward=r) for i, r in enumerate(rewards)
    ]
    return Group(Task(task, id=task), rows)


def values(ledger):
    return [credit.advantage for credit in ledger.credits]


def reasons(ledger):
    return [credit.reason for credit in ledger.credits]


def test_golden_std():
    # mean 0.25, sum of squares 0.75, sample variance 0.25, deviation 0.5
    ledger = advantages([group(1.0, 0.0, 0.0, 0.0)])
    assert values(ledger) == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3], abs=1e-12)
    assert ledger.tokens == {TRAINED: 8}


def test_golden_mean():
    assert values(advantages([group(3.0, 0.0, 0.0)], CreditSettings(kind="mean"))) == [
        2.0,
        -1.0,
        -1.0,
    ]


def test_golden_uneven_groups():
    # two of 2: mean 0.5, deviation sqrt(0.5); three: mean 2, deviation 1
    ledger = advantages([group(0.0, 1.0, task="a"), group(1.0, 2.0, 3.0, task="b")])
    pair = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert values(ledger) == pytest.approx([-pair, pair, -1 / 1.0001, 0.0, 1 / 1.0001], abs=1e-12)


def test_an_episode_whose_environment_failed_to_close_is_trained():
    whole = group(1.0, 0.0)
    whole.trajectories[0].error = Failure("OSError", "gone", "close")
    assert values(advantages([whole], CreditSettings(kind="mean"))) == [0.5, -0.5]


def test_failed_and_unrewarded_are_not_in_the_baseline():
    whole = group(1.0, None, 0.0, 5.0, 9.0)
    whole.trajectories[3].stop = StopReason.TOOL_ERROR
    whole.trajectories[4].error = Failure("OSError", "gone", "reward")
    ledger = advantages([whole], CreditSettings(kind="mean"))
    assert values(ledger) == [0.5, None, -0.5, None, None]
    assert reasons(ledger) == [None, "no_reward", None, "failed", "failed"]
    assert ledger.tokens == {TRAINED: 4, "no_reward": 2, "failed": 4}


def test_reward_none_is_not_zero():
    # With 0.0 in its place there would be a signal.
    assert values(advantages([group(1.0, 1.0, None)])) == [None] * 3


def test_ties_have_no_signal_but_count():
    ledger = advantages([group(0.3, 0.1 + 0.2)])
    assert reasons(ledger) == ["no_signal"] * 2
    assert all(credit.counted for credit in ledger.credits)
    assert ledger.tokens == {"no_signal": 4}


@pytest.mark.parametrize("rewards", [(1.0,), (1.0, None), (None,)])
def test_groups_of_one_are_dropped(rewards):
    ledger = advantages([group(*rewards)])
    assert values(ledger) == [None] * len(rewards)
    assert reasons(ledger)[0] == ("no_reward" if rewards[0] is None else "group_too_small")
    assert not any(credit.counted for credit in ledger.credits)


def test_min_group():
    assert (
        reasons(advantages([group(0.0, 1.0, 0.5)], CreditSettings(min_group=4)))
        == ["group_too_small"] * 3
    )
    assert reasons(advantages([group(1.0)], CreditSettings(min_group=1))) == ["no_signal"]
    assert advantages([Group(Task("t"), [])]).credits == ()


def test_span_reasons_are_counted():
    whole = group(1.0, 0.0)
    whole.trajectories[0].spans[1].untrained = "rewound"
    ledger = advantages([whole])
    assert ledger.tokens == {TRAINED: 2, "rewound": 2}
    assert [credit.tokens for credit in ledger.credits] == [0, 2]


def test_an_id_without_context_is_counted():
    row = chain([(M, [2, 3]), (E, [4]), (M, [5])], reward=1.0)
    other = replace(chain([(P, [1]), (M, [2])], sample=1, reward=0.0))
    assert advantages([Group(row.task, [row, other])]).tokens == {TRAINED: 3, "no_context": 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_are_finite(bad):
    with pytest.raises(RewardError, match=r"task 't', sample 1 .* is -?(nan|inf)"):
        advantages([group(0.0, bad)])


REWARDS = st.lists(st.sampled_from((0.0, 0.25, 1.0, -2.0)), min_size=2, max_size=4)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(REWARDS, min_size=1, max_size=8),
    st.floats(0.05, 1.0),
    st.sampled_from(("std", "rloo", "batch")),
    st.randoms(),
)
def test_the_groups_that_vary_most_are_kept(rewards, share, kind, random):
    made = [group(*one, task=f"t{number}") for number, one in enumerate(rewards)]
    chosen = CreditSettings(kind=kind, kept_share=share)
    credits = advantages(random.sample(made, len(made)), chosen).credits

    left_out = {c.trajectory.key.task for c in credits if c.reason == "filtered"}
    spreads = {f"t{number}": statistics.pstdev(one) for number, one in enumerate(rewards)}
    kept = {task: spread for task, spread in spreads.items() if task not in left_out}
    assert len(kept) == max(1, round(share * len(made)))
    assert all(spreads[task] <= min(kept.values()) for task in left_out)

    # What is kept has the advantages that it has alone, and those of equal spread are the first.
    alone = advantages([g for g in made if g.task.id in kept], replace(chosen, kept_share=1.0))
    of_kept = [c for c in credits if c.trajectory.key.task in kept]
    assert [c.advantage for c in of_kept] == values(alone)
    for task in left_out:
        assert not any(kept[other] == spreads[task] and other > task for other in kept)


def test_a_group_that_its_filter_leaves_out_takes_no_place_of_one_that_varies():
    made = [group(0.0, 4.0, task="a"), group(0.0, 1.0, task="b"), group(1.0, 1.0, task="c")]
    chosen = CreditSettings(
        keep_group=lambda usable: GroupChoice(usable[0].key.task != "a"), kept_share=0.34
    )
    kept = [c.trajectory.key.task for c in advantages(made, chosen).credits if c.counted]
    assert kept == ["b", "b"]
    # What refill replaces does not depend on the share.
    assert without_signal(made, chosen) == [True, False, False]


@settings(max_examples=120, deadline=None)
@given(groups(sampled_roots=True, missing_logprobs=True), st.sampled_from((1, 2, 3)), st.randoms())
def test_invariant_1_every_sampled_id_is_accounted_for(made, min_group, random):
    ledger = advantages(made, CreditSettings(min_group=min_group))
    everything = [t for g in made for t in g.trajectories]
    assert (
        sum(ledger.tokens.values()) == ledger.sampled == sum(t.sampled_tokens for t in everything)
    )
    assert len(ledger.credits) == len(everything)
    for credit in ledger.credits:
        assert (credit.advantage is None) == (credit.reason is not None)
        if credit.trajectory.reward is None or credit.trajectory.error is not None:
            assert credit.advantage is None
    # The order in which episodes finish plays no part.
    shuffled = [Group(g.task, random.sample(g.trajectories, len(g.trajectories))) for g in made]
    random.shuffle(shuffled)
    again = advantages(shuffled, CreditSettings(min_group=min_group))
    assert [(c.trajectory.key, c.reason) for c in again.credits] == [
        (c.trajectory.key, c.reason) for c in ledger.credits
    ]
    assert values(again) == pytest.approx(values(ledger), abs=1e-12)


@settings(max_examples=120, deadline=None)
@given(trajectories(sampled_roots=True))
def test_trainable_tokens_are_those_of_the_samples(trajectory):
    placed = sum(
        1
        for sample in trajectory.samples()
        for place, weight in enumerate(sample.weights)
        if weight and place
    )
    assert trainable_tokens(trajectory) == placed

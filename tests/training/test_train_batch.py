"""Batches: which id is trained where, and forward passes that cover them once."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import groups, trajectories
from kit.training import E, M, P, chain, random_groups

from turnwright.training import TRAINED, Credit, LossDenominator, make_batch, trainable_tokens
from turnwright.training.advantages import advantages
from turnwright.training.credit import sort_key
from turnwright.training.forward.batch import split_minibatches
from turnwright.training.forward.passes import OVERHEAD_TOKENS
from turnwright.training.forward.training_rows import rows_of


def batch_of(made, aggregation="token", micro_tokens=64, **more):
    ledger = advantages(made)
    return ledger, make_batch(
        ledger.credits,
        LossDenominator.of(ledger.credits, aggregation, **more),
        micro_tokens=micro_tokens,
    )


@settings(max_examples=100, deadline=None)
@given(groups(sampled_roots=True, missing_logprobs=True), st.sampled_from((1, 8, 40, 10_000)))
def test_invariant_1_every_trained_id_is_in_the_batch_once(made, micro_tokens):
    ledger, batch = batch_of(made, micro_tokens=micro_tokens)
    assert batch.size == ledger.tokens[TRAINED]
    tokens = [int(n) for micro in batch.micros for n in micro.tokens_m]
    assert sorted(tokens) == list(range(batch.size))
    for micro in batch.micros:
        lines, width = micro.ids_bt.shape
        assert lines * width <= micro_tokens or lines == 1
        assert micro.positions.tolist() == [list(range(width))]
        assert len(set(micro.before_m.tolist())) == len(micro.before_m)


@settings(max_examples=100, deadline=None)
@given(trajectories(vocabulary=10_000, sampled_roots=True))
def test_rows_are_paths_and_targets_follow_their_position(trajectory):
    # Every (span, offset) gets an id of its own, so that an id says where it came from.
    owners = {}
    for index, span in enumerate(trajectory.spans):
        for offset in range(len(span.ids)):
            owners[len(owners)] = (index, offset)
        first = len(owners) - len(span.ids)
        span.ids = list(range(first, len(owners)))
    paths = [trajectory.path(leaf) for leaf in trajectory.leaves()]
    seen = Counter()
    for row in rows_of(trajectory, 0):
        for place, target in zip(row.places, row.targets, strict=True):
            whole = [*row.ids, row.targets[-1]]
            assert whole[place] == target
            assert whole[: place + 1] in [path[: place + 1] for path in paths]
            span = trajectory.spans[owners[target][0]]
            assert span.sampled
            assert span.untrained is None
            seen[target] += 1
    assert all(count == 1 for count in seen.values())
    assert sum(seen.values()) == trainable_tokens(trajectory)


def test_missing_logprobs_stay_missing():
    row = chain([(P, [1]), (M, [2, 3])], reward=1.0)
    row.spans[1].logprobs = [None, -0.5]
    batch = make_batch([Credit(row, 1.0, None, 2)], LossDenominator("token", 2, 1), micro_tokens=9)
    assert torch.isnan(batch.engine_n[0])
    assert batch.engine_n[1] == -0.5


def test_rows_end_behind_the_last_target():
    row = chain([(P, [1, 2]), (M, [3, 4]), (E, [5, 6, 7, 8])], reward=1.0)
    (made,) = rows_of(row, 0)
    assert made.ids == [1, 2, 3]  # nothing is predicted from the last target
    assert made.places == [2, 3]
    assert made.targets == [3, 4]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 5] * 5),
        ("trajectory", [1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6]),
        ("fixed", [1 / 20] * 5),
    ],
)
def test_weights_by_hand(aggregation, expected):
    made = [
        chain([(P, [1]), (M, [2, 3])], sample=0, reward=1.0),
        chain([(P, [1]), (M, [4, 5, 6])], sample=1, reward=0.0),
    ]
    credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in made]
    batch = make_batch(credits, LossDenominator.of(credits, aggregation, 10), micro_tokens=99)
    assert batch.weights_n.tolist() == pytest.approx(expected)
    assert batch.trajectory_n.tolist() == [0, 0, 1, 1, 1]


def test_denominators_count_ties_but_not_what_was_dropped():
    made = random_groups(groups=3, size=2)
    for t in made[0].trajectories:
        t.reward = 1.0  # no signal: an advantage of 0
    for t in made[1].trajectories:
        t.reward = None
    ledger = advantages(made)
    scale = LossDenominator.of(ledger.credits, "token")
    counted = [*made[0].trajectories, *made[2].trajectories]
    assert scale.tokens == sum(t.sampled_tokens for t in counted)
    assert scale.trajectories == 4


@settings(max_examples=50, deadline=None)
@given(groups(max_groups=4, max_size=6), st.integers(1, 6))
def test_minibatches_deal_every_credit_once(made, parts):
    credits = advantages(made).credits
    dealt = split_minibatches(credits, parts, "7:0")
    trained = [credit for credit in credits if credit.reason is None and credit.tokens]
    assert sorted((c.trajectory.key for part in dealt for c in part), key=str) == sorted(
        (c.trajectory.key for c in trained), key=str
    )
    assert all(dealt)
    assert all(part == sorted(part, key=lambda c: sort_key(c.trajectory)) for part in dealt)
    assert dealt == split_minibatches(credits, parts, "7:0")


def test_length_sorting_bounds_the_padding():
    _, batch = batch_of(random_groups(groups=8, size=8, high=20), micro_tokens=100_000)
    real = sum(len(row.ids) for t in batch.trajectories for row in rows_of(t, 0))
    assert 1 < len(batch.micros) < 10
    assert sum(micro.ids_bt.numel() for micro in batch.micros) - real <= OVERHEAD_TOKENS * len(
        batch.micros
    )

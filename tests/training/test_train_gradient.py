"""Invariants 4 and 5: where a gradient is and is not, and that no layout of
the batch changes it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.gradients import check_probe, loss_and_gradient
from kit.strategies import groups, trajectories
from kit.training import STILL, E, M, P, branched, chain, distance, gradient, random_groups

from turnwright.config import TrainConfig
from turnwright.training import Trainer
from turnwright.training.advantages import advantages
from turnwright.types import Group, Span, Task

# Invariant 4.


def example():
    """Two rewarded chains of different lengths, one of them with a branch."""
    first = chain([(P, [1, 2]), (M, [3, 4]), (E, [5, 6]), (M, [7]), (E, [8])], reward=1.0)
    second = chain(
        [(P, [1, 2]), (M, [9, 8, 7]), (E, [6]), (M, [5, 4]), (E, [3])], sample=1, reward=0.0
    )
    second.spans.append(Span(P, [11, 12, 13, 14, 15], 1, 4))
    second.spans.append(Span(M, [16, 17], 5, 9, [-1.0, -1.0], 0))
    second.spans.append(Span(M, [18], 6, 11, [-1.0], 0, untrained="rewound"))
    return [Group(Task("t", id="t"), [first, second])]


def test_invariant_4_gradients_are_at_sampled_ids_alone():
    check_probe(example())


@pytest.mark.parametrize("shift", [-1, 1])
def test_invariant_4_fails_with_a_shifted_mask(shift):
    with pytest.raises(AssertionError, match="gradient at position"):
        check_probe(example(), shift)


@settings(max_examples=40, deadline=None)
@given(st.lists(trajectories(failures=False, sampled_roots=True), min_size=2, max_size=4))
def test_invariant_4_on_random_forests(made):
    for sample, t in enumerate(made):
        t.key, t.reward = replace(t.key, sample=sample), float(sample % 2)
    check_probe([Group(made[0].task, made)])


# Invariant 5.


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "fixed"])
@pytest.mark.parametrize("micro_tokens", [1, 30, 100, 100_000])
def test_invariant_5_micro_batches(aggregation, micro_tokens):
    made = random_groups(3)
    loss, base = loss_and_gradient(Model64(), made, aggregation=aggregation, micro_tokens=1000)
    other_loss, other = loss_and_gradient(
        Model64(), made, aggregation=aggregation, micro_tokens=micro_tokens
    )
    assert distance(other, base) < 1e-10
    assert other_loss == pytest.approx(loss, rel=1e-10, abs=1e-14)


@settings(max_examples=20, deadline=None)
@given(
    groups(max_groups=3, max_size=4),
    st.sampled_from(("token", "trajectory", "fixed")),
    st.sampled_from((1, 20, 64)),
)
def test_invariant_5_on_random_forests(made, aggregation, micro_tokens):
    if not any(credit.tokens for credit in advantages(made).trained):
        return
    _, base = loss_and_gradient(Model64(), made, aggregation=aggregation)
    _, split = loss_and_gradient(
        Model64(), made, aggregation=aggregation, micro_tokens=micro_tokens
    )
    _, whole = loss_and_gradient(Model64(whole=True), made, aggregation=aggregation)
    assert (split - base).norm() <= 1e-10 * base.norm() + 1e-15
    assert (whole - base).norm() <= 1e-10 * base.norm() + 1e-15


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "fixed"])
def test_invariant_5_one_chain_or_five_branches(aggregation):
    made = random_groups(5, turns=5)
    trees = [Group(g.task, [branched(t) for t in g.trajectories]) for g in made]
    assert sum(1 for _ in trees[0].trajectories[0].samples()) > 1
    loss, base = loss_and_gradient(Model64(), made, aggregation=aggregation)
    tree_loss, tree = loss_and_gradient(Model64(), trees, aggregation=aggregation)
    assert distance(tree, base) < 1e-10
    assert tree_loss == pytest.approx(loss, rel=1e-10, abs=1e-14)


def test_order_of_groups_and_trajectories_changes_no_bit():
    made = random_groups(6)
    loss, base = loss_and_gradient(Model64(), made)
    turned = [Group(g.task, g.trajectories[::-1]) for g in made[::-1]]
    turned_loss, other = loss_and_gradient(Model64(), turned)
    assert torch.equal(base, other)
    assert turned_loss == loss


def test_companions_without_weight_change_no_bit_of_the_gradient():
    """Trajectories that are dropped must not be fed, and must not dilute."""
    made = random_groups(7)
    more = random_groups(8, groups=2)
    for index, g in enumerate(more):
        for t in g.trajectories:
            t.reward = None if index else t.reward
            t.key = type(t.key)("train", 1, t.key.task, t.key.sample)
            for span in t.spans:
                span.untrained = "stale" if span.sampled else None
    assert torch.equal(
        loss_and_gradient(Model64(), made)[1], loss_and_gradient(Model64(), made + more)[1]
    )


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "fixed"])
def test_invariant_5_hugging_face_float32(tiny_model, aggregation):
    made = random_groups(9, groups=6, size=6, turns=4)
    loss, base = loss_and_gradient(tiny_model, made, aggregation=aggregation)
    trees = [Group(g.task, [branched(t) for t in g.trajectories]) for g in made]
    for other, micro_tokens in ((made, 1), (made, 200), (trees, 4096), (trees, 150)):
        other_loss, found = loss_and_gradient(
            tiny_model, other, aggregation=aggregation, micro_tokens=micro_tokens
        )
        assert distance(found, base) < 5e-6
        assert abs(other_loss - loss) < 1e-5


def test_head_on_trained_positions_equals_whole_logits(tiny_model):
    made = random_groups(10)
    _, base = loss_and_gradient(tiny_model, made)
    trainer = Trainer(tiny_model, TrainConfig(**STILL))
    assert trainer.forward.head is not None
    trainer.forward.body = trainer.forward.head = None
    trainer.step(made, step=0, steps=1)
    assert distance(gradient(tiny_model), base) < 5e-6

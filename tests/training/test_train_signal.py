"""The learning rate that follows what gradients agree on: the formula, the measurement, and
what it does to a run."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.training import ANY, distance, fingerprint, gradient, random_groups
from torch import nn

from turnwright.config import TrainConfig
from turnwright.training import Ranks, Trainer
from turnwright.training.model import models
from turnwright.training.trainer.dot_products import dot_products
from turnwright.training.trainer.gradient_signal import (
    YOUNG,
    GradientSignal,
    signal_share,
    standard_errors,
)
from turnwright.training.trainer.optimizer import Optimizer
from turnwright.types import Group, Task

# The formula.


@given(st.floats(1e-6, 1e6), st.floats(0.0, 0.999))
def test_the_share_solves_the_equation_of_the_agreement(r, beta):
    k = (1 + beta) / (1 - beta)
    agreement = math.sqrt(r / (1 + r) * (k * r) / (1 + k * r))
    assert signal_share(agreement, beta) == pytest.approx(k * r / (1 + k * r), rel=1e-6)


@given(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0), st.floats(0.0, 0.999))
def test_the_share_rises_from_0_to_1(first, second, beta):
    low, high = sorted((first, second))
    assert 0 <= signal_share(low, beta) <= signal_share(high, beta) <= 1
    assert signal_share(min(first, 0.0), beta) == 0.0
    assert signal_share(1.0, beta) == 1.0


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_without_noise_the_share_of_what_was_averaged_is_near_one(beta):
    assert signal_share(0.9999, beta) > 0.999


def noisy(strength, steps, seed=0, dim=400, sizes=None, updates=1):
    """The agreements of each gradient, and the signal's share of the momentum, of a true direction
    under noise. It is one coordinate; with `sizes` of the coordinates it has `strength` of each
    size. A gradient is used for some `updates`."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(dim, 1, bias=False)
    optimizer = Optimizer(model, TrainConfig(lr=0.0, weight_decay=0.0, max_grad_norm=1e9), Ranks())
    true = torch.zeros(1, dim)
    true[0, 0] = strength
    if sizes is not None:
        true = strength * sizes / math.sqrt(dim)
    found, shares = [], []
    for _ in range(steps):
        noise = torch.randn(1, dim, generator=generator) / math.sqrt(dim)
        model.weight.grad = true + (noise if sizes is None else noise * sizes)
        found.append(optimizer.agreement(optimizer.gradient(), optimizer.momentum()))
        for _ in range(updates):
            optimizer.step(0.0)
        momentum = optimizer.adamw.state[model.weight]["exp_avg"]
        weight = 1.0 if sizes is None else 1.0 / sizes.square()
        shares.append(
            float((weight * momentum * true).sum() / (weight * momentum * momentum).sum())
        )
    return found[50:], shares[50:]


def mean(values):
    return sum(values) / len(values)


UNEVEN = torch.cat([torch.full((1, 4), 30.0), torch.ones(1, 396)], 1)
"""Sizes of coordinates, of which four are nearly the whole length of a gradient."""


@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("strength", [0.15, 0.3, 1.0, 3.0])
def test_the_share_is_found_from_the_agreement_alone(strength, updates):
    """The best multiple of a noisy momentum, as it is known to who knows the true gradient."""
    found, shares = noisy(strength, 600, updates=updates)
    assert signal_share(mean([one.cosine for one in found]), 0.9**updates) == pytest.approx(
        mean(shares), abs=0.05
    )


@pytest.mark.parametrize("strength", [0.15, 0.3, 1.0, 3.0])
def test_the_scaled_agreement_finds_the_share_in_units_of_each_coordinate(strength):
    found, shares = noisy(strength, 600, sizes=UNEVEN)
    assert signal_share(mean([one.scaled for one in found]), 0.9) == pytest.approx(
        mean(shares), abs=0.05
    )


@pytest.mark.parametrize("sizes", [None, UNEVEN])
def test_noise_alone_agrees_with_nothing(sizes):
    found, _ = noisy(0.0, 2000, sizes=sizes)
    plain, scaled = [one.cosine for one in found], [one.scaled for one in found]
    assert abs(mean(plain)) < (0.01 if sizes is None else 0.05)
    assert abs(mean(scaled)) < 0.01


def test_a_signal_in_every_coordinate_is_seen_sooner_scaled():
    """Its cosine is as large in both, and noise agrees by chance among few large
    coordinates more than among all."""
    plain, scaled = GradientSignal(20, 0.9), GradientSignal(20, 0.9)
    opened = [0, 0]
    for seed in range(20):
        for one in noisy(0.25, 80, seed, sizes=UNEVEN)[0]:
            plain.update(one.cosine)
            scaled.update(one.scaled)
        opened[0] += plain.share > 0
        opened[1] += scaled.share > 0
        plain, scaled = GradientSignal(20, 0.9), GradientSignal(20, 0.9)
    assert opened[0] <= 10
    assert opened[1] >= 19


# The measurement.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agreement_is_the_cosine_with_the_momentum(dtype):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(dtype)
    optimizer = Optimizer(model, TrainConfig(max_grad_norm=1e9), Ranks())
    generator = torch.Generator().manual_seed(1)
    momentum, square = None, 0.0
    for _ in range(4):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.clip_gradient()
        now = gradient(model)
        square = 0.95 * square + 0.05 * now.square()
        found = optimizer.agreement(optimizer.gradient(), optimizer.momentum())
        if momentum is None:
            assert found is None
            momentum = torch.zeros_like(now)
        else:
            assert found.cosine == pytest.approx(
                float(torch.cosine_similarity(now, momentum, dim=0)), rel=1e-5
            )
            units = square.sqrt()
            assert found.scaled == pytest.approx(
                float(torch.cosine_similarity(now / units, momentum / units, dim=0)), rel=1e-5
            )
            assert found.norm == pytest.approx(float(now.norm()), rel=1e-5)
        optimizer.step(1e-3)
        momentum = 0.9 * momentum + 0.1 * now
    optimizer.zero_grad()
    optimizer.clip_gradient()
    assert optimizer.agreement(optimizer.gradient(), optimizer.momentum()) is None


@pytest.mark.parametrize("memory", [10, 20, 50])
def test_chance_is_rarely_taken_for_evidence(memory):
    rng = random.Random(0)
    signal, opened = GradientSignal(memory, 0.9), 0
    for _ in range(20_000):
        signal.update(max(-1.0, min(1.0, rng.gauss(0.0, 0.3))))
        opened += signal.share > 0
    assert opened / 20_000 < 0.0025
    for _ in range(5 * memory):
        signal.update(0.3 + rng.gauss(0.0, 0.1))
    assert signal.share > 0.3


def test_the_average_begins_without_evidence():
    signal = GradientSignal(4, 0.9)
    assert signal.share == 0.0
    terms = []
    for agreement, expected in ((None, 0.0), (0.8, 0.2), (-1.0, -0.1), (0.5, 0.05)):
        signal.update(agreement)
        assert signal.average == pytest.approx(expected)
        terms = [0.75 * term for term in terms] + [0.25 * (agreement or 0.0)]
        assert signal.variance == pytest.approx(sum(term * term for term in terms))
    assert signal.share == 0.0  # 0.05 on average, with a standard error of more
    assert signal.weight == pytest.approx(1 - 0.75**4)
    off = GradientSignal(0, 0.9)
    off.update(-1.0)
    assert off.share == 1.0


@pytest.mark.parametrize("agreement", [0.2, 0.5, 0.9])
def test_steady_agreement_counts_fully_soon(agreement):
    """The start from 0 is no lack of evidence, and the steps' own spread is
    none of the signal's."""
    shares = shares_of([agreement] * 40)
    assert shares[:4] == [0.0] * 4
    assert shares[5:] == pytest.approx([signal_share(agreement, 0.9)] * 35)


def shares_of(agreements):
    """The share of each step of a run with these agreements, which is still
    where the share is 0."""
    signal, shares = GradientSignal(20, 0.9), []
    for agreement in agreements:
        signal.update(agreement, moved=signal.share > 0)
        shares.append(signal.share)
    return shares


def restore(signal, average, variance):
    """Restore the evidence of many steps."""
    each = 1.0 / signal.memory
    squares, fourths = (each**n / (1.0 - (1.0 - each) ** n) for n in (2, 4))
    signal.restore(average, variance, 1.0, squares, fourths)


@given(st.floats(0.01, 0.1))
def test_the_share_rises_from_nothing_where_noise_has_just_become_evidence(error):
    signal, shares = GradientSignal(20, 0.9), []
    for percent in range(1001):
        restore(signal, percent / 100 * error, error**2)
        shares.append(signal.share)
    opened = next(number for number, share in enumerate(shares) if share)
    assert 280 <= opened <= 300  # the square of the average is in its variance too
    assert shares[opened] < 0.25 * signal_share(opened / 100 * error, 0.9)
    assert shares == sorted(shares)
    assert shares[-1] > 0.8 * signal_share(10 * error, 0.9)


def test_a_policy_that_stands_still_shows_weak_signals_and_moves_by_noise_less_often():
    rng = random.Random(0)
    noise, signal, older = [], [], []
    for _ in range(200):
        steps = [rng.gauss(0.0, 0.1) for _ in range(180)]
        noise.append(sum(shares_of(steps)))
        moving, opened = GradientSignal(20, 0.9), 0.0
        for step in steps:
            moving.update(step)
            opened += moving.share
        older.append(opened)
        signal.append(shares_of([step + 0.04 for step in steps]))
    assert sum(share > 0 for share in noise) <= 8
    assert sum(noise) < sum(older)
    assert sum(any(shares[:80]) for shares in signal) > 140


def test_what_a_policy_that_moves_has_left_is_forgotten_sooner():
    still, moving = (GradientSignal(20, 0.9) for _ in range(2))
    for signal in (still, moving):
        for _ in range(30):
            signal.update(0.3)
        for _ in range(30):
            signal.update(0.0, moved=signal is moving)
    assert still.average > 3 * moving.average
    assert still.terms > moving.terms


def first_share(parts):
    """The share after the first step of a run that has an agreement, which
    consists of these parts."""
    signal = GradientSignal(20, 0.9)
    signal.update(None)
    signal.update(sum(parts), parts)
    return signal.share


@given(st.lists(st.floats(0.05, 0.06), min_size=10, max_size=16))
def test_groups_that_agree_open_the_gate_at_the_first_agreement(parts):
    assert 0 < first_share(parts) < signal_share(sum(parts), 0.9)


def test_a_few_groups_or_groups_that_differ_do_not_open_it():
    assert first_share([0.2] * 4) == first_share([0.9]) == first_share(()) == 0.0
    assert first_share([0.9, *[-0.02] * 8, *[0.02] * 7]) == 0.0


def test_only_the_first_steps_of_a_run_are_split_by_groups():
    signal, young = GradientSignal(20, 0.9), []
    for _ in range(8):
        young.append(signal.is_young)
        signal.update(0.1)
    assert young == [True] * YOUNG + [False] * (8 - YOUNG)
    assert not GradientSignal(0, 0.9).is_young


@pytest.mark.parametrize("terms", [8, 16, 60])
def test_as_many_standard_errors_are_as_rare_for_any_number_of_terms(terms):
    rng, errors = random.Random(terms), []
    for _ in range(20_000):
        made = [rng.gauss(0.0, 1.0) for _ in range(terms)]
        errors.append(standard_errors(sum(made), sum(one * one for one in made), terms))
    for limit, share in ((1.0, 0.159), (2.0, 0.0228)):
        assert 0.6 * share < sum(error > limit for error in errors) / 20_000 < 1.1 * share
    assert sum(error > 3.0 for error in errors) / 20_000 < 0.0017
    assert standard_errors(4.0, 4.0, 4.0) == 0.0  # four of one size and sign
    assert standard_errors(8.0, 8.0, 8.0) == math.inf
    assert standard_errors(-8.0, 8.0, 8.0) == standard_errors(0.0, 0.0, 8.0) == 0.0


def test_noise_of_groups_rarely_opens_it():
    """Noise along one direction: each step's agreement is near 1 or -1, and only its groups
    show that it is chance."""
    rng, opened = random.Random(0), 0
    for _ in range(2000):
        signal = GradientSignal(20, 0.9)
        signal.update(None)
        for _ in range(5):
            parts = [rng.gauss(0.0, 1.0) for _ in range(16)]
            signal.update(sum(parts) / max(16.0, abs(sum(parts))), [part / 16.0 for part in parts])
            opened += signal.share > 0
    assert opened / 10_000 < 0.004


# In the trainer.


def trainer_of(tiny_dir, **settings):
    config = TrainConfig(
        **{"lr": 1e-3, "schedule": "constant", "weight_decay": 0.0, **ANY, **settings}
    )
    return Trainer(models.load(tiny_dir)[0], config)


def dealt(groups, seed):
    """The groups with their rewards dealt anew."""
    rng = random.Random(seed)
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        rng.shuffle(rewards)
        for t, reward in zip(group.trajectories, rewards, strict=True):
            t.reward = reward
    return groups


def test_the_same_lesson_opens_the_gate_and_noise_does_not(tiny_dir):
    lesson, noise = (
        trainer_of(tiny_dir, gradient_signal_steps=10),
        trainer_of(tiny_dir, gradient_signal_steps=10),
    )
    rates = []
    for step in range(30):
        learned = lesson.step(random_groups(0), step=step, steps=30).metrics
        shuffled = noise.step(dealt(random_groups(0, groups=8), step), step=step, steps=30).metrics
        rates.append((learned["lr"], shuffled["lr"]))
    assert rates[0] == (0.0, 0.0)
    assert learned["gradient_agreement"] > 0.5
    assert rates[-1][0] > 0.7e-3
    assert sum(rate for _, rate in rates) / 30 < 0.05e-3


def test_the_parts_of_groups_are_those_of_the_agreement(tiny_dir, monkeypatch):
    """They are measured by finite differences, and sum to the cosine."""
    found = []
    monkeypatch.setattr(
        GradientSignal,
        "update",
        lambda self, agreement, parts=(), **_more: found.append((agreement, parts)),
    )
    trainer = trainer_of(tiny_dir, gradient_signal_steps=10, micro_tokens=60)
    for step in range(3):
        before = fingerprint(trainer.model)
        trainer.step(random_groups(0, groups=6), step=step, steps=9)
        assert (fingerprint(trainer.model) == before) == (trainer.signal_share == 0.0)
    assert all(not parts for _, parts in found[1::2])  # the scaled agreement has none
    for step, (agreement, parts) in enumerate(found[::2]):
        assert len(parts) == 3 if step == 0 else 3 < len(parts) <= 6
        assert sum(parts) == pytest.approx(agreement, abs=0.03)


def test_the_first_step_compares_the_gradients_of_its_halves(tiny_dir, monkeypatch):
    compared = []
    whole = Optimizer.agreement

    def record(self, gradient, other, **given):
        compared.append(torch.cat([g.flatten().double() for g in gradient.values()]))
        return whole(self, gradient, other, **given)

    monkeypatch.setattr(Optimizer, "agreement", record)
    groups = random_groups(0, groups=7)
    for made in (groups[::2], groups[1::2]):
        trainer_of(tiny_dir).step(made, step=0, steps=9)
    trainer = trainer_of(tiny_dir, gradient_signal_steps=10, max_grad_norm=0.01)
    found = trainer.step(groups, step=0, steps=9).metrics
    assert found["gradient_agreement"] == pytest.approx(
        float(torch.cosine_similarity(*compared[:2], dim=0)), abs=1e-4
    )
    units = sum(one.square() for one in compared[:2]).sqrt() + 1e-8
    expected = float(torch.cosine_similarity(*(one / units for one in compared[:2]), dim=0))
    assert found["gradient_agreement_scaled"] == pytest.approx(expected, abs=1e-3)


def test_one_lesson_in_every_task_is_learned_from_the_first_step_on(tiny_dir):
    made = random_groups(0, groups=1)[0]
    tasks = [Task(f"t{n}", id=f"t{n}") for n in range(20)]
    groups = [Group(task, [replace(t, task=task) for t in made.trajectories]) for task in tasks]
    figures = trainer_of(tiny_dir, gradient_signal_steps=20).step(groups, step=0, steps=9).metrics
    assert figures["gradient_agreement"] == pytest.approx(1.0, abs=1e-4)
    assert figures["lr"] > 0.9e-3
    assert (
        trainer_of(tiny_dir, gradient_signal_steps=20)
        .step(groups[:1], step=0, steps=9)
        .metrics["lr"]
        == 0.0
    )


def test_a_move_along_a_direction_is_undone_to_the_bit(tiny_dir):
    trainer = trainer_of(tiny_dir)
    trainer.step(random_groups(0), step=0, steps=9)
    before, past = (
        fingerprint(trainer.model),
        [p.detach().clone() for p in trainer.model.parameters()],
    )
    with trainer.optimizer.moved(trainer.optimizer.momentum(), 0.25):
        gap = torch.cat(
            [(p - q).flatten() for p, q in zip(trainer.model.parameters(), past, strict=True)]
        )
        assert float(gap.norm()) == pytest.approx(0.25, rel=1e-3)
    assert fingerprint(trainer.model) == before


def test_noise_moves_the_weights_less(tiny_dir):
    moved = {}
    for memory in (0, 20):
        trainer = trainer_of(tiny_dir, gradient_signal_steps=memory)
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        for step in range(30):
            trainer.step(dealt(random_groups(0, groups=8), step), step=step, steps=30)
        moved[memory] = distance(
            torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), before
        )
    assert moved[20] < 0.1 * moved[0]


def test_the_same_episodes_again_are_no_evidence(tiny_dir):
    """Epochs and minibatches of a step share episodes, so their noise agrees; only what a
    step begins with counts."""
    trainer = trainer_of(tiny_dir, gradient_signal_steps=6, epochs=4, minibatches=2)
    assert trainer.signals[0].beta == 0.9**4
    restore(trainer.signals[1], 0.8, 0.001)  # of a run in which gradients agree
    figures = trainer.step(random_groups(0), step=0, steps=9).metrics
    assert figures["optimizer_steps"] == 8
    assert trainer.signals[0].average == pytest.approx(figures["gradient_agreement"] / 6)
    found = trainer.step(random_groups(0), step=1, steps=9).metrics["gradient_agreement"]
    assert trainer.signals[0].average == pytest.approx(
        5 / 36 * figures["gradient_agreement"] + found / 6
    )


def test_gradients_that_change_nothing_are_counted_once(tiny_dir):
    once, often = (
        trainer_of(tiny_dir, gradient_signal_steps=6, epochs=epochs, minibatches=2)
        for epochs in (1, 3)
    )
    before = fingerprint(often.model)
    for trainer in (once, often):
        figures = trainer.step(random_groups(0), step=0, steps=9).metrics
        assert figures["optimizer_steps"] == 2
    assert fingerprint(often.model) == before
    momenta = zip(
        once.optimizer.momentum().values(), often.optimizer.momentum().values(), strict=True
    )
    assert all(torch.equal(one, other) for one, other in momenta)


@pytest.mark.parametrize("average", [0.05, 0.2, 0.3, 0.4, 0.6])
def test_a_step_takes_the_fewest_passes_that_move_as_far_as_its_share_of_all(tiny_dir, average):
    lr = 1e-3
    trainer = trainer_of(
        tiny_dir, gradient_signal_steps=50, epochs=4, minibatches=2, lr=lr, schedule="constant"
    )
    trainer.signals[1].restore(average, 1e-5, 1.0, 1.0, 0.001)
    figures = trainer.step(random_groups(0), step=0, steps=9).metrics
    passes, share = figures["optimizer_steps"] / 2, trainer.signal_share
    assert 0 < share < 1
    assert passes * figures["lr"] == pytest.approx(4 * share * lr)
    assert figures["lr"] <= lr
    assert (passes - 1) * lr < 4 * share * lr


def test_a_step_without_signal_is_no_look(tiny_dir):
    trainer = trainer_of(tiny_dir, gradient_signal_steps=6)
    for step in range(3):
        trainer.step(random_groups(0), step=step, steps=9)
    average = trainer.signals[0].average
    trainer.step(random_groups(1, rewards=(1.0,)), step=3, steps=9)
    assert trainer.signals[0].average == average > 0


def test_no_bit_depends_on_the_order_of_groups(tiny_dir):
    one, other = (
        trainer_of(tiny_dir, gradient_signal_steps=6),
        trainer_of(tiny_dir, gradient_signal_steps=6),
    )
    for step in range(4):
        made = random_groups(step // 2)
        one.step(made, step=step, steps=9)
        other.step([Group(g.task, g.trajectories[::-1]) for g in made[::-1]], step=step, steps=9)
    assert one.signals[0].average == other.signals[0].average > 0
    assert fingerprint(one.model) == fingerprint(other.model)


def test_layout_of_the_batch_plays_no_part(tiny_dir):
    one, other = trainer_of(tiny_dir), trainer_of(tiny_dir, micro_tokens=40)
    for step in range(3):
        first, second = (t.step(random_groups(0), step=step, steps=9).metrics for t in (one, other))
    assert first["gradient_agreement"] == pytest.approx(second["gradient_agreement"], abs=1e-3)


def test_another_phase_forgets_what_was_seen(tiny_dir):
    trainer = trainer_of(tiny_dir, gradient_signal_steps=6)
    for step in range(3):
        trainer.step(random_groups(0), step=step, steps=9)
    trainer.reset_optimizer()
    assert trainer.signals[0].average == 0.0


def test_the_rate_follows_the_measure_that_shows_more(tiny_dir):
    trainer = trainer_of(tiny_dir, gradient_signal_steps=20)
    assert trainer.signal_share == 0.0
    restore(trainer.signals[1], 0.2, 0.001)
    assert trainer.signal_share == trainer.signals[1].share > 0.0
    restore(trainer.signals[0], 0.4, 0.001)
    assert trainer.signal_share == trainer.signals[0].share > trainer.signals[1].share


@pytest.mark.parametrize("steps", [0, 1])
def test_a_large_parameter_is_compared_in_pieces(monkeypatch, steps):
    def agreement():
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = Optimizer(model, TrainConfig(), Ranks())
        for number in range(steps + 1):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if number < steps:
                optimizer.step(1e-3)
        other = optimizer.momentum() or {p: torch.randn_like(p) for p in model.parameters()}
        return optimizer.agreement(optimizer.gradient(), other)

    whole = agreement()
    monkeypatch.setattr("turnwright.training.trainer.optimizer.WHOLE", 100)
    monkeypatch.setattr("turnwright.training.trainer.optimizer.PIECE", 70)
    assert agreement() == pytest.approx(whole, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 20_000),
    without=st.booleans(),
    has_past=st.booleans(),
    scale=st.sampled_from((1e-6, 1.0, 100.0)),
    seed=st.integers(0, 999),
)
def test_the_kernel_for_large_models_has_the_agreement_of_tensors(
    size, without, has_past, scale, seed
):
    """Each sum within rounding of the one in float64."""
    torch.manual_seed(seed)
    gradient, other = scale * torch.randn(size), scale * torch.randn(size)
    past = (scale * torch.randn(size)) ** 2 if has_past else torch.zeros(0)
    found = dot_products(gradient.numpy(), other.numpy(), past.numpy(), without, 0.99, 1e-16)

    o = other.double()
    g = gradient.double() - o if without else gradient.double()
    mean = (0.99 * past.double() + 0.01 * g * g if has_past else g * g + o * o) + 1e-16
    pairs = (g, o), (g, g), (o, o), (g / mean, o), (g / mean, g), (o / mean, o)
    for value, (one, two) in zip(found, pairs, strict=True):
        size_of_terms = float((one * two).abs().sum())
        assert abs(value - float((one * two).sum())) <= 1e-4 * size_of_terms


def test_a_large_models_agreement_is_that_of_a_small_one(monkeypatch):
    def agreements():
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 200)
        optimizer, found = Optimizer(model, TrainConfig(), Ranks()), []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            found.append(optimizer.agreement(optimizer.gradient(), optimizer.momentum()))
            optimizer.clip_gradient()
            optimizer.step(1e-3)
        return optimizer.one_pass, found

    kernel, expected = agreements()
    assert not kernel
    monkeypatch.setattr("turnwright.training.trainer.optimizer.LARGE_WEIGHTS", 1)
    kernel, found = agreements()
    assert kernel
    assert found[0] is expected[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one == pytest.approx(other, rel=1e-4)

"""Credit by turn, loss scales, KL estimators and penalties: by hand, by enumeration, and in
the account of every id."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.strategies import groups
from kit.training import STILL, E, M, P, branched, chain, gradient

from turnwright.config import TrainConfig
from turnwright.errors import ConfigError, UsageError
from turnwright.training import TRAINED, Trainer, trainable_tokens
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.training.group_member import discounted_returns
from turnwright.training.loss import ESTIMATORS, Correction, k1, k2, k3
from turnwright.training.loss_weights import TokenWeights, last_round, loss_scale
from turnwright.types import Group, Message, RowReward, Task, Turn


def episode(replies, rewards, *, own=0.0, sample=0, roles=None):
    """A trajectory of turns, with the reward of each and what the episode adds to them."""
    pieces = [(P, [1, 2])]
    for reply in replies:
        pieces += [(M, reply), (E, [7])]
    made = chain(pieces, sample=sample, reward=math.fsum(rewards) + own)
    for turn in range(len(replies)):
        said = (Message(roles[turn] if roles else "user", "x"),)
        made.turns.append(
            Turn(
                "main",
                2 * turn,
                0,
                (1 + 2 * turn,),
                said,
                Message("assistant", "y"),
                parent=turn - 1,
                reward=rewards[turn],
            )
        )
    return made


def by_turn(ledger):
    """The advantage of each turn's first id, by trajectory."""
    return [
        c.advantages_of([(index, 0) for t in c.trajectory.turns for index in t.spans])
        for c in ledger.credits
    ]


def in_rows(rewards, sample=0, added=0.0):
    """A trajectory whose replies are rows of their own, of one id each, with their rewards."""
    made = branched(
        episode(
            [[3 + number + 2 * sample] for number in range(len(rewards))],
            [0.0] * len(rewards),
            sample=sample,
        )
    )
    made.turns = [
        Turn("main", 2 * number, 0, (2 * number + 1,), (), Message("assistant", "y"))
        for number in range(len(rewards))
    ]
    made.row_rewards = [RowReward(reward, (number,)) for number, reward in enumerate(rewards)]
    made.reward = math.fsum(rewards) / len(rewards) + added
    return made


# Returns and baselines.


def test_returns_by_hand():
    assert discounted_returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert discounted_returns([1.0, 2.0], 1.0) == [3.0, 2.0]


TWO = [
    Group(
        Task("t", id="t"),
        [episode([[3], [4, 5]], [1.0, 2.0], own=0.5), episode([[6]], [4.0], sample=1)],
    )
]


@pytest.mark.parametrize(
    ("kind", "discount", "expected"),
    [
        # returns 3.5, 2.5 and 4, 0 behind its end
        ("rloo", 1.0, [[-0.5, 2.5], [0.5]]),
        ("mean", 1.0, [[-0.25, 1.25], [0.25]]),
        ("rloo", 0.5, [[-1.75, 2.5], [1.75]]),
        # squares .0625 * 2 + 1.5625 * 2 over (2 - 1) * 2
        (
            "std",
            1.0,
            [
                [-0.25 / (math.sqrt(1.625) + 1e-4), 1.25 / (math.sqrt(1.625) + 1e-4)],
                [0.25 / (math.sqrt(1.625) + 1e-4)],
            ],
        ),
        # tokens 3.5, 2.5, 2.5, 4: mean 3.125, variance 0.421875
        (
            "batch",
            1.0,
            [
                [v / (math.sqrt(0.421875) + 1e-4) for v in (0.375, -0.625)],
                [0.875 / (math.sqrt(0.421875) + 1e-4)],
            ],
        ),
    ],
)
def test_turn_advantages_by_hand(kind, discount, expected):
    found = by_turn(advantages(TWO, CreditSettings(kind, credit="turn", discount=discount)))
    assert [value for row in found for value in row] == pytest.approx(
        [value for row in expected for value in row], abs=1e-12
    )


ROWS = [Group(Task("t", id="t"), [in_rows([1.0, 0.0, 0.5]), in_rows([1.0], 1, added=0.25)])]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # means 0.5 and 1.25, whose mean is 0.875
        ("mean", [[0.125, -0.875, -0.375], [0.375]]),
        ("rloo", [[-0.25, -1.25, -0.75], [0.75]]),
        # (0.125 ** 2 + 0.875 ** 2 + 0.375 ** 2) / 3 + 0.375 ** 2 over 2 - 1
        (
            "std",
            [
                [v / (math.sqrt(0.921875 / 3 + 0.140625) + 1e-4) for v in row]
                for row in ([0.125, -0.875, -0.375], [0.375])
            ],
        ),
        # ids 1, 0, 0.5, 1.25: mean 0.6875
        (
            "batch",
            [
                [v / (math.sqrt(0.23046875) + 1e-4) for v in row]
                for row in ([0.3125, -0.6875, -0.1875], [0.5625])
            ],
        ),
    ],
)
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_advantages_of_rows_by_hand(kind, expected, credit):
    """Each row's own reward against the mean of the episodes' means."""
    found = by_turn(advantages(ROWS, CreditSettings(kind, credit=credit, discount=0.5)))
    assert [value for row in found for value in row] == pytest.approx(
        [value for row in expected for value in row], abs=1e-12
    )


def test_rows_give_a_signal_where_the_episodes_are_equal():
    rewards = [[1.0, 0.0], [0.0, 1.0]]
    credits = advantages(
        [Group(Task("t", id="t"), [in_rows(row, n) for n, row in enumerate(rewards)])],
        CreditSettings("mean"),
    )
    assert by_turn(credits) == [[0.5, -0.5], [-0.5, 0.5]]
    same = advantages(
        [Group(Task("t", id="t"), [in_rows([0.5, 0.5], n) for n in range(2)])],
        CreditSettings("mean"),
    )
    assert {one.reason for one in same.credits} == {"no_signal"}


def test_a_row_has_its_reward_in_samples_and_at_its_last_token():
    made = in_rows([1.0, 0.0, 0.5], added=0.25)
    rows = list(made.samples())
    assert [row.reward for row in rows] == [1.25, 0.25, 0.75]
    assert [row.token_rewards[-1] for row in rows] == [1.25, 0.25, 0.75]
    assert [sum(row.token_rewards) for row in rows] == [1.25, 0.25, 0.75]


def test_the_gradient_is_that_of_each_row_with_its_advantage():
    """Linear in the rows' advantages, and another for each row."""

    def learned(rewards):
        model = Model64()
        made = [Group(Task("t", id="t"), [in_rows(row, n) for n, row in enumerate(rewards)])]
        rest = {"advantage": "mean", "aggregation": "fixed", "fixed_length": 1}
        Trainer(model, TrainConfig(**STILL, **rest)).step(made, step=0, steps=1)
        return gradient(model)

    first, second = learned([[2.0, 0.0], [0.0, 0.0]]), learned([[0.0, 2.0], [0.0, 0.0]])
    mixed = learned([[2.0, 2.0], [0.0, 0.0]])
    assert (mixed - first - second).norm() < 1e-10 * mixed.norm()
    assert (first - second).norm() > 0.1 * first.norm()


def test_turns_give_a_signal_where_the_sums_are_equal():
    made = [
        Group(
            Task("t", id="t"),
            [episode([[3], [4]], [1.0, 0.0]), episode([[3], [4]], [0.0, 1.0], sample=1)],
        )
    ]
    assert [c.reason for c in advantages(made).credits] == ["no_signal"] * 2
    assert by_turn(advantages(made, CreditSettings("rloo", credit="turn"))) == [
        [0.0, -1.0],
        [0.0, 1.0],
    ]


STOP, GO = 8, 9
PAID = {STOP: (0.3, -0.2, 1.0), GO: (0.1, -0.4, 0.7)}
PATHS = [(STOP,), (GO, STOP), (GO, GO, STOP), (GO, GO, GO)]
"""Every trajectory of a problem of three turns at most: go on, or stop."""


def path(actions, sample=0):
    return episode(
        [[a] for a in actions], [PAID[a][turn] for turn, a in enumerate(actions)], sample=sample
    )


def chance(model, trajectory):
    """The log-probability of a trajectory under a model that can say nothing but stop and go."""
    (sample,) = trajectory.samples()
    logits = model(torch.tensor([sample.ids]), torch.arange(len(sample.ids))[None]).logits[0][
        :, [STOP, GO]
    ]
    logp = torch.log_softmax(logits, -1)
    return sum(
        logp[i - 1, sample.ids[i] - STOP] for i, weight in enumerate(sample.weights) if weight
    )


def enumerated(kind, credit, discount=1.0, aggregation="fixed"):
    """The exact mean of the trainer's gradient over all groups of two, and the gradient
    of the expected return."""
    model = Model64()
    keys = {
        "advantage": kind,
        "credit": credit,
        "discount": discount,
        "aggregation": aggregation,
        "fixed_length": 1,
    }
    trainer = Trainer(model, TrainConfig(**keys, **STILL), banned_ids=set(range(50)) - {STOP, GO})
    odds = [float(chance(model, path(actions)).exp()) for actions in PATHS]
    assert math.fsum(odds) == pytest.approx(1.0)
    total = 0.0
    for (p, first), (q, second) in itertools.product(zip(odds, PATHS, strict=True), repeat=2):
        model.zero_grad()
        trainer.step([Group(Task("t", id="t"), [path(first), path(second, 1)])], step=0, steps=1)
        total = total - p * q * gradient(model)
    model.zero_grad()
    sum(
        chance(model, path(a)).exp() * sum(PAID[x][k] for k, x in enumerate(a)) for a in PATHS
    ).backward()
    return total, gradient(model)


@pytest.mark.parametrize(("kind", "share"), [("rloo", 1.0), ("mean", 0.5)])
@pytest.mark.parametrize("credit", ["turn", "trajectory"])
def test_the_gradient_is_unbiased(kind, share, credit):
    """By enumeration of all pairs of trajectories, whose ends differ, through the
    whole trainer in float64."""
    found, exact = enumerated(kind, credit)
    assert (found - share * exact).norm() < 1e-12 * exact.norm()


def test_the_enumeration_sees_a_bias():
    found, exact = enumerated("rloo", "turn", aggregation="trajectory")
    cosine = float(found @ exact / (found.norm() * exact.norm()))
    assert abs((found.norm() / exact.norm()) - 1) > 1e-3 or cosine < 0.999


# Loss scales.


def test_slots_give_the_place_of_each_id():
    made = episode([[3, 4], [5]], [0.0, 0.0])
    (sample,) = made.samples()
    assert [made.spans[span].ids[offset] for span, offset in sample.slots] == sample.ids


def test_last_round_by_hand():
    roles = ["user", "tool", "user", "tool"]
    made = episode([[3, 4], [5], [6, 7, 8], [9]], [0.0] * 4, roles=roles)
    weights = last_round(made)
    assert {span: list(given) for span, given in weights.by_span.items()} == {
        1: [0.0, 0.0],
        3: [0.0],
    }
    whole = [Group(made.task, [made, episode([[3]], [1.0], sample=1)])]
    ledger = advantages(whole, CreditSettings(scale=last_round))
    assert ledger.tokens == {TRAINED: 5, "earlier_round": 3}
    assert [credit.tokens for credit in ledger.credits] == [4, 1]


def own(tmp_path, body):
    file = tmp_path / "weigh.py"
    file.write_text(body, encoding="utf-8")
    return f"{file}:weigh"


def test_weights_multiply_the_loss_of_their_tokens(tmp_path):
    made = [
        Group(
            Task("t", id="t"),
            [
                episode([[3, 4], [5, 6]], [1.0, 0.0]),
                episode([[6, 5], [3, 4]], [0.0, 0.0], sample=1),
            ],
        )
    ]
    plain = {**STILL, "aggregation": "fixed", "fixed_length": 1}

    def learned(body):
        model = Model64()
        spec = (
            "default"
            if body is None
            else own(tmp_path, f"def weigh(trajectory):\n    return {body}\n")
        )
        figures = (
            Trainer(model, TrainConfig(**plain, loss_scale=spec))
            .step(made, step=0, steps=1)
            .metrics
        )
        return gradient(model), figures

    first, seen = learned("[1, 0]")
    assert seen["tokens_loss_scale"] == seen["tokens_trained"] == 4
    late, _ = learned("[[0, 0], [0, 1]]")
    later, _ = learned("[0, [1, 0]]")
    both, whole = learned("[3, [0.5, 2]]")
    assert whole["tokens_trained"] == 8
    assert (both - (3 * first + 2 * late + 0.5 * later)).norm() < 1e-12 * both.norm()
    everything, _ = learned(None)
    assert (everything - first - late - later).norm() < 1e-12 * everything.norm()
    for group in made:  # an agent function's own weights count once, alone and beside a scale
        for trajectory in group.trajectories:
            trajectory.turns[0].weights, trajectory.turns[1].weights = (3.0, 3.0), (0.5, 2.0)
    given, _ = learned(None)
    assert (given - both).norm() < 1e-12 * both.norm()
    beside, _ = learned("[2, 2]")
    assert (beside - 2 * both).norm() < 1e-12 * both.norm()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[1]", "returned 1 entries for 2 turns"),
        ("[1, [1]]", "turn 2: 1 weights for 2 sampled ids"),
        ("[1, -1]", "turn 2: weights must be finite and at least 0"),
        ("[1, float('nan')]", "turn 2: weights must be finite"),
        ("[1, 'x']", "turn 2: 'x' is neither a number nor numbers"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, body, said):
    weigh = loss_scale(own(tmp_path, f"def weigh(trajectory):\n    return {body}\n"))
    with pytest.raises(UsageError, match=f"task 't', sample 0: .*{said}"):
        weigh(episode([[3, 4], [5, 6]], [1.0, 0.0]))
    with pytest.raises(ConfigError, match="must take one argument"):
        loss_scale(own(tmp_path, "def weigh():\n    return 1\n"))


@settings(max_examples=100, deadline=None)
@given(
    groups(sampled_roots=True),
    st.sampled_from(("std", "rloo", "batch", "group_batch")),
    st.integers(0, 99),
)
def test_invariant_1_with_weights(made, kind, seed):
    def scale(trajectory):
        spans = enumerate(trajectory.spans)
        return TokenWeights(
            {
                i: [float((seed + i + n) % 3) for n in range(len(s.ids))]
                for i, s in spans
                if s.sampled
            },
            "loss_scale",
        )

    ledger = advantages(made, CreditSettings(kind, credit="turn", discount=0.9, scale=scale))
    assert sum(ledger.tokens.values()) == ledger.sampled
    for credit in ledger.trained:
        placed = 0
        for sample in credit.trajectory.samples():
            for place, weight in enumerate(sample.weights):
                if weight and place and credit.weights.of(*sample.slots[place]):
                    placed += 1
                    assert math.isfinite(credit.advantages_of([sample.slots[place]])[0])
        assert placed == credit.tokens == trainable_tokens(credit.trajectory, credit.weights)


# KL.


def test_estimators_by_hand():
    logp, reference = (
        torch.tensor([math.log(0.5)]).double(),
        torch.tensor([math.log(0.25)]).double(),
    )
    assert k1(logp, reference).item() == pytest.approx(math.log(2))
    assert k2(logp, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(logp, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_means_and_gradients_of_the_estimators(name):
    """By enumeration over seven ids: what each estimates, and where its
    gradient in a loss leads."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    forward, backward = (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()
    values = ESTIMATORS[name](p, q)
    if name != "k2":
        assert (p.exp() * values).sum().item() == pytest.approx(forward.item(), abs=1e-12)
    (slope,) = torch.autograd.grad((p.exp().detach() * values).sum(), logits, retain_graph=True)
    truth = {"k1": 0.0 * forward, "k2": forward, "k3": backward}[name]
    (expected,) = torch.autograd.grad(truth, logits)
    assert torch.allclose(slope, expected, atol=1e-12)


# Corrections.

LOGP = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
RATIOS = torch.tensor([0.1, 1.5, 1.9, 4.0], dtype=torch.float64)
OWNERS = torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("tis", {}, [0.1, 1.5, 1.9, 2.0]),
        ("tis", {"correction_high": 3.0}, [0.1, 1.5, 1.9, 3.0]),
        ("icepop", {}, [0.0, 1.5, 1.9, 4.0]),
        ("icepop", {"correction_low": 0.05, "correction_high": 1.8}, [0.1, 1.5, 0.0, 0.0]),
        (
            "sequence_mis",
            {},
            [0.4, 2.85, 2.85, 0.4],
        ),  # products 0.4 and 2.85, whatever rows the tokens are in
        ("sequence_mis", {"correction_high": 2.8}, [0.4, 0.0, 0.0, 0.4]),
        ("sequence_mis_mean", {}, [0.0] * 4),
        (
            "sequence_mis_mean",
            {"correction_low": 0.6, "correction_high": 1.6},
            [1.0, 0.0, 0.0, 1.0],
        ),  # 0.63 and 1.69
    ],
)
def test_corrections_by_hand(kind, bounds, expected):
    correction = Correction.of(TrainConfig(correction=kind, **bounds))
    found = correction.weights(LOGP, LOGP - RATIOS.log(), OWNERS)
    assert found.tolist() == pytest.approx(expected)

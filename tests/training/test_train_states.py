"""Algorithms that compare turns which began in equal states: values by hand, float64 references
from the formulas, bias by enumeration, and the account of every id."""

import itertools
import math
import random
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.gradients import disturbed
from kit.strategies import groups
from kit.training import (
    STILL,
    E,
    M,
    P,
    chain,
    distance,
    fork_last_reply,
    gradient,
    random_groups,
    with_turns,
)

from turnwright.config import TrainConfig
from turnwright.config.names import STATE_ADVANTAGES
from turnwright.errors import ConfigError, RewardError
from turnwright.training import Trainer, resolve_settings
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.training.step_groups import StepGroupSettings, states_of
from turnwright.types import Group, ImageRef, MediaPlacement, Message, Span, Task

ALGORITHMS = STATE_ADVANTAGES
NAMES = {kind: kind for kind in ALGORITHMS} | {"state_std": "state_grpo"}
"""The algorithm of each advantage."""


# Which state a turn began in.


def episode(replies, states=(), rewards=(), *, sample=0, after=7, task="t"):
    pieces = [(P, [1, 2])]
    for reply in replies:
        pieces += [(M, reply), (E, [after])]
    made = chain(pieces, sample=sample, task=task, reward=math.fsum(rewards) if rewards else 0.0)
    return with_turns(made, states, rewards)


def test_turns_that_read_the_same_ids_began_in_the_same_state():
    first, second = episode([[3], [4]]), episode([[3], [5]], sample=1)
    assert states_of(first, "history") == states_of(second, "history")
    other = episode([[9], [4]], sample=2)
    assert states_of(first, "history")[0] == states_of(other, "history")[0]
    assert states_of(first, "history")[1] != states_of(other, "history")[1]


def test_observations_are_equal_whatever_came_before():
    first, other = episode([[3], [4]]), episode([[9], [4]], sample=1)
    assert states_of(first, "observation") == states_of(other, "observation")
    other.turns[1].messages = (Message("user", "something else"),)
    assert states_of(first, "observation")[1] != states_of(other, "observation")[1]


@pytest.mark.parametrize("name", ["left", 3, {"at": [1, 2], "key": None}, [True], 0.5, ""])
@pytest.mark.parametrize("key", ["history", "observation"])
def test_a_name_counts_before_what_was_read(name, key):
    first, other = episode([[3], [4]], [name, "end"]), episode([[9], [5]], [name, "x"], after=8)
    assert states_of(first, key)[1] == states_of(other, key)[1]
    unnamed = episode([[3], [4]])
    assert states_of(first, key)[1] != states_of(unnamed, key)[1]


def test_names_are_told_apart_by_value_and_agent():
    names = ["1", 1, True, [1], {"1": 1}]
    states = [states_of(episode([[3], [4]], [name, "end"]), "history")[1] for name in names]
    assert len(set(states)) == len(names)
    made = episode([[3], [4]], ["a", "end"])
    made.turns[1].agent = "other"
    assert states_of(made, "history")[1] != states_of(episode([[3], [4]], ["a", "b"]), "history")[1]


def test_an_action_that_was_refused_leaves_the_state_as_it_was():
    made = episode([[3], [4], [5]], ["s", "s", "end"])
    made.turns[1].info = {"invalid_action": "say left or right"}
    states = states_of(made, "history")
    assert states[1] == states[2]
    made.turns[0].info = {}
    states = states_of(made, "history")
    assert states[1] != states[2]


def test_a_name_that_json_cannot_sort_is_a_name():
    states = states_of(episode([[3], [4]], [{1: "a", "b": {2}}, "end"]), "history")
    again = states_of(episode([[3], [4]], [{"b": {2}, 1: "a"}, "end"]), "history")
    assert states == again


# Values by hand.

FORK = [
    Group(
        Task("t", id="t"),
        [
            episode([[3], [4]], ["s", "end"], [0.0, 1.0]),
            episode([[5], [6]], ["s", "end"], [0.5, 0.0], sample=1),
            episode([[5], [8]], ["r", "end"], [0.0, 0.0], sample=2),
        ],
    )
]
"""All begin alike; the first two meet again in state s, the third is alone in r."""


def by_turn(credits):
    return [
        credit.advantages_of([(index, 0) for t in credit.trajectory.turns for index in t.spans])
        for credit in credits.credits
    ]


def flat(rows):
    return [value for row in rows for value in row]


def std(values):
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-4


def test_gigpo_by_hand():
    # Totals 1, 0.5, 0; returns from the opening on with discount 0.5: 0.5, 0.5, 0; from s: 1, 0.
    found = by_turn(advantages(FORK, CreditSettings("gigpo", credit="turn", discount=0.5)))
    whole = [value / std([1.0, 0.5, 0.0]) for value in (0.5, 0.0, -0.5)]
    opening = [value / std([0.5, 0.5, 0.0]) for value in (1 / 6, 1 / 6, -1 / 3)]
    in_s = [value / std([1.0, 0.0]) for value in (0.5, -0.5)]
    expected = [
        [whole[0] + opening[0], whole[0] + in_s[0]],
        [whole[1] + opening[1], whole[1] + in_s[1]],
        [whole[2] + opening[2], whole[2]],
    ]
    assert flat(found) == pytest.approx(flat(expected), abs=1e-12)

    half = CreditSettings(
        "gigpo", credit="turn", discount=0.5, by_state=StepGroupSettings(step_weight=0.5)
    )
    assert by_turn(advantages(FORK, half))[0][1] == pytest.approx(whole[0] + 0.5 * in_s[0])


def test_gagpo_by_hand():
    # Values: the opening 1.5 / 3, s 0.5, r 0. Errors without a discount:
    # first 0 + 0.5 - 0.5 and 1 - 0.5; second 0.5 + 0.5 - 0.5 and 0 - 0.5; third 0 + 0 - 0.5 and 0.
    settings = CreditSettings("gagpo", credit="turn", by_state=StepGroupSettings(gae_lambda=0.5))
    found = by_turn(advantages(FORK, settings))
    raw = [0.0 + 0.5 * 0.5, 0.5, 0.5 - 0.5 * 0.5, -0.5, -0.5, 0.0]
    mean = math.fsum(raw) / 6
    assert flat(found) == pytest.approx([(v - mean) / std(raw) for v in raw], abs=1e-12)


def test_state_rloo_by_hand():
    # In s the other's return: 0 and 1. After the opening, s promises (1 + 0) / 2 to both.
    # Others' returns from the opening on: (0.5 + 0) / 2, (1 + 0) / 2, (1 + 0.5) / 2.
    # In r nobody else was: the others' returns from turn 1 on, (1 + 0) / 2.
    settings = CreditSettings(
        "state_rloo", credit="turn", by_state=StepGroupSettings(gae_lambda=None)
    )
    found = by_turn(advantages(FORK, settings))
    assert flat(found) == pytest.approx(
        [0.5 - 0.25, 1.0, 0.5 + 0.5 - 0.5, -1.0, 0.0 - 0.75, -0.5], abs=1e-12
    )
    own = CreditSettings("state_rloo", credit="turn", by_state=StepGroupSettings(gae_lambda=1.0))
    assert by_turn(advantages(FORK, own))[0][0] == pytest.approx(1.0 - 0.25)


def test_a_state_that_is_met_again_counts_once_for_each_of_the_others():
    made = [
        Group(
            Task("t", id="t"),
            [
                episode([[3], [4], [5]], ["s", "s", "end"], [0.0, 1.0, 2.0]),
                episode([[3], [4]], ["s", "end"], [0.0, 7.0], sample=1),
            ],
        )
    ]
    settings = CreditSettings(
        "state_rloo", credit="turn", by_state=StepGroupSettings(gae_lambda=1.0)
    )
    found = by_turn(advantages(made, settings))
    assert found[1][1] == pytest.approx(7.0 - 3.0)  # the other's first return from s, not 2
    assert found[0][1:] == pytest.approx([3.0 - 7.0, 2.0 - 7.0])


def test_maxrl_by_hand():
    made = [
        Group(
            Task("t", id="t"),
            [episode([[3], [4]], (), [0.0, r], sample=n) for n, r in enumerate((1.0, 0.0, 0.0))],
        )
    ]
    found = [credit.advantage for credit in advantages(made, CreditSettings("maxrl")).credits]
    assert found == pytest.approx([2.0, -1.0, -1.0])
    found = by_turn(advantages(made, CreditSettings("maxrl", credit="turn")))
    assert flat(found) == pytest.approx([2.0, 2.0, -1.0, -1.0, -1.0, -1.0])


def test_maxrl_needs_a_success_and_no_negative_reward():
    lost = [Group(Task("t", id="t"), [episode([[3]], (), [0.0], sample=n) for n in range(3)])]
    assert {credit.reason for credit in advantages(lost, CreditSettings("maxrl")).credits} == {
        "no_signal"
    }
    lost[0].trajectories[1].reward = -0.5
    with pytest.raises(RewardError, match=r"is -0\.5; advantage = \"maxrl\" divides by the mean"):
        advantages(lost, CreditSettings("maxrl"))


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_equal_returns_from_every_state_have_no_signal(kind):
    made = [
        Group(
            Task("t", id="t"),
            [episode([[3], [4]], ["s", "end"], [0.1, 0.2], sample=n) for n in range(3)],
        )
    ]
    credits = advantages(made, CreditSettings(kind, credit="turn")).credits
    assert {credit.reason for credit in credits} == {"no_signal"}


@pytest.mark.parametrize("kind", ["gigpo", "state_rloo"])
def test_a_turn_has_a_signal_where_the_sums_are_equal(kind):
    made = [
        Group(
            Task("t", id="t"),
            [
                episode([[3], [4]], ["s", "end"], [1.0, 0.0]),
                episode([[5], [6]], ["s", "end"], [0.0, 1.0], sample=1),
            ],
        )
    ]
    settings = CreditSettings(kind, credit="turn", by_state=StepGroupSettings(gae_lambda=1.0))
    found = by_turn(advantages(made, settings))
    assert found[0][1] < 0 < found[1][1]


# References: the whole step, in loops over Python numbers.


def example():
    """Groups of different sizes with turns, named states that some share, cut replies, a reply that
    is not trained, an episode on several branches, and rewards by turn."""
    rng = random.Random(5)
    made = random_groups(31, groups=3, size=5, turns=4)
    made[1].trajectories = made[1].trajectories[:3]
    for g in made:
        for t in g.trajectories:
            turns = sum(span.sampled for span in t.spans)
            rewards = [rng.choice((0.0, 0.5, 1.0)) for _ in range(turns)]
            t.reward = math.fsum(rewards) + rng.choice((0.0, 0.25))
            with_turns(t, [rng.choice("abc") for _ in range(turns)], rewards)
    for g, sample, untrained in ((0, 0, "rewound"), (0, 3, "turn_length")):
        span = made[g].trajectories[sample].spans[1]
        span.untrained, span.untrained_from = untrained, len(span.ids) // 2
    fork_last_reply(made[2].trajectories[1])
    return made


def slow_states(t):
    states = ["start"]
    for turn in t.turns[:-1]:
        states.append(turn.info["state"])
    return states


def slow_values(kind, members, discount, trace):  # noqa: C901 - three formulas over the same loops
    """Advantages by member and turn, from the formulas in the algorithms' files."""
    rewards = []
    for t in members:
        row = [turn.reward for turn in t.turns]
        row[-1] += t.reward - sum(row)
        rewards.append(row)
    togo = [
        [sum(discount**n * r for n, r in enumerate(row[k:])) for k in range(len(row))]
        for row in rewards
    ]
    states = [slow_states(t) for t in members]
    met = defaultdict(list)
    for i, row in enumerate(states):
        for k, state in enumerate(row):
            met[state].append((i, k))

    def first(j, state):
        return next((togo[j][k] for i, k in met[state] if i == j), None)

    def others(i, k):
        found = [first(j, states[i][k]) for j in range(len(members)) if j != i]
        return [value for value in found if value is not None]

    if kind == "gigpo":
        totals = [sum(row) for row in rewards]
        values = []
        for i, row in enumerate(togo):
            of_turns = []
            for k, value in enumerate(row):
                same = [togo[a][b] for a, b in met[states[i][k]]]
                step = 0.0
                if len(same) > 1 and max(same) > min(same):
                    step = (value - sum(same) / len(same)) / std(same)
                of_turns.append((totals[i] - sum(totals) / len(totals)) / std(totals) + step)
            values.append(of_turns)
        return values

    if kind == "gagpo":
        worth = {s: sum(togo[a][b] for a, b in where) / len(where) for s, where in met.items()}
        raw = []
        for i, row in enumerate(rewards):
            errors = [
                r
                + (discount * worth[states[i][k + 1]] if k + 1 < len(row) else 0.0)
                - worth[states[i][k]]
                for k, r in enumerate(row)
            ]
            raw.append(
                [
                    sum((discount * trace) ** n * e for n, e in enumerate(errors[k:]))
                    for k in range(len(row))
                ]
            )
        every = [value for row in raw for value in row]
        return [[(v - sum(every) / len(every)) / std(every) for v in row] for row in raw]

    def after(i, k):
        """What trajectory i may expect from turn k on."""
        if k == len(rewards[i]):
            return 0.0
        own = rewards[i][k] + discount * after(i, k + 1)
        rest = others(i, k)
        if not rest:
            return own
        weight = 1 / (1 + len(rest)) if trace is None else trace
        return weight * own + (1 - weight) * sum(rest) / len(rest)

    values = []
    for i, row in enumerate(rewards):
        of_turns = []
        for k, r in enumerate(row):
            rest = others(i, k) or [
                togo[j][k] if k < len(togo[j]) else 0.0 for j in range(len(members)) if j != i
            ]
            of_turns.append(r + discount * after(i, k + 1) - sum(rest) / len(rest))
        values.append(of_turns)
    if kind == "state_std":
        every = flat(values)
        deviation = math.sqrt(sum(v**2 for v in every) / (len(every) - 1)) + 1e-4
        values = [[value / deviation for value in row] for row in values]
    return values


def row_logprobs(model, ids):
    logits = model(torch.tensor([ids]), torch.arange(len(ids))[None]).logits[0]
    return torch.log_softmax(logits, -1)


def slow_loss(model, made, kind, discount, trace, fixed):
    """The loss with its gradient, token by token, from the rows of the trajectories; ratios are to
    the engine's logprobs."""
    total, tokens, count = 0.0, 0, 0
    for g in made:
        values = slow_values(kind, g.trajectories, discount, trace)
        for t, of_turns in zip(g.trajectories, values, strict=True):
            turn_of = {index: k for k, turn in enumerate(t.turns) for index in turn.spans}
            logps, olds = defaultdict(list), defaultdict(list)
            for row in t.samples():
                logp = row_logprobs(model, row.ids)
                for place, weight in enumerate(row.weights):
                    if weight and place:
                        k = turn_of[row.slots[place][0]]
                        logps[k].append(logp[place - 1, row.ids[place]])
                        olds[k].append(row.logprobs[place])
            for k, row in logps.items():
                now, old = torch.stack(row), torch.tensor(olds[k], dtype=torch.float64)
                high = 0.2 if kind == "state_rloo" else 0.28
                ratio = torch.exp(now - old)
                if kind == "gagpo":
                    # The ratio of the turn, and the gradient of its log-probability.
                    ratio = torch.exp((now - old).sum()) * torch.exp(now - now.detach())
                    ratio = ratio * torch.exp((now - old).sum().detach() - (now - old).sum())
                bounded = ratio.clamp(1 - 0.2, 1 + high)
                total = total - torch.minimum(ratio * of_turns[k], bounded * of_turns[k]).sum()
                tokens += len(row)
            count += 1
    return total / (count * fixed if kind == "state_rloo" else tokens)


DISCOUNT = {"gigpo": 0.95, "gagpo": 0.95, "state_rloo": 1.0, "state_std": 1.0}
TRACE = {"gigpo": None, "gagpo": 0.95, "state_rloo": None, "state_std": None}


@pytest.mark.parametrize("more", [{}, {"discount": 0.8, "gae_lambda": 0.6}])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_loss_and_gradient_against_the_formula(kind, more):
    """On chains and branches, uneven groups, cut replies and some that are not trained."""
    if kind == "gigpo":
        more = {key: value for key, value in more.items() if key == "discount"}
    made = example()
    assert any(len(list(t.samples())) > 1 for g in made for t in g.trajectories)
    model = Model64()
    settings = {**STILL, "algorithm": NAMES[kind], "old_logprobs": "engine"}
    for g in made:  # near enough that not every ratio is clipped
        for t in g.trajectories:
            for row in t.samples():
                logp = row_logprobs(model, row.ids).detach()
                for place, (span, offset) in enumerate(row.slots):
                    if t.spans[span].sampled:
                        t.spans[span].logprobs[offset] = float(logp[place - 1, row.ids[place]])
    disturbed(model, 0.02, 1)
    if kind == "state_rloo":
        settings["fixed_length"] = 7
    found = Trainer(model, TrainConfig(**settings, **more)).step(made, step=0, steps=10)
    learned = gradient(model)

    model.zero_grad()
    discount = more.get("discount", DISCOUNT[kind])
    loss = slow_loss(model, made, kind, discount, more.get("gae_lambda", TRACE[kind]), 7)
    loss.backward()
    assert found.metrics["loss"] == pytest.approx(loss.item(), rel=1e-10, abs=1e-13)
    assert distance(learned, gradient(model)) < 1e-10
    assert found.metrics["clip_fraction"] > 0


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_neither_layout_nor_order_change_the_gradient(kind):
    settings = {**STILL, "algorithm": NAMES[kind], "old_logprobs": "engine"}

    def learn(made, **more):
        model = Model64()
        figures = Trainer(model, TrainConfig(**settings, **more)).step(made, step=0, steps=10)
        return figures.metrics["loss"], gradient(model)

    loss, base = learn(example())
    turned = [Group(g.task, g.trajectories[::-1]) for g in example()[::-1]]
    assert learn(turned)[0] == loss
    assert torch.equal(learn(turned)[1], base)
    for micro_tokens in (1, 60):
        assert distance(learn(example(), micro_tokens=micro_tokens)[1], base) < 1e-9


# Bias, by enumeration.

STOP, GO = 8, 9
PAID = {STOP: (0.3, -0.2, 1.0), GO: (0.1, -0.4, 0.7)}
PATHS = [(STOP,), (GO, STOP), (GO, GO, STOP), (GO, GO, GO)]


def path(actions, sample=0):
    """An episode of a problem of three turns at most: go on, or stop. Its states are its turns."""
    rewards = [PAID[a][turn] for turn, a in enumerate(actions)]
    return episode([[a] for a in actions], [f"turn {k + 1}" for k in range(len(actions))], rewards,
                   sample=sample)  # fmt: skip


def chance(model, trajectory):
    (row,) = trajectory.samples()
    logits = model(torch.tensor([row.ids]), torch.arange(len(row.ids))[None]).logits[0]
    logp = torch.log_softmax(logits[:, [STOP, GO]], -1)
    return sum(logp[i - 1, row.ids[i] - STOP] for i, weight in enumerate(row.weights) if weight)


def enumerated(kind, size, **keys):
    """The exact mean of the trainer's gradient over all groups of a size, and the gradient of the
    expected return."""
    model = Model64()
    config = TrainConfig(
        **STILL, algorithm=kind, aggregation="fixed", fixed_length=1, discount=1.0, **keys
    )
    trainer = Trainer(model, config, banned_ids=set(range(50)) - {STOP, GO})
    odds = [float(chance(model, path(actions)).exp()) for actions in PATHS]
    total = 0.0
    for chosen in itertools.product(range(len(PATHS)), repeat=size):
        model.zero_grad()
        group = [path(PATHS[which], sample) for sample, which in enumerate(chosen)]
        trainer.step([Group(Task("t", id="t"), group)], step=0, steps=1)
        total = total - math.prod(odds[which] for which in chosen) * gradient(model)
    model.zero_grad()
    sum(
        chance(model, path(a)).exp() * sum(PAID[x][k] for k, x in enumerate(a)) for a in PATHS
    ).backward()
    return total, gradient(model)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("trace", [None, 1.0, 0.3])
def test_state_rloo_is_unbiased(size, trace):
    keys = {} if trace is None else {"gae_lambda": trace}
    found, exact = enumerated("state_rloo", size, **keys)
    assert (found - exact).norm() < 1e-12 * exact.norm()


# The account, and what a recipe says.


@settings(max_examples=60, deadline=None)
@given(groups(max_groups=3, max_size=4), st.sampled_from(ALGORITHMS), st.sampled_from("ho"))
def test_every_sampled_id_is_accounted_for(made, kind, state):
    key = "history" if state == "h" else "observation"
    ledger = advantages(
        made, CreditSettings(kind, credit="turn", by_state=StepGroupSettings(key, None))
    )
    assert sum(ledger.tokens.values()) == ledger.sampled
    for credit in ledger.trained:
        for index, span in enumerate(credit.trajectory.spans):
            if span.sampled:
                slots = [(index, offset) for offset in range(len(span.ids))]
                assert all(math.isfinite(value) for value in credit.advantages_of(slots))


def test_pictures_tell_states_apart():
    """Ids of a picture's block are the same for every picture."""

    def seen(sha256):
        made = episode([[3], [4]])
        prompt = made.spans[0]
        reference = ImageRef(sha256, 2, 2)
        made.spans[0] = Span(P, prompt.ids, media=(MediaPlacement(reference, 0, 1),))
        return states_of(made, "history")

    assert seen("a" * 64) == seen("a" * 64)
    assert seen("a" * 64)[0] != seen("b" * 64)[0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"algorithm": "gigpo", "credit": "trajectory"}, "which is by turn; leave it out"),
        ({"advantage": "state_rloo", "credit": "trajectory"}, "which is by turn"),
    ],
)
def test_contradictions_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        Trainer(Model64(), TrainConfig(**keys))


def test_keys_that_are_open_are_the_algorithms():
    plain = resolve_settings(TrainConfig(algorithm="gigpo"))
    assert (plain.credit, plain.discount, plain.advantage) == ("turn", 0.95, "gigpo")
    mixed = resolve_settings(TrainConfig(advantage="gigpo", discount=0.9))
    assert (mixed.credit, mixed.discount) == ("turn", 0.9)
    assert resolve_settings(TrainConfig()).credit == "trajectory"

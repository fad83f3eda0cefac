"""Every algorithm against a slow float64 reference written from its formula, and against
values worked out by hand."""

import math
import random

import pytest
import torch
from kit.double_precision import Model64
from kit.gradients import disturbed
from kit.training import STILL, E, M, P, branched, chain, distance, gradient, random_groups

from turnwright.config import TrainConfig
from turnwright.config.names import ALGORITHM_ADVANTAGES, ALGORITHMS
from turnwright.errors import ConfigError
from turnwright.training import Trainer, resolve_settings
from turnwright.training.advantages import overlong_penalty
from turnwright.training.algorithms import BUILT_IN, TokenBatch
from turnwright.training.algorithms.settings import check_custom, load_custom
from turnwright.types import Group, Task

MOST, BUFFER, FIXED = 14, 0.5, 7


def slow_logprobs(model, ids):
    """log p(ids[i] | ids[:i]), 0 for the first, as Python numbers."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None]).logits[0].tolist()
    rows = zip(logits, ids[1:], strict=False)
    return [0.0] + [row[i] - math.log(math.fsum(math.exp(x) for x in row)) for row, i in rows]


def example(noise=0.6):
    """Three groups, one of them without signal, whose engine disagrees with `Model64()`
    by up to `noise` nats."""
    made = random_groups(21, groups=3, size=3, turns=3, rewards=(0.0, 1.0, 0.3))
    for t in made[1].trajectories:
        t.reward = 0.5
    rng, model = random.Random(4), Model64()
    for g in made:
        for t in g.trajectories:
            (sample,) = t.samples()
            logp = slow_logprobs(model, sample.ids)
            for span in t.spans:
                if span.sampled:
                    span.logprobs = [
                        logp[i] + rng.uniform(-noise, noise) for i in range(span.start, span.end)
                    ]
    return made


# The references: written from the formulas of the papers, in loops over Python numbers.


class Episode:
    def __init__(self, trajectory, group, now, ref, old=None):
        (sample,) = trajectory.samples()
        places = [place for place, weight in enumerate(sample.weights) if weight]
        logp, reference = slow_logprobs(now, sample.ids), slow_logprobs(ref, sample.ids)
        before = sample.logprobs if old is None else slow_logprobs(old, sample.ids)
        self.reward, self.group = trajectory.reward, group
        self.now, self.old, self.ref = (
            [row[place] for place in places] for row in (logp, before, reference)
        )
        self.ratios = [math.exp(a - b) for a, b in zip(self.now, self.old, strict=True)]

    def __len__(self):
        return len(self.now)


def mean(values):
    return math.fsum(values) / len(values)


def sample_std(values):
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def siblings(episodes, one):
    return [e.reward for e in episodes if e.group == one.group]


def ppo(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def k2(e, t):
    return 0.5 * (e.now[t] - e.ref[t]) ** 2


def k3(e, t):
    return math.exp(e.ref[t] - e.now[t]) - (e.ref[t] - e.now[t]) - 1


def grpo(episodes, kl, high=0.28):
    total = 0.0
    for e in episodes:
        rewards = siblings(episodes, e)
        advantage = (e.reward - mean(rewards)) / (sample_std(rewards) + 1e-4)
        flat = max(rewards) == min(rewards)  # nothing to learn: neither policy nor KL term
        total += sum(
            0.0 if flat else ppo(r, advantage, 0.2, high) + kl * k3(e, t)
            for t, r in enumerate(e.ratios)
        )
    return total / sum(map(len, episodes))


def dr_grpo(episodes, kl):
    total = 0.0
    for e in episodes:
        rewards = siblings(episodes, e)
        flat = max(rewards) == min(rewards)
        for t, ratio in enumerate(e.ratios):
            total += 0.0 if flat else ppo(ratio, e.reward - mean(rewards), 0.2, 0.2) + kl * k3(e, t)
    return total / (len(episodes) * FIXED)


def dapo(episodes, kl):
    for e in episodes:
        cache = BUFFER * MOST
        over = (
            0.0
            if len(e) <= MOST - cache
            else -1.0
            if len(e) > MOST
            else (MOST - cache - len(e)) / cache
        )
        e.reward += over
    return grpo(episodes, kl)


def rloo(episodes, kl):
    total = 0.0
    paid = [
        e.reward - kl * sum(old - ref for old, ref in zip(e.now, e.ref, strict=True))
        for e in episodes
    ]
    for i, e in enumerate(episodes):
        others = [paid[j] for j, other in enumerate(episodes) if other.group == e.group and j != i]
        total += sum(ppo(ratio, paid[i] - mean(others), 0.2, 0.2) for ratio in e.ratios)
    return total / (len(episodes) * FIXED)


def normalised(values):
    flat = [v for row in values for v in row]
    std = math.sqrt(mean([(v - mean(flat)) ** 2 for v in flat])) + 1e-4
    return [[(v - mean(flat)) / std for v in row] for row in values]


def reinforce_pp(episodes, kl):
    togo = [
        [e.reward - kl * sum(e.now[s] - e.ref[s] for s in range(t, len(e))) for t in range(len(e))]
        for e in episodes
    ]
    rows = zip(episodes, normalised(togo), strict=True)
    total = sum(
        ppo(r, a, 0.2, 0.2) for e, values in rows for r, a in zip(e.ratios, values, strict=True)
    )
    return total / sum(map(len, episodes))


def reinforce_pp_baseline(episodes, kl):
    lifted = [[e.reward - mean(siblings(episodes, e))] * len(e) for e in episodes]
    total = 0.0
    for e, values in zip(episodes, normalised(lifted), strict=True):
        total += sum(
            ppo(r, a, 0.2, 0.2) + kl * k2(e, t)
            for t, (r, a) in enumerate(zip(e.ratios, values, strict=True))
        )
    return total / sum(map(len, episodes))


def gspo(episodes, kl):
    total = 0.0
    for e in episodes:
        rewards = siblings(episodes, e)
        if max(rewards) == min(rewards):
            continue
        advantage = (e.reward - mean(rewards)) / (sample_std(rewards) + 1e-4)
        ratio = math.exp(mean([a - b for a, b in zip(e.now, e.old, strict=True)]))
        total += ppo(ratio, advantage, 3e-4, 4e-4) + kl * mean([k3(e, t) for t in range(len(e))])
    return total / len(episodes)


def cispo(episodes, kl):
    total = 0.0
    for e in episodes:
        rewards = siblings(episodes, e)
        if max(rewards) == min(rewards):
            continue
        advantage = (e.reward - mean(rewards)) / (sample_std(rewards) + 1e-4)
        total += sum(
            -min(r, 5.0) * advantage * e.now[t] + kl * k3(e, t) for t, r in enumerate(e.ratios)
        )
    return total / sum(map(len, episodes))


def maxrl(episodes, kl):
    total = 0.0
    for e in episodes:
        rewards = siblings(episodes, e)
        if max(rewards) == min(rewards):
            continue
        advantage = (e.reward - mean(rewards)) / mean(rewards)
        total += sum(ppo(r, advantage, 0.2, 0.2) + kl * k3(e, t) for t, r in enumerate(e.ratios))
    return total / (len(episodes) * FIXED)


FORMULAS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gspo": gspo,
    "cispo": cispo,
    "maxrl": maxrl,
}
"""Those that compare whole episodes; `test_train_states.py` has those that compare turns."""


def config(name, **more):
    given = {**STILL, "algorithm": name, "fixed_length": FIXED, **more}
    return TrainConfig(
        **given, **({"overlong_tokens": MOST, "overlong_buffer": BUFFER} if name == "dapo" else {})
    )


def learn(model, made, name, **more):
    trainer = Trainer(model, config(name, **more))
    trainer.reference()
    figures = trainer.step(made, step=0, steps=10).metrics
    return figures, gradient(model)


@pytest.mark.parametrize("kl", [0.0, 0.2])
@pytest.mark.parametrize("name", FORMULAS)
def test_against_the_formula(name, kl):
    made = example()
    model = Model64()
    trainer = Trainer(model, config(name, kl=kl, old_logprobs="engine"))
    trainer.reference()
    disturbed(model, 0.02, 1)
    figures = trainer.step(made, step=0, steps=10).metrics
    episodes = [Episode(t, n, model, Model64()) for n, g in enumerate(made) for t in g.trajectories]
    assert figures["loss"] == pytest.approx(FORMULAS[name](episodes, kl), rel=1e-10, abs=1e-13)
    assert figures["clip_fraction"] > 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_later_epochs_take_the_ratio_against_the_policy_before_the_first(name):
    made = example()
    moving = {"lr": 3e-3, "max_grad_norm": 1.0}
    model = Model64()
    first = Trainer(model, config(name, **moving)).step(made, step=0, steps=1).metrics["loss"]
    episodes = [
        Episode(t, n, model, model, Model64()) for n, g in enumerate(made) for t in g.trajectories
    ]
    both = Trainer(Model64(), config(name, **moving, epochs=2)).step(made, step=0, steps=1).metrics
    assert both["loss"] == pytest.approx((first + FORMULAS[name](episodes, 0.0)) / 2, rel=1e-9)


def test_the_gradient_of_gspo_is_that_of_its_formula():
    """By autograd through the geometric mean itself, without the form that stops gradients."""
    made = example(0.1)
    model = Model64()
    _, found = learn(model, made, "gspo", old_logprobs="engine", clip_low=0.9, clip_high=0.9)
    model.zero_grad()
    total = 0.0
    for g in made:
        rewards = [t.reward for t in g.trajectories]
        for t in g.trajectories:
            (sample,) = t.samples()
            logits = model(torch.tensor([sample.ids]), torch.arange(len(sample.ids))[None]).logits[
                0
            ]
            logp = torch.log_softmax(logits, -1)
            gaps = [
                logp[i - 1, sample.ids[i]] - sample.logprobs[i]
                for i, weight in enumerate(sample.weights)
                if weight
            ]
            advantage = (t.reward - mean(rewards)) / (sample_std(rewards) + 1e-4)
            total = total - torch.exp(torch.stack(gaps).mean()) * advantage
    (total / 9).backward()
    assert distance(found, gradient(model)) < 1e-10


@pytest.mark.parametrize("name", FORMULAS)
def test_neither_layout_nor_order_nor_branches_change_the_gradient(name):
    made = example()
    more = {"old_logprobs": "engine", "kl": 0.1}
    figures, base = learn(Model64(), made, name, **more)
    turned = [Group(g.task, g.trajectories[::-1]) for g in made[::-1]]
    again, same = learn(Model64(), turned, name, **more)
    assert torch.equal(same, base)
    assert again["loss"] == figures["loss"]
    trees = [Group(g.task, [branched(t) for t in g.trajectories]) for g in made]
    assert any(len(list(t.samples())) > 1 for g in trees for t in g.trajectories)
    for other, micro_tokens in ((made, 1), (made, 60), (trees, 1), (trees, 4096)):
        other_figures, found = learn(Model64(), other, name, micro_tokens=micro_tokens, **more)
        assert distance(found, base) < 1e-9
        assert other_figures["loss"] == pytest.approx(figures["loss"], rel=1e-10, abs=1e-14)


def pair(rewards=(1.0, 0.0), ids=((3, 4), (5,))):
    rows = [
        chain([(P, [1, 2]), (M, list(i))], sample=n, reward=r)
        for n, (r, i) in enumerate(zip(rewards, ids, strict=True))
    ]
    return [Group(Task("t", id="t"), rows)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("grpo", [0.5 / (math.sqrt(0.5) + 1e-4), -0.5 / (math.sqrt(0.5) + 1e-4)]),
        ("dr_grpo", [0.5, -0.5]),
        ("rloo", [1.0, -1.0]),
        # three tokens: 1, 1, 0: mean 2/3, deviation sqrt(2)/3
        (
            "reinforce_pp",
            [(1 / 3) / (math.sqrt(2) / 3 + 1e-4), (-2 / 3) / (math.sqrt(2) / 3 + 1e-4)],
        ),
        # 1/2, 1/2, -1/2: mean 1/6, the same deviation
        (
            "reinforce_pp_baseline",
            [(1 / 3) / (math.sqrt(2) / 3 + 1e-4), (-2 / 3) / (math.sqrt(2) / 3 + 1e-4)],
        ),
    ],
)
def test_advantages_by_hand(name, values):
    ledger = Trainer(Model64(), config(name)).step_credits(pair())
    assert [credit.advantage for credit in ledger.credits] == pytest.approx(values, abs=1e-12)


def one(name, ratio, advantage, *, sequence=0.0, turn=0.0):
    """Loss and slope of a token with its algorithm's own bounds."""
    settings = resolve_settings(TrainConfig(algorithm=name))
    logp = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    value = torch.tensor([advantage], dtype=torch.float64)
    given = TokenBatch(
        logp=logp,
        old=value * 0 - 1.0,
        advantage=value,
        sequence=value * 0 + sequence,
        turn=value * 0 + turn,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    made = settings.algorithm.loss(given)
    made.loss.sum().backward()
    return made.loss.item(), logp.grad.item(), bool(made.clipped)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "sequence", "expected"),
    [
        ("dr_grpo", 1.25, 2.0, 0.0, (-2.4, 0.0, True)),
        ("dapo", 1.25, 2.0, 0.0, (-2.5, -2.5, False)),  # the higher upper bound
        ("dapo", 1.30, 2.0, 0.0, (-2.56, 0.0, True)),
        ("rloo", 0.5, -2.0, 0.0, (1.6, 0.0, True)),
        (
            "gspo",
            1.9,
            2.0,
            2e-4,
            (-2.0 * math.exp(2e-4), -2.0 * math.exp(2e-4), False),
        ),  # its own ratio plays no part
        ("gspo", 1.0, 2.0, 5e-4, (-2.0 * 1.0004, 0.0, True)),
        ("gspo", 1.0, -2.0, -4e-4, (2.0 * 0.9997, 0.0, True)),
        ("cispo", 1.5, 2.0, 0.0, (-3.0 * (math.log(1.5) - 1), -3.0, False)),
        (
            "cispo",
            8.0,
            2.0,
            0.0,
            (-10.0 * (math.log(8.0) - 1), -10.0, True),
        ),  # bounded, and still pulled
        ("cispo", 0.01, -2.0, 0.0, (0.02 * (math.log(0.01) - 1), 0.02, False)),
    ],
)
def test_tokens_by_hand(name, ratio, advantage, sequence, expected):
    found = one(name, ratio, advantage, sequence=sequence)
    assert found[:2] == pytest.approx(expected[:2], abs=1e-12)
    assert found[2] == expected[2]


@pytest.mark.parametrize(
    ("tokens", "lost"), [(5, 0.0), (10, 0.0), (12, -0.2), (15, -0.5), (20, -1.0), (31, -1.0)]
)
def test_overlong_by_hand(tokens, lost):
    row = chain([(P, [1]), (M, [2] * 5), (E, [3] * 9), (M, [4] * (tokens - 5))], reward=1.0)
    assert overlong_penalty(row, 20, 0.5) == pytest.approx(lost)


# What a recipe says.


def test_every_name_has_an_algorithm():
    assert tuple(BUILT_IN) == ALGORITHMS
    assert {
        name: algorithm.advantage for name, algorithm in BUILT_IN.items()
    } == ALGORITHM_ADVANTAGES


def test_explicit_keys_win_and_what_they_take_away_is_told():
    plain = resolve_settings(TrainConfig(algorithm="dr_grpo"))
    assert (plain.advantage, plain.aggregation, plain.clip_high, plain.notes) == (
        "mean",
        "fixed",
        0.2,
        (),
    )
    mixed = resolve_settings(TrainConfig(algorithm="dr_grpo", advantage="std", clip_high=0.5))
    assert (mixed.advantage, mixed.aggregation, mixed.clip_high) == ("std", "fixed", 0.5)
    (note,) = mixed.notes
    assert (
        "train.advantage = 'std' replaces dr_grpo's own 'mean', which defines the algorithm" in note
    )
    (note,) = resolve_settings(TrainConfig(kl=0.1, kl_estimator="k1")).notes
    assert "constrains nothing" in note
    assert (
        resolve_settings(
            TrainConfig(algorithm="rloo", kl_in="loss", kl_estimator="k2")
        ).kl_estimator
        == "k2"
    )
    assert resolve_settings(TrainConfig(kl_in="reward")).kl_estimator == "k1"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"algorithm": "gprpo"}, r"did you mean 'grpo'\? there are grpo, dr_grpo"),
        (
            {"algorithm": "rloo", "kl_estimator": "k3"},
            r'rloo subtracts KL from the reward, which needs k1; set train\.kl_in = "loss"',
        ),
        ({"kl_in": "reward", "kl_estimator": "k3"}, "must be k1 in a reward"),
        ({"correction": "tis", "old_logprobs": "engine"}, "apply twice the correction"),
        ({"correction_high": 3.0}, r'no meaning with correction = "none"'),
        ({"correction": "tis", "correction_low": 0.5}, "has no lower bound"),
        (
            {"correction": "icepop", "correction_low": 5.0, "correction_high": 2.0},
            r"must be under train\.correction_high = 2",
        ),
        ({"discount": 0.9}, 'set credit = "turn"'),
        ({"loss_scale": "last"}, r"did you mean 'last_round'\?"),
    ],
)
def test_contradictions_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        Trainer(Model64(), TrainConfig(**keys))


# One's own.


def write(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text("import torch\nimport random\n" + body, encoding="utf-8")
    return f"{file}:mine"


OWN = (
    "def mine(tokens):\n    return -torch.minimum(tokens.ratio, torch.full_like(tokens.ratio, "
    "1.5)) * tokens.advantage\n"
)


def test_an_algorithm_of_ones_own_trains(tmp_path):
    made = example()
    spec = write(tmp_path, OWN)
    figures, base = learn(Model64(), made, spec, old_logprobs="engine")
    episodes = [
        Episode(t, n, Model64(), Model64()) for n, g in enumerate(made) for t in g.trajectories
    ]
    total = 0.0
    for e in episodes:
        rewards = siblings(episodes, e)
        advantage = (e.reward - mean(rewards)) / (sample_std(rewards) + 1e-4)
        total -= sum(min(ratio, 1.5) * advantage for ratio in e.ratios)
    assert figures["loss"] == pytest.approx(total / sum(map(len, episodes)), rel=1e-10)
    assert (
        distance(learn(Model64(), made, spec, old_logprobs="engine", micro_tokens=1)[1], base)
        < 1e-10
    )


def test_every_built_in_passes_the_check_of_ones_own():
    for name, algorithm in BUILT_IN.items():
        check_custom(lambda tokens, algorithm=algorithm: algorithm.loss(tokens).loss, name)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mine = 3\n", "is int, not a function"),
        (
            "def mine(tokens, more):\n    return tokens.logp\n",
            r"must take one argument.*def mine\(tokens\)",
        ),
        ("def mine(tokens):\n    return 1 / 0\n", "raised ZeroDivisionError on 6 tokens"),
        ("def mine(tokens):\n    return 0.0\n", "returned float, not a tensor"),
        (
            "def mine(tokens):\n    return (tokens.logp * tokens.advantage).mean()\n",
            r"of shape \(\) for 6 tokens.*without mean or sum",
        ),
        ("def mine(tokens):\n    return tokens.logp / (tokens.old - tokens.old)\n", "not finite"),
        (
            "def mine(tokens):\n    return -tokens.advantage * tokens.logp.detach()\n",
            "no gradient reaches the policy",
        ),
        (
            "def mine(tokens):\n    return (tokens.logp.detach() - tokens.logp).abs().sqrt()\n",
            "gradient is not finite",
        ),
        (
            "def mine(tokens):\n    return -tokens.ratio * (tokens.advantage - "
            "tokens.advantage.mean())\n",
            "depends on the others of its pass",
        ),
        (
            "def mine(tokens):\n    return -tokens.advantage * tokens.logp.mean() + 0 * "
            "tokens.logp\n",
            "depends on the others of its pass",
        ),
        (
            "def mine(tokens):\n    tokens.advantage.mul_(2)\n    return -tokens.logp * "
            "tokens.advantage\n",
            "modifies its input tensors in place",
        ),
    ],
)
def test_a_function_that_is_not_fit_is_refused_when_it_is_given(tmp_path, body, said):
    spec = write(tmp_path, body)
    with pytest.raises(ConfigError, match=said) as caught:
        load_custom(spec)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="nope"):
        load_custom(spec.replace(":mine", ":nope"))

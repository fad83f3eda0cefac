"""The loss against a slow float64 reference written from its formula, and against
values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.gradients import disturbed
from kit.training import random_groups

from turnwright.config import TrainConfig
from turnwright.engines import Sampling
from turnwright.training import LogitDistribution, Trainer, resolve_settings
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.training.algorithms import TokenBatch
from turnwright.training.algorithms.grpo import ALGORITHM as GRPO
from turnwright.training.loss import k3, logprob_mismatch


def slow_logprobs(model, ids, temperature=1.0, banned=()):
    """log p(ids[i] | ids[:i]) for i >= 1, one forward per id."""
    out = [0.0]
    for place in range(1, len(ids)):
        given_ids = torch.tensor([ids[:place]])
        logits = model(given_ids, torch.arange(place)[None]).logits[0, -1].detach() / temperature
        kept = [math.exp(x) for v, x in enumerate(logits.tolist()) if v not in banned]
        out.append(float(logits[ids[place]]) - math.log(math.fsum(kept)))
    return out


def slow_loss(model, old_model, reference, made, config, temperature, banned):
    """The loss of a step, written out as sums over trajectories and their sampled ids."""
    settings = resolve_settings(config)
    ledger = advantages(made, CreditSettings(settings.advantage, min_group=config.min_group))
    counted = [credit for credit in ledger.credits if credit.counted]
    tokens = sum(credit.tokens for credit in counted)
    total = 0.0
    for credit in ledger.trained:
        (sample,) = credit.trajectory.samples()
        now, old, ref = (
            slow_logprobs(m, sample.ids, temperature, banned) for m in (model, old_model, reference)
        )
        own = 0.0
        for place, weight in enumerate(sample.weights):
            if not weight:
                continue
            before = sample.logprobs[place] if config.old_logprobs == "engine" else old[place]
            ratio = math.exp(now[place] - before)
            bounded = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
            own -= min(ratio * credit.advantage, bounded * credit.advantage)
            own += config.kl * (math.exp(ref[place] - now[place]) - (ref[place] - now[place]) - 1)
        if settings.aggregation == "token":
            total += own / tokens
        elif settings.aggregation == "trajectory":
            total += own / credit.tokens / len(counted)
        else:
            total += own / config.fixed_length / len(counted)
    return total


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "fixed"])
@pytest.mark.parametrize(("old", "kl"), [("trainer", 0.0), ("trainer", 0.1), ("engine", 0.1)])
def test_against_the_formula(aggregation, old, kl):
    made = random_groups(1, groups=3, size=3, turns=2, rewards=(0.0, 1.0, 0.3))
    for t in made[0].trajectories[:2]:
        t.reward = None  # a group of one is left, and dropped
    for t in made[1].trajectories:
        t.reward = 0.5  # ties
    temperature, banned = 0.7, {5, 11}
    for g in made:
        for t in g.trajectories:
            for span in t.spans:
                span.ids = [i if i not in banned else 1 for i in span.ids]
                if span.sampled:
                    span.logprobs = [-3.0 - 0.3 * i for i in range(len(span.ids))]
    config = TrainConfig(
        lr=0.0,
        kl=kl,
        old_logprobs=old,
        aggregation=aggregation,
        fixed_length=7,
        max_mismatch=1e9,
        clip_low=0.1,
        clip_high=0.4,
    )
    model = Model64()
    trainer = Trainer(model, config, sampling=Sampling(temperature=temperature), banned_ids=banned)
    trainer.reference()
    disturbed(model, 0.02, 1)
    figures = trainer.step(made, step=0, steps=10).metrics
    expected = slow_loss(model, model, Model64(), made, config, temperature, banned)
    assert figures["loss"] == pytest.approx(expected, rel=1e-10, abs=1e-13)
    assert (figures["clip_fraction"] > 0) == (old == "engine")
    assert ("kl" in figures) == bool(kl)


def test_later_epochs_against_the_formula():
    """The second epoch's ratio is taken against the policy before the first."""
    made = random_groups(2, groups=2, size=3, turns=1, rewards=(0.0, 1.0, 0.3))
    settings = {"lr": 3e-3, "schedule": "constant", "weight_decay": 0.0, "max_mismatch": 1e9}
    model = Model64()
    first = Trainer(model, TrainConfig(**settings)).step(made, step=0, steps=1).metrics["loss"]
    config = TrainConfig(**settings, epochs=2)
    second = slow_loss(model, Model64(), Model64(), made, config, 1.0, ())
    both = Trainer(Model64(), config).step(made, step=0, steps=1).metrics
    assert both["loss"] == pytest.approx((first + second) / 2, rel=1e-9)
    assert both["optimizer_steps"] == 2


def terms(ratio, advantage):
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    tokens = TokenBatch(
        logp, torch.zeros(1, dtype=torch.float64), advantage * one, 0 * one, 0 * one, 0.2, 0.28
    )
    made = GRPO.loss(tokens)
    made.loss.sum().backward()
    return made.loss.item(), logp.grad.item(), bool(made.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.56, 0.0, True),  # too likely already: 1.28 * 2
        (0.5, 2.0, -1.0, -1.0, False),  # a good id that grew unlikely is still pulled up
        (0.5, -2.0, 1.6, 0.0, True),  # unlikely enough: 0.8 * -2
        (1.5, -2.0, 3.0, 3.0, False),
        (1.1, 0.0, 0.0, 0.0, False),
    ],
)
def test_clip_by_hand(ratio, advantage, loss, slope, clipped):
    found = terms(ratio, advantage)
    assert found[:2] == pytest.approx((loss, slope), abs=1e-12)
    assert found[2] == clipped


def test_k3_by_hand():
    logp, reference = (
        torch.tensor([math.log(0.5)]).double(),
        torch.tensor([math.log(0.25)]).double(),
    )
    assert k3(logp, reference).item() == pytest.approx(0.5 - 1 - math.log(0.5))
    assert k3(logp, logp).item() == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.floats(0.3, 3.0))
def test_k3_estimates_the_divergence(seed, scale):
    """Its mean under the policy is KL(policy || reference) exactly, by enumeration."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (
        torch.log_softmax(scale * torch.randn(7, generator=generator, dtype=torch.float64), 0)
        for _ in range(2)
    )
    assert (p.exp() * k3(p, q)).sum().item() == pytest.approx(
        (p.exp() * (p - q)).sum().item(), abs=1e-12
    )


def test_tempered_and_banned_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, 5.0]], dtype=torch.float64)
    stats = LogitDistribution(2.0, {3, 99}).stats(logits, torch.tensor([1]), entropy=True)
    weights = [math.exp(x / 2) for x in (2.0, 1.0, 0.0)]
    share = [w / sum(weights) for w in weights]
    assert stats.logprobs_m.item() == pytest.approx(math.log(share[1]))
    assert stats.entropy_m.item() == pytest.approx(-sum(s * math.log(s) for s in share))


def test_banned_ids_get_no_gradient():
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    stats = LogitDistribution(1.0, {4}).stats(logits, torch.tensor([0, 1, 2]), entropy=True)
    stats.logprobs_m.sum().backward()
    assert torch.equal(logits.grad[:, 4], torch.zeros(3, dtype=torch.float64))
    assert torch.isfinite(stats.entropy_m).all()


def test_mismatch_by_hand():
    trainer = torch.tensor([-1.0, -2.0, -3.0, -9.0])
    engine = torch.tensor([-1.0, -2.5, -2.9, math.nan])
    figures = logprob_mismatch(trainer, engine)
    assert figures["mismatch_max"] == pytest.approx(0.5)
    assert figures["mismatch_mean"] == pytest.approx(0.2)
    assert figures["mismatch_p95"] == pytest.approx(0.1)
    weights = [1.0, math.exp(0.5), math.exp(-0.1)]
    assert figures["mismatch_kl"] == pytest.approx(
        sum(w - 1 - math.log(w) for w in weights) / 3, rel=1e-6
    )
    assert figures["importance_ess"] == pytest.approx(
        sum(weights) ** 2 / (3 * sum(w * w for w in weights)), rel=1e-6
    )
    assert logprob_mismatch(trainer, torch.full((4,), math.nan)) == {}

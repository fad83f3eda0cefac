"""Sampling-mask replay: what top-k and top-p leave is renormalised in the trainer, found
once a step and then kept."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.training import gradient, played, random_groups

from turnwright.config import (
    TrainConfig,
)
from turnwright.engines import Sampling
from turnwright.engines.distribution import truncate
from turnwright.errors import SyncError
from turnwright.rollouts import run_sync
from turnwright.training import LogitDistribution, Trainer
from turnwright.training.forward.support import SamplingSupport

CUTS = [(0.8, 0), (1.0, 5), (0.95, 8), (1e-9, 0)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.sampled_from(CUTS), st.sampled_from([0.7, 1.0, 1.5]))
def test_logprobs_are_those_of_the_engine_s_distribution(seed, given, temperature):
    torch.manual_seed(seed)
    logits = torch.randn(6, 20) * 3
    law = LogitDistribution(temperature, {1, 7}, *given)
    banned = logits.clone()
    banned[:, [1, 7]] = -torch.inf
    expected = truncate(banned / temperature, Sampling(temperature, *given)).log_softmax(-1)
    targets = expected.argmax(-1)
    found = law.stats(logits, targets, entropy=True)
    assert (found.logprobs_m - expected.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-6
    entropy = -(expected.exp() * expected).nan_to_num(0.0).sum(-1)
    assert (found.entropy_m - entropy).abs().max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.sampled_from(CUTS))
def test_what_is_kept_can_be_taken_apart_and_joined(seed, given):
    torch.manual_seed(seed)
    logits, targets = torch.randn(9, 12), torch.randint(12, (9,))
    law = LogitDistribution(1.0, (), *given)
    kept = law.support(logits, targets)
    whole = kept.excluded(12)
    assert not whole.gather(1, targets[:, None]).any()  # what was sampled is never left out
    order = torch.randperm(9)
    parts = [kept.take(order[:4]), kept.take(order[4:])]
    assert torch.equal(SamplingSupport.join(parts).excluded(12), whole[order])
    assert torch.equal(SamplingSupport.of(whole).excluded(12), whole)


def test_it_is_replayed_when_the_logits_have_changed():
    law = LogitDistribution(1.0, (), 1.0, 2)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    kept = law.support(logits, torch.tensor([1]))
    later = torch.tensor([[0.0, 1.0, 5.0, 9.0]])  # by which 1 is no longer among the two best
    share = [
        float(law.stats(later, torch.tensor([i]), kept, entropy=False).logprobs_m.exp())
        for i in range(4)
    ]
    assert share[0] + share[1] == pytest.approx(1.0)
    assert share[1] == pytest.approx(1 / (1 + torch.tensor(-1.0).exp().item()))
    assert share[2] == share[3] == 0.0


@pytest.mark.parametrize(
    "config", [{"epochs": 2, "minibatches": 2}, {"algorithm": "gspo", "epochs": 2}, {"kl": 0.1}]
)
def test_a_step_does_not_depend_on_its_passes(config):
    slopes, figures = [], []
    for micro in (8, 10**6):
        given = {"max_mismatch": 1e9, "schedule": "constant", "lr": 1e-2, "micro_tokens": micro}
        trainer = Trainer(
            Model64(), TrainConfig(**given | config), sampling=Sampling(top_p=0.7, top_k=20)
        )
        trainer.reference()
        metrics, records = trainer.step(random_groups(3), step=0, steps=1)
        figures.append(metrics)
        slopes.append(gradient(trainer.model))
        shut = records[1][0].support.excluded(50)
        assert 0 < shut.double().mean() < 1
        # The one that was sampled comes on top where it was not among them.
        assert int((~shut).sum(1).max()) <= 21
    assert (slopes[0] - slopes[1]).norm() <= 1e-9 * slopes[1].norm()
    assert figures[0]["loss"] == pytest.approx(figures[1]["loss"], rel=1e-9)


@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_a_run_whose_engine_cuts_trains_on_the_same_distribution(tmp_path, min_p):
    made, run = played(tmp_path / "run", min_p=min_p)
    with run:
        run_sync(made.play())
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["phase"] == "train"]
    assert len(steps) == 2
    assert all(row["mismatch_max"] < 1e-4 for row in steps)
    assert all(row["optimizer_steps"] == 4 for row in steps)
    first = json.loads((tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()[-1])
    assert {one["sampling"].get("min_p", 0.0) for one in first["spans"] if "sampling" in one} == {
        min_p
    }


def test_the_trainer_renormalizes_over_what_min_p_leaves():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    shares = [
        float(
            LogitDistribution(min_p=0.2)
            .stats(logits, torch.tensor([i]), entropy=False)
            .logprobs_m.exp()
        )
        for i in (0, 1)
    ]
    assert sum(shares) == pytest.approx(1.0)  # exp(-1) is over 0.2, exp(-2) is not


def test_a_trainer_that_does_not_know_of_it_stops_the_run(tmp_path):
    made, run = played(tmp_path / "run")
    made.policies.trained[0].trainer.distribution = LogitDistribution(
        0.8, made.parts.renderer.banned_ids
    )
    with (
        run,
        pytest.raises(
            SyncError, match=r"samples at temperature 0.8 with top_p 1, top_k 0 and min_p 0"
        ),
    ):
        run_sync(made.play())

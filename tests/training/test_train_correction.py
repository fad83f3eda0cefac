"""Corrections of the engine's distribution and bounds on it, through the trainer."""

import math

import pytest
import torch
from kit.double_precision import Model64
from kit.training import branched, distance, fingerprint, gradient, random_groups, with_logprobs

from turnwright.config import TrainConfig
from turnwright.errors import ConfigError, SyncError
from turnwright.training import Trainer
from turnwright.types import Group

STILL = {"lr": 0.0, "schedule": "constant", "max_grad_norm": 1e9, "weight_decay": 0.0}


def shifted(made, gaps):
    """The groups as an engine would have sampled them whose logprobs are lower by `gaps`,
    one for each trajectory."""
    for g in with_logprobs(Model64(), made):
        for t, gap in zip(g.trajectories, gaps, strict=True):
            for span in t.spans:
                if span.sampled:
                    span.logprobs = [logprob - gap for logprob in span.logprobs]
    return made


def learn(made, **keys):
    model = Model64()
    figures = (
        Trainer(model, TrainConfig(**STILL, max_mismatch=1e9, **keys))
        .step(made, step=0, steps=1)
        .metrics
    )
    return figures, gradient(model)


def test_no_disagreement_no_difference():
    made = shifted(random_groups(1), [0.0] * 4)
    _, base = learn(made)
    for kind in ("tis", "sequence_mis", "sequence_mis_mean", "icepop"):
        figures, found = learn(made, correction=kind)
        assert distance(found, base) < 1e-9
        assert figures["correction_ess"] == pytest.approx(1.0)
        assert figures["correction_masked"] == 0.0


def test_weights_multiply_and_what_is_left_out_is_counted():
    """Ratios 1, 1, 1.2 and 6 by trajectory: IcePop leaves the last one out, TIS holds it at 2."""
    gaps = [0.0, 0.0, math.log(1.2), math.log(6.0)]
    parts = [
        shifted(random_groups(2), [0.0 if n == k else 99.0 for n in range(4)]) for k in range(4)
    ]
    # A trajectory alone: the others' ratio of e^99 is left out.
    alone = [learn(part, correction="icepop")[1] for part in parts]
    made = shifted(random_groups(2), gaps)
    figures, found = learn(made, correction="icepop")
    assert distance(found, alone[0] + alone[1] + 1.2 * alone[2]) < 1e-9
    gone = sum(g.trajectories[3].sampled_tokens for g in made)
    assert figures["tokens_mismatch"] == gone
    assert figures["tokens_trained"] + gone == figures["tokens_sampled"]
    assert figures["correction_masked"] == pytest.approx(gone / figures["tokens_sampled"])
    _, held = learn(made, correction="tis")
    assert distance(held, alone[0] + alone[1] + 1.2 * alone[2] + 2 * alone[3]) < 1e-9


@pytest.mark.parametrize("kind", ["sequence_mis", "sequence_mis_mean"])
def test_sequence_corrections_do_not_depend_on_layout_or_branches(kind):
    made = shifted(random_groups(3), [0.01, 0.002, -0.004, 0.2])
    figures, base = learn(made, correction=kind, minibatches=2, epochs=2)
    assert 0 < figures["correction_masked"] < 1
    trees = [Group(g.task, [branched(t) for t in g.trajectories]) for g in made]
    for other, micro_tokens in ((made, 1), (trees, 1), (trees, 4096)):
        again, found = learn(
            other, correction=kind, minibatches=2, epochs=2, micro_tokens=micro_tokens
        )
        assert distance(found, base) < 1e-9
        assert again["correction_ess"] == pytest.approx(figures["correction_ess"])


def test_a_correction_needs_logprobs():
    made = shifted(random_groups(4), [0.0] * 4)
    span = next(s for s in made[0].trajectories[0].spans if s.sampled)
    span.logprobs = [None] * len(span.ids)
    with pytest.raises(
        ConfigError,
        match=r"train\.correction = 'tis' needs a logprob for every sampled id; .* to 'none'",
    ):
        learn(made, correction="tis")


@pytest.mark.parametrize(
    ("keys", "stops"),
    [({"max_mismatch_kl": 0.1}, True), ({"max_mismatch_kl": 0.5}, False), ({}, False)],
)
def test_a_mean_divergence_over_its_bound_stops_the_step(keys, stops):
    made = shifted(random_groups(5), [0.7, -0.7, 0.7, -0.7])  # k3 is 0.31 and 0.20
    model = Model64()
    trainer = Trainer(model, TrainConfig(correction="tis", max_mismatch=9.0, **keys))
    before = fingerprint(model)
    if not stops:
        assert trainer.step(made, step=0, steps=9).metrics["optimizer_steps"] == 1
        return
    with pytest.raises(
        SyncError, match=r"sample from different policies: KL.* over train\.max_mismatch_kl = 0\.1"
    ) as caught:
        trainer.step(made, step=0, steps=9)
    assert "\n" not in str(caught.value)
    assert fingerprint(model) == before
    assert torch.isfinite(gradient(model)).all()

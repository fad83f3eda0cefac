"""How far a reader of a training step has to go: the modules of `turnwright.training` that a
default step runs through."""

from __future__ import annotations

import sys

from kit.training import random_groups, with_logprobs

from turnwright.config import TrainConfig
from turnwright.training import Trainer

PREFIX = "turnwright.training."


def modules_of(work):
    """Return the modules of `turnwright.training` whose functions run during a call."""
    found = set()

    def record(frame, event, _):
        found.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, {name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX)}


def test_a_step_runs_through_these_modules_and_no_other(tiny_model):
    trainer = Trainer(tiny_model, TrainConfig())
    groups = with_logprobs(tiny_model, random_groups(0))
    result, modules = modules_of(lambda: trainer.step(groups, step=0, steps=2))
    assert result.metrics["optimizer_steps"] == 1
    assert modules == {
        "advantages",
        "credit",
        "forward.batch",
        "forward.forward",
        "forward.packing",
        "forward.passes",
        "forward.prefix_tree",
        "forward.ranks",
        "forward.training_rows",
        "group_member",
        "loss",
        "loss_weights",
        "trainer.gradient_signal",
        "trainer.micro_batches",
        "trainer.mismatch",
        "trainer.optimizer",
        "trainer.step_metrics",
        "trainer.trainer",
        "trainer.weight_probe",
    }

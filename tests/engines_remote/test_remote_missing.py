"""Ids without a logprob, where a server may leave some out by name: untrained, or against the
trainer's own; and counted."""

from __future__ import annotations

import pytest

import turnwright as tw
from turnwright.engines import Generation
from turnwright.records import RunDir, rebuild_trajectories

REPLY = (72, 105, 33)


class Leaky:
    """Samples three ids and knows the logprob of the one in the middle."""

    version = 0
    context = None

    def __init__(self, rule):
        self.rule = rule

    async def generate(self, request):
        ids = [*REPLY, min(request.stop_ids)]
        return Generation(ids, [None, -0.5, None, -0.25], "stop", 0, missing_logprobs=self.rule)

    def release(self, session):
        pass

    async def close(self):
        pass


class Ask(tw.Env):
    def reset(self, task, *, seed=None):
        return "Say hi."

    def step(self, action):
        return tw.Step(reward=1.0, terminated=True)


def play(rule, run=None):
    (trajectory,) = tw.rollout(Ask, [tw.Task("go", id="a")], engine=Leaky(rule), out=run)
    return trajectory


def test_a_missing_logprob_is_a_breach_unless_it_is_allowed_by_name():
    trajectory = play("error")
    assert trajectory.stop == "engine_error"
    assert "logprob that is missing" in trajectory.error.message
    assert not trajectory.sampled_tokens


def test_masked_ids_are_in_the_record_untrained_with_a_reason_and_counted():
    trajectory = play("mask")
    (sample,) = trajectory.samples()
    sampled = [
        (i, w, p)
        for i, w, p, m in zip(sample.ids, sample.weights, sample.logprobs, sample.mask, strict=True)
        if m
    ]
    assert [i for i, _, _ in sampled[:3]] == list(REPLY)
    assert [w for _, w, _ in sampled] == [0.0, 1.0, 0.0, 1.0]
    assert [p for _, _, p in sampled] == [None, -0.5, None, -0.25]
    assert trajectory.metrics["logprobs_masked"] == 2
    reasons = [span.untrained for span in trajectory.spans if span.sampled]
    assert reasons == ["no_logprob", None, "no_logprob", None]
    assert trajectory.turns[0].reply.text == "Hi!"
    for span in trajectory.spans:
        span.check()


def test_recomputed_ids_are_trained_in_one_span_and_counted():
    trajectory = play("recompute")
    (sample,) = trajectory.samples()
    assert sum(sample.weights) == 4
    assert trajectory.metrics["logprobs_recomputed"] == 2
    (span,) = [span for span in trajectory.spans if span.sampled]
    assert span.logprobs == (None, -0.5, None, -0.25)


@pytest.mark.parametrize("rule", ["mask", "recompute"])
def test_the_journal_holds_what_was_missing_as_null(rule, tmp_path):
    trajectory = play(rule, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    try:
        found = rebuild_trajectories(run.events(), {"a": trajectory.task}.get)
    finally:
        run.close()
    (again,) = found.values()
    assert [(s.ids, s.logprobs, s.untrained) for s in again.spans] == [
        (s.ids, s.logprobs, s.untrained) for s in trajectory.spans
    ]


@pytest.mark.parametrize("rule", ["mask", "recompute"])
def test_the_trainers_batch_takes_them_as_they_are(rule):
    batch = pytest.importorskip("turnwright.training.forward.batch")
    torch = pytest.importorskip("torch")
    (row,) = batch.rows_of(play(rule), 0)
    missing = torch.isnan(torch.tensor(row.logprobs)).tolist()
    assert missing == ([False, False] if rule == "mask" else [True, False, True, False])

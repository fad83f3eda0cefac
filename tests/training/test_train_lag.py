"""Tokens of several policy versions in a step: lag, checks of the current ones, metrics by
lag, and a leaked cache."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.training import E, M, P, branched, chain, fingerprint, random_groups, with_logprobs

import turnwright as tw
from turnwright.config import TrainConfig
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.weights import fingerprint as digest_of
from turnwright.errors import SyncError
from turnwright.training import Trainer, setup
from turnwright.training.credit import Credit
from turnwright.training.forward.batch import LossDenominator, make_batch
from turnwright.training.loss_weights import trainable_tokens
from turnwright.training.metrics import lag_metrics
from turnwright.types import Turn

NOW = 5


def aged(versions, *, split=False):
    """A chain with one reply of three ids for each (version, version of its cache); or each reply
    on a root of its own."""
    pieces = [(P, [1, 2])]
    for number, _ in enumerate(versions):
        pieces += [(M, [3 + number, 4, 5]), (E, [6, 7])]
    made = chain(pieces)
    replies = [span for span in made.spans if span.sampled]
    for span, (version, cache) in zip(replies, versions, strict=True):
        span.version, span.cache_version = version, cache
    if split:
        apart = branched(made)
        for span, of in zip([span for span in apart.spans if span.sampled], replies, strict=True):
            span.cache_version = of.cache_version
        return apart
    return made


def batch_of(trajectories, version=NOW):
    credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in trajectories]
    return make_batch(
        credits, LossDenominator.of(credits, "token"), micro_tokens=64, version=version
    )


VERSIONS = st.tuples(st.integers(0, NOW), st.none() | st.integers(0, NOW))


@given(st.lists(st.lists(VERSIONS, min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_every_token_has_the_lag_of_the_span_that_sampled_it(episodes, split):
    trajectories = [aged(versions, split=split) for versions in episodes]
    batch = batch_of(trajectories)
    found = list(
        zip(
            batch.trajectory_n.tolist(),
            batch.slots,
            batch.lags_n.tolist(),
            batch.kept_n.tolist(),
            strict=True,
        )
    )
    assert len(found) == 3 * sum(map(len, episodes))
    for index, (span_index, _), lag, kept in found:
        span = trajectories[index].spans[span_index]
        assert lag == NOW - span.version
        assert kept == (span.cache_version is not None and span.cache_version < span.version)
    assert batch.current_n.tolist() == [lag == 0 and not kept for *_, lag, kept in found]
    assert bool(batch_of(trajectories, None).current_n.all())


def test_a_reply_continued_after_an_update_has_two_lags():
    """Three ids of policy 4 and two of policy 5, in one turn."""
    made = chain([(P, [1, 2]), (M, [3, 4, 5]), (M, [6, 7])])
    made.spans[1].version, made.spans[2].version = 4, 5
    assert batch_of([made]).lags_n.tolist() == [1, 1, 1, 0, 0]


def test_a_token_of_a_newer_policy_is_refused():
    with pytest.raises(
        SyncError,
        match=r"sampled by policy 5, newer than policy 4 that is trained; pass Trainer\.step",
    ):
        batch_of([aged([(5, None)])], 4)


def spoiled(groups, gap=0.2, *, version=NOW):
    """Shift the engine's logprobs of replies in the first trajectory of each group, which
    another version sampled."""
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            for span in trajectory.spans:
                if span.sampled:
                    span.version = NOW if number else version
                    span.logprobs = [
                        logprob - (0.0 if number else gap) for logprob in span.logprobs
                    ]
    return groups


STILL = {"lr": 0.0, "schedule": "constant", "weight_decay": 0.0}


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_the_bound_is_of_tokens_of_the_current_version_with_a_correction_too(correction):
    model = Model64()
    groups = spoiled(with_logprobs(model, random_groups(1)), version=NOW - 1)
    before = fingerprint(model)
    trainer = Trainer(model, TrainConfig(correction=correction, **STILL))
    metrics, records = trainer.step(groups, step=0, steps=1, version=NOW)
    assert metrics["mismatch_max"] < 1e-6
    stale = sum(g.trajectories[0].sampled_tokens for g in groups)
    found = lag_metrics(records[1])
    assert found["tokens_by_lag"] == {"0": metrics["tokens_sampled"] - stale, "1": stale}
    assert found["lag_max"] == 1
    assert found["lag_mean"] == pytest.approx(stale / metrics["tokens_sampled"])
    assert found["mismatch_kl_by_lag"]["0"] < 1e-9 < found["mismatch_kl_by_lag"]["1"]
    with pytest.raises(SyncError, match=rf"over train\.max_mismatch = 0\.001 for {stale} of"):
        Trainer(model, TrainConfig(correction=correction)).step(
            spoiled(groups, 0.0), step=0, steps=1, version=NOW
        )
    assert fingerprint(model) == before


def test_tokens_on_a_kept_cache_are_measured_apart():
    model = Model64()
    groups = spoiled(with_logprobs(model, random_groups(1)))
    for group in groups:
        for span in group.trajectories[0].spans:
            span.cache_version = NOW - 2 if span.sampled else None
    _, records = Trainer(model, TrainConfig(correction="tis", **STILL)).step(
        groups, step=0, steps=1, version=NOW
    )
    found = lag_metrics(records[1])
    assert found["tokens_by_cache"]["kept"] == sum(g.trajectories[0].sampled_tokens for g in groups)
    assert found["mismatch_kl_by_cache"]["own"] < 1e-9 < found["mismatch_kl_by_cache"]["kept"]
    assert "lag_mean" not in found


def test_a_synchronous_step_has_no_metrics_by_lag():
    model = Model64()
    groups = with_logprobs(model, random_groups(1))
    _, records = Trainer(model, TrainConfig(**STILL)).step(groups, step=0, steps=1, version=0)
    assert lag_metrics(records[1]) == {}


@pytest.mark.parametrize(
    ("cached", "says"),
    [("spoiled", "and none of the ids of other calls"), ("all", "Every call"), ("none", "")],
)
def test_an_error_names_the_prefix_cache_if_only_calls_that_used_it_mismatch(cached, says):
    model = Model64()
    groups = spoiled(with_logprobs(model, random_groups(1)))
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            for index, span in enumerate(trajectory.spans):
                if span.sampled:
                    turn = Turn(
                        "main",
                        span.parent,
                        span.start,
                        (index,),
                        (),
                        {"role": "assistant", "content": ""},
                    )
                    turn.cached = (
                        1 if cached == "all" or (cached == "spoiled" and not number) else 0
                    )
                    trajectory.turns.append(turn)
    with pytest.raises(SyncError, match="engine and trainer disagree") as caught:
        Trainer(model, TrainConfig(correction="tis")).step(groups, step=0, steps=1, version=NOW)
    assert ("prefix cache" in str(caught.value)) == bool(says)
    assert says in str(caught.value)


class Parity(tw.Env):
    """Pays for texts of odd length, so that a model without any training has
    groups with a signal."""

    max_turns = 3

    def reset(self, task, *, seed=None):
        return list(task.messages)

    def step(self, action):
        return tw.Step("go on", reward=float(len(action.text) % 2))

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"Write about the {split} number {number}.") for number in range(n)]


class LeakyEngine(LocalEngine):
    """Has one prefix cache for all calls, as servers do, and keeps it over weight updates."""

    async def generate(self, request):
        return await super().generate(replace(request, group="all"))

    def _update_weights(self, weights, version):
        self._scheduler.clear_cache = lambda: None
        return super()._update_weights(weights, version)


class OldEngine(LocalEngine):
    """Reports updates that it does not make, from the second on."""

    def _update_weights(self, weights, version):
        given = dict(weights)
        if version == 0:
            return super()._update_weights(given.items(), version)
        self._scheduler.versions[0] = version
        return digest_of(given.items())


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (LeakyEngine, "disagree.* prefix cache, which may have"),
        (OldEngine, "its logprobs lack the last update"),
    ],
)
def test_a_leaked_cache_and_a_lost_update_are_named_within_one_update_with_a_correction(
    tmp_path, monkeypatch, engine, says
):
    monkeypatch.setattr(setup, "LocalEngine", engine)
    with pytest.raises(SyncError, match=says):
        tw.train(
            model=tw.tiny(hidden=32, layers=2),
            env=Parity,
            out=tmp_path / "run",
            display="none",
            limits={"turns": 3, "turn_tokens": 8, "on_turn_length": "continue"},
            rollout={"groups": 4, "group_size": 4},
            warmup={"demos": 0},
            train={"steps": 2, "lr": 1e-2, "schedule": "constant", "correction": "tis"},
            eval={"tasks": 2},
        )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if row["phase"] == "train"] == [1]

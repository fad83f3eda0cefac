"""Samples carry the distribution that their logprobs belong to, and logits give the same logprobs
in any array library."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

import turnwright as tw
from turnwright.engines.local import LocalEngine
from turnwright.records import read_json_lines, rebuild_trajectories
from turnwright_view.export import rows_of

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


class Twice(tw.Env):
    def reset(self, task, *, seed=None):
        return "Go."

    def step(self, action):
        self.done = hasattr(self, "done")
        return tw.Step("On.", terminated=self.done)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=300, initializer_range=0.3, **SIZES, **HEADS)
    ).eval()


@pytest.fixture(scope="module")
def engine(model):
    renderer = tw.byte_renderer()
    renderer.banned_ids |= frozenset(range(266, 300))
    return LocalEngine(model, renderer=renderer)


def play(engine, sampling, **more):
    limits = tw.Limits(turn_tokens=6, on_turn_length="continue")
    return tw.rollout(
        Twice, [tw.Task(id="a")], engine, samples=2, sampling=sampling, limits=limits, **more
    )


@pytest.mark.parametrize("chosen", [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 20), (0.0, 1.0, 0)])
def test_logits_and_a_sample_give_its_logprobs(model, engine, chosen, tmp_path):
    for trajectory in play(engine, tw.Sampling(*chosen), out=tmp_path):
        for sample in trajectory.samples():
            found = getattr(sample, "sampling", None)
            assert found is not None, (
                "a sample does not say which distribution its logprobs belong to"
            )
            assert (found.temperature, found.top_p, found.top_k) == chosen
            assert found.banned_ids == engine.renderer.banned_ids
            with torch.no_grad():
                logits = model(torch.tensor([sample.ids])).logits[0, :-1]
            ours = tw.token_logprobs(logits, torch.tensor(sample.ids[1:]), found).numpy()
            plain = tw.token_logprobs(logits.numpy(), np.array(sample.ids[1:]), found)
            sampled = np.array(sample.mask[1:], bool)
            told = np.array(sample.logprobs[1:], float)[sampled]
            assert np.abs(ours[sampled] - told).max() < 1e-5
            assert np.abs(plain[sampled] - told).max() < 1e-5
    records = rebuild_trajectories(
        read_json_lines(tmp_path / "journal.jsonl"), lambda name: tw.Task(id=name)
    )
    assert {s.sampling for t in records.values() for s in t.samples()} == {found}
    (row, *_) = rows_of(trajectory, "samples")
    (exported,) = row["sampling"]
    assert sorted(found.banned_ids) == exported["banned_ids"]
    assert row["mask"][exported["first"]] == row["mask"][exported["last"]] == 1
    json.dumps(row["sampling"])


def test_calls_of_one_path_with_unlike_distributions_are_told_apart(engine):
    async def play_function(task, model):
        reply = await model.generate("Go.")
        await model.generate(
            [tw.Message("user", "Go."), reply.message, tw.Message("user", "On.")], temperature=0.5
        )
        return 1.0

    (trajectory,) = tw.rollout(
        play_function,
        [tw.Task(id="a")],
        engine,
        limits=tw.Limits(turn_tokens=6, on_turn_length="continue"),
    )
    (sample,) = trajectory.samples()
    found = getattr(sample, "samplings", [])
    assert [one.temperature for one in dict.fromkeys(one for one in found if one)] == [1.0, 0.5]
    with pytest.raises(ValueError, match="2 distributions"):
        sample.sampling  # noqa: B018
    (row,) = rows_of(trajectory, "samples")
    assert [part["temperature"] for part in row["sampling"]] == [1.0, 0.5]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from((0.0, 0.5, 1.0, 1.7)),
    top_p=st.sampled_from((1.0, 0.9, 0.3, 1e-9)),
    top_k=st.sampled_from((0, 1, 5, 99)),
    min_p=st.sampled_from((0.0, 0.0, 0.05, 0.5)),
    banned=st.frozensets(st.integers(0, 30), max_size=9),
)
def test_the_definition_holds_in_every_library(seed, temperature, top_p, top_k, min_p, banned):
    """Weighed against the definition in words: sort, apply min_p, take the first top_k, then the
    fewest that reach top_p."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=(4, 20)) * 3, 1)  # ties are among them
    sampling = tw.SamplingDistribution(temperature, top_p, top_k, banned, min_p=min_p)
    assert tw.SamplingDistribution.from_dict(json.loads(json.dumps(sampling.to_dict()))) == sampling
    ids = np.array([rng.choice([i for i in range(20) if i not in banned]) for _ in range(4)])
    expected = [
        _by_hand(list(row), int(one), sampling) for row, one in zip(logits, ids, strict=True)
    ]
    assert tw.token_logprobs(logits, ids, sampling) == pytest.approx(expected, abs=1e-9)
    rows = torch.tensor(logits, requires_grad=True)
    ours = tw.token_logprobs(rows, torch.tensor(ids), sampling)
    ours.sum().backward()
    assert ours.tolist() == pytest.approx(expected, abs=1e-9)
    assert rows.grad.isfinite().all()


def _by_hand(logits, one, sampling):
    scores = {
        i: logit / (sampling.temperature or 1.0)
        for i, logit in enumerate(logits)
        if i not in sampling.banned_ids
    }
    kept = sorted(scores, key=lambda i: (-scores[i], i))
    if sampling.temperature > 0:
        kept = [i for i in kept if np.exp(scores[i] - scores[kept[0]]) >= sampling.min_p - 1e-12][
            : sampling.top_k or None
        ]
        weights = np.exp([scores[i] - scores[kept[0]] for i in kept])
        before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
        kept = [
            i
            for n, i in enumerate(kept)
            if n == 0 or before[n] < sampling.top_p or sampling.top_p == 1.0
        ]
    kept = {*kept, one}
    peak = max(scores[i] for i in kept)
    return scores[one] - peak - np.log(sum(np.exp(scores[i] - peak) for i in kept))

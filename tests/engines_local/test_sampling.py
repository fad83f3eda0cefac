"""Noise and draws: a function of (seed, position), and the distribution that was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kit.local_engines import request

from turnwright.engines import Request, Sampling
from turnwright.engines.local.sampler import Sampler, counter_uniforms, round_up_rows


@dataclass
class Row:
    request: Request
    position: int = 0


def draw(logits: torch.Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
    spare = round_up_rows(len(rows)) - len(rows)
    return Sampler()(torch.cat([logits, logits[:1].expand(spare, -1)]), rows)


def many(logits: torch.Tensor, count: int, **changes: object) -> tuple[list[int], list[float]]:
    """Draw often from one distribution, with seeds that count up."""
    return draw(
        logits.expand(count, -1),
        [Row(request([0], seed=seed, **changes), seed % 3) for seed in range(count)],
    )


def chi_square(ids: list[int], probabilities: torch.Tensor) -> float:
    seen = np.bincount(ids, minlength=len(probabilities))
    expected = probabilities.double().numpy() * len(ids)
    kept = expected > 0
    assert not seen[~kept].any()
    return float((((seen - expected) ** 2)[kept] / expected[kept]).sum())


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds = np.arange(500, dtype=np.uint64) * np.uint64(977)
    positions = np.arange(500, dtype=np.uint64) % np.uint64(7)
    noise = counter_uniforms(seeds, positions)
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    order = np.random.default_rng(0).permutation(500)
    assert (counter_uniforms(seeds[order], positions[order]) == noise[order]).all()
    assert len(np.unique(noise)) > 495
    # Neighbours in seed or position have nothing in common: the spread of their difference is that
    # of independent numbers.
    wide = counter_uniforms(np.arange(20000, dtype=np.uint64), np.zeros(20000, dtype=np.uint64))
    assert abs(np.corrcoef(wide[1:], wide[:-1])[0, 1]) < 0.03
    assert abs(wide.mean() - 0.5) < 0.01


def test_noise_never_changes() -> None:
    """Runs are resumed and compared by these numbers: they are part of the format."""
    noise = counter_uniforms(
        np.array([0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 5, 9], dtype=np.uint64)
    )
    assert [round(float(value) * 2**24) for value in noise] == [10946269, 12992262, 14765068]


def test_the_distribution_is_the_softmax() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -30.0, 0.5, -torch.inf, 0.0]])
    ids, logprobs = many(logits, 20000)
    expected = logits.softmax(1)[0]
    assert chi_square(ids, expected) < 24.3  # p = 0.001 at 7 degrees of freedom
    assert (
        max(abs(lp - float(expected[i].log())) for i, lp in zip(ids, logprobs, strict=True)) < 1e-5
    )


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 3]),
        (Sampling(top_k=1), [3]),
        (Sampling(top_p=0.6), [3]),
        (Sampling(top_p=0.7), [0, 3]),
        (Sampling(top_p=1e-9), [3]),
        (Sampling(temperature=0.5, top_p=0.9), [0, 3]),
        (Sampling(top_k=3, top_p=0.99), [0, 1, 3]),
        (Sampling(top_k=100), [0, 1, 2, 3]),
        (Sampling(min_p=0.1), [0, 1, 3]),
        (Sampling(temperature=0.5, min_p=0.1), [0, 3]),
        (Sampling(top_p=0.9, min_p=0.1), [0, 3]),
        (Sampling(top_p=0.9), [0, 1, 3]),
    ],
)
def test_cut_distributions_are_renormalised(sampling: Sampling, kept: list[int]) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])  # .237 .087 .032 .644
    ids, logprobs = many(logits, 3000, sampling=sampling)
    scaled = logits[0] / sampling.temperature
    cut = torch.full((4,), -torch.inf)
    cut[kept] = scaled[kept]
    expected = cut.softmax(0)
    assert set(ids) == set(kept)
    assert chi_square(ids, expected) < 16.3  # p = 0.001 at 3 degrees of freedom
    assert (
        max(abs(lp - float(expected[i].log())) for i, lp in zip(ids, logprobs, strict=True)) < 1e-5
    )


def test_banned_ids_are_never_drawn_and_the_rest_is_renormalised() -> None:
    logits = torch.tensor([[3.0, 0.0, -1.0, 2.0]])
    ids, logprobs = many(logits, 3000, banned_ids=frozenset([0, 2]))
    expected = torch.tensor([-torch.inf, 0.0, -torch.inf, 2.0]).softmax(0)
    assert set(ids) == {1, 3}
    assert (
        max(abs(lp - float(expected[i].log())) for i, lp in zip(ids, logprobs, strict=True)) < 1e-5
    )
    ids, logprobs = draw(
        logits, [Row(request([0], banned_ids=frozenset([0]), sampling=Sampling(temperature=0.0)))]
    )
    assert ids == [3]
    assert (
        abs(logprobs[0] - float(torch.tensor([-torch.inf, 0.0, -1.0, 2.0]).log_softmax(0)[3]))
        < 1e-6
    )


def test_a_row_is_drawn_alike_whatever_is_drawn_beside_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 53)
    kinds = [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_p=0.8),
        Sampling(temperature=0.0),
        Sampling(top_k=5),
    ]
    rows = [
        Row(request([0], seed=n, sampling=kinds[n % 5], banned_ids=frozenset([n % 2])), n)
        for n in range(40)
    ]
    together = draw(logits, rows)
    for n, row in enumerate(rows):
        assert draw(logits[n : n + 1], [row]) == ([together[0][n]], [together[1][n]])


def test_a_row_without_a_distribution_says_so() -> None:
    for logits in (
        torch.full((1, 5), torch.nan),
        torch.full((1, 5), -torch.inf),
        torch.tensor([[0.0, torch.inf, 0.0]]),
    ):
        ids, logprobs = draw(logits, [Row(request([0]))])
        assert 0 <= ids[0] < logits.shape[1]
        assert not np.isfinite(logprobs[0])

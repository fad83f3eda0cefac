"""Intervals and pass@k against values worked out elsewhere."""

from __future__ import annotations

from itertools import combinations

import pytest

from turnwright.records.episode_metrics import mean_interval, pass_at_k, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score, no
        # continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_at_its_ends():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    assert wilson(3, 10)[0] == pytest.approx(1 - wilson(7, 10)[1])
    with pytest.raises(ValueError, match="from 0 to n"):
        wilson(3, 2)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_equals_counting_every_choice(n, c):
    results = [1] * c + [0] * (n - c)
    for k in range(1, n + 1):
        choices = list(combinations(results, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_many_samples_stays_finite():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(4, 2, 5)


def test_interval_of_a_mean():
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    assert mean_interval([]) == (0.0, 1.0)
    low, high = mean_interval([0.25, 0.75] * 50)
    assert (low, high) == pytest.approx((0.5 - 0.0492, 0.5 + 0.0492), abs=2e-4)

"""Success rates with intervals: Wilson's score interval, unbiased pass@k, and the mean of per-task values."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""Standard normal quantile of 0.975."""


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95% unless told; (0, 1) without observations.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22 (1927), eq. for p0.

    Raises:
        ValueError: when `successes` is not between 0 and `n`.
    """
    if n < 0 or not 0 <= successes <= max(n, 0):
        raise ValueError(f"successes must be from 0 to n, not {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 where nothing, or everything, succeeded; rounding would leave 1e-17.
    return (0.0 if successes == 0 else max(0.0, centre - half)), (1.0 if successes == n else min(1.0, centre + half))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of `k` episodes succeeds, unbiased, from `c` successes of `n` episodes of one task.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, eq. 1: 1 - C(n-c, k) / C(n, k).

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # As a product, since the binomials themselves overflow a float for large n.
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float]:
    """95% interval of the mean over tasks of values in [0, 1] (pass@k, success over several episodes of each task).

    Tasks are the independent units, so the standard error is that of their values (Miller, "Adding Error Bars to Evals",
    arXiv 2411.00640, eq. 1). Values that are all 0 or 1 are a proportion: Wilson's interval; so are values that all agree,
    where the standard error would be 0.
    """
    n = len(values)
    mean = sum(values) / n if n else 0.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    if variance == 0.0 or all(value in (0.0, 1.0) for value in values):
        return wilson(min(max(mean * n, 0.0), n), n, z)
    half = z * math.sqrt(variance / n)
    return max(0.0, mean - half), min(1.0, mean + half)

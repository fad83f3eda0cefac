"""Metrics of many episodes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def default_aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each numeric metric over the episodes that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for row in metrics:
        for key, value in row.items():
            if isinstance(value, (bool, int, float)):
                values[key].append(float(value))
    return {key: sum(found) / len(found) for key, found in values.items()}

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


def aggregate_for_environment(env_name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of many episodes as the environment of an id combines them."""
    from skyrl_gym.envs.registration import load_env_creator, spec

    entry = spec(env_name).entry_point
    found: dict[str, Any] = (load_env_creator(entry) if isinstance(entry, str) else entry).aggregate_metrics(metrics)
    return found

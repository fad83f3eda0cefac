"""slime's and Miles' own filters of groups."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput

SMALLEST = 1e-6
"""Deviation of rewards under which they count as equal."""


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    rewards = [float(one.get_reward_value(args)) for one in _flat(samples)]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > SMALLEST
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Any], **options: Any) -> DynamicFilterOutput:
    """Prefer a group whose rewards differ, and keep another one where there are too few."""
    output = check_reward_nonzero_std(args, samples, **options)
    output.keep_when_insufficient = True
    return output


def check_no_aborted(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group without an aborted sample."""
    aborted = any(one.status == type(one).Status.ABORTED for one in _flat(samples))
    return DynamicFilterOutput(keep=not aborted, reason="group_has_aborted" if aborted else None)


def _flat(samples: Sequence[Any]) -> Iterator[Any]:
    for one in samples:
        yield from one if isinstance(one, list) else [one]

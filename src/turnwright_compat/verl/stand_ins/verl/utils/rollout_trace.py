"""Tracing of rollouts, which turnwright records itself."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def rollout_trace_op(func: F) -> F:
    """Return the function unchanged."""
    return func

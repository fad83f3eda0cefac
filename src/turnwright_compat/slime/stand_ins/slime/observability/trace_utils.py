"""Spans of user code. slime draws them; the episode's own record has its turns and times, so nothing is kept here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class TraceSpanContext:
    """What a span gives to its block."""

    def set(self, key: str, value: Any) -> TraceSpanContext:
        """Do nothing."""
        return self

    def update(self, attrs: Mapping[str, Any] | None) -> TraceSpanContext:
        """Do nothing."""
        return self

    set_attr = set
    update_attrs = update


@contextmanager
def trace_span(target: Any = None, name: str = "", *, attrs: Any = None, **_: Any) -> Iterator[TraceSpanContext]:
    """Yield a span."""
    yield TraceSpanContext()


def trace_function(name: str = "", **_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that changes nothing."""
    return lambda function: function


def trace_event(target: Any = None, name: str = "", *, attrs: Any = None, **_: Any) -> None:
    """Do nothing."""


def bind_trace(sample: Any) -> None:
    """Do nothing."""


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a reply's `meta_info`."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency")
    return {name: meta[name] for name in names if meta.get(name) is not None}

"""Timing of a loop's parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to a dict, by name."""
    began = time.monotonic()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.monotonic() - began

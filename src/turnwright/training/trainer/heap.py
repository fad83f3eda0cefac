"""The process' heap: freed memory goes back to the system where the other half of a step needs
it."""

from __future__ import annotations

import ctypes
import gc
from functools import cache
from typing import Any

from turnwright.engines.protocols import Engine, SharesMemory, SupportsWeightUpdate

LARGE_WEIGHTS = 2**27
"""Bytes of weights from which freed memory goes back to the system between sampling and training.
The allocator would keep what one of them freed while the other needs its own: about 1 GB for a
model of 135 million weights."""


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None  # another C library


def return_free_pages() -> None:
    """Return the pages of freed blocks to the system.

    The allocator of glibc keeps those between blocks that are in use.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def return_freed_memory() -> None:
    """Return freed pages to the system, those of objects in cycles too."""
    gc.collect()
    return_free_pages()


def return_large_heap(engine: Engine | SupportsWeightUpdate) -> None:
    """Return freed memory to the system, between sampling and training in one process with a large
    model."""
    if isinstance(engine, SharesMemory) and engine.weight_bytes >= LARGE_WEIGHTS:
        return_freed_memory()

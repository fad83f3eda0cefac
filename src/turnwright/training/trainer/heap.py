"""The process' heap."""

from __future__ import annotations

import ctypes
import gc
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return None


def return_freed_memory() -> None:
    """Return freed pages to the system, those of objects in cycles too.

    The allocator of glibc keeps pages between blocks that are in use.
    """
    gc.collect()
    if (trim := _trim()) is not None:
        trim(0)

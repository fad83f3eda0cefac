"""What a piece of code costs, whatever else the machine or the process does meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Cost:
    """CPU time of a block."""

    seconds = 0.0


@contextmanager
def own_cost() -> Iterator[Cost]:
    """Measure the CPU time of this thread alone, without the garbage collector.

    `process_time` counts the process' other threads too, and a full collection, which takes half a
    second in a process that has imported as much as a test run has, may fall into any block.
    """
    cost, was_on = Cost(), gc.isenabled()
    gc.disable()
    began = time.thread_time()
    try:
        yield cost
    finally:
        cost.seconds = time.thread_time() - began
        if was_on:
            gc.enable()

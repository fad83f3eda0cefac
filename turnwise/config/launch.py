"""How this process was started: alone, or by torchrun as one of several."""

from __future__ import annotations

import os


def world_size() -> int:
    """How many processes torchrun started; 1 where it started none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which device of its machine is this process's."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks: the first of several, or alone."""
    return world_size() == 1 or os.environ.get("RANK", "0") == "0"

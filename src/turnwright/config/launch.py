"""Rank and world size under torchrun."""

from __future__ import annotations

import os


def world_size() -> int:
    """Return the number of processes started by torchrun, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the index of this process's device on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_rank_zero() -> bool:
    """Return whether this process reports: rank 0, or the only process."""
    return world_size() == 1 or os.environ.get("RANK", "0") == "0"

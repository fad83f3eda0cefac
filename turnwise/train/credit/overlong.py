"""What a trajectory loses for its length. No tensors here."""

from __future__ import annotations

from turnwise.types import Trajectory


def overlong_penalty(trajectory: Trajectory, most: int, buffer: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in points of reward, from 0 to -1.

    With n the trajectory's sampled tokens, all turns together, and c = buffer * most::

        0                       n <= most - c
        (most - c - n) / c      most - c < n <= most
        -1                      n > most

    Args:
        most: tokens from which on the whole point is lost.
        buffer: share of `most`, over 0 and at most 1.
    """
    length, cache = trajectory.sampled_tokens, buffer * most
    return min(0.0, max(-1.0, (most - cache - length) / cache))

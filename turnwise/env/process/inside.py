"""Whether this process is one that environments and rewards have of their own."""

import os

INSIDE = "TURNWISE_NURSERY"
"""Set in the environment of such processes."""


def inside() -> bool:
    """Whether it is."""
    return bool(os.environ.get(INSIDE))
